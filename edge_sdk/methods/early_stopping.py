"""Early stopping, and the choice of a device's best model among its rounds.

Models are compared by validation loss, which is more precise than accuracy on few samples. Two stop rules:

validation  Smooths the validation loss of the trained model over participations. A device stops if the smoothed loss
            has not fallen below its minimum by the share ``min_improvement`` in ``patience`` participations in a row,
            but not before ``min_participations``, nor before it has fallen by ``BEGUN`` of its first value.
paper       FedSPU, arXiv:2403.11464, section 4 and Algorithm 1: L_t = λ·L_train + (1-λ)·L_val estimates the mean loss
            over all of a device's data. A device stops after ``patience`` rises in a row (the paper: 1), each compared
            to its own last participation. A tie is no rise; the released code stops on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparrow.protocol.messages import Evaluation
from sparrow.protocol.settings import FederationSettings

SMOOTHING = 0.5
"""Weight of the newest validation loss in the smoothed one."""
BEGUN = 0.1
"""Share of the first validation loss by which the loss must fall before learning counts as begun."""
MAY_LOSE = 0.25
"""Largest excess of a newer model's validation loss over the lowest one, as a share, to replace an older model."""


@dataclass(frozen=True)
class Smoothed:
    """State of the rule ``validation``."""

    participations: int = 0
    first_loss: float = 0.0
    smoothed_loss: float = 0.0
    # Lowest loss of the smoothed losses that counted as an improvement.
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
    """State of the rule ``paper``."""

    last_loss: float | None = None
    increases: int = 0

    def after(self, loss: float) -> Rises:
        """Return the state after one more participation. Raises ValueError if ``loss`` is not finite."""
        _check_finite(loss)
        rose = self.last_loss is not None and loss > self.last_loss
        return Rises(loss, self.increases + 1 if rose else 0)


def stop_loss(train: float, validation: float, weight: float) -> float:
    """Return L_t, with λ = ``weight``."""
    return weight * train + (1 - weight) * validation


def _check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise ValueError(f"the stop-rule loss is {loss}: the round has failed, keep the state from before it")


@dataclass(frozen=True)
class Judged:
    """Result of a stop rule."""

    memory: Mapping[str, Any]
    validation: Evaluation | None = None
    # The loss that it compared, None without early stopping.
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
    """Apply the stop rule to a round's model, whose validation loss ``judge`` measures. validate: measure even without
    a rule.
    """
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


def anew(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return a device's notes without those of a stop rule, for a device that trains again after it has stopped."""
    notes = {*Smoothed.__dataclass_fields__, *Rises.__dataclass_fields__}
    return {name: note for name, note in memory.items() if name not in notes}


def gives_way(found: Evaluation, lowest_loss: float) -> bool:
    """Return whether a round's model should yield to an older one: only if its loss is well above the lowest of all
    rounds, since the lowest of many losses is often luck on a few samples."""
    return found.loss - lowest_loss > MAY_LOSE * abs(lowest_loss)
