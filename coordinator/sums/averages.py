"""Streaming averages of sparse updates, weight by weight.

    w_i <- sum over the devices k that sent i of n_k * w_ki / sum over the same devices of n_k        (FedSPU, Alg. 1)

Numerators are float64; memory is about one model in float64, for any cohort. Under neuron masks all values between the
same two neurons have the same senders, so one weight per pair suffices.

The last bits of float64 sums depend on the order, so the caller folds updates in the cohort's fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.elements import ElementMask, Index, Points
from sparrow.protocol.manifest import Array, Manifest, Tensors, TensorSpec
from sparrow.protocol.masks import (
    CHUNK_VALUES,
    Block,
    Mask,
    count_values,
    neuron_view,
    pack,
    same_mask,
    unpack,
    unpack_whole,
)

Sum = NDArray[np.float64]

PAIRS = CHUNK_VALUES // 4
"""Pairs of numerator and weight added at a time, so that scratch arrays fit a core's cache."""


class Sums(Protocol):
    """Running sums of one round's updates, and their number."""

    updates: int

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update: float32 [count_values(manifest, mask)], weighted with ``num_examples``."""


def difference(manifest: Manifest, sent: Tensors, values: Array, mask: Mask | None) -> Sum:
    """Return the float64 difference of an update's values [count_values(manifest, mask)] from the sent ones."""
    return values.astype(np.float64) - pack(manifest, sent, mask)


def add_in_place(total: Sum, values: Array, scale: float) -> None:
    """Add ``scale`` times ``values`` [n] to ``total`` [n] in float64, in slices that fit caches."""
    scratch = np.empty(min(len(values), CHUNK_VALUES))
    for start in range(0, len(values), CHUNK_VALUES):
        place = total[start : start + CHUNK_VALUES]
        scaled = scratch[: len(place)]
        # A separate step: a converting product would use a buffer.
        scaled[:] = values[start : start + CHUNK_VALUES]
        scaled *= scale
        place += scaled


class MaskedSums:
    """Numerators and weights of updates under neuron masks, or of full models.

    Numerators have the order of packed values, so that a full model is added in one step.

    everybody: values that a device did not send count as the global model's; ``completed`` counts them.
    """

    def __init__(self, manifest: Manifest, *, everybody: bool = False) -> None:
        self._manifest = manifest
        self._everybody = everybody
        self._weight = 0.0
        self.completed = 0
        self._sum = np.zeros(manifest.shared_values, dtype=np.float64)
        # Views of the sum.
        self._numerators = cast("dict[str, Sum]", unpack_whole(manifest, self._sum))
        views = [neuron_view(manifest, spec)[:2] for spec in manifest.shared]
        self._weights = {like: np.zeros(views[like], dtype=np.float64) for like in set(manifest.alike)}
        # Weight of whole models.
        self._of_all = 0.0
        self.updates = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update, whose mask is not of elements."""
        weight = float(num_examples)
        self._weight += weight
        self.completed += len(self._sum) - len(values) if self._everybody else 0
        if len(values) == len(self._sum):
            add_in_place(self._sum, values, weight)
            self._of_all += weight
        else:
            self._fold_part(values, mask, weight)
        self.updates += 1

    def _fold_part(self, values: Array, mask: Mask | None, weight: float) -> None:
        parts = unpack(self._manifest, values, mask)
        for place, (like, (spec, block, part)) in enumerate(zip(self._manifest.alike, parts, strict=True)):
            assert isinstance(block, Block)
            block.add(self._numerators[spec.name], part, scale=weight)
            if like == place:
                block.pairs().add(self._weights[like], weight)

    def mean(self, previous: Tensors) -> Tensors:
        """Return the next global values by name, float32; values without a sender are those of ``previous``."""
        result: Tensors = {}
        for like, spec in zip(self._manifest.alike, self._manifest.shared, strict=True):
            only_whole_models = self._of_all and not self._weights[like].any()
            if only_whole_models:
                mean = result[spec.name] = np.empty(spec.shape, dtype=np.float32)
                # Rounded directly: a float64 array would take the memory of two more models.
                np.divide(self._numerators[spec.name], self._of_all, out=mean, casting="same_kind")
                continue
            view = neuron_view(self._manifest, spec)
            numerator = self._numerators[spec.name].reshape(view)
            weights = self._weights[like] + self._of_all
            spread = weights.reshape(weights.shape + (1,) * (len(view) - weights.ndim))
            old = previous[spec.name].reshape(view)
            if self._everybody:
                # Values without a sender stay bit for bit.
                total = np.where(spread > 0, self._weight, 0.0)
                numerator = numerator + (total - spread) * old.astype(np.float64)
                spread = total
            result[spec.name] = quotient(numerator, spread, old).reshape(spec.shape)
        return result


class ElementSums:
    """Numerators and weights of updates under element masks, most of them under the round's ``mask``.

    Those are summed packed. Maskable values of others are added to complex arrays of the model's shapes, numerator and
    weight as real and imaginary parts: a scattered position then costs one cache line.
    """

    def __init__(self, manifest: Manifest, mask: ElementMask) -> None:
        self._manifest = manifest
        self._mask = mask
        self._packed = np.zeros(count_values(manifest, mask), dtype=np.float64)
        self._weight = 0.0
        # Arrays [size] by tensor.
        self._apart: dict[str, NDArray[np.complex128]] = {}
        self.updates = 0
        self.num_examples = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update."""
        assert isinstance(mask, ElementMask)
        if same_mask(mask, self._mask):
            add_in_place(self._packed, values, float(num_examples))
            self._weight += num_examples
        else:
            self._fold_apart(values, mask, float(num_examples))
        self.updates += 1
        self.num_examples += num_examples

    def _fold_apart(self, values: Array, mask: ElementMask, weight: float) -> None:
        shared = {spec.name: part for spec, _, part in unpack(self._manifest, self._packed, self._mask)}
        for spec, block, part in unpack(self._manifest, values, mask):
            if isinstance(block, Points):
                if spec.name not in self._apart:
                    self._apart[spec.name] = np.zeros(spec.size, dtype=np.complex128)
                _add_pairs(self._apart[spec.name], block.index, part, weight)
            else:
                add_in_place(cast("Sum", shared[spec.name].reshape(-1)), part.reshape(-1), weight)

    @property
    def alike(self) -> bool:
        """Return True if all updates have the round's mask, so that ``packed`` equals ``totals``."""
        return self.updates > 0 and not self._apart

    def packed(self) -> Iterator[tuple[TensorSpec, Block | Points, Sum]]:
        """Yield each shared tensor, its existing places, and their numerators, if all updates are ``alike``.

        Each weight is ``num_examples``.
        """
        return cast(
            "Iterator[tuple[TensorSpec, Block | Points, Sum]]", unpack(self._manifest, self._packed, self._mask)
        )

    def totals(self) -> Iterator[tuple[TensorSpec, Sum, Sum]]:
        """Yield each shared tensor with its numerators and weights, float64 [size]; both are 0 without a sender."""
        for spec, block, part in unpack(self._manifest, self._packed, self._mask):
            if isinstance(block, Points):
                apart = self._apart.get(spec.name)
                numerator, weights = (
                    np.zeros((2, spec.size)) if apart is None else (apart.real.copy(), apart.imag.copy())
                )
                block.add(numerator, part)
                block.add(weights, self._weight)
                yield spec, numerator, weights
            else:
                yield spec, part.astype(np.float64).reshape(-1), np.full(spec.size, float(self.num_examples))

    def mean(self, previous: Tensors) -> Tensors:
        """Return the next global values by name, float32; values without a sender are those of ``previous``."""
        result: Tensors = {}
        if self.alike:
            for spec, block, part in self.packed():
                result[spec.name] = np.array(previous[spec.name], dtype=np.float32, order="C")
                block.put(result[spec.name], (part / self.num_examples).astype(np.float32))
            return result
        for spec, numerator, weights in self.totals():
            result[spec.name] = quotient(numerator, weights, previous[spec.name].reshape(-1)).reshape(spec.shape)
        return result


