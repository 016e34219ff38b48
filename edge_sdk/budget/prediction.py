"""Prediction of what a round takes at a budget: bytes of memory, seconds of computing, bytes on the network.

There is one predictor, for ``join``, for ``sparrow profile`` and for simulated boards. It takes a few steps of local
training as rounds at that budget take them, of the federation's own model on a copy, with the engine that will train
(``engines.rehearsal``, ``training.rehearsal``). Memory follows from what these steps take on few samples, seconds from
how long they take; on a simulated board, which cannot be timed, seconds follow from counted FLOPs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

from sparrow.devices import memory
from sparrow.devices.simulation import Board
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import Kind
from sparrow.protocol.settings import FederationSettings

from ..engines.rehearsal import Effort, Rehearsal, Rehearse, Unpredictable
from ..methods import BudgetTooSmall, load_method
from ..tasks import Task, count_examples

BUDGETS = tuple(tenths / 10 for tenths in range(1, 11))
"""The budgets among which a device chooses."""

MODELS_HELD = 2
"""Models that a session holds while it trains another one: the personal model, and the one it received."""

TIMED_STEPS = 4
TIMED_SECONDS = 1.0
"""A budget is timed for this many steps, of which the first does not count, and for longer where these are short."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a round takes: ``held`` by the process before, and what training, evaluation and the ``models`` that a
    session holds add at their peaks."""

    held: int
    training: int
    evaluation: int
    models: int

    @property
    def total(self) -> int:
        """Return the bytes that the process holds at the peak of a round."""
        return self.held + self.models + max(self.training, self.evaluation)

    @property
    def without_training(self) -> int:
        """Return the bytes that it holds at the peak of an evaluation."""
        return self.held + self.models + self.evaluation


def predict_memory(rehearsal: Rehearsal, effort: Effort, held_before: Callable[[], int]) -> Memory:
    """Predict the memory of rounds that train with ``effort``, in batches of the task's size.

    held_before: read after the trainings, because the first one loads what every later one finds loaded. Raises
    Unpredictable, and what training raises.
    """
    training, evaluation = predict_training(rehearsal, effort), predict_evaluation(rehearsal)
    return Memory(held_before(), training, evaluation, MODELS_HELD * rehearsal.model_bytes)


def predict_training(rehearsal: Rehearsal, effort: Effort) -> int:
    """Predict the bytes that training adds at its peak.

    Two steps, since what an optimiser remembers exists from the second on. A gate computes other blocks for other
    samples, so that its steps cannot be compared; the step of the whole model, which takes about as much, stands for
    them. Raises as ``predict_memory``.
    """
    try:
        return rehearsal.peak(lambda few: effort.train(2, few), rehearsal.samples)
    except Unpredictable:
        return rehearsal.peak(lambda few: rehearsal.train(2, samples=few), rehearsal.samples)


def predict_evaluation(rehearsal: Rehearsal) -> int:
    """Predict the bytes that an evaluation adds at its peak. Raises as ``predict_memory``."""
    return rehearsal.peak(rehearsal.evaluate, rehearsal.held_out)


def held(device: str) -> int:
    """Return the bytes that this process holds of the memory that training on ``device`` uses, after giving back those
    that are free."""
    if device == "cpu":
        memory.give_back()
        return memory.resident()
    import torch  # here, because nothing else of a device that trains without it needs it

    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def room(device: str) -> int:
    """Return the bytes that this process may hold at most: those that it holds, and those that are free."""
    if device == "cpu":
        return held(device) + memory.available()
    import torch

    free: int = torch.cuda.mem_get_info(device)[0]
    return held(device) + free


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
    from counted FLOPs, and which holds nothing yet. rehearse: makes rehearsals, PyTorch's by default. clock: gives
    seconds. Raises what training raises.
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
        rehearse: Rehearse | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._task, self._manifest, self._settings = task, manifest, settings
        self._rehearse = rehearse or rehearse_torch
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
        if self._settings.early_stopping != "off" or self._settings.keeps_best:
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
        given = self._task, self._manifest, self._settings
        return self._rehearse(*given, narrow=self._method.narrow, clock=self._clock)

    def _possible(self, rehearsal: Rehearsal, budget: float) -> bool:
        try:
            self._method.at_budget(rehearsal, budget)
        except BudgetTooSmall:
            return False
        return True


def rehearse_torch(
    task: Task,
    manifest: Manifest,
    settings: FederationSettings,
    *,
    narrow: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Rehearsal:
    """Return a rehearsal with PyTorch."""
    from ..training.rehearsal import TorchRehearsal  # here, because the other engine needs no PyTorch

    return TorchRehearsal(task, manifest, settings, narrow=narrow, clock=clock)


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
