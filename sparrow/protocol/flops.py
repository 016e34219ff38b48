"""FLOPs of a model, counted from its manifest: two operations per multiplication with a weight.

A layer with W weights that answers at P positions (output pixels, steps of a recurrent layer) costs, per sample,

    2·P·W   forward,   2·P·W   for the gradient of its weights,   2·P·W   for that of its input,

so a step costs three times the forward pass less one part of the first layer, whose input needs no gradient. Frozen
weights need no gradient of theirs, and what lies before the first trained layer none at all. Counted are linear layers,
convolutions, recurrent layers and the projections of attention (key and value as long as the query). Left out are
parameters outside of torch's layers, products of activations, and what has no matrix of weights, as
``torch.utils.flop_counter`` does.
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
    """FLOPs of one sample's forward pass; under ``mask``, of the network that its active neurons or elements form."""
    return sum(_layer_flops(manifest, mask))


def nonzero_flops(manifest: Manifest, tensors: Tensors) -> int:
    """Return the FLOPs of one sample's forward pass through a model, without weights that are zero. tensors: by name;
    missing ones count as whole."""
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
    """Return the FLOPs of training on ``samples`` samples, each pass over one counted: forward, and both gradients.

    weight_gradients: the neurons between which gradients of weights are computed; the error passes through the others
    (FedSPU, Eq. 5). narrow: the others are not there, and cost nothing; nor does what a mask of elements leaves out
    (FedSGC, appendix A.1), though dense kernels compute it.
    """
    gone = narrow or isinstance(weight_gradients, ElementMask)
    forward = _layer_flops(manifest, weight_gradients if gone else None)
    gradients = _layer_flops(manifest, weight_gradients, trained=True)
    return samples * _step_flops(forward, gradients)


def growth_flops(manifest: Manifest, samples: int, mask: ElementMask) -> int:
    """FLOPs of the whole weights' gradients on ``samples``, the rest of the pass being that of what exists."""
    forward, gradients = _layer_flops(manifest, mask), _layer_flops(manifest, None, trained=True)
    return samples * _step_flops(forward, gradients)


def block_flops(manifest: Manifest) -> NDArray[np.int64]:
    """FLOPs of one sample's forward pass that each block of the manifest stands for, [L]: 0 of biases and norms."""
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
    """Return ``Manifest.block_groups``, or one group if forced blocks of a group take more than its share of the
    smallest budget. cost: "parameters", or any other for FLOPs."""
    table, groups = manifest.block_table, manifest.block_groups(per)
    costs = table.sizes if cost == "parameters" else block_flops(manifest)
    fit = all(costs[each][table.forced[each]].sum() <= budget * costs[each].sum() for each in groups.values())
    return groups if fit else manifest.block_groups("model")


def _step_flops(forward: Sequence[int], gradients: Sequence[int]) -> int:
    """Return the FLOPs of a sample's step: layers behind the first that is trained need their input's gradient, too."""
    first = next((place for place, flops in enumerate(gradients) if flops), len(gradients))
    return sum(forward) + sum(forward[first + 1 :]) + sum(gradients)


def _layer_flops(manifest: Manifest, mask: Mask | None, *, trained: bool = False) -> list[int]:
    """Forward FLOPs per sample of each layer that counts, in forward order; trained: of its trained weights alone."""
    specs = {spec.name: spec for spec in manifest.tensors}
    flops = []
    for layer in manifest.layers:
        if layer.kind in COUNTED:
            named = [specs[name] for name in layer.tensors if len(specs[name].shape) > 1]
            weights = [spec for spec in named if spec.trainable or not trained]
            flops.append(2 * layer.positions * sum(block_of(manifest, spec, mask).size for spec in weights))
    return flops
