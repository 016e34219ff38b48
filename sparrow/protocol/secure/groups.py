"""Cells of devices that are summed together, neighbours that keep shares, and how many of these suffice.

A secret of a device is shared among k neighbours, and t of their shares give it. Two things can go wrong: fewer than t
neighbours answer, so that the round has no sum; or a coordinator that lies about who has vanished is given both kinds
of shares of one device, which takes 2t answers of k neighbours, of whom the c colluders may answer twice:
t > (k + c) / 2 rules that out (Bell et al., section 3; Bonawitz et al., section 6.2).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

LARGEST_FAILURE = 1e-4
"""Chance, a round, that some secret cannot be put together because too many of its keepers have vanished."""


@dataclass(frozen=True)
class Sharing:
    """Neighbours of each device, k, and shares that give a secret, t."""

    neighbours: int
    threshold: int


def least_cell(colluders: int) -> int:
    """Return the fewest survivors of a cell whose sum may come out: two devices that do not collude, besides c."""
    return colluders + 2


def most_of(devices: int, colluders: int) -> int:
    """Return the fewest signatures of n devices that no second story can have, too: more than (n + c) / 2."""
    return (devices + colluders) // 2 + 1


@lru_cache(maxsize=256)
def choose_sharing(devices: int, colluders: int, dropouts: float) -> Sharing | None:
    """Return the smallest k, and its t, at which a round fails with a chance below ``LARGEST_FAILURE``; None without
    one. dropouts: the share of devices that may vanish in a phase."""
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
    """Return the least t > (k + c) / 2."""
    return (neighbours + colluders) // 2 + 1


def chance_of_failure(devices: int, gone: int, neighbours: int, threshold: int) -> float:
    """Return an upper bound on the chance that some device keeps fewer than t of its k neighbours when ``gone`` devices
    vanish: neighbours are a random set, so those left are distributed hypergeometrically."""
    others = devices - 1

    def short(left: int) -> float:
        """Chance that fewer than t of k are among the ``left`` of the others."""
        ways = sum(
            math.comb(left, kept) * math.comb(others - left, neighbours - kept)
            for kept in range(max(0, neighbours - (others - left)), min(threshold, neighbours + 1, left + 1))
        )
        return ways / math.comb(others, neighbours)

    return (devices - gone) * short(devices - gone - 1) + gone * short(devices - gone)


@lru_cache(maxsize=16)
def neighbourhoods(names: tuple[str, ...], neighbours: int, seed: bytes) -> Mapping[str, tuple[str, ...]]:
    """Return the neighbours of each device: the nearest on a ring in random order (Bell et al., section 3). It is
    mutual."""
    ring = sorted(names)
    random.Random(seed).shuffle(ring)
    count = len(ring)
    if neighbours >= count - 1:
        return {name: tuple(other for other in ring if other != name) for name in ring}
    steps = [step for each in range(1, neighbours // 2 + 1) for step in (each, -each)]
    return {name: tuple(ring[(place + step) % count] for step in steps) for place, name in enumerate(ring)}


@dataclass(frozen=True)
class Cell:
    """Devices that train under one mask, drawn from one key, and are summed together. ratio: None: the whole model."""

    names: tuple[str, ...]
    ratio: float | None


def make_cells(ratios: Mapping[str, float | None], least: int, seed: bytes) -> list[Cell]:
    """Return the cells of a cohort, name -> active ratio, each of at least ``least`` devices, fewer if there are fewer.
    A device with too few of its ratio joins those of the next smaller one; the smallest take those above down to
    theirs."""
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
