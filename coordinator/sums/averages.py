"""Streaming averages of sparse updates, weight by weight.

    w_i <- sum over the devices k that sent i of n_k * w_ki / sum over the same devices of n_k        (FedSPU, Alg. 1)

Numerators are float64. Memory is that of one model in float64 and a little, whatever the cohort: under neuron masks all
values that join the same two neurons (a kernel's taps, the columns of a flattened channel) are sent by the same
devices, so one weight per pair of neurons serves; under the one mask of elements that a round's devices share there is
one weight for all, and values are summed as they come, packed.

Order: float64 sums depend on it in the last bits, so the caller folds updates in the cohort's fixed order and the same
updates give the same model, bit for bit. A value that nobody sent keeps its old one; it is never averaged in as zero.
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
"""Numerators with their weights added at a time: scratch arrays of them stay in a core's cache."""


class Sums(Protocol):
    """Running sums of one round's updates, and how many there are."""

    updates: int

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update: float32 [count_values(manifest, mask)], weighted with its ``num_examples``."""


def difference(manifest: Manifest, sent: Tensors, values: Array, mask: Mask | None) -> Sum:
    """Return the float64 difference of an update's values [count_values(manifest, mask)] from those that were sent."""
    return values.astype(np.float64) - pack(manifest, sent, mask)


def add_in_place(total: Sum, values: Array, scale: float) -> None:
    """Add ``scale`` times ``values`` [n] to ``total`` [n], products and sums in float64, in slices that caches hold."""
    scratch = np.empty(min(len(values), CHUNK_VALUES))
    for start in range(0, len(values), CHUNK_VALUES):
        place = total[start : start + CHUNK_VALUES]
        scaled = scratch[: len(place)]
        scaled[:] = values[start : start + CHUNK_VALUES]  # by itself: a product that converts goes through a buffer
        scaled *= scale
        place += scaled


class MaskedSums:
    """Numerators and weights of updates under neuron masks, or of whole models.

    Numerators lie in the order in which values are packed, so that a whole model is added in one go. Tensors that lie
    alike between neurons (a layer's bias and norms) share their weights.

    everybody: a value that a device did not send counts, with the device's weight, as the one of the global model, so
    that a mean is one of whole models. ``completed`` is the number of values that were so added.
    """

    def __init__(self, manifest: Manifest, *, everybody: bool = False) -> None:
        self._manifest = manifest
        self._everybody = everybody
        self._weight = 0.0
        self.completed = 0
        self._sum = np.zeros(manifest.shared_values, dtype=np.float64)
        self._numerators = cast("dict[str, Sum]", unpack_whole(manifest, self._sum))  # views of it
        views = [neuron_view(manifest, spec)[:2] for spec in manifest.shared]
        self._weights = {like: np.zeros(views[like], dtype=np.float64) for like in set(manifest.alike)}
        self._of_all = 0.0  # the weight of whole models
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
        """Return the next global values: name -> float32; values that nobody sent are those of ``previous``."""
        result: Tensors = {}
        for like, spec in zip(self._manifest.alike, self._manifest.shared, strict=True):
            if self._of_all and not self._weights[like].any():  # of whole models alone: one weight for all
                mean = result[spec.name] = np.empty(spec.shape, dtype=np.float32)
                # Rounded on the way: an array of float64 beside would be two models more in memory.
                np.divide(self._numerators[spec.name], self._of_all, out=mean, casting="same_kind")
                continue
            view = neuron_view(self._manifest, spec)
            numerator, weights = self._numerators[spec.name].reshape(view), self._weights[like] + self._of_all
            spread = weights.reshape(weights.shape + (1,) * (len(view) - weights.ndim))
            old = previous[spec.name].reshape(view)
            if self._everybody:
                total = np.where(spread > 0, self._weight, 0.0)  # what nobody sent stays, bit for bit
                numerator, spread = numerator + (total - spread) * old.astype(np.float64), total
            result[spec.name] = quotient(numerator, spread, old).reshape(spec.shape)
        return result


