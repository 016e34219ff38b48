"""Robust aggregation rules, instead of the weighted mean, against a few malicious devices.

Of n drawn devices up to f = max(1, floor(share n)) may be malicious and collude. docs/methods.md, "Robust rules", has
the threat model and each rule's guarantees.

    trimmed_mean   the mean of a coordinate's values without the f smallest and the f largest
    median         the middle value, or mean of two          (both: Yin, Chen, Ramchandran, Bartlett, ICML 2018,
                                                              arXiv:1803.01498)
    krum           the mean of the n - f updates that are closest to their n - f - 2 neighbours (multi-Krum;
                   Blanchard, El Mhamdi, Guerraoui, Stainer, NIPS 2017, arXiv:1703.02757)

Before any rule, each value is clipped to its tensor's bound: its distance from the old model becomes at most the lower
median, over the updates that sent some of the tensor, of their largest distances in it. It is at most the largest
change by an honest device, if at most half of these updates are malicious.

With fewer than 2f + 1 senders (at least three) a coordinate keeps its old value; krum needs 2f + 3 updates. Values have
equal weights, because a device could claim any number of examples.

Each update is written to an unnamed file, 4 bytes per value of the full model, and read back in slices of coordinates.
Memory is about 14 models in float32 for any cohort.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import Mask, pack, unpack, unpack_whole

from .averages import Sum, blocks_of

Rule = Literal["trimmed_mean", "median", "krum"]

FEWEST = 3
"""Smallest number of senders that change a coordinate: of two values, neither can be identified as malicious."""

ACCIDENT = 1e-9
"""Tolerance for binary floats: 0.29 * 100 is 28.999999999999996."""

FAR = 1e100
"""Distance of an infinite value; its square is finite."""

SMALLEST_SLICE = 2**20
"""Smallest number of values read at a time."""


def malicious_of(share: float, drawn: int) -> int:
    """Return f, the assumed number of malicious devices among ``drawn``."""
    return max(1, math.floor(share * drawn + ACCIDENT))


def fewest(rule: Rule, share: float, drawn: int) -> int:
    """Return the smallest number of updates, or senders of a coordinate, with which a rule changes it."""
    return max(FEWEST, 2 * malicious_of(share, drawn) + (3 if rule == "krum" else 1))


class RobustSums:
    """Updates of one round, stored until the mean is taken, for methods that only use the mean."""

    def __init__(self, manifest: Manifest, rule: Rule, share: float, folder: Path) -> None:
        self._manifest = manifest
        self._rule = rule
        self._share = share
        self._touched = np.zeros(len(manifest.block_table.sizes), dtype=bool)
        self.masks: set[bytes | None] = set()
        """The different choices of blocks among the updates."""
        self._senders = np.zeros(manifest.shared_values, dtype=np.uint32)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="round-", suffix=".partial")
        # The file disappears with this object or the process.
        os.unlink(name)
        self._file = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.updates = 0
        self.drawn = 0
        """Devices drawn for the round, set before ``mean``; at least the number of updates."""

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Store one update."""
        # NaN stands for values not sent; an update has none.
        row = np.full(self._manifest.shared_values, np.nan, dtype=np.float32)
        whole = unpack_whole(self._manifest, row)
        for spec, block, part in unpack(self._manifest, values, mask):
            block.put(whole[spec.name], part)
        self._senders += ~np.isnan(row)
        _write(self._file, row, self.updates * row.nbytes)
        self._touched[slice(None) if not isinstance(mask, BlockMask) else mask.on] = True
        self.masks.add(blocks_of(mask))
        self.updates += 1

    @property
    def touched(self) -> NDArray[np.bool_]:
        """Return the blocks that any device sent, [L]."""
        return self._touched

    @property
    def held_back(self) -> int:
        """Return the number of values with too few senders."""
        return int(np.count_nonzero(self._senders) - np.count_nonzero(self._senders >= self._fewest))

    def mean(self, previous: Tensors) -> Tensors:
        """Return the next global values by name, float32; values with too few senders are those of ``previous``."""
        old = pack(self._manifest, previous, None)
        new = old.copy()
        if self.updates < self._fewest:
            return unpack_whole(self._manifest, new)
        bounds, ends = self._bounds(old)
        chosen = self._nearest(old) if self._rule == "krum" else np.arange(self.updates)
        for place, rows in self._slices():
            bound = bounds[np.searchsorted(ends, np.arange(place.start, place.stop), side="right")]
            kept = rows[chosen].astype(np.float64)
            # NaN (not sent) stays NaN.
            np.clip(kept, old[place] - bound, old[place] + bound, out=kept)
            moves = self._senders[place] >= self._fewest
            counts = len(chosen) - np.count_nonzero(np.isnan(kept), axis=0)
            mean = middle_mean(kept, counts, np.where(moves, self._trimmed(counts), 0))
            np.copyto(new[place], mean, where=moves, casting="same_kind")
        return unpack_whole(self._manifest, new)

    @property
    def _malicious(self) -> int:
        return malicious_of(self._share, max(self.drawn, self.updates))

    @property
    def _fewest(self) -> int:
        return fewest(self._rule, self._share, max(self.drawn, self.updates))

    def _trimmed(self, counts: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the number of values left out at each end, by the number of senders."""
        if self._rule == "median":
            return (counts - 1) // 2
        return np.full_like(counts, self._malicious if self._rule == "trimmed_mean" else 0)

    def _bounds(self, old: NDArray[np.float32]) -> tuple[Sum, NDArray[np.intp]]:
        """Return each tensor's largest allowed distance from the old model, and its end."""
        ends = np.cumsum([spec.size for spec in self._manifest.shared])
        farthest = np.full((self.updates, len(ends)), np.nan)
        for place, rows in self._slices():
            moved = np.abs(rows.astype(np.float64) - old[place])
            first, last = np.searchsorted(ends, (place.start, place.stop - 1), side="right")
            cuts = np.concatenate(([place.start], ends[first:last])) - place.start
            there = farthest[:, first : last + 1]
            # fmax ignores NaN (not sent).
            np.fmax(there, np.fmax.reduceat(moved, cuts, axis=1), out=there)
        # NaN is sorted to the end.
        farthest.sort(axis=0)
        middle = np.maximum(np.count_nonzero(~np.isnan(farthest), axis=0) - 1, 0) // 2
        return np.nan_to_num(farthest[middle, np.arange(len(ends))], nan=0.0, posinf=np.inf), ends

    def _nearest(self, old: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return the indices of the updates that multi-Krum keeps, sorted."""
        count = self.updates
        malicious = self._malicious
        squares = np.zeros((count, count))
        for place, rows in self._slices():
            # Relative to the nearby old model: differences of large squares would lose precision. NaN counts as 0.
            moved = np.nan_to_num(rows.astype(np.float64) - old[place], posinf=FAR, neginf=-FAR)
            power = (moved * moved).sum(axis=1)
            squares += power + power[:, None] - 2 * (moved @ moved.T)
        # An update does not count as its own neighbour.
        np.fill_diagonal(squares, np.inf)
        scores = np.sort(squares, axis=1)[:, : count - malicious - 2].sum(axis=1)
        return np.sort(np.argsort(scores, kind="stable")[: count - malicious])

    def _slices(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yield slices of coordinates with the values of all updates, [updates, coordinates]; NaN: not sent."""
        size = self._manifest.shared_values
        width = max(1, max(size, SMALLEST_SLICE) // self.updates)
        for start in range(0, size, width):
            rows = np.empty((self.updates, min(width, size - start)), dtype=np.float32)
            for number in range(self.updates):
                _read(self._file, rows[number], 4 * (number * size + start))
            yield slice(start, start + rows.shape[1]), rows


def middle_mean(values: Sum, counts: NDArray[np.intp], trimmed: NDArray[np.intp]) -> Sum:
    """Return the means of the middle of each column of ``values`` [n, m]; NaN for an empty column.

    counts [m]: numbers of values that are not NaN; trimmed [m]: numbers of values left out at each end.
    """
    if trimmed.any():
        # NaN is sorted to the end.
        values.sort(axis=0)
        ranks = np.arange(len(values))[:, None]
        inside = (ranks >= trimmed) & (ranks < counts - trimmed)
    else:
        inside = ~np.isnan(values)
    total = np.where(inside, values, 0.0).sum(axis=0)
    left = counts - 2 * trimmed
    mean: Sum = np.divide(total, left, out=np.full(len(total), np.nan), where=left > 0)
    return mean


def _write(file: int, row: NDArray[np.float32], offset: int) -> None:
    view = row.view(np.uint8).data
    while view:
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset += written


def _read(file: int, row: NDArray[np.float32], offset: int) -> None:
    view = row.view(np.uint8).data
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise OSError("the file of this round's updates is shorter than the bytes written to it")
        view = view[count:]
        offset += count
