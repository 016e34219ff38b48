"""Keep old global models, to which an operator can roll back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..storage.tables import Model

DENSE = 10
"""Number of models kept at one distance, before older ones are thinned to twice the distance."""


class Quality(NamedTuple):
    """Means of devices' evaluations. accuracy: None if the task has none."""

    accuracy: float | None
    loss: float
    # Number of devices; 0 if unknown.
    devices: int = 0


@dataclass(frozen=True)
class Retention:
    """The newest ``last`` models, the best one, pinned ones, and every ``every``-th (0: none).

    The ``every``-th models are thinned with age: from an age of ``DENSE * every`` rounds every second one is kept, from
    twice this age every fourth, and so on.
    """

    last: int = 1
    every: int = 0

    def kept(self, models: Collection[Model]) -> set[int]:
        """Return the kept versions of these models."""
        numbers = sorted(each.version for each in models)
        if not numbers:
            return set()
        best = best_of(models, noted(models))
        chosen = {each.version for each in models if each.pinned_until or each.version == best}
        regular = {each for each in numbers if self.every and each % self._distance(numbers[-1] - each) == 0}
        return {*numbers[-self.last :], *regular, *chosen}

    def _distance(self, age: int) -> int:
        distance = self.every
        while age >= DENSE * distance:
            distance *= 2
        return distance


def noted(models: Collection[Model]) -> dict[int, Quality]:
    """Return the recorded quality of models: version -> quality."""
    return {each.version: Quality(each.accuracy, each.loss, each.devices) for each in models if each.loss is not None}


def best_of(models: Collection[Model], quality: Mapping[int, Quality]) -> int | None:
    """Return the version of the best of these models, the newest of equal ones.

    Undone models do not count, nor those that fewer than half as many devices evaluated as another one: a mean over
    other devices is not comparable.
    """
    judged = [each.version for each in models if each.version in quality and not each.undone]
    most = max((quality[version].devices for version in judged), default=0)
    judged = [version for version in judged if 2 * quality[version].devices >= most]

    def rank(version: int) -> tuple[float, float, int]:
        # A task without accuracy is judged by the loss.
        accuracy, loss, _ = quality[version]
        return -math.inf if accuracy is None else accuracy, -loss, version

    return max(judged, key=rank, default=None)
