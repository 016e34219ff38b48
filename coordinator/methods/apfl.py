"""APFL, server half: FedAvg's mean of the models that devices send; mixtures and their weights stay with them.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, Algorithm 1.
"""

from __future__ import annotations

from pydantic import Field

from . import CoordinatorMethod, MethodSettings, needs_sums_alone


class APFLSettings(MethodSettings):
    """APFL's settings beyond FedAvg's."""

    mixing_weight: float = Field(default=0.5, ge=0, le=1, description="Share α of the personal model at first")


APFL = CoordinatorMethod(
    settings_type=APFLSettings,
    personal_models=True,
    mixes_global=True,
    adjusts_logits=True,
    why_not_secure=needs_sums_alone,
)
