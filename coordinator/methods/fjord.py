"""FjORD, server half: every device has the first neurons of each layer, as many as its budget allows.

Horváth et al., NeurIPS 2021, arXiv:2102.13451: max(1, floor(p_k n_l)) neurons, the same in all rounds. The server
averages each weight over the devices that have it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sparrow.protocol.neurons import first_neurons

from . import ActiveNeurons, CoordinatorMethod, MethodSettings, any_budget, needs_sums_alone


class FjordSettings(MethodSettings):
    """FjORD's own settings. The defaults are the paper's."""

    widths: Literal["uniform", "fixed"] = Field(
        default="uniform",
        description="Width of each local step: drawn uniformly up to the device's own, or always the device's own "
        "without distillation (the simple form)",
    )
    width_steps: int = Field(
        default=5, ge=2, le=100, description="Number of widths, multiples of 1 over this, besides the device's own"
    )
    distil: bool = Field(
        default=True, description="Train the device's own width in each step, and narrower ones on its outputs"
    )
    distil_weight: float = Field(
        default=1.0, ge=0, le=1, description="Weight α of the distillation loss; the labels' loss has 1 - α"
    )
    distil_temperature: float = Field(default=1.0, gt=0, le=100, description="Temperature T of the distilled outputs")


FJORD = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=FjordSettings,
    active=ActiveNeurons(narrow=True, rule=first_neurons),
    personal_models=True,
    adjusts_logits=True,
    why_not_secure=needs_sums_alone,
)