def _add_pairs(total: NDArray[np.complex128], index: Index, values: Array, weight: float) -> None:
    """Add ``weight * values + i weight`` to ``total`` at the sorted, distinct positions ``index``."""
    count = min(len(index), PAIRS)
    addend, sums = np.empty((2, count), dtype=np.complex128)
    addend.imag = weight
    for start in range(0, len(index), PAIRS):
        places = index[start : start + PAIRS]
        one = addend[: len(places)]
        two = sums[: len(places)]
        np.multiply(values[start : start + PAIRS], weight, out=one.real, dtype=np.float64)
        # Nothing is clipped, but with "raise" numpy would buffer the output.
        np.take(total, places, out=two, mode="clip")
        total[places] = np.add(two, one, out=two)


def quotient(numerator: Sum, weights: Sum, old: Array) -> NDArray[np.float32]:
    """Return ``numerator / weights``, or ``old`` for zero weights: float32 of the numerator's shape."""
    return np.divide(numerator, weights, out=old.astype(np.float64), where=weights > 0).astype(np.float32)


class OneUpdate:
    """The unchanged update of the one device that prepares a model."""

    def __init__(self) -> None:
        self.updates = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Store the update."""
        self.values = values
        self.mask = mask
        self.updates += 1


def blocks_of(mask: Mask | None) -> bytes | None:
    """Return the packed blocks of ``mask``, or None if it contains all."""
    return mask.packed() if isinstance(mask, BlockMask) and not mask.on.all() else None


class BlockSums:
    """Numerators of updates under block masks, and each block's weight of senders.

    everybody: untouched blocks count as no change, as in the code of pFedGate's authors.
    """

    def __init__(self, manifest: Manifest, *, everybody: bool = False) -> None:
        self._manifest = manifest
        self._everybody = everybody
        self._numerators = {spec.name: np.zeros(spec.size, dtype=np.float64) for spec in manifest.shared}
        self._weights = np.zeros(len(manifest.block_table.sizes), dtype=np.float64)
        self._weight = 0.0
        self.masks: set[bytes | None] = set()
        self.updates = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update, of some blocks or of all."""
        assert mask is None or isinstance(mask, BlockMask)
        self.masks.add(blocks_of(mask))
        for spec, block, part in unpack(self._manifest, values, mask):
            block.add(self._numerators[spec.name].reshape(spec.shape), part, scale=float(num_examples))
        self._weights[slice(None) if mask is None else mask.on] += num_examples
        self._weight += num_examples
        self.updates += 1

    @property
    def touched(self) -> NDArray[np.bool_]:
        """Return the blocks that any device sent, [L]."""
        return self._weights > 0

    def mean(self, previous: Tensors) -> Tensors:
        """Return the next global values by name, float32; blocks without a sender are those of ``previous``."""
        table = self._manifest.block_table
        result: Tensors = {}
        for spec in self._manifest.shared:
            weights: NDArray[np.float64] = np.array([self._weight])
            if spec.name in table.tensors:
                weights = np.repeat(self._weights[table.places[spec.name]], table.tensors[spec.name])
            numerator = self._numerators[spec.name]
            old = previous[spec.name].reshape(-1).astype(np.float64)
            total = np.where(weights > 0, self._weight, 0.0) if self._everybody else weights
            result[spec.name] = quotient(numerator + (total - weights) * old, total, old).reshape(spec.shape)
        return result
