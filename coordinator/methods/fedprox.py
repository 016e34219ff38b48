"""FedProx, server half: FedAvg, with a setting for devices.

Li et al., MLSys 2020, arXiv:1812.06127. The paper draws devices in proportion to their samples and averages plainly;
here, as in its released code, they are drawn evenly and weighted by n_k: the same mean, and FedAvg's cohorts.
"""

from __future__ import annotations

from pydantic import Field

from . import CoordinatorMethod, MethodSettings, needs_sums_alone


class FedProxSettings(MethodSettings):
    """FedProx's settings beyond FedAvg's."""

    proximal_weight: float = Field(
        default=0.01,
        ge=0,
        allow_inf_nan=False,
        description="Weight μ of the pull towards the received model; 0 is FedAvg, usual are 0.01, 0.1 and 1",
    )


FEDPROX = CoordinatorMethod(
    settings_type=FedProxSettings,
    pages=True,
    adjusts_logits=True,
    why_not_secure=needs_sums_alone,
)
