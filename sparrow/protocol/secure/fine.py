"""Numbers of a secure update that need more range or precision than one word: two words each, after the values.

*Running statistics* of batch norm move with activations, not with the learning rate: a variance of 1 may become 1,000
in the first round. A value of magnitude b may move by up to ±16 (1 + |b|).

*Metrics*, with ``secure_metrics``: each is weighted like its update, and averaged over the devices that have it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .. import evidence, skew
from ..manifest import Array, Manifest
from ..masks import Mask, blocks
from .numbers import Scale, Words

STATISTICS_RANGE = 16.0
"""Limit of a running statistic's movement in a round, in multiples of 1 + its magnitude; the rest follows later."""

METRICS = {
    "train_loss": 100.0,
    "loss_personal": 100.0,
    "accuracy_personal": 1.0,
    "loss_global": 100.0,
    "accuracy_global": 1.0,
    **evidence.TOLD,
    **skew.TOLD,
}
"""The metrics of an update, and the magnitude at which each is clipped."""


def words_of_extras(manifest: Manifest, mask: Mask | None, *, metrics: bool) -> int:
    """Return the number of words after the values of a masked update."""
    return 2 * (len(statistics(manifest, mask)) + (2 * len(METRICS) if metrics else 0))


def statistics(manifest: Manifest, mask: Mask | None, *, kind: str = "") -> NDArray[np.intp]:
    """Return the positions of running statistics, or of a kind such as "running_var", among packed values."""
    start = 0
    found = [np.zeros(0, np.intp)]
    for spec, part in blocks(manifest, mask):
        if not spec.trainable and spec.name.endswith(kind):
            found.append(np.arange(start, start + part.size, dtype=np.intp))
        start += part.size
    return np.concatenate(found)


def hide_extras(
    moved: NDArray[np.float64],
    base: NDArray[np.float32],
    metrics: Mapping[str, float | None] | None,
    scale: Scale,
    weight: float,
    chance: np.random.Generator,
) -> tuple[Words, int]:
    """Return the words of running statistics and metrics, and the number of clipped ones."""
    values = list(moved)
    ranges = list(_ranges(base))
    if metrics is not None:
        for name, largest in METRICS.items():
            value = metrics.get(name)
            values += [0.0, 0.0] if value is None else [float(np.clip(value, -largest, largest)), 1.0]
            ranges += [largest, 1.0]
    return scale.round_fine(np.array(values), np.array(ranges), weight, chance)


def read_extras(
    words: Words, base: NDArray[np.float32], scale: Scale, *, metrics: bool
) -> tuple[NDArray[np.float64], dict[str, tuple[float, float]]]:
    """Return the weighted sum of running statistics' movements, and each metric's weighted sum and weight."""
    ranges = np.concatenate([_ranges(base), *([largest, 1.0] for largest in METRICS.values() if metrics)])
    sums = scale.sum_of_fine(words, ranges)
    told = sums[len(base) :].reshape(-1, 2) if metrics else np.zeros((0, 2))
    named = zip(METRICS, told, strict=False)
    return sums[: len(base)], {name: (float(total), float(weight)) for name, (total, weight) in named}


def _ranges(base: Array) -> NDArray[np.float64]:
    return STATISTICS_RANGE * (1.0 + np.abs(base.astype(np.float64)))
