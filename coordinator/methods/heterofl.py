"""HeteroFL, server half: every device has the first neurons of each layer, and the global model is the widest.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, arXiv:2010.01264: a device of width ratio r has the first
ceil(r n_l) neurons, and the server averages every weight over the devices that hold it, weighted with their training
samples. A budget is a width; the share of the weights that it makes is about its square.

Rows of the output layer are averaged over the devices that have their class, as in the code that the authors released
(``Federation.combine``, which knows each device's ``label_split``). For this the rows are a group of neurons of their
own in the federation's manifest, and the mask of an update names those that it brings: that, and no more, is what the
server learns of a device's labels.
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
        description="Rows of the output layer that a device sends: of the classes that it has, which tells the "
        "coordinator what these are, or all",
    )


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest whose masks can name rows of the output layer, where devices send some of them."""
    return with_classes(published) if own_settings(settings, HeteroFLSettings).rows == "seen" else published


def why_not_secure(settings: FederationSettings) -> str | None:
    """Return that devices differ in the rows that they send, unless they send all."""
    if own_settings(settings, HeteroFLSettings).rows == "seen":
        return "each device sends the rows of its own classes, which no other has; give method_settings.rows = all"
    return None


HETEROFL = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=HeteroFLSettings,
    manifest=manifest,
    active=ActiveNeurons(narrow=True, rule=first_neurons_up, optional=CLASSES),
    why_not_secure=why_not_secure,
)
