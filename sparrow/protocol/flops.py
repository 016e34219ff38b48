"""FLOPs of a model, counted from its manifest: two operations per multiplication with a weight.

A layer with W weights and P output positions (pixels, steps of a recurrent layer) costs, per sample,

    2·P·W   forward,   2·P·W   for the gradient of its weights,   2·P·W   for that of its input,

so a step costs three forward passes, except that the first layer's input needs no gradient. Frozen weights need no
gradient either, nor do inputs before the first trained layer. Linear layers, convolutions, recurrent layers and the
projections of attention count (key and value as long as the query). As in ``torch.utils.flop_counter``, products of
activations and layers without a weight matrix do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .blocks import BudgetPer, Groups
from .elements import ElementMask
from .manifest import COUNTED, Manifest, Tensors
from .masks import Mask, block_of


def forward_flops(manifest: Manifest, mask: Mask | None = None) -> int:
    """Return the FLOPs of one sample's forward pass. mask: count only the active neurons or elements."""
    return sum(_layer_flops(manifest, mask))


def nonzero_flops(manifest: Manifest, tensors: Tensors) -> int:
    """Return the FLOPs of one sample's forward pass without zero weights.

    tensors: name -> array; a missing tensor counts as dense.
    """
    specs = {spec.name: spec for spec in manifest.tensors}
    return sum(
        2 * layer.positions * (int(np.count_nonzero(tensors[name])) if name in tensors else specs[name].size)
        for layer in manifest.layers
        if layer.kind in COUNTED
        for name in layer.tensors
        if len(specs[name].shape) > 1
    )


def training_flops(
    manifest: Manifest, samples: int, *, weight_gradients: Mask | None = None, narrow: bool = False
) -> int:
    """Return the FLOPs of training on ``samples`` samples, counting each pass: forward, and both gradients.

    weight_gradients: neurons whose weights get gradients; errors pass through the others (FedSPU, Eq. 5). narrow: the
    others are absent and cost nothing. Elements outside a mask also cost nothing (FedSGC, appendix A.1).
    """
    gone = narrow or isinstance(weight_gradients, ElementMask)
    forward = _layer_flops(manifest, weight_gradients if gone else None)
    gradients = _layer_flops(manifest, weight_gradients, trained=True)
    return samples * _step_flops(forward, gradients)


def growth_flops(manifest: Manifest, samples: int, mask: ElementMask) -> int:
    """Return the FLOPs of the gradients of all weights on ``samples``, after a forward pass of the existing weights."""
    forward = _layer_flops(manifest, mask)
    gradients = _layer_flops(manifest, None, trained=True)
    return samples * _step_flops(forward, gradients)


def block_flops(manifest: Manifest) -> NDArray[np.int64]:
    """Return each block's FLOPs in one sample's forward pass, [L]; 0 for biases and norms."""
    positions = {name: layer.positions for layer in manifest.layers if layer.kind in COUNTED for name in layer.tensors}
    matrices = {spec.name for spec in manifest.shared if len(spec.shape) > 1}
    return np.array(
        [
            2 * positions.get(name, 0) * size * (name in matrices)
            for name, sizes in manifest.block_table.tensors.items()
            for size in sizes
        ],
        dtype=np.int64,
    )


def budget_groups(manifest: Manifest, per: BudgetPer, budget: float, cost: str) -> Groups:
    """Return ``Manifest.block_groups``, or one group if a group's forced blocks exceed its share of the smallest
    budget. cost: "parameters", or any other for FLOPs."""
    table = manifest.block_table
    groups = manifest.block_groups(per)
    costs = table.sizes if cost == "parameters" else block_flops(manifest)
    fit = all(costs[each][table.forced[each]].sum() <= budget * costs[each].sum() for each in groups.values())
    return groups if fit else manifest.block_groups("model")


def _step_flops(forward: Sequence[int], gradients: Sequence[int]) -> int:
    """Return the FLOPs of a training step per sample."""
    first = next((place for place, flops in enumerate(gradients) if flops), len(gradients))
    return sum(forward) + sum(forward[first + 1 :]) + sum(gradients)


def _layer_flops(manifest: Manifest, mask: Mask | None, *, trained: bool = False) -> list[int]:
    specs = {spec.name: spec for spec in manifest.tensors}
    flops = []
    for layer in manifest.layers:
        if layer.kind in COUNTED:
            named = [specs[name] for name in layer.tensors if len(specs[name].shape) > 1]
            weights = [spec for spec in named if spec.trainable or not trained]
            flops.append(2 * layer.positions * sum(block_of(manifest, spec, mask).size for spec in weights))
    return flops
