"""Rows of an evaluated round from the state of all devices, with comparisons to the previous evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.analysis import measures
from benchmarks.analysis.looking import Look
from benchmarks.analysis.measures import Layers, Matrix
from sparrow.bench.rows import Analysis

MOST_DEVICES = 20
"""Devices that a row's matrices have, the first ones; means are over all."""

OF_THE_END = ("matrix", "each", "linkage")
"""What only the last row of a kind keeps."""

Looks = Sequence[Look | None]
"""Of each device; None for one that was not evaluated."""


@dataclass
class Summaries:
    """The rows of a trial, round by round. labels: samples by device and class, [n, classes]; None without classes."""

    labels: NDArray[np.int64] | None = None
    _rows: list[Analysis] = field(default_factory=list)
    _before: Looks = ()
    _first: Layers | None = None
    _bins: list[int] = field(default_factory=list)

    def add(self, number: int, looks: Looks) -> None:
        """Summarise the state of all devices after round ``number``; call it in the order of rounds."""
        self._masks(number, looks)
        self._global(number, looks)
        self._models(number, looks)
        self._gates(number, looks)
        self._before = looks

    def note(self, kind: str, number: int, numbers: dict[str, Any]) -> None:
        """Add a row."""
        self._rows.append(Analysis(kind, number, numbers))

    def rows(self) -> tuple[Analysis, ...]:
        """Return all rows, with matrices in the last one of each kind, and label counts before them."""
        last = {each.kind: each.round for each in self._rows}
        found = [
            each if each.round == last[each.kind] else replace(each, numbers=_without(each.numbers))
            for each in self._rows
        ]
        if self.labels is None or not found:
            return tuple(found)
        data = {
            "labels": self.labels[:MOST_DEVICES].tolist(),
            "to_all": _short(measures.distances_to_all(self.labels)[:MOST_DEVICES]),
            "matrix": _matrix(measures.label_distances(self.labels)),
        }
        return (Analysis("data", 0, data), *found)

    def _masks(self, number: int, looks: Looks) -> None:
        who = [index for index, each in enumerate(looks) if each and each.mask is not None]
        if not who:
            return
        seen = [look for look in looks if look and look.mask is not None]
        masks: list[Layers] = [look.mask for look in seen if look.mask is not None]
        found = measures.jaccard(masks)
        own = [
            measures.similarity(mask, before.mask)
            for index, mask in zip(who, masks, strict=True)
            if (before := self._earlier(index)) and before.mask is not None
        ]
        self.note(
            "masks",
            number,
            {
                "unit": seen[0].unit,
                "devices": who[:MOST_DEVICES],
                "jaccard": measures.spread(measures.pairs(found)),
                "overlap": measures.spread(measures.pairs(measures.overlap(masks))),
                "chance": measures.spread(measures.pairs(measures.chance_jaccard(masks))),
                "own": measures.spread(np.array(own)),
                "labels": self._with_labels(found, who),
                "matrix": _matrix(found),
            },
        )
        layers = {name: np.array([look.kept[name] for look in seen if look.kept]) for name in seen[0].kept or {}}
        kept = {
            name: {**(measures.spread(each) or {}), "bins": measures.histogram(each)} for name, each in layers.items()
        }
        self.note("kept", number, {"devices": len(who), "layers": kept})
        self._private(number, who, seen)

    def _private(self, number: int, who: Sequence[int], seen: Sequence[Look]) -> None:
        """Note the overlap of the devices' own masks with the global one, if they have both."""
        if any(look.shared is None for look in seen):
            return
        both = [(look.mask or {}, look.shared or {}) for look in seen]
        shared = np.array([_count(mine, others) / _count(mine, mine) for mine, others in both])
        to_all = None if self.labels is None else measures.distances_to_all(self.labels)[list(who)]
        self.note(
            "private",
            number,
            {
                "devices": list(who)[:MOST_DEVICES],
                "shared": measures.spread(shared),
                "private": measures.spread(1 - shared),
                "labels": None if to_all is None else measures.together_each(shared, to_all),
                "each": _short(shared[:MOST_DEVICES]),
            },
        )

    def _global(self, number: int, looks: Looks) -> None:
        """Note how a global mask has changed."""
        mask, before = (
            [each.shared for each in some if each and each.shared is not None] for some in (looks, self._before)
        )
        if not mask:
            return
        self._first = self._first or mask[0]
        self.note(
            "global",
            number,
            {
                "kept": _count(mask[0], mask[0]) / sum(len(flags) for flags in mask[0].values()),
                "before": measures.similarity(mask[0], before[0]) if before else None,
                "first": measures.similarity(mask[0], self._first),
            },
        )

    def _models(self, number: int, looks: Looks) -> None:
        who = [index for index, each in enumerate(looks) if each and each.model is not None]
        if len(who) < 2:
            return
        products = measures.gram([look.model for look in looks if look and look.model is not None])
        distances = measures.euclidean(products)
        angles = measures.cosine(products)
        self.note(
            "models",
            number,
            {
                "devices": who[:MOST_DEVICES],
                "euclidean": measures.spread(measures.pairs(distances)),
                "cosine": measures.spread(measures.pairs(angles)),
                "labels": self._with_labels(distances, who),
                "labels_cosine": self._with_labels(angles, who),
                "matrix": _matrix(distances),
            },
        )

    def _gates(self, number: int, looks: Looks) -> None:
        who = [index for index, each in enumerate(looks) if each and each.gate]
        gates = [each.gates for each in looks if each and each.gates is not None]
        if len(who) < 2:
            return
        distances = measures.euclidean(measures.gram([look.gate for look in looks if look and look.gate]))
        bins = measures.histogram(np.concatenate(gates))
        moved = [
            float(np.abs(look.gates - before.gates).mean())
            for index, look in enumerate(looks)
            if look and look.gates is not None and (before := self._earlier(index)) and before.gates is not None
        ]
        self.note(
            "gates",
            number,
            {
                "devices": who[:MOST_DEVICES],
                "bins": bins,
                "change": measures.histogram_distance(bins, self._bins) if self._bins else None,
                "moved": measures.spread(np.array(moved)),
                "euclidean": measures.spread(measures.pairs(distances)),
                "labels": self._with_labels(distances, who),
                **self._neighbours(distances, who),
                "matrix": _matrix(distances),
                "linkage": [_short(np.array(row)) for row in measures.ward(distances[:MOST_DEVICES, :MOST_DEVICES])],
            },
        )
        self._bins = bins

    def _neighbours(self, distances: Matrix, who: Sequence[int]) -> dict[str, float]:
        """Return the share of devices that have a label of their nearest device, and the same share over all pairs."""
        if self.labels is None:
            return {}
        has = (self.labels[list(who)] > 0).astype(int)
        common = (has @ has.T) > 0
        near = float(np.mean([common[one, other] for one, other in enumerate(measures.nearest(distances))]))
        return {"common_nearest": near, "common_any": float(measures.pairs(common.astype(float)).mean())}

    def _with_labels(self, matrix: Matrix, who: Sequence[int]) -> dict[str, float] | None:
        """Return the correlation of a matrix of devices with the distances of their labels."""
        if self.labels is None:
            return None
        return measures.together(matrix, measures.label_distances(self.labels[list(who)]))

    def _earlier(self, index: int) -> Look | None:
        return self._before[index] if self._before else None


def _count(one: Layers, other: Layers) -> int:
    """Return how many both masks keep."""
    return sum(int(np.count_nonzero(flags & other[name])) for name, flags in one.items())


def _without(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in numbers.items() if name not in OF_THE_END}


def _short(values: NDArray[np.float64]) -> list[float]:
    """Return the values with four significant digits: rows are committed."""
    return [float(f"{value:.4g}") for value in values]


def _matrix(matrix: Matrix) -> list[list[float]]:
    return [_short(row) for row in matrix[:MOST_DEVICES, :MOST_DEVICES]]
