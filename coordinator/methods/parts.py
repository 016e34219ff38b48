"""Helpers of methods that share a part of the model: they cut it into a body and a head."""

from __future__ import annotations

from collections.abc import Sequence

from edge_sdk.protocol.manifest import Layer, Manifest
from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.errors import BadContent


def private_head(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest in which the last linear layer is private."""
    return published.with_private(check_apart(published, linear_layers(published)[-1:]))


def check_apart(manifest: Manifest, part: Sequence[Layer]) -> set[str]:
    """Return the tensors of some layers. Raises BadContent for one that another layer uses, too (tied weights)."""
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
    """Return the linear layers, in forward order. Raises BadContent where there are fewer than two layers in all."""
    layers = [layer for layer in manifest.layers if layer.kind == "linear"]
    if not layers or len(manifest.layers) < 2:
        raise BadContent(
            "the model cannot be cut into a body and a head: it needs a linear layer, and another layer; choose a "
            "method that shares the whole model, such as fedavg, ditto or apfl"
        )
    return layers
