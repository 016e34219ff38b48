"""Masks: the part of a model that a device trains and sends in a round.

A ``NeuronMask`` lists the active neurons of every hidden neuron group; ``None`` instead of a mask means all. A value is
active if the neurons on all its axes are (see ``manifest``), so the active values of a tensor form a *block*, an outer
product of index lists, packed row-major, tensor after tensor in state-dict order. Under an ``ElementMask``
(``elements``) they are *points*, under a ``BlockMask`` (``blocks``) *runs*.

Both sides can draw a mask from a ``NeuronDraw``: the active neurons of a group are the ``a = max(1, floor(ratio * n))``
ones with the smallest SHA-256 of ``fedspu|key|group|i``. The assignment has the key, so a device cannot compute the
draws of other devices or later rounds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockMask, Runs
from .elements import ElementMask, Index, Points, check_elements
from .errors import ManifestError
from .manifest import Array, Manifest, NeuronGroup, Segment, Tensors, TensorSpec

FULL_RATIO = 0.99
"""Active ratios from this value on count as 1."""


@dataclass(frozen=True)
class NeuronDraw:
    """The seed form of a mask. key: the assignment's. ratio: the active ratio p_k in (0, 1]."""

    key: str
    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}; the active ratio must lie in (0, 1]")
        if "|" in self.key:
            raise ValueError("the key may not contain '|', which separates the fields of the draw")


@dataclass(frozen=True)
class NeuronMask:
    """Active neurons: group name -> their sorted indices, int. Every hidden group of the manifest has an entry."""

    active: Mapping[str, Index]


Mask = NeuronMask | ElementMask | BlockMask
"""The active part of a model; None instead of a mask means everything."""


def active_count(size: int, ratio: float) -> int:
    """Return max(1, floor(ratio * size)). Adding 1e-9 makes 100 * 0.29 count as 29."""
    if ratio >= FULL_RATIO:
        return size
    return max(1, math.floor(ratio * size + 1e-9))


def draw_group(draw: NeuronDraw, group: str, size: int) -> Index:
    """Return the active neurons of one group of ``size``: sorted indices, int."""
    count = active_count(size, draw.ratio)
    if count == size:
        return np.arange(size)
    prefix = hashlib.sha256(f"fedspu|{draw.key}|{group}|".encode())
    digests = []
    for index in range(size):
        hasher = prefix.copy()
        hasher.update(str(index).encode())
        digests.append((hasher.digest(), index))
    return np.sort(np.array([index for _, index in sorted(digests)[:count]], dtype=np.intp))


def draw_neurons(manifest: Manifest, draw: NeuronDraw) -> NeuronMask:
    """Draw the mask of ``draw`` for every hidden group of the manifest. Its arrays are read-only."""
    return _draw_groups(manifest.groups, draw)


@lru_cache(maxsize=256)
def _draw_groups(groups: tuple[NeuronGroup, ...], draw: NeuronDraw) -> NeuronMask:
    # Cached, because a coordinator needs an assignment's mask for its payload, its update and the sums.
    active = {group.name: draw_group(draw, group.name, group.size) for group in groups}
    for index in active.values():
        index.flags.writeable = False
    return NeuronMask(active)


def check_mask(manifest: Manifest, mask: Mask) -> None:
    """Raise ManifestError unless the mask fits the manifest's model. Neurons: all groups, each with sorted indices, at
    least one. Elements: all maskable tensors with their shapes. Blocks: a boolean for each."""
    if isinstance(mask, ElementMask):
        check_elements(manifest, mask)
        return
    if isinstance(mask, BlockMask):
        length = len(manifest.block_table.sizes)
        if mask.on.shape != (length,) or mask.on.dtype != np.bool_:
            raise ManifestError(f"a mask of {mask.on.dtype} {mask.on.shape} for {length} blocks; give booleans of each")
        return
    if set(mask.active) != set(manifest.group_sizes):
        raise ManifestError(
            f"the mask names the groups {sorted(mask.active)}, the manifest {list(manifest.group_sizes)}"
        )
    for group, size in manifest.group_sizes.items():
        index = mask.active[group]
        if len(index) == 0 or index[0] < 0 or index[-1] >= size or np.any(np.diff(index) <= 0):
            raise ManifestError(
                f"{group}: active neurons must be sorted, different, in 0..{size - 1}, and at least one"
            )


def same_mask(one: Mask | None, other: Mask | None) -> bool:
    """Return whether two masks of one manifest have the same neurons, elements or blocks."""
    match one, other:
        case NeuronMask(), NeuronMask():
            return all(np.array_equal(index, other.active[group]) for group, index in one.active.items())
        case ElementMask(), ElementMask():
            return one.digest == other.digest
        case BlockMask(), BlockMask():
            return np.array_equal(one.on, other.on)
    return one is other


