"""Trained parts of a model: neurons of a mask, or single elements.

For a parameter that is frozen in part, the optimiser moves a *leaf*, an array of its active values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import Block, neuron_block

from .training import Flags, Part

Array = NDArray[np.float32]


@dataclass
class Leaf:
    """A parameter and its trained part: a block, single elements by their flat ``index``, or the whole."""

    whole: Array
    block: Block | None = None
    index: NDArray[np.intp] | None = None
    # Int32 mask of the gradient, -1 at existing elements.
    bits: NDArray[np.int32] | None = None
    # Multiplies the whole parameter.
    factor: Array | None = None
    values: Array = field(init=False)

    def __post_init__(self) -> None:
        if self.factor is not None:
            self.values = np.array(self.whole)
        else:
            self.values = self.whole if self.block is None and self.index is None else self._take(self.whole)

    def gradient(self, computed: Array) -> Array:
        """Return the leaf's gradient, from the parameter's or from its own."""
        # A bitwise and takes one pass over memory; copying by random flags takes five.
        if self.bits is not None:
            whole = computed.view(np.int32)
            np.bitwise_and(whole, self.bits, out=whole)
        if self.values is self.whole:
            return computed
        return computed.reshape(self.values.shape) if computed.size == self.values.size else self._take(computed)

    def write_back(self) -> None:
        """Copy the leaf into the parameter."""
        if self.block is not None:
            self.block.put(self.whole, self.values)
        elif self.index is not None:
            self.whole.reshape(-1)[self.index] = self.values
        elif self.factor is not None:
            np.multiply(self.values, self.factor, out=self.whole)

    def leave(self) -> None:
        """Copy the leaf into the parameter without its factor."""
        if self.factor is not None:
            np.copyto(self.whole, self.values)

    def _take(self, tensor: Array) -> Array:
        if self.block is not None:
            return np.asarray(self.block.take(tensor), np.float32)
        assert self.index is not None
        return np.take(tensor.reshape(-1), self.index)


def leaves_of(manifest: Manifest, tensors: Tensors, part: Part) -> dict[str, Leaf]:
    """Return the leaf of each trained parameter. Raises ValueError for invalid elements."""
    _check_flags(part, tensors)
    elements = part.elements or {}
    trained = part.trained or {}
    factors = part.factors or {}
    found: dict[str, Leaf] = {}
    for spec in manifest.tensors:
        if not spec.trainable:
            continue
        whole = np.asarray(tensors[spec.name], np.float32)
        exists = elements.get(spec.name)
        moves = trained.get(spec.name)
        bits = None if exists is None else bits_of(exists)
        if bits is not None and (whole.view(np.int32) & ~bits & np.int32(2**31 - 1)).any():
            raise ValueError(f"{spec.name}: masked weights must be zero; multiply it by its mask first")
        if moves is not None and not moves.all():
            moving = moves if exists is None else moves & exists
            if moving.any():
                found[spec.name] = Leaf(whole, index=np.flatnonzero(moving))
            continue
        block = neuron_block(manifest, spec, part.mask)
        frozen = block.rows is not None or block.columns is not None
        found[spec.name] = Leaf(whole, block if frozen else None, bits=bits, factor=factors.get(spec.name))
    return found


def _check_flags(part: Part, tensors: Tensors) -> None:
    for given in (part.elements or {}, part.trained or {}):
        for name, flags in given.items():
            if name not in tensors or flags.shape != tensors[name].shape or flags.dtype != np.bool_:
                raise ValueError(
                    f"{name}: elements of type {flags.dtype} and shape {flags.shape} do not fit the parameter; give "
                    "booleans of its shape"
                )


def bits_of(exists: Flags) -> NDArray[np.int32] | None:
    """Return the ``Leaf.bits`` of existing elements; None if all exist."""
    return None if exists.all() else -exists.astype(np.int32)


def frozen_in_part(leaves: Mapping[str, Leaf]) -> dict[str, Block]:
    """Return the trained blocks of partly frozen parameters: name -> block."""
    return {name: leaf.block for name, leaf in leaves.items() if leaf.block is not None}
