"""APFL, server half: FedAvg's mean of the devices' global models; mixtures and their weights stay on devices.

Deng et al., arXiv:2003.13461, Algorithm 1.
"""

from __future__ import annotations

from pydantic import Field

from . import CoordinatorMethod, MethodSettings, needs_sums_alone


class APFLSettings(MethodSettings):
    """APFL's settings beyond FedAvg's."""

    mixing_weight: float = Field(default=0.5, ge=0, le=1, description="Initial share α of the personal model")


APFL = CoordinatorMethod(
    settings_type=APFLSettings,
    personal_models=True,
    mixes_global=True,
    adjusts_logits=True,
    why_not_secure=needs_sums_alone,
)