class ElementSums:
    """Numerators and weights of updates under masks of elements, most of them under ``mask``, the round's.

    Those are summed packed, and unpacked once. Of others, what is maskable is added to arrays of the model's shapes,
    made for the first of them: complex numbers of which the real part is the numerator and the imaginary part the
    weight, because positions that lie apart cost their cache lines, and so both come with one.
    """

    def __init__(self, manifest: Manifest, mask: ElementMask) -> None:
        self._manifest = manifest
        self._mask = mask
        self._packed = np.zeros(count_values(manifest, mask), dtype=np.float64)
        self._weight = 0.0
        self._apart: dict[str, NDArray[np.complex128]] = {}  # [size]
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
        """Return whether all updates came under the round's mask: then ``packed`` tells all that ``totals`` does."""
        return self.updates > 0 and not self._apart

    def packed(self) -> Iterator[tuple[TensorSpec, Block | Points, Sum]]:
        """Yield each shared tensor, the places where it exists, and the numerators there, if all updates are ``alike``.

        The weight of each is ``num_examples``."""
        return cast(
            "Iterator[tuple[TensorSpec, Block | Points, Sum]]", unpack(self._manifest, self._packed, self._mask)
        )

    def totals(self) -> Iterator[tuple[TensorSpec, Sum, Sum]]:
        """Yield each shared tensor, its numerators and weights, float64 [size]: both 0 where nobody sent a value."""
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
        """Return the next global values: name -> float32; values that nobody sent are those of ``previous``."""
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
    """Add ``weight * values + i weight`` to ``total`` where ``index`` says: sorted positions, all different."""
    count = min(len(index), PAIRS)
    addend, sums = np.empty((2, count), dtype=np.complex128)
    addend.imag = weight
    for start in range(0, len(index), PAIRS):
        places = index[start : start + PAIRS]
        one, two = addend[: len(places)], sums[: len(places)]
        np.multiply(values[start : start + PAIRS], weight, out=one.real, dtype=np.float64)
        # clip, which never happens: with "raise" numpy would buffer the output
        np.take(total, places, out=two, mode="clip")
        total[places] = np.add(two, one, out=two)


def quotient(numerator: Sum, weights: Sum, old: Array) -> NDArray[np.float32]:
    """Return ``numerator / weights`` where there is weight, else ``old``: float32 of the numerator's shape."""
    return np.divide(numerator, weights, out=old.astype(np.float64), where=weights > 0).astype(np.float32)


class OneUpdate:
    """The update of the one device that prepares a model, as it came."""

    def __init__(self) -> None:
        self.updates = 0

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Keep the update."""
        self.values, self.mask = values, mask
        self.updates += 1


def blocks_of(mask: Mask | None) -> bytes | None:
    """Return the blocks that ``mask`` names, packed, or None where it leaves none out."""
    return mask.packed() if isinstance(mask, BlockMask) and not mask.on.all() else None


class BlockSums:
    """Numerators of updates under masks of blocks, and for every block the weight of those who touched it.

    everybody: untouched blocks count as no change, so that a block's divisor is the weight of all updates, as in the
    code that pFedGate's authors released. ``masks`` are the different ones among the updates'.
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
        """Return the next global values: name -> float32; blocks that nobody sent are ``previous``'s, bit for bit."""
        table = self._manifest.block_table
        result: Tensors = {}
        for spec in self._manifest.shared:
            weights: NDArray[np.float64] = np.array([self._weight])
            if spec.name in table.tensors:
                weights = np.repeat(self._weights[table.places[spec.name]], table.tensors[spec.name])
            numerator, old = self._numerators[spec.name], previous[spec.name].reshape(-1).astype(np.float64)
            total = np.where(weights > 0, self._weight, 0.0) if self._everybody else weights
            result[spec.name] = quotient(numerator + (total - weights) * old, total, old).reshape(spec.shape)
        return result
