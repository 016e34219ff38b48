"""FedPer, server half: the mean of the devices' bodies; heads stay where they are.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv:1912.00818. The last
linear layer is each device's own (DM-PFL's method card, section 5): its tensors are ``personal`` in the manifest that
the federation is created with, and so never on a wire. What is averaged is no model by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_sdk.protocol.manifest import Layer, Manifest
from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import CoordinatorMethod


class FedPer(CoordinatorMethod):
    """Server half of FedPer: FedAvg's mean over what is shared."""

    usable_global_model = False
    personal_models = True

    def smallest_budget(self, settings: FederationSettings) -> float:
        """The whole model is trained."""
        return 1.0

    def manifest(self, published: Manifest, settings: FederationSettings) -> Manifest:
        """The last linear layer is private."""
        return published.with_private(check_apart(published, linear_layers(published)[-1:]))


def check_apart(manifest: Manifest, part: Sequence[Layer]) -> set[str]:
    """The tensors of some layers. Raises BadContent, naming it, for one that another layer uses, too (tied weights)."""
    names = {name for layer in part for name in layer.tensors}
    for layer in manifest.layers:
        shared = names.intersection(layer.tensors) if layer not in part else ()
        if shared:
            raise BadContent(
                f"the model cannot be cut into a body and a head: {min(shared)} is used by {layer.name} as well (tied "
                f"weights); choose a method that shares the whole model, such as fedavg, ditto or apfl"
            )
    return names


def linear_layers(manifest: Manifest) -> list[Layer]:
    """The model's linear layers, in forward order. Raises BadContent where there are fewer than two layers in all."""
    layers = [layer for layer in manifest.layers if layer.kind == "linear"]
    if not layers or len(manifest.layers) < 2:
        raise BadContent(
            "the model cannot be cut into a body and a head: it needs a linear layer, and another layer; choose a "
            "method that shares the whole model, such as fedavg, ditto or apfl"
        )
    return layers
