"""How long each layer of a model takes on this device: what a budget is a share of where seconds count."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

from edge_sdk.protocol.blocks import Costs
from edge_sdk.protocol.manifest import MULTIPLYING, Manifest
from edge_sdk.tracing.modes import buffers_kept

REPEATS = 3
"""Passes through each layer, of which the quickest counts."""


def block_nanoseconds(model: nn.Module, manifest: Manifest, inputs: torch.Tensor) -> Costs:
    """Nanoseconds of a training step on ``inputs`` that each block stands for, [L], measured here: those of its layer,
    forward and backward, by its share of the layer's weights. 0 of what is in no linear layer or convolution."""
    modules = dict(model.named_modules())
    layers = {layer.name: modules[layer.name] for layer in manifest.layers if layer.kind in MULTIPLYING}
    seen: dict[str, torch.Tensor] = {}

    def notice(name: str, given: tuple[torch.Tensor, ...]) -> None:
        seen.setdefault(name, given[0].detach())

    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: notice(name, given))
        for name, module in layers.items()
    ]
    try:
        with torch.no_grad(), buffers_kept(model):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    table = manifest.block_table
    costs = np.zeros(len(table.sizes), dtype=np.int64)
    for layer in manifest.layers:
        if layer.name not in seen:
            continue
        given = seen[layer.name].requires_grad_(layer.input_error != "none")
        nanoseconds = min(_pass(layers[layer.name], given) for _ in range(REPEATS))
        weights = [table.places[name] for name in layer.tensors if name in table.tensors]
        largest = max(weights, key=lambda place: int(table.sizes[place].sum()))
        sizes = table.sizes[largest]
        costs[largest] += nanoseconds * sizes // sizes.sum()
    return costs


def _pass(layer: nn.Module, inputs: torch.Tensor) -> int:
    start = time.perf_counter_ns()
    outputs = layer(inputs)
    torch.autograd.grad(outputs.sum(), [*layer.parameters(), *([inputs] if inputs.requires_grad else [])])
    return time.perf_counter_ns() - start
