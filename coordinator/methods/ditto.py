"""Ditto, server half: FedAvg, with a setting for devices; personal models stay on devices.

Li et al., ICML 2021, arXiv:2012.04221, Algorithm 1.
"""

from __future__ import annotations

from pydantic import Field

from . import CoordinatorMethod, needs_sums_alone
from .last_rounds import LAST_ROUNDS, LastRoundsSettings


class DittoSettings(LastRoundsSettings):
    """Ditto's settings beyond FedAvg's."""

    proximal_weight: float = Field(
        default=0.1, ge=0, allow_inf_nan=False, description="Weight λ of the pull from personal to global model"
    )


DITTO = CoordinatorMethod(
    settings_type=DittoSettings,
    aggregation=LAST_ROUNDS,
    personal_models=True,
    mixes_global=True,
    adjusts_logits=True,
    why_not_secure=needs_sums_alone,
)