def axis_index(segments: tuple[Segment, ...], mask: NeuronMask, sizes: Mapping[str, int]) -> Index | None:
    """Return the active entries of an axis; None if all are active."""
    if all(len(mask.active[segment.group]) == sizes[segment.group] for segment in segments):
        return None
    if len(segments) == 1 and segments[0].repeat == 1:
        return mask.active[segments[0].group]
    parts: list[Index] = []
    offset = 0
    for segment in segments:
        starts = mask.active[segment.group] * segment.repeat + offset
        parts.append((starts[:, None] + np.arange(segment.repeat)).ravel())
        offset += sizes[segment.group] * segment.repeat
    return np.concatenate(parts)


CHUNK_VALUES = 32 * 1024
"""Values per chunk: scratch arrays of this size stay in a core's cache."""


@dataclass(frozen=True)
class Block:
    """The active values of one tensor. Tensors given to its methods must be C-contiguous.

    view: the tensor's ``neuron_view``; rows and columns index its first two axes, None meaning all. shape: shape of the
    block within that view. Values between the same two neurons are adjacent, a *run*. All methods move chunks of runs
    with one flat index, for speed.
    """

    view: tuple[int, ...]
    rows: Index | None
    columns: Index | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of active values."""
        return math.prod(self.shape)

    def pairs(self) -> Block:
        """Return the corresponding block of an array [view[:2]] with one entry per pair of neurons."""
        return Block(self.view[:2], self.rows, self.columns, self.shape[:2])

    def _run(self) -> int:
        """Return the length of a run."""
        if self.columns is not None:
            return math.prod(self.view[2:])
        return 1 if self.rows is None else math.prod(self.view[1:])

    def _chunks(self) -> Iterator[tuple[Index | slice, slice]]:
        """Yield runs of the tensor (as [runs, run]) and of the packed block, chunk by chunk."""
        if self.rows is None and self.columns is None:
            for start in range(0, self.size, CHUNK_VALUES):
                yield slice(start, start + CHUNK_VALUES), slice(start, start + CHUNK_VALUES)
            return
        rows = np.arange(self.view[0]) if self.rows is None else self.rows
        runs_per_row = 1 if self.columns is None else len(self.columns)
        step = max(1, CHUNK_VALUES // (runs_per_row * self._run()))
        for start in range(0, len(rows), step):
            index = rows[start : start + step]
            if self.columns is not None:
                index = (index[:, None] * self.view[1] + self.columns).ravel()
            yield index, slice(start * runs_per_row, start * runs_per_row + len(index))

    def take(self, tensor: Array) -> Array:
        """Return the active values of ``tensor`` as a block, copied."""
        taken = np.empty(self.shape, dtype=tensor.dtype)
        self.take_into(tensor, taken)
        return taken

    def take_into(self, tensor: Array, out: Array) -> None:
        """Copy the active values of ``tensor`` into ``out``, a C-contiguous array of ``size`` values of its dtype."""
        runs = tensor.reshape(-1, self._run())
        packed = out.reshape(-1, self._run())
        for index, part in self._chunks():
            if isinstance(index, slice):
                packed[part] = runs[index]
            else:
                # Indices are never out of range; with "raise" numpy would buffer the output.
                np.take(runs, index, axis=0, out=packed[part], mode="clip")

    def put(self, tensor: Array, block: Array) -> None:
        """Overwrite the active values of ``tensor`` in place."""
        runs = tensor.reshape(-1, self._run())
        packed = block.reshape(-1, self._run())
        for index, part in self._chunks():
            runs[index] = packed[part]

    def add(self, tensor: NDArray[np.float64], block: Array | float, scale: float = 1.0) -> None:
        """Add ``scale`` times ``block`` (``size`` values, or one for all) to the active values in place, in float64."""
        run = self._run()
        runs = tensor.reshape(-1, run)
        packed = block.reshape(-1, run) if isinstance(block, np.ndarray) else None
        # One pair for all chunks; the first chunk is the longest.
        scratch: NDArray[np.float64] | None = None
        for index, part in self._chunks():
            count = len(runs[index]) if isinstance(index, slice) else len(index)
            if scratch is None:
                scratch = np.empty((2, count, run))
            addend = np.multiply(
                block if packed is None else packed[part], scale, dtype=np.float64, out=scratch[0, :count]
            )
            if isinstance(index, slice):
                runs[index] += addend
            else:
                # Indices are never out of range; with "raise" numpy would buffer the output.
                sums = np.take(runs, index, axis=0, out=scratch[1, :count], mode="clip")
                runs[index] = np.add(sums, addend, out=sums)


def neuron_view(manifest: Manifest, spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a tensor with neurons (or inputs, or classes) on its first two axes. Behind a flatten, a
    channel's entries become a separate axis.
    """
    last = min(len(spec.axes), 2) - 1
    segments = spec.axes[last] if spec.axes else ()
    if len(segments) == 1 and segments[0].repeat > 1:
        owned = (manifest.group_sizes[segments[0].group], segments[0].repeat)
        return (*spec.shape[:last], *owned, *spec.shape[last + 1 :])
    return spec.shape


