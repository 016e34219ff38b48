"""A model cut into blocks, and which of them a budget keeps (pFedGate, arXiv:2305.02776; its method card, 4.3 and 4.4).

Every weight and every bias is a tensor of its own; a block is a run of one tensor's values in row-major order. Blocks
are numbered through the model, tensor after tensor. The first block of every tensor is always on; which of the others
are follows from their importances by a knapsack, solved exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Selection = NDArray[np.bool_]

LARGEST_FRONT = 50_000
"""Partial choices that the exact solver keeps at once; beyond, it makes do with a greedy one (card, 4.4)."""

_TIE = 1e-9
"""Taken off a block's importance per place, so that of equal ones the first wins (card, 4.4)."""


def split(size: int, count: int, smallest_share: float) -> tuple[int, ...]:
    """Sizes of the at most ``count`` blocks of a tensor of ``size`` values (card, 4.3).

    The first holds ``smallest_share`` of them (s_min, in (0, 1]), the others equal parts of the rest, the last what is
    left. A tensor smaller than ``count`` has blocks of one value.
    """
    first = min(size, max(1, math.floor(size * smallest_share + 1e-9)))
    rest = size - first
    parts = min(count - 1, rest)
    if rest == 0 or parts == 0:
        return (size,)
    each = math.ceil(rest / parts)
    full = math.ceil(rest / each) - 1
    return (first, *(each,) * full, rest - full * each)


def whole_rows(sizes: Sequence[int], row: int) -> tuple[int, ...]:
    """``sizes`` of blocks with their ends moved to the nearest multiple of ``row`` values; what is left empty goes."""
    ends = [max(row, (end + row // 2) // row * row) for end in accumulate(sizes)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False) if end > start)


@dataclass(frozen=True)
class BlockTable:
    """The blocks of a model: tensor name -> sizes of its blocks, in the order in which blocks are numbered."""

    tensors: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        *,
        count: int = 5,
        smallest_share: float | None = None,
        align_rows: bool = False,
    ) -> BlockTable:
        """The table of tensors of ``shapes``: ``count`` blocks for each (B of the paper), see ``split``.

        ``smallest_share`` is 1 / ``count`` unless given. ``align_rows`` lets no block end inside an output row or
        channel, so that what is off need not be computed. Raises ValueError for numbers out of range.
        """
        share = 1 / count if smallest_share is None and count > 0 else smallest_share
        if count < 1 or share is None or not 0 < share <= 1:
            raise ValueError(f"{count} blocks of which the first holds {share}: give at least 1, and a share in (0, 1]")
        tensors = {}
        for name, shape in shapes.items():
            sizes = split(math.prod(shape), count, share)
            tensors[name] = whole_rows(sizes, math.prod(shape[1:])) if align_rows else sizes
        return cls(tensors)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Values in each block, [L]: W of the card."""
        return np.array([size for sizes in self.tensors.values() for size in sizes], dtype=np.int64)

    @cached_property
    def forced(self) -> Selection:
        """Which blocks are always on, [L]: the first of every tensor, F of the card."""
        return np.array([place == 0 for sizes in self.tensors.values() for place in range(len(sizes))], dtype=bool)

    def capacity(self, share: float) -> int:
        """Values that blocks which are not forced may hold at a budget of ``share`` (s of the card, in (0, 1]).

        Raises ValueError where not even the forced blocks fit.
        """
        total, forced = int(self.sizes.sum()), int(self.sizes[self.forced].sum())
        capacity = math.floor(share * total + 1e-9) - forced
        if capacity < 0:
            raise ValueError(
                f"the blocks that are always on hold {forced} of {total} values, more than a budget of {share:g}; "
                f"raise the budget, or lower the first block's share"
            )
        return capacity

    def select(self, importances: NDArray[np.floating], share: float) -> Selection:
        """The blocks that are on, [L]: the forced ones and the most important others that fit in ``share`` (card, 4.4).

        ``importances`` [L] are G of the card, in (0, 1); those of forced blocks are not looked at. Raises ValueError
        where the budget is too small.
        """
        capacity = self.capacity(share)
        chosen = self.forced.copy()
        candidates = np.flatnonzero(~chosen)
        values = importances[candidates] - _TIE * candidates
        chosen[candidates[knapsack(self.sizes[candidates], values, capacity)]] = True
        return chosen


def knapsack(sizes: NDArray[np.int64], values: NDArray[np.floating], capacity: int) -> NDArray[np.intp]:
    """Sorted places of the items of the largest total value whose ``sizes`` [n] add up to at most ``capacity``.

    Exact: partial choices that another one beats, being no larger and no less valuable, are dropped (Pareto dominance);
    the blocks of a tensor share one size, so few remain. With more than LARGEST_FRONT of them, ``_greedy``.
    """
    if sizes.sum() <= capacity:
        return np.arange(len(sizes))
    order = np.argsort(-sizes, kind="stable")
    weights, worth = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[NDArray[np.intp], Selection]] = []
    for item in order:
        fits = np.flatnonzero(weights + sizes[item] <= capacity)
        parents = np.concatenate([np.arange(len(weights)), fits])
        taken = np.arange(len(parents)) >= len(weights)
        weights = np.concatenate([weights, weights[fits] + sizes[item]])
        worth = np.concatenate([worth, worth[fits] + values[item]])
        ranked = np.lexsort((-worth, weights))
        best = np.maximum.accumulate(worth[ranked])
        kept = ranked[np.concatenate([[True], best[1:] > best[:-1]])]
        if len(kept) > LARGEST_FRONT:
            return _greedy(sizes, values, capacity)
        weights, worth = weights[kept], worth[kept]
        steps.append((parents[kept], taken[kept]))
    chosen, point = [], len(weights) - 1  # the front rises in value, so its last point is the best
    for item, (parents, taken) in zip(order[::-1], reversed(steps), strict=True):
        if taken[point]:
            chosen.append(item)
        point = parents[point]
    return np.sort(np.array(chosen, dtype=np.intp))


def _greedy(sizes: NDArray[np.int64], values: NDArray[np.floating], capacity: int) -> NDArray[np.intp]:
    """The densest items first, or the best single one: at least half of the largest value (card, 4.4)."""
    chosen, left = [], capacity
    for item in np.argsort(-values / sizes, kind="stable"):
        if sizes[item] <= left:
            chosen.append(item)
            left -= sizes[item]
    fitting = np.flatnonzero(sizes <= capacity)
    if len(fitting) and values[fitting].max() > values[chosen].sum():
        chosen = [fitting[values[fitting].argmax()]]
    return np.sort(np.array(chosen, dtype=np.intp))
