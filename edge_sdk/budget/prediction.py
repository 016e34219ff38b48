"""Prediction of what a round takes at a budget: bytes of memory, seconds of computing, bytes on the network.

There is one predictor, for ``join``, for ``sparrow profile`` and for simulated boards. It takes a few steps of local
training as rounds at that budget take them, of the federation's own model on a copy (``training.rehearsal``). Memory
follows from what these steps allocate (``budget.memory``), seconds from how long they take; on a simulated board, which
cannot be timed, seconds follow from counted FLOPs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING

from edge_sdk.budget.memory import Memory, held, predict_memory
from edge_sdk.methods import BudgetTooSmall, load_method
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import FederationSettings, Kind
from edge_sdk.tasks import Task, count_examples
from sparrow.devices.simulation import Board

if TYPE_CHECKING:
    from edge_sdk.training.rehearsal import Effort, Rehearsal

BUDGETS = tuple(tenths / 10 for tenths in range(1, 11))
"""The budgets among which a device chooses."""

TIMED_STEPS = 4
TIMED_SECONDS = 1.0
"""A budget is timed for this many steps, of which the first does not count, and for longer where these are short."""


@dataclass(frozen=True)
class Prediction:
    """Prediction of a round at a budget.

    flops: of a step. steps: of a round. seconds: of computing, of which ``fixed_seconds`` do not depend on the number
    of steps (what is set up once, and early stopping's evaluation); 0 where nothing was timed. memory: None where it
    was not predicted, because there is far more than enough.
    """

    budget: float
    flops: int
    steps: int
    seconds: float
    fixed_seconds: float
    bytes_down: int
    bytes_up: int
    memory: Memory | None

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step."""
        return (self.seconds - self.fixed_seconds) / self.steps


class Predictor:
    """Predictions for one device, each made when its budget is first asked for.

    timed: False counts seconds as 0. memory: False leaves memory out. board: a simulated board, whose seconds follow
    from counted FLOPs, and which holds nothing yet. clock: gives seconds. Raises what training raises.
    """

    def __init__(
        self,
        task: Task,
        manifest: Manifest,
        settings: FederationSettings,
        *,
        timed: bool = True,
        memory: bool = True,
        board: Board | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._task, self._manifest, self._settings = task, manifest, settings
        self._method = load_method(settings.method)
        self._timed, self._memory, self._board, self._clock = timed, memory, board, clock
        self._known: dict[float, Prediction] = {}
        self._of_work: dict[tuple[int, int], Prediction] = {}
        self._held: int | None = 0 if board else None  # one reading for all budgets: it drifts by megabytes
        rehearsal = self._rehearsal()
        self.budgets = tuple(budget for budget in BUDGETS if self._possible(rehearsal, budget))
        """The budgets of ``BUDGETS`` at which the method can work, rising."""
        self.samples, self.held_out = rehearsal.samples, rehearsal.held_out
        """Samples of a batch, in training and in an evaluation."""
        self.whole_flops = rehearsal.flops(rehearsal.samples, None)
        """FLOPs of a step of the whole model."""

    def at(self, budget: float) -> Prediction:
        """Return the prediction for ``budget``. Raises BudgetTooSmall, and Unpredictable."""
        if budget not in self._known:
            self._known[budget] = self._predict(budget)
        return self._known[budget]

    def _predict(self, budget: float) -> Prediction:
        rehearsal = self._rehearsal()
        effort = self._method.at_budget(rehearsal, budget)
        flops = effort.flops()
        if (flops, effort.values) in self._of_work:  # the whole model at any budget: chance would decide between them
            return replace(self._of_work[flops, effort.values], budget=budget)
        memory = predict_memory(rehearsal, effort, self._held_before) if self._memory else None
        steps = self._settings.local_steps or self._settings.local_epochs * len(self._task.train)
        seconds, fixed = self._seconds(rehearsal, effort, flops, steps)
        down, up = _bytes(effort.values, self._settings)
        found = Prediction(budget, flops, steps, seconds, fixed, down, up, memory)
        self._of_work[flops, effort.values] = found
        return found

    def _seconds(self, rehearsal: Rehearsal, effort: Effort, flops: int, steps: int) -> tuple[float, float]:
        """Return the seconds of a round, and how many of them do not depend on the number of steps."""
        if self._board is not None:  # samples are those of whole passes, or of steps in batches
            samples = steps / len(self._task.train) * count_examples(self._task.train)
            return self._board.computing_seconds(round(flops * samples / rehearsal.samples)), 0.0
        if not self._timed:
            return 0.0, 0.0
        per_step, fixed = _timed(effort.train, self._clock)
        if self._settings.early_stopping != "off" or self._settings.personal_model == "best":
            samples = count_examples(self._task.validation)
            few = min(rehearsal.samples, samples)
            fixed += rehearsal.seconds(partial(effort.judge, few)) * samples / few
        return steps * per_step + fixed, fixed

    def _held_before(self) -> int:
        if self._held is None:
            self._held = held(self._task.compute.device)
        return self._held

    def _rehearsal(self) -> Rehearsal:
        # Made for each prediction, because it holds a copy of the model that training later needs the room of.
        from edge_sdk.training.rehearsal import Rehearsal

        return Rehearsal(self._task, self._manifest, self._settings, narrow=self._method.narrow, clock=self._clock)

    def _possible(self, rehearsal: Rehearsal, budget: float) -> bool:
        try:
            self._method.at_budget(rehearsal, budget)
        except BudgetTooSmall:
            return False
        return True


def _bytes(values: int, settings: FederationSettings) -> tuple[int, int]:
    size = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
    down, up = (settings.precision_of(way, Kind.train) for way in ("down", "up"))
    return size.get(down, 4) * values, size.get(up, 4) * values


def _timed(train: Callable[[int], list[float]], clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of a step, and those that training takes once, however many steps it has."""
    taken = train(TIMED_STEPS)  # the first time also pays for what any training loads
    steps = max(TIMED_STEPS, min(30, int(TIMED_SECONDS / max(median(taken), 1e-6))))
    begin = clock()
    taken = train(steps)
    whole = clock() - begin
    per_step = fmean(taken)  # not the median: a round pays for what now and then takes long, too
    return per_step, max(0.0, whole - steps * per_step)
