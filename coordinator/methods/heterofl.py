"""HeteroFL, server half: every device has the first neurons of each layer, and the global model is the widest.

Diao, Ding, Tarokh, ICLR 2021, arXiv:2010.01264: a device of width ratio r has the first ceil(r n_l) neurons, and the
server averages every weight over the devices that have it, weighted by training samples. A budget is a width.

Rows of the output layer are averaged over the devices with their class, as in the authors' released code
(``Federation.combine``). So an update's mask names its rows, which reveals the device's classes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sparrow.protocol.manifest import Manifest
from sparrow.protocol.neurons import CLASSES, first_neurons_up, with_classes
from sparrow.protocol.settings import FederationSettings

from . import ActiveNeurons, CoordinatorMethod, MethodSettings, any_budget, own_settings


class HeteroFLSettings(MethodSettings):
    """HeteroFL's own settings."""

    rows: Literal["seen", "all"] = Field(
        default="seen",
        description="Rows of the output layer that a device sends: of its own classes, which reveals these to the "
        "coordinator, or all",
    )


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest, with the output layer's rows as a group if devices send some of them."""
    return with_classes(published) if own_settings(settings, HeteroFLSettings).rows == "seen" else published


def why_not_secure(settings: FederationSettings) -> str | None:
    """Return a reason if devices send different rows."""
    if own_settings(settings, HeteroFLSettings).rows == "seen":
        return "each device sends the rows of its own classes; set method_settings.rows = all"
    return None


HETEROFL = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=HeteroFLSettings,
    manifest=manifest,
    active=ActiveNeurons(narrow=True, rule=first_neurons_up, optional=CLASSES),
    why_not_secure=why_not_secure,
)
