"""Cells of devices that are summed together, neighbours that keep shares, and thresholds.

A device's secret is shared among k neighbours, and t shares reveal it. There are two risks. If fewer than t
neighbours answer, the round has no sum. If a coordinator lies about lost devices, it may get both kinds of shares of
one device; that takes 2t answers of k neighbours, of whom the c colluders may answer twice, so t > (k + c) / 2 excludes
it (Bell et al., section 3; Bonawitz et al., section 6.2).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

LARGEST_FAILURE = 1e-4
"""Chance per round that a secret is lost because too many of its keepers drop out."""


LARGEST_SEARCHED = 100


@dataclass(frozen=True)
class Sharing:
    """Parameters of secret sharing.

    neighbours: number of each device's neighbours, k. threshold: number of shares that reveal a secret, t.
    """

    neighbours: int
    threshold: int


def least_cell(colluders: int) -> int:
    """Return the smallest cell whose sum may be revealed: two honest devices besides c colluders."""
    return colluders + 2


def most_of(devices: int, colluders: int) -> int:
    """Return the smallest number of signatures that two different lists cannot both have: more than (n + c) / 2."""
    return (devices + colluders) // 2 + 1


def smallest_cohort(colluders: int, dropouts: float, least: int = 0) -> int | None:
    """Return the smallest number of devices from ``least`` on with a sharing; None if it exceeds
    ``LARGEST_SEARCHED``."""
    counts = range(max(least, least_cell(colluders)), LARGEST_SEARCHED + 1)
    return next((count for count in counts if choose_sharing(count, colluders, dropouts)), None)


@lru_cache(maxsize=256)
def choose_sharing(devices: int, colluders: int, dropouts: float) -> Sharing | None:
    """Return the smallest k, and its t, with a chance of failure below ``LARGEST_FAILURE``; None without one. dropouts:
    share of devices that may drop out in a phase."""
    if devices < least_cell(colluders):
        return None
    gone = math.floor(dropouts * devices + 1e-9)
    for neighbours in range(2, devices, 2):
        threshold = _threshold(neighbours, colluders)
        if threshold <= neighbours and chance_of_failure(devices, gone, neighbours, threshold) < LARGEST_FAILURE:
            return Sharing(neighbours, threshold)
    whole = Sharing(devices - 1, _threshold(devices - 1, colluders))
    fails = chance_of_failure(devices, gone, whole.neighbours, whole.threshold)
    return whole if whole.threshold <= whole.neighbours and fails < LARGEST_FAILURE else None


def _threshold(neighbours: int, colluders: int) -> int:
    """Return the smallest t > (k + c) / 2."""
    return (neighbours + colluders) // 2 + 1


def chance_of_failure(devices: int, gone: int, neighbours: int, threshold: int) -> float:
    """Return an upper bound on the chance that some device keeps fewer than t of its k neighbours if ``gone`` devices
    drop out. Neighbours are a random set, so the remaining ones are distributed hypergeometrically."""
    others = devices - 1

    def short(left: int) -> float:
        """Return the chance that fewer than t of the k neighbours are among ``left`` remaining devices."""
        ways = sum(
            math.comb(left, kept) * math.comb(others - left, neighbours - kept)
            for kept in range(max(0, neighbours - (others - left)), min(threshold, neighbours + 1, left + 1))
        )
        return ways / math.comb(others, neighbours)

    return (devices - gone) * short(devices - gone - 1) + gone * short(devices - gone)


@lru_cache(maxsize=16)
def neighbourhoods(names: tuple[str, ...], neighbours: int, seed: bytes) -> Mapping[str, tuple[str, ...]]:
    """Return the neighbours of each device: the nearest on a ring in random order (Bell et al., section 3). The
    relation is mutual."""
    ring = sorted(names)
    random.Random(seed).shuffle(ring)
    count = len(ring)
    if neighbours >= count - 1:
        return {name: tuple(other for other in ring if other != name) for name in ring}
    steps = [step for each in range(1, neighbours // 2 + 1) for step in (each, -each)]
    return {name: tuple(ring[(place + step) % count] for step in steps) for place, name in enumerate(ring)}


@dataclass(frozen=True)
class Cell:
    """Devices that train under one drawn mask and are summed together."""

    names: tuple[str, ...]
    # None for the whole model.
    ratio: float | None


def make_cells(ratios: Mapping[str, float | None], least: int, seed: bytes) -> list[Cell]:
    """Return the cells of a cohort, name -> active ratio, each of at least ``least`` devices if possible. If too few
    devices share a ratio, they join those of the next smaller one; the smallest lower the ratio of those above."""
    names = list(ratios)
    random.Random(seed).shuffle(names)
    if all(ratio is None for ratio in ratios.values()):
        return [Cell(tuple(sorted(names)), None)]
    ordered = sorted(names, key=lambda name: -(ratios[name] or 1.0))
    cells: list[list[str]] = [[]]
    for name in ordered:
        last = cells[-1]
        if len(last) >= least and ratios[name] != ratios[last[-1]]:
            cells.append([name])
        else:
            last.append(name)
    if len(cells) > 1 and len(cells[-1]) < least:
        cells[-2:] = [cells[-2] + cells[-1]]
    return [Cell(tuple(sorted(cell)), min(ratios[name] or 1.0 for name in cell)) for cell in cells]
