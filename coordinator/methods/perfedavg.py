"""Per-FedAvg, server half: FedAvg of models that devices train for adaptation.

Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, arXiv:2002.07948, Algorithm 1. Departure: devices are weighted by training
samples. There is no personal model: after the last round every device gets the global model, and adapts it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from . import CoordinatorMethod, MethodSettings, needs_sums_alone


class PerFedAvgSettings(MethodSettings):
    """Per-FedAvg's settings beyond FedAvg's."""

    hessian: Literal["first_order", "hessian_free"] = Field(
        default="first_order",
        description="The step's Hessian term: left out (two gradients per step), or by a difference of gradients "
        "(four)",
    )
    inner_rate: float = Field(
        default=0.01, gt=0, le=100, description="Learning rate α of the step that adapts the model to a device's data"
    )
    difference: float = Field(
        default=0.01,
        ge=1e-6,
        le=1,
        description="With hessian_free: distance δ of the compared gradients from the model, in gradient lengths",
    )
    adaptation_steps: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Steps of α, one batch each, before a device's model is evaluated or kept",
    )


PERFEDAVG = CoordinatorMethod(settings_type=PerFedAvgSettings, why_not_secure=needs_sums_alone)
