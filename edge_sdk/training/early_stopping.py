"""When a device leaves training for good (FedSPU, arXiv:2403.11464, section 4 and Algorithm 1).

After each round a device took part in, L_t = λ·L_train + (1-λ)·L_val estimates the mean loss over all its data; a rise
against its own last participation stops it. Where paper and released code differ: strictly greater, as the paper's
formula has it, while the code also stops on a tie. ``patience`` (1 is the paper) and ``min_improvement`` are ours.

The rule asks nothing of a method but its losses, so every method here can use it; what a stop means is the method's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks import Task
from edge_sdk.training.local import evaluate


@dataclass(frozen=True)
class StopState:
    """What the rule remembers: the loss of the last participation (None before the first), and rises in a row."""

    last_loss: float | None = None
    increases: int = 0


def stop_loss(train: float, validation: float, weight: float) -> float:
    """L_t: the training loss weighted by λ = ``weight``, the validation loss by the rest."""
    return weight * train + (1 - weight) * validation


def judge(state: StopState, loss: float, patience: int, min_improvement: float) -> tuple[StopState, bool]:
    """The state to remember after a round with stop-rule loss ``loss``, and whether the device stops.

    A fall of less than ``min_improvement`` counts as a rise; ``patience`` rises in a row stop. Raises ValueError for a
    loss that is not finite: such a round has failed, and the old state stands.
    """
    if not math.isfinite(loss):
        raise ValueError(f"the stop-rule loss is {loss}: the round has failed, keep the state from before it")
    rose = state.last_loss is not None and loss > state.last_loss - min_improvement
    increases = state.increases + 1 if rose else 0
    return StopState(loss, increases), increases >= patience


@dataclass(frozen=True)
class Judged:
    """What the rule found after a round; None and the memory as it was where the federation does not stop early."""

    memory: Mapping[str, Any]
    validation_loss: float | None = None
    stop_loss: float | None = None
    stopped: bool = False


def judge_round(
    model: nn.Module,
    task: Task,
    settings: FederationSettings,
    memory: Mapping[str, Any],
    train_loss: float,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Judged:
    """Measure ``model``, as a round has left it, on validation data, and apply the rule where ``settings`` ask for it.

    memory: the device's notes from before the round, in which the rule keeps its own two; the others stay. forward: as
    ``evaluate`` takes it, which also says what is raised.
    """
    if not settings.early_stopping:
        return Judged(memory)
    validation_loss = evaluate(model, task, task.validation, forward).loss
    loss = stop_loss(train_loss, validation_loss, settings.stop_weight)
    before = StopState(memory.get("last_loss"), memory.get("increases", 0))
    after, stopped = judge(before, loss, settings.patience, settings.min_improvement)
    return Judged({**memory, **asdict(after)}, validation_loss, loss, stopped)
