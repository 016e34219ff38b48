"""Paired comparison of two labels, device by device.

At the same point of the axes and with the same seed, devices of the same name have the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..rows import Recorded
from .figures import participants

RESAMPLES = 10_000


@dataclass(frozen=True)
class Paired:
    """Accuracy of one label minus another's, paired by device, in percentage points."""

    seeds: int
    pairs: int
    # Over devices, then over seeds.
    mean: float
    # 95 %, Student's over the seeds' means, because devices of one seed share a model; resampling three seeds would
    # give too narrow an interval. With one seed: bootstrap over devices.
    interval: tuple[float, float]
    # Fractions of the pairs.
    better: float
    equal: float
    worse: float


def differences(
    first: Sequence[Recorded], other: Sequence[Recorded], budget: float | None = None
) -> dict[int, dict[str, float]]:
    """Return seed -> device -> accuracy of ``first`` minus ``other``, in points, for devices with both.

    budget: only devices with this budget in ``first``. Raises SystemExit if devices of the same name hold different
    data: then the rows are of different experiments.
    """
    others = {each.trial.seed: {device.device: device for device in participants(each)} for each in other}
    found: dict[int, dict[str, float]] = {}
    for trial in first:
        for device in participants(trial):
            match = others.get(trial.trial.seed, {}).get(device.device)
            if match is None or match.accuracy is None or device.accuracy is None:
                continue
            if budget is not None and device.budget != budget:
                continue
            if match.test_examples != device.test_examples:
                raise SystemExit(
                    f"{trial.trial.name}: {device.device} has {device.test_examples} test samples here and "
                    f"{match.test_examples} under the label it is compared with; run both again"
                )
            found.setdefault(trial.trial.seed, {})[device.device] = 100 * (device.accuracy - match.accuracy)
    return found


def paired(first: Sequence[Recorded], other: Sequence[Recorded], budget: float | None = None) -> Paired | None:
    """Compare ``first`` with ``other``; None if they have no seed in common.

    budget: the budget, as for ``differences``.
    """
    by_seed = differences(first, other, budget)
    if not by_seed:
        return None
    values = [value for by_device in by_seed.values() for value in by_device.values()]
    means = [fmean(by_device.values()) for by_device in by_seed.values()]
    return Paired(
        seeds=len(means),
        pairs=len(values),
        mean=fmean(means),
        interval=students(means) or _bootstrap(values),
        better=sum(value > 0 for value in values) / len(values),
        equal=sum(value == 0 for value in values) / len(values),
        worse=sum(value < 0 for value in values) / len(values),
    )


def students(means: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean over seeds; None for one seed."""
    if len(means) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(means) - 1) * stats.sem(means))
    return fmean(means) - half, fmean(means) + half


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(_resamples(len(values)) @ np.array(values) / len(values), [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=2)
def _resamples(devices: int) -> NDArray[np.int64]:
    """Return the count of each device in each resample, [RESAMPLES, devices]."""
    return np.random.default_rng(0).multinomial(devices, np.full(devices, 1 / devices), size=RESAMPLES)


def accuracy_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return Student's 95 % interval of a mean accuracy, cut at 0 and 100 %; the mean itself for one seed."""
    low, high = students(means) or (means[0], means[0])
    return max(low, 0.0), min(high, 100.0)
