"""Random federated dropout, server half: each round every device is sent another narrow network of the one model.

Caldas, Konečný, McMahan, Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", arXiv:1812.07210; Wen, Jeon, Huang, "Federated Dropout", arXiv:2109.15258. The neurons are drawn as
FedSPU's are, the server averages weight by weight over those who held it, weighted with
their training samples, and the whole global model is what is judged. Devices scale what is left of activations.
"""

from __future__ import annotations

from pydantic import Field

from . import ActiveNeurons, CoordinatorMethod, MethodSettings, any_budget, needs_sums_alone


class FedDropSettings(MethodSettings):
    """FedDrop's own setting."""

    scaled: bool = Field(
        default=True,
        description="Multiply what is left of activations by 1 / (1 - dropout rate) while training; false is the "
        "simple form",
    )


FEDDROP = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=FedDropSettings,
    active=ActiveNeurons(narrow=True),
    why_not_secure=needs_sums_alone,
)
"""A masked weighted mean; a weight that nobody held keeps its value."""
