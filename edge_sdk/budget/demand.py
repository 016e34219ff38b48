"""What rounds take at a budget: bytes of memory, seconds of computing, bytes on the wire.

``Tried`` runs a few steps of local training as rounds at that budget take them, on this device, of the federation's own
model (``training.rehearsal``), and predicts the memory that they take (``training.footprint``). ``Simulated`` counts
FLOPs for a board of the simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Protocol

from edge_sdk.budget.footprint import held, predict_evaluation, predict_training, whole_round
from edge_sdk.methods import BudgetTooSmall, load_method
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import FederationInfo, FederationSettings, Kind
from edge_sdk.tasks import Task
from edge_sdk.training.local import count_examples
from edge_sdk.training.rehearsal import Rehearsal
from sparrow.devices.simulation import Board

TIERS = tuple(tenths / 10 for tenths in range(1, 11))
"""Budgets that are chosen among."""

TRIED_STEPS = 4
TRIED_SECONDS = 1.0
"""A budget is tried for so many steps, of which the first does not count, and longer where these are short."""


@dataclass(frozen=True)
class Demand:
    """What a round takes at a budget: bytes that the process holds at its peak (0 where there is far more than enough),
    seconds of computing, of which ``fixed`` do not depend on the number of steps (what is set up once, early stopping's
    judging), and bytes on the wire."""

    budget: float
    memory: int
    seconds: float
    fixed: float
    bytes_down: int
    bytes_up: int


class Needs(Protocol):
    """What rounds take on a device."""

    steps: int
    """Local steps of a round."""

    tiers: tuple[float, ...]
    """The budgets at which the method can work, rising."""

    def at(self, budget: float) -> Demand:
        """What they take at ``budget``."""


class Tried:
    """What rounds take on this very device, tried at each budget when it is first asked for.

    timed: whether seconds are tried, too; where not, they count as 0. memory: whether memory is. clock: what seconds
    are taken from. Raises what training raises.
    """

    def __init__(
        self,
        task: Task,
        manifest: Manifest,
        info: FederationInfo,
        *,
        timed: bool,
        memory: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._task, self._manifest, self._info = task, manifest, info
        self._timed, self._memory = timed, memory
        self._known: dict[float, Demand] = {}
        self._held: int | None = None  # one reading for all budgets: what the process holds drifts by megabytes
        self.steps = _steps(info.settings, task)
        self.tiers = affordable_tiers(task, manifest, info)

    def at(self, budget: float) -> Demand:
        """What they take at ``budget``."""
        if budget not in self._known:
            self._known[budget] = self._try(budget)
        return self._known[budget]

    def _try(self, budget: float) -> Demand:
        method, settings = load_method(self._info.method), self._info.settings
        rehearsal = Rehearsal(self._task, self._manifest, settings, narrow=method.narrow, clock=self._clock)
        effort = method.at_budget(rehearsal, budget)
        memory, seconds, fixed = 0, 0.0, 0.0
        if self._memory:
            training = predict_training(rehearsal, method.sample_mask(self._manifest, budget))
            peak = whole_round(rehearsal, training, predict_evaluation(rehearsal))
            if self._held is None:  # read now: a first try loads what every later one finds loaded
                self._held = held(self._task.compute.device)
            memory = self._held + peak
        if self._timed:
            per_step, fixed = _seconds_of(effort.train, self._clock)
            if settings.early_stopping != "off" or settings.personal_model == "best":
                samples = count_examples(self._task.validation)
                few = min(rehearsal.samples, samples)
                fixed += rehearsal.seconds(partial(effort.judge, few)) * samples / few
            seconds = self.steps * per_step + fixed
        down, up = _bytes(effort.values, settings)
        return Demand(budget, memory, seconds, fixed, down, up)


class Simulated:
    """What rounds take on a ``board``: seconds from counted FLOPs, as the simulation will report them."""

    def __init__(self, board: Board, task: Task, manifest: Manifest, info: FederationInfo) -> None:
        self._board, self._manifest, self._info = board, manifest, info
        self._task = task
        self._whole: int | None = None  # memory that the whole model takes: predicting it takes longest
        self.steps = _steps(info.settings, task)
        self.tiers = affordable_tiers(task, manifest, info)

    def at(self, budget: float) -> Demand:
        """What they take at ``budget``; samples are those of whole passes, or of steps in batches."""
        method, settings = load_method(self._info.method), self._info.settings
        rehearsal = Rehearsal(self._task, self._manifest, settings, narrow=method.narrow)
        effort = method.at_budget(rehearsal, budget)
        samples = self.steps / len(self._task.train) * count_examples(self._task.train)
        seconds = self._board.computing_seconds(round(effort.flops() * samples / rehearsal.samples))
        mask = method.sample_mask(self._manifest, budget)
        if mask is not None or self._whole is None:
            memory = whole_round(rehearsal, predict_training(rehearsal, mask), predict_evaluation(rehearsal))
            self._whole = memory if mask is None else self._whole
        else:
            memory = self._whole
        down, up = _bytes(effort.values, settings)
        return Demand(budget, memory, seconds, 0.0, down, up)


def affordable_tiers(task: Task, manifest: Manifest, info: FederationInfo) -> tuple[float, ...]:
    """The tiers at which the method can work at all."""
    method = load_method(info.method)
    rehearsal = Rehearsal(task, manifest, info.settings, narrow=method.narrow)

    def possible(budget: float) -> bool:
        try:
            method.at_budget(rehearsal, budget)
        except BudgetTooSmall:
            return False
        return True

    return tuple(budget for budget in TIERS if possible(budget))


def _steps(settings: FederationSettings, task: Task) -> int:
    return settings.local_steps or settings.local_epochs * len(task.train)


def _bytes(values: int, settings: FederationSettings) -> tuple[int, int]:
    size = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
    down, up = (settings.precision_of(way, Kind.train) for way in ("down", "up"))
    return size.get(down, 4) * values, size.get(up, 4) * values


def _seconds_of(train: Callable[[int], list[float]], clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step, and of what training takes once, however many steps it has."""
    taken = train(TRIED_STEPS)  # the first time also pays for what any training loads
    steps = max(TRIED_STEPS, min(30, int(TRIED_SECONDS / max(median(taken), 1e-6))))
    begin = clock()
    taken = train(steps)
    whole = clock() - begin
    per_step = fmean(taken)  # not the median: a round pays for what now and then takes long, too
    return per_step, max(0.0, whole - steps * per_step)
