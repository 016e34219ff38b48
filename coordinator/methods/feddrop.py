"""Random federated dropout, server half: each round sends every device a different narrow part of the global model.

Caldas et al., arXiv:1812.07210; Wen et al., arXiv:2109.15258. Neurons are drawn as in FedSPU; the server averages each
weight over the devices that have it, weighted by training samples.
"""

from __future__ import annotations

from pydantic import Field

from . import ActiveNeurons, CoordinatorMethod, MethodSettings, any_budget, needs_sums_alone


class FedDropSettings(MethodSettings):
    """FedDrop's own setting."""

    scaled: bool = Field(
        default=True,
        description="Multiply the remaining activations by 1 / (1 - dropout rate) during training; false: the simple "
        "form",
    )


FEDDROP = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=FedDropSettings,
    active=ActiveNeurons(narrow=True),
    why_not_secure=needs_sums_alone,
)
"""A masked weighted mean; a weight without an update keeps its value."""