Part = Block | Points | Runs
"""The active values of one tensor."""


def block_of(manifest: Manifest, spec: TensorSpec, mask: Mask | None) -> Part:
    """Return the active values of ``spec`` in ``mask`` (None: all values)."""
    if isinstance(mask, BlockMask):
        table = manifest.block_table
        if spec.name not in table.tensors:
            return neuron_block(manifest, spec, None)
        return Runs.of(spec.shape, table.tensors[spec.name], mask.on[table.places[spec.name]])
    if isinstance(mask, ElementMask):
        index = mask.index.get(spec.name)
        return neuron_block(manifest, spec, None) if index is None else Points(spec.shape, index)
    return neuron_block(manifest, spec, mask)


def neuron_block(manifest: Manifest, spec: TensorSpec, mask: NeuronMask | None) -> Block:
    """Return the block of ``spec`` whose neurons are active on both axes."""
    view = neuron_view(manifest, spec)
    if mask is None or not any(spec.axes):
        return Block(view, None, None, view)
    axes = list(spec.axes[:2])
    if len(view) > len(spec.shape):
        # The view indexes channels, not their entries.
        axes[-1] = (Segment(group=axes[-1][0].group),)
    rows, columns = (*(axis_index(axis, mask, manifest.group_sizes) for axis in axes), None)[:2]
    active = [length if index is None else len(index) for length, index in zip(view, (rows, columns), strict=False)]
    return Block(view, rows, columns, (*active, *view[2:]))


def blocks(manifest: Manifest, mask: Mask | None) -> Iterator[tuple[TensorSpec, Part]]:
    """Yield every shared tensor with its active block, in packing order."""
    if isinstance(mask, ElementMask | BlockMask):
        for spec in manifest.shared:
            yield spec, block_of(manifest, spec, mask)
        return
    # Tensors with equal shape and axes, such as a layer's bias and norm, share a block.
    found: dict[int, Block] = {}
    for spec, like in zip(manifest.shared, manifest.alike, strict=True):
        if like not in found:
            found[like] = neuron_block(manifest, spec, mask)
        yield spec, found[like]


def count_values(manifest: Manifest, mask: Mask | None) -> int:
    """Return the number of transferred values with ``mask``, including running statistics."""
    if mask is None:
        return manifest.shared_values
    if isinstance(mask, ElementMask):
        return manifest.shared_values - mask.size + mask.count
    if isinstance(mask, BlockMask):
        return manifest.shared_values - int(manifest.block_table.sizes[~mask.on].sum())
    active = {group: len(index) for group, index in mask.active.items()}
    total = 0
    for spec in manifest.shared:
        count = 1
        for segments, length in zip(spec.axes or ((),) * len(spec.shape), spec.shape, strict=True):
            count *= sum(active[segment.group] * segment.repeat for segment in segments) if segments else length
        total += count
    return total


def pack(manifest: Manifest, tensors: Tensors, mask: Mask | None) -> NDArray[np.float32]:
    """Return the active values of the shared tensors as one vector [count_values]: block after block, row-major."""
    packed = np.empty(count_values(manifest, mask), dtype=np.float32)
    start = 0
    for spec, block in blocks(manifest, mask):
        block.take_into(tensors[spec.name], packed[start : start + block.size])
        start += block.size
    return packed


def unpack(manifest: Manifest, packed: Array, mask: Mask | None) -> Iterator[tuple[TensorSpec, Part, Array]]:
    """Yield each shared tensor of a packed vector with its block and the block's values (views, no copy)."""
    start = 0
    for spec, block in blocks(manifest, mask):
        yield spec, block, packed[start : start + block.size].reshape(block.shape)
        start += block.size


def unpack_whole(manifest: Manifest, packed: Array) -> Tensors:
    """Return the tensors of a packed complete model by name (views, no copy)."""
    return {spec.name: values.reshape(spec.shape) for spec, _, values in unpack(manifest, packed, None)}


def merge_in_place(manifest: Manifest, tensors: Tensors, packed: Array, mask: Mask | None) -> None:
    """Overwrite the active values of ``tensors`` with received ones."""
    for spec, block, values in unpack(manifest, packed, mask):
        block.put(tensors[spec.name], values)
