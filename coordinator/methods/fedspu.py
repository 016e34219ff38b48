"""FedSPU: personalised federated learning with stochastic parameter update, server half.

Niu, Dong, Qin, "FedSPU: Personalized Federated Learning for Resource-constrained Devices with Stochastic Parameter
Update", arXiv:2403.11464. Every device keeps a full personal model; in each round it receives, trains and returns only
the weights between neurons drawn anew for it, at its active ratio p_k (Algorithm 1). The server averages weight by
weight over those who held it, with n_k, the number of training samples, as weights.

A device begins with the global model as it is at its first participation; ``start=initial`` is Algorithm 1, line 1,
where all begin with w^0. Where paper and released code differ: the code weights with the number of mini-batches and
averages full and partial devices apart, so that the later one overwrites; here there is one mean weighted with n_k, as
the paper's text says.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sparrow.protocol.manifest import Data, Manifest
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from . import ActiveNeurons, CoordinatorMethod, any_budget, needs_sums_alone, own_settings
from .last_rounds import LAST_ROUNDS, LastRoundsSettings


class FedSPUSettings(LastRoundsSettings):
    """FedSPU's own settings."""

    alone: bool = Field(
        default=False,
        description="Whether devices train another model beside it, without the others, which they may take at the "
        "end with personal_model=fleet; a round then takes twice the time and energy",
    )
    start: Literal["current", "initial"] = Field(
        default="current",
        description="What a device's personal model is before its first round: the global model as it is then, or the "
        "first one of all, w^0 (as printed)",
    )


def published(manifest: Manifest, settings: FederationSettings) -> Manifest:
    """Return the published manifest. Raises BadContent where devices cannot draw the first model, and are to."""
    given = next((spec.name for spec in manifest.shared if isinstance(spec.init, Data)), None)
    if given is not None and own_settings(settings, FedSPUSettings).start == "initial":
        raise BadContent(
            f"start: devices are to begin with the first model, but {given} has values that are published with it and "
            f"sent to nobody; take start=current"
        )
    return manifest


FEDSPU = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=FedSPUSettings,
    manifest=published,
    aggregation=LAST_ROUNDS,
    active=ActiveNeurons(),
    personal_models=True,
    mixes_global=True,
    pages=True,
    adjusts_logits=True,
    why_not_secure=needs_sums_alone,
)
"""A masked weighted mean; a weight that nobody held keeps its value. ``averaged_rounds`` is not of the paper."""
