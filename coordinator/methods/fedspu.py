"""FedSPU, server half: personalised federated learning with stochastic parameter update.

Niu, Dong, Qin, arXiv:2403.11464. Every device keeps a full personal model; in each round it receives, trains and
returns only the weights between neurons drawn for it in this round, at its active ratio p_k (Algorithm 1). The server
averages each weight over the devices that have it, weighted by training samples n_k.

A device starts with the global model of its first participation; ``start=initial`` is Algorithm 1, line 1: w^0. The
released code weights by mini-batches, and the averages of full and partial devices overwrite each other; this follows
the paper's text.
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
        description="Also train a local-only model on each device, which it may use at the end with "
        "personal_model=fleet; a round then takes twice the time and energy",
    )
    start: Literal["current", "initial"] = Field(
        default="current",
        description="A device's personal model before its first round: the current global model, or the federation's "
        "first one, w^0 (as printed)",
    )


def published(manifest: Manifest, settings: FederationSettings) -> Manifest:
    """Return the published manifest. Raises BadContent if devices cannot draw the first model but should start with
    it."""
    given = next((spec.name for spec in manifest.shared if isinstance(spec.init, Data)), None)
    if given is not None and own_settings(settings, FedSPUSettings).start == "initial":
        raise BadContent(
            f"start: devices should start with the first model, but {given} has published values that are not sent to "
            f"them; set start=current"
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
"""A masked weighted mean; a weight without an update keeps its value. ``averaged_rounds`` is an addition to the
paper."""
