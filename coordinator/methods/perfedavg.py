"""Per-FedAvg, server half: FedAvg's, of models that devices have trained to be adapted.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, arXiv:2002.07948, Algorithm 1. The paper weighs the devices of a round equally; here they count
with their training samples, as in every method here. There is one global model and no personal one: when the federation
has ended every device is given the last global model, and adapts it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from . import CoordinatorMethod, MethodSettings, needs_sums_alone


class PerFedAvgSettings(MethodSettings):
    """Per-FedAvg's settings beyond FedAvg's."""

    hessian: Literal["first_order", "hessian_free"] = Field(
        default="first_order",
        description="The Hessian's part of a step: left out (two gradients a step), or by a difference of gradients "
        "(four)",
    )
    inner_rate: float = Field(
        default=0.01, gt=0, le=100, description="Rate α of the step that adapts the model to a device's data"
    )
    difference: float = Field(
        default=0.01,
        ge=1e-6,
        le=1,
        description="With hessian_free: δ, how far from the model gradients are taken, in lengths of the gradient",
    )
    adaptation_steps: int = Field(
        default=1, ge=1, le=10_000, description="Steps of α, on a batch each, before a device's model is judged or kept"
    )


PERFEDAVG = CoordinatorMethod(settings_type=PerFedAvgSettings, why_not_secure=needs_sums_alone)
