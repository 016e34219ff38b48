"""Convert an ``nn.Module`` to the manifest that a method needs."""

from __future__ import annotations

from importlib.metadata import entry_points

import torch
from torch import nn

from sparrow.protocol.auto import FOR_ANY_MODEL, FOR_NEURONS
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.settings import AUTO

from ..publishing import RunningStatistics
from ..publishing.coupling import describe
from ..publishing.graph import UnsupportedLayer
from ..publishing.untraced import describe_whole
from . import DeviceMethod, load_method

LEAST_MASKED = 0.1
"""Smallest share of a model's trained weights that a neuron-wise method must be able to leave out."""


def describe_for(
    method: str,
    model: nn.Module,
    example: torch.Tensor,
    *,
    task: str,
    running_statistics: RunningStatistics = "shared",
) -> Manifest:
    """Return the manifest of ``model`` that ``method`` needs, found by running it on ``example`` [N, ...]. Raises
    UnknownMethod and UnsupportedLayer, which names method and layer."""
    if method == AUTO:
        try:
            return describe_for(FOR_NEURONS, model, example, task=task, running_statistics=running_statistics)
        except UnsupportedLayer:
            method = FOR_ANY_MODEL
    half = load_method(method)
    manifest = describe_whole(model, example, task=task, running_statistics=running_statistics)
    try:
        if half.needs_coupling:
            manifest = describe(model, example, task=task, running_statistics=running_statistics, least=LEAST_MASKED)
        half.check_model(model, manifest, example)
    except (UnsupportedLayer, ManifestError) as error:
        any_model = ", ".join(_for_any_model())
        raise UnsupportedLayer(f"{method}: {error}. Methods that take any model: {any_model}") from error
    return manifest


def _for_any_model() -> list[str]:
    methods = {entry.name: entry.load() for entry in entry_points(group="sparrow.device_methods")}
    return sorted(
        name for name, method in methods.items() if isinstance(method, DeviceMethod) and method.takes_any_model
    )
