"""A model divided into blocks, and the selection of blocks within a budget (pFedGate, arXiv:2305.02776, section 5.2).

A block is a run of one tensor's values in row-major order; blocks are numbered through the model, tensor after tensor.
The first block of every tensor is always on; a knapsack over importances selects others, for the full model or each
group of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Selection = NDArray[np.bool_]
Costs = NDArray[np.int64]
Rule = Literal["exact", "greedy"]
Importance = Literal["per_weight", "per_block"]
BudgetPer = Literal["model", "kind", "layer"]
Groups = Mapping[str, NDArray[np.intp]]
"""Name -> numbers of its blocks; the groups are a partition of all blocks."""

RULES: Mapping[Importance, Rule] = {"per_block": "exact", "per_weight": "greedy"}
"""Solver of the knapsack. With values per weight, an exact solution would select blocks by size to fill the budget."""

LARGEST_FRONT = 50_000
"""Largest number of partial choices of the exact solver; beyond it the greedy one is used."""

TIE = 1e-9
"""Subtracted from a block's importance per position, so that ties take the first."""


def split(size: int, count: int, smallest_share: float) -> tuple[int, ...]:
    """Return the sizes of at most ``count`` blocks of a tensor (section 5.2.2): the first has ``smallest_share`` of its
    values, the others equal parts of the rest. A smaller tensor has blocks of one value."""
    first = min(size, max(1, math.floor(size * smallest_share + 1e-9)))
    rest = size - first
    parts = min(count - 1, rest)
    if rest == 0 or parts == 0:
        return (size,)
    each = math.ceil(rest / parts)
    full = math.ceil(rest / each) - 1
    return (first, *(each,) * full, rest - full * each)


