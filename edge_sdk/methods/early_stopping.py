"""Early stopping, and the choice of a device's best model among its rounds.

Models are compared by their loss on validation data: the few samples of a device tell models apart better by their loss
than by how many they get right. The stop rules are two, which ask nothing of a method but its losses:

validation  The validation loss of the model as local training leaves it, smoothed over participations. The device stops
            once the smoothed loss has not fallen below its lowest value by ``min_improvement`` of it in ``patience``
            participations in a row, and not before ``min_participations``. A device whose smoothed loss has not yet
            fallen by ``BEGUN`` of its first value has not begun to learn, and goes on.
paper       FedSPU, arXiv:2403.11464, section 4 and Algorithm 1: L_t = λ·L_train + (1-λ)·L_val estimates the mean loss
            over all of a device's data; ``patience`` rises in a row (the paper: 1), each against the device's own last
            participation, stop it. Where paper and released code differ: strictly greater, as the paper's formula has
            it; the code also stops on a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparrow.protocol.messages import Evaluation
from sparrow.protocol.settings import FederationSettings

SMOOTHING = 0.5
"""Weight of the newest validation loss in the smoothed one; the rest is the smoothed loss of before."""
BEGUN = 0.1
"""Share of the first validation loss by which it has fallen where a device has begun to learn."""
MAY_LOSE = 0.25
"""Share of the lowest validation loss by which a newer round's may lie above it, its model still replacing an older."""


@dataclass(frozen=True)
class Smoothed:
    """The memory of the rule ``validation``; lowest_loss: the lowest smoothed one that counted as an improvement."""

    participations: int = 0
    first_loss: float = 0.0
    smoothed_loss: float = 0.0
    lowest_loss: float = 0.0
    without_improvement: int = 0

    def after(self, loss: float, min_improvement: float) -> Smoothed:
        """Return the state after one more participation. Raises ValueError for a loss that is not finite."""
        _check_finite(loss)
        if self.participations == 0:
            return Smoothed(1, loss, loss, loss, 0)
        smoothed = (1 - SMOOTHING) * self.smoothed_loss + SMOOTHING * loss
        improved = smoothed < self.lowest_loss - min_improvement * abs(self.lowest_loss)
        lowest = smoothed if improved else self.lowest_loss
        begun = lowest < self.first_loss - BEGUN * abs(self.first_loss)
        since = 0 if improved or not begun else self.without_improvement + 1
        return Smoothed(self.participations + 1, self.first_loss, smoothed, lowest, since)


@dataclass(frozen=True)
class Rises:
    """The memory of the rule ``paper``: the loss of the last participation, and the rises in a row."""

    last_loss: float | None = None
    increases: int = 0

    def after(self, loss: float) -> Rises:
        """Return the state after one more participation. Raises ValueError for a loss that is not finite."""
        _check_finite(loss)
        rose = self.last_loss is not None and loss > self.last_loss
        return Rises(loss, self.increases + 1 if rose else 0)


def stop_loss(train: float, validation: float, weight: float) -> float:
    """Return L_t: the training loss weighted by λ = ``weight``, the validation loss by the rest."""
    return weight * train + (1 - weight) * validation


def _check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise ValueError(f"the stop-rule loss is {loss}: the round has failed, keep the state from before it")


@dataclass(frozen=True)
class Judged:
    """The judgement after a round. stop_loss: what the rule went by, None without early stopping."""

    memory: Mapping[str, Any]
    validation: Evaluation | None = None
    stop_loss: float | None = None
    stopped: bool = False


def judge_round(
    judge: Callable[[], Evaluation],
    settings: FederationSettings,
    memory: Mapping[str, Any],
    train_loss: float,
    *,
    validate: bool = False,
) -> Judged:
    """Apply the stop rule to the model that a round has left, which ``judge`` measures on validation data. memory: the
    device's notes, among them the rule's. validate: measure even if no rule asks for it."""
    rule = settings.early_stopping
    validation = judge() if validate or rule != "off" else None
    if rule == "off" or validation is None:
        return Judged(memory, validation)
    if rule == "paper":
        loss = stop_loss(train_loss, validation.loss, settings.stop_weight)
        rises = Rises(memory.get("last_loss"), memory.get("increases", 0)).after(loss)
        return Judged({**memory, **asdict(rises)}, validation, loss, rises.increases >= settings.stop_patience)
    known = {name: memory[name] for name in Smoothed.__dataclass_fields__ if name in memory}
    state = Smoothed(**known).after(validation.loss, settings.min_improvement)
    stopped = (
        state.participations >= settings.min_participations and state.without_improvement >= settings.stop_patience
    )
    return Judged({**memory, **asdict(state)}, validation, state.smoothed_loss, stopped)


def gives_way(found: Evaluation, lowest_loss: float) -> bool:
    """Return whether a round's model gives way to the one kept before: only if its loss lies well above the lowest of
    all rounds, since of many models the one with the lowest loss is often lucky in a few samples."""
    return found.loss - lowest_loss > MAY_LOSE * abs(lowest_loss)
