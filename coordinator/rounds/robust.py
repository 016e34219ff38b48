"""Robust rules that a few malicious devices cannot bend, by coordinate, in place of a round's weighted mean.

    trimmed_mean   of the k values of a coordinate the ceil(share k) smallest and largest are left out, and the rest
                   averaged; at least one or two are left               (Yin, Chen, Ramchandran, Bartlett, ICML 2018,
    median         the middle value, or the mean of both                 arXiv:1803.01498)
    krum           with f = floor(share n) malicious updates among n updates, the n - f whose n - f - 2 nearest others
                   lie nearest are averaged (multi-Krum; Blanchard, El Mhamdi, Guerraoui, Stainer, NIPS 2017,
                   arXiv:1703.02757)

Values count alike whatever examples a device claims, which it could claim without end. A coordinate is judged among
those that sent it. By the first two rules one that fewer than three sent keeps its old value: of one or two nobody can
say which one lies.
Krum measures two updates by the mean squared difference over what both sent, which makes masks of unequal sizes
comparable; those that share nothing are infinitely far. It needs n >= 2f + 3: with less, f falls, but not below 1, so
that a round of fewer than five leaves the model as it was.

All updates of a round are needed at once. Each is written to a file without a name, 4 bytes for each value of the whole
model, and read back in slices of coordinates. Memory: a slice of all updates has as many values as one model (or 2^20,
where that is more) and takes 4 bytes each, and five times 8 while it is sorted; beside it the old and the new model.
That is about 13 models in float32, whatever the cohort; and two numbers for each pair of updates for Krum.
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

from edge_sdk.protocol.blocks import BlockMask
from edge_sdk.protocol.manifest import Array, Manifest, Tensors
from edge_sdk.protocol.masks import Mask, pack, unpack, unpack_whole
from edge_sdk.protocol.messages import FederationSettings
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import CoordinatorMethod
from sparrow.coordinator.rounds.sums import Sum

Rule = Literal["trimmed_mean", "median", "krum"]

FEWEST = 3
"""Devices that must have sent a coordinate for the trimmed mean or the median to move it."""

FEWEST_KRUM = 5
"""Updates that Krum needs to suspect one of them."""

SMALLEST_SLICE = 2**20
"""Values that are read at a time, at least."""


def check_robust(method: CoordinatorMethod, settings: FederationSettings) -> None:
    """Raise BadContent for a federation whose rule could not work."""
    if settings.robust is None:
        return
    reason = method.why_mean_only(settings)
    if reason:
        raise BadContent(f"robust: {settings.method} cannot do with {settings.robust}: {reason}; leave robust out")
    fewest = FEWEST_KRUM if settings.robust == "krum" else FEWEST
    if settings.cohort < fewest:
        raise BadContent(
            f"cohort: among {settings.cohort} devices {settings.robust} cannot tell who lies; draw at least {fewest}"
        )


class RobustSums:
    """Updates of one round, kept until they can be judged; in place of sums, for methods that only take their mean."""

    def __init__(self, manifest: Manifest, rule: Rule, share: float, folder: Path) -> None:
        self._manifest = manifest
        self._rule = rule
        self._share = share
        self._touched = np.zeros(len(manifest.block_table.sizes), dtype=bool)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="round-", suffix=".partial")
        os.unlink(name)  # gone with this object, or with the process
        self._file = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.updates = 0

    def fold_in_place(
        self, values: Array, mask: Mask | None, num_examples: int, gradients: Array | None = None
    ) -> None:
        """Keep one update."""
        row = np.full(self._manifest.shared_values, np.nan, dtype=np.float32)  # no value of an update is NaN
        whole = unpack_whole(self._manifest, row)
        for spec, block, part in unpack(self._manifest, values, mask):
            block.put(whole[spec.name], part)
        _write(self._file, row, self.updates * row.nbytes)
        self._touched[slice(None) if not isinstance(mask, BlockMask) else mask.on] = True
        self.updates += 1

    @property
    def touched(self) -> NDArray[np.bool_]:
        """Return the blocks that any device sent, [L]."""
        return self._touched

    def mean(self, previous: Tensors) -> Tensors:
        """Return the next global values: name -> float32; values that too few sent are those of ``previous``."""
        old = pack(self._manifest, previous, None)
        new = old.copy()
        chosen = self._nearest(old) if self._rule == "krum" else np.arange(self.updates)
        least = 1 if self._rule == "krum" else FEWEST
        if len(chosen) < least:
            return unpack_whole(self._manifest, new)
        for place, rows in self._slices():
            kept = rows[chosen].astype(np.float64)
            counts = len(chosen) - np.count_nonzero(np.isnan(kept), axis=0)
            mean = middle_mean(kept, counts, self._trimmed(counts))
            np.copyto(new[place], mean, where=counts >= least, casting="same_kind")
        return unpack_whole(self._manifest, new)

    def _trimmed(self, counts: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return how many values are cut at each end, by how many there are."""
        most = np.maximum(counts - 1, 0) // 2
        if self._rule == "krum":
            return np.zeros_like(counts)
        if self._rule == "median":
            return most
        # Less an accident of binary floats: 0.2 * 15 is 3.0000000000000004.
        wanted: NDArray[np.intp] = np.minimum(np.ceil(self._share * counts - 1e-9).astype(np.intp), most)
        return wanted

    def _nearest(self, old: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return the updates that multi-Krum keeps, sorted; none if there are too few."""
        count = self.updates
        malicious = min(max(1, math.floor(self._share * count + 1e-9)), (count - 3) // 2)
        if malicious < 1:
            return np.zeros(0, dtype=np.intp)
        squares, overlap = np.zeros((2, count, count))
        for place, rows in self._slices():
            sent = ~np.isnan(rows)
            # From the old model, near which all lie: differences of large squares would lose what they differ by.
            moved = np.where(sent, rows.astype(np.float64) - old[place], 0.0)
            both = sent.astype(np.float64)
            power = (moved * moved) @ both.T
            squares += power + power.T - 2 * (moved @ moved.T)
            overlap += both @ both.T
        apart = np.divide(squares, overlap, out=np.full_like(squares, np.inf), where=overlap > 0)
        np.fill_diagonal(apart, np.inf)  # nobody vouches for himself
        scores = np.sort(apart, axis=1)[:, : count - malicious - 2].sum(axis=1)
        return np.sort(np.argsort(scores, kind="stable")[: count - malicious])

    def _slices(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yield slices of the coordinates, with all updates' values there, [updates, coordinates]; NaN: not sent."""
        size = self._manifest.shared_values
        width = max(1, max(size, SMALLEST_SLICE) // self.updates)
        for start in range(0, size, width):
            rows = np.empty((self.updates, min(width, size - start)), dtype=np.float32)
            for number in range(self.updates):
                _read(self._file, rows[number], 4 * (number * size + start))
            yield slice(start, start + rows.shape[1]), rows


def middle_mean(values: Sum, counts: NDArray[np.intp], trimmed: NDArray[np.intp]) -> Sum:
    """Return the means of the middle of each column of ``values`` [n, m]; NaN where there is none.

    counts [m]: how many of a column are not NaN; trimmed [m]: how many of those go at each end.
    """
    if trimmed.any():
        values.sort(axis=0)  # NaN is sorted to the end
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
        view, offset = view[written:], offset + written


def _read(file: int, row: NDArray[np.float32], offset: int) -> None:
    view = row.view(np.uint8).data
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise OSError("the file of this round's updates is shorter than the bytes written to it")
        view, offset = view[count:], offset + count