def whole_rows(sizes: Sequence[int], row: int) -> tuple[int, ...]:
    """Return ``sizes`` with block boundaries moved to the nearest multiple of ``row`` values, without empty blocks."""
    ends = [max(row, (end + row // 2) // row * row) for end in accumulate(sizes)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False) if end > start)


@dataclass(frozen=True)
class BlockTable:
    """The blocks of a model: tensor name -> sizes of its blocks, in numbering order."""

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
        """Return the table of tensors of ``shapes``: ``count`` blocks each (B of the paper), see ``split``.
        smallest_share: share of the first block, by default 1 / ``count``. align_rows: blocks end with output rows, so
        that inactive ones need not be computed. Raises ValueError if ``count`` or the share is out of range."""
        share = 1 / count if smallest_share is None and count > 0 else smallest_share
        if count < 1 or share is None or not 0 < share <= 1:
            raise ValueError(
                f"{count} blocks, the first with a share of {share}: use at least 1 block, and a share in (0, 1]"
            )
        tensors = {}
        for name, shape in shapes.items():
            sizes = split(math.prod(shape), count, share)
            tensors[name] = whole_rows(sizes, math.prod(shape[1:])) if align_rows else sizes
        return cls(tensors)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Numbers of values in the blocks, [L]."""
        return np.array([size for sizes in self.tensors.values() for size in sizes], dtype=np.int64)

    @cached_property
    def forced(self) -> Selection:
        """The blocks that are always selected, [L]: the first block of every tensor."""
        return np.array([place == 0 for sizes in self.tensors.values() for place in range(len(sizes))], dtype=bool)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Tensor name -> the numbers of its blocks."""
        ends = list(accumulate(len(sizes) for sizes in self.tensors.values()))
        return {
            name: slice(end - len(sizes), end) for (name, sizes), end in zip(self.tensors.items(), ends, strict=True)
        }

    def smallest_share(self, costs: Costs | None = None) -> float:
        """Return the budget of the forced blocks: with less, nothing can be selected."""
        costs = self.sizes if costs is None else costs
        return float(costs[self.forced].sum() / costs.sum())

    def capacity(
        self, share: float, costs: Costs | None = None, blocks: NDArray[np.intp] | None = None, of: str = ""
    ) -> int:
        """Return the cost that remains for further blocks at a budget of ``share``, s. costs: integers [L]
        >= 0; by default numbers of values. blocks: scope of the budget, named ``of``. Raises ValueError, naming the
        smallest budget, if the forced blocks do not fit."""
        costs, forced = self.sizes if costs is None else costs, self.forced
        if blocks is not None:
            costs, forced = costs[blocks], forced[blocks]
        total, least = int(costs.sum()), int(costs[forced].sum())
        capacity = math.floor(share * total + 1e-9) - least
        if capacity < 0:
            raise ValueError(
                f"the blocks{of and f' of {of}'} that are always on cost {least} of {total}, more than a budget of "
                f"{share:g}: the smallest is {math.ceil(least / total * 1000) / 1000:g}; raise the budget, or lower "
                f"the share of the first blocks"
            )
        return capacity

    def scale_in_place(self, tensors: Mapping[str, NDArray[np.generic]], gates: NDArray[np.generic]) -> None:
        """Compute θ ⊛ M' for ``gates`` [L]; tensors outside the table stay."""
        for name, sizes in self.tensors.items():
            flat = tensors[name].reshape(-1)
            ends = accumulate(sizes)
            for size, end, gate in zip(sizes, ends, gates[self.places[name]].tolist(), strict=True):
                np.multiply(flat[end - size : end], np.float32(gate), out=flat[end - size : end])

    def select(
        self,
        importances: NDArray[np.floating],
        share: float,
        costs: Costs | None = None,
        among: Selection | None = None,
        rule: Rule | None = None,
        *,
        importance: Importance = "per_block",
        groups: Groups | None = None,
    ) -> Selection:
        """Return the selected blocks, of the shape of ``importances`` G [..., L] in (0, 1): the forced ones and the
        most important others within ``share``. costs: cost of each block, as for ``capacity``. among: allowed blocks.
        rule: rule of ``knapsack``, by default from RULES. groups: each has the budget ``share``. Raises ValueError if
        the budget is too small."""
        costs = self.sizes if costs is None else costs
        chosen = np.broadcast_to(self.forced, importances.shape).copy()
        free = ~self.forced if among is None else ~self.forced & among
        values = values_of(importances, costs, importance)
        for name, blocks in (groups or {"": np.arange(len(costs))}).items():
            candidates = blocks[free[blocks]]
            if len(candidates):
                capacity = self.capacity(share, costs, blocks, name)
                rows = values[..., candidates].reshape(-1, len(candidates))
                taken = knapsack(costs[candidates], rows, capacity, rule or RULES[importance])
                chosen[..., candidates] = taken.reshape(*importances.shape[:-1], len(candidates))
        return chosen


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Blocks of the manifest's table: ``on`` [L]. Values outside the table (buffers) belong to every such mask."""

    on: Selection

    def packed(self) -> bytes:
        """Return one bit for every block, most significant bit first."""
        return np.packbits(self.on).tobytes()


@dataclass(frozen=True)
class Runs:
    """A mask's blocks in one tensor, with the methods of ``masks.Block``."""

    view: tuple[int, ...]
    # Sorted (start, stop) of runs of its values in row-major order.
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, view: tuple[int, ...], sizes: Sequence[int], on: Selection) -> Runs:
        """Return the blocks marked ``on`` of a tensor that is divided into ``sizes``."""
        spans: list[tuple[int, int]] = []
        for end, size, wanted in zip(accumulate(sizes), sizes, on.tolist(), strict=True):
            if wanted and spans and spans[-1][1] == end - size:
                spans[-1] = spans[-1][0], end
            elif wanted:
                spans.append((end - size, end))
        return cls(view, tuple(spans))

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed values."""
        return (self.size,)

    def _pairs(self, tensor: NDArray[np.generic]) -> Iterator[tuple[NDArray[np.generic], slice]]:
        """Yield each run of ``tensor``, a view, and its packed position."""
        flat = tensor.reshape(-1)
        done = 0
        for start, stop in self.spans:
            yield flat[start:stop], slice(done, done + stop - start)
            done += stop - start

    def take_into(self, tensor: NDArray[np.generic], out: NDArray[np.generic]) -> None:
        """Copy the values of ``tensor`` into ``out``, a C-contiguous array of ``size`` values of its dtype."""
        packed = out.reshape(-1)
        for run, place in self._pairs(tensor):
            packed[place] = run

    def put(self, tensor: NDArray[np.generic], values: NDArray[np.generic]) -> None:
        """Overwrite the values of the C-contiguous ``tensor`` in place."""
        packed = values.reshape(-1)
        for run, place in self._pairs(tensor):
            run[:] = packed[place]

    def add(self, tensor: NDArray[np.float64], values: NDArray[np.generic] | float, scale: float = 1.0) -> None:
        """Add ``scale`` times ``values`` (``size`` of them, or one for all) to those of ``tensor``, in place, in
        float64."""
        flat = tensor.reshape(-1)
        done = 0
        packed = np.broadcast_to(np.asarray(values).reshape(-1), self.size)
        for start, stop in self.spans:
            flat[start:stop] += np.multiply(packed[done : done + stop - start], scale, dtype=np.float64)
            done += stop - start


def values_of(importances: NDArray[np.floating], costs: Costs, importance: Importance) -> NDArray[np.floating]:
    """Return each block's value [..., L] in the knapsack; ties prefer the first. ``per_block`` (Eq. 6): its importance.
    ``per_weight``: its importance times its cost.
    """
    worth = importances - TIE * np.arange(len(costs))
    return worth * np.maximum(costs, 1) if importance == "per_weight" else worth


def knapsack(sizes: NDArray[np.int64], values: NDArray[np.floating], capacity: int, rule: Rule = "exact") -> Selection:
    """Return, for each problem, the items with ``sizes`` [n] up to ``capacity`` in total and the largest sum of
    ``values`` [problems, n]; ties take the first.
    """
    # Among items of one size the most valuable come first, so a choice is a count per size. A partial choice is
    # dropped if another is no larger and no less valuable, or if all remaining items could not lift it above one with
    # room for them. Beyond LARGEST_FRONT partial choices, or with the rule ``greedy``, see ``_greedy``.
    problems = len(values)
    if sizes.sum() <= capacity or not problems:
        return np.ones(values.shape, dtype=bool)
    if rule == "greedy":
        return _greedy(sizes, values, capacity)
    rows = np.arange(problems)[:, None]
    order = np.argsort(-sizes, kind="stable")
    ranked = sizes[order]
    ranks = np.lexsort((-values[:, order], np.broadcast_to(-ranked, values.shape)), axis=1)
    ordered = values[:, order].ravel().take(ranks + rows * len(sizes))
    starts = np.flatnonzero(np.diff(ranked, prepend=-1)).tolist()
    rest = [*np.cumsum(ranked[::-1])[::-1].tolist(), 0]
    weights = np.zeros((problems, 1), dtype=np.int64)
    worth = np.zeros((problems, 1))
    steps: list[tuple[int, int, NDArray[np.intp]]] = []
    decided = len(sizes)
    useful = bool(ordered.min() > 0)
    for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        count = end - start
        sums = np.zeros((problems, 1, count + 1))
        ordered[:, None, start:end].cumsum(axis=2, out=sums[:, :, 1:])
        heavier = (weights[:, :, None] + ranked[start] * np.arange(count + 1)).reshape(problems, -1)
        better = (worth[:, :, None] + sums).reshape(problems, -1)
        better[heavier > capacity] = -np.inf
        least = np.where(heavier <= capacity - rest[end], better, -np.inf).max(axis=1, keepdims=True)
        better[better < least] = -np.inf
        front = np.lexsort((-better, heavier), axis=1)
        flat = front + rows * front.shape[1]
        best = better.take(flat)
        highest = np.maximum.accumulate(best, axis=1)
        kept = best > -np.inf
        kept[:, 1:] &= best[:, 1:] > highest[:, :-1]
        width = int(kept.sum(axis=1).max())
        if width * problems > LARGEST_FRONT:
            if problems == 1:
                return _greedy(sizes, values, capacity)
            return np.concatenate([knapsack(sizes, half, capacity) for half in np.array_split(values, 2)])
        if problems == 1:
            places = np.flatnonzero(kept)[None]
        else:
            places = np.argsort(~kept, axis=1, kind="stable")[:, :width]
            best[~kept] = -np.inf
        places = places + rows * front.shape[1]
        worth = best.take(places)
        flat = flat.take(places)
        front = front.take(places)
        weights = heavier.take(flat)
        steps.append((start, count, front))
        if useful and np.where(worth > -np.inf, weights, 0).max() + rest[end] <= capacity:
            # All remaining items fit with any choice.
            decided = end
            break
    sorted_choice = np.zeros(values.shape, dtype=bool)
    sorted_choice[:, decided:] = True
    point = worth.argmax(axis=1)
    for start, count, front in reversed(steps):
        point, taken = np.divmod(front[rows[:, 0], point], count + 1)
        sorted_choice[:, start : start + count] = np.arange(count) < taken[:, None]
    chosen = np.zeros(values.shape, dtype=bool)
    chosen[rows, order[ranks]] = sorted_choice
    return chosen


def _greedy(sizes: NDArray[np.int64], values: NDArray[np.floating], capacity: int) -> Selection:
    """Return a greedy selection, or the best single item: at least half of the optimal value."""
    chosen = np.zeros(values.shape, dtype=bool)
    # Items without cost always fit.
    order = np.argsort(-values / np.maximum(sizes, 1), axis=1, kind="stable")
    costs = sizes.tolist()
    for row, ranked, useful in zip(chosen, order.tolist(), (values > 0).sum(axis=1).tolist(), strict=True):
        left = capacity
        taken = []
        # Lists, because numpy scalars take ten times as long.
        for item in ranked[:useful]:
            if costs[item] <= left:
                left -= costs[item]
                taken.append(item)
        row[taken] = True
    alone = np.where(sizes <= capacity, values, -np.inf)
    better = alone.max(axis=1) > np.where(chosen, values, 0).sum(axis=1)
    chosen[better] = np.arange(len(sizes)) == alone[better].argmax(axis=1)[:, None]
    return chosen
