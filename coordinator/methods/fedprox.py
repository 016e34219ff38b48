"""FedProx, server half: FedAvg's, with one setting that the devices read.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
arXiv:1812.06127. Where the paper draws devices in proportion to their samples and averages plainly, here they are drawn
evenly and averaged with weights n_k, as its released code does: the same mean, and the same cohorts as FedAvg.
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
        description="Weight μ of the pull back to the model received; 0 is FedAvg, usual are 0.01, 0.1 and 1",
    )


FEDPROX = CoordinatorMethod(
    settings_type=FedProxSettings,
    pages=True,
    adjusts_logits=True,
    why_not_secure=needs_sums_alone,
)
