"""Dealing one data set to many devices, and one device's part to training, validation and test.

Every device computes its own part alone, so all must deal alike, whatever their numpy. Hence ``RandomState``: numpy
promises that its streams never change, which it does not for the distributions of ``Generator``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.manifest import Array
from edge_sdk.tasks.loading import DataError

Index = NDArray[np.intp]

REDRAWS = 10_000
"""Draws of the proportions before a partition is called impossible; all of them together take about a second."""


@dataclass(frozen=True)
class Split:
    """A device's samples by use: indices into its part, sorted, no two sets overlapping."""

    train: Index
    validation: Index
    test: Index


def dirichlet(labels: Array, devices: int, alpha: float, seed: int, minimum: int = 10) -> list[Index]:
    """Deal samples to ``devices`` with label skew: per class, q ~ Dir(alpha·1_N) says which share each device gets.

    labels: [samples], classes of any type. Small ``alpha`` gives devices few classes each, a large one equal mixtures.
    Proportions are redrawn until every device has ``minimum`` samples (FedSPU, arXiv:2403.11464, section 5, names the
    distribution; the rest is our choice, since the authors published only ready-made files). Returns each device's
    indices, sorted; every sample is dealt once. Raises DataError when that cannot be had.
    """
    if devices < 1 or minimum < 0:
        raise DataError(f"{devices} devices of at least {minimum} samples each; give at least 1 device and 0 samples")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise DataError(f"alpha is {alpha}; it must be a number above 0, such as 0.3")
    if devices * minimum > len(labels):
        raise DataError(f"{len(labels)} samples cannot give {devices} devices {minimum} each; use fewer devices")
    random = _random(seed)
    by_class = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    for _ in range(REDRAWS):
        proportions = random.dirichlet(np.full(devices, alpha), size=len(by_class))
        if not np.isfinite(proportions).all():
            continue  # a tiny alpha can make every share of a class underflow to zero, and their quotient NaN
        sizes = np.array([[len(samples)] for samples in by_class])
        cuts = (np.cumsum(proportions[:, :-1], axis=1) * sizes).astype(np.intp)
        counts = np.diff(cuts, axis=1, prepend=0, append=sizes)
        if counts.sum(axis=0).min() >= minimum:
            dealt = [np.split(samples, cut) for samples, cut in zip(by_class, cuts, strict=True)]
            return [np.sort(np.concatenate(parts)) for parts in zip(*dealt, strict=True)]
    raise DataError(
        f"{REDRAWS} draws with alpha={alpha:g} never gave each of {devices} devices {minimum} of {len(labels)} "
        f"samples; use a larger alpha or fewer devices"
    )


def split(count: int, seed: int, held_out: float = 0.3, validation: float = 0.15) -> Split:
    """Split ``count`` samples into train, validation and test at random.

    ``held_out`` is the test share, ``validation`` that of the rest: 0.595, 0.105 and 0.3 by default. The stop rule
    reads validation and reports read test (the authors use one held-out share for both, which flatters the reports).
    Each set gets at least one sample. Raises DataError for fewer than three, or shares outside (0, 1).
    """
    if not (0 < held_out < 1 and 0 < validation < 1):
        raise DataError(f"held_out is {held_out} and validation {validation}; both must lie between 0 and 1")
    if count < 3:
        raise DataError(f"{count} samples cannot be split into training, validation and test; give at least 3")
    order = _random(seed).permutation(count)
    # The 1e-9 removes accidents of binary floats: (1 - 0.3) * 10 is 7, not 6.999...
    local = min(max(math.floor((1 - held_out) * count + 1e-9), 2), count - 1)
    kept = min(max(math.floor(validation * local + 1e-9), 1), local - 1)
    return Split(np.sort(order[kept:local]), np.sort(order[:kept]), np.sort(order[local:]))


def _random(seed: int) -> np.random.RandomState:
    if not 0 <= seed < 2**63:
        raise DataError(f"the seed is {seed}; it must lie in 0..2^63-1")
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])
