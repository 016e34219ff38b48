"""LG-FedAvg, server half: the mean of the devices' heads; what makes their features stays where it is.

Liang and others, "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
arXiv:2001.01523. Shared are the linear layers; convolutions and whatever else lies below are each device's own. In a
network of linear layers alone the first one is (DM-PFL's method card, section 5).
"""

from __future__ import annotations

from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.methods import CoordinatorMethod, whole_model
from sparrow.coordinator.methods.parts import check_apart, linear_layers


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest in which all but the linear layers, or the first of them, is private."""
    linear = linear_layers(published)
    head = check_apart(published, linear)
    body = {spec.name for spec in published.shared} - head
    return published.with_private(body or check_apart(published, linear[:1]))


LGFEDAVG = CoordinatorMethod(
    smallest_budget=whole_model, usable_global_model=False, personal_models=True, manifest=manifest
)
