"""Predict a round's memory, computing time and network traffic at a budget.

The predictor rehearses a few training steps on a copy of the federation's model (``engines.rehearsal``,
``training.rehearsal``). Memory is extrapolated from few samples; seconds are timed, or on a simulated board computed
from FLOPs.
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

# Budgets from which a device chooses.
BUDGETS = tuple(tenths / 10 for tenths in range(1, 11))

# Models in memory besides the trained one: the personal model and the received one.
MODELS_HELD = 2

# A budget is timed for these steps; if they are short, for about these seconds.
TIMED_STEPS = 4
TIMED_SECONDS = 1.0


@dataclass(frozen=True)
class Memory:
    """Bytes of a round: held before it, and the peaks added by training, evaluation and models."""

    held: int
    training: int
    evaluation: int
    models: int

    @property
    def total(self) -> int:
        """Peak bytes of a round."""
        return self.held + self.models + max(self.training, self.evaluation)

    @property
    def without_training(self) -> int:
        """Peak bytes of an evaluation."""
        return self.held + self.models + self.evaluation


def predict_memory(rehearsal: Rehearsal, effort: Effort, held_before: Callable[[], int]) -> Memory:
    """Predict the memory of a round. Raises Unpredictable if measured runs differ."""
    training = predict_training(rehearsal, effort)
    evaluation = predict_evaluation(rehearsal)
    # Read after training, because the first training loads libraries that stay loaded.
    return Memory(held_before(), training, evaluation, MODELS_HELD * rehearsal.model_bytes)


def predict_training(rehearsal: Rehearsal, effort: Effort) -> int:
    """Predict the peak bytes added by training. Raises Unpredictable if measured runs differ."""
    # Two steps: an optimiser's state exists from the second step on.
    try:
        return rehearsal.peak(lambda few: effort.train(2, few), rehearsal.samples)
    # A gate chooses blocks by sample, so its steps cannot be compared; the whole model needs about as much.
    except Unpredictable:
        return rehearsal.peak(lambda few: rehearsal.train(2, samples=few), rehearsal.samples)


def predict_evaluation(rehearsal: Rehearsal) -> int:
    """Predict the peak bytes added by an evaluation. Raises Unpredictable if measured runs differ."""
    return rehearsal.peak(rehearsal.evaluate, rehearsal.held_out)


def held(device: str) -> int:
    """Return the bytes that this process holds on ``device``, after releasing free memory."""
    if device == "cpu":
        memory.give_back()
        return memory.resident()
    # Imported here, because a device that trains with ONNX Runtime needs no PyTorch.
    import torch

    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def room(device: str) -> int:
    """Return the bytes that this process may hold: its memory plus the free memory."""
    if device == "cpu":
        return held(device) + memory.available()
    import torch

    free: int = torch.cuda.mem_get_info(device)[0]
    return held(device) + free


@dataclass(frozen=True)
class Prediction:
    """Prediction of a round at a budget."""

    budget: float
    # Flops per step.
    flops: int
    # Steps per round.
    steps: int
    # Seconds of computing; 0 if not timed.
    seconds: float
    # The part that does not depend on the steps (setup, evaluation for early stopping).
    fixed_seconds: float
    bytes_down: int
    bytes_up: int
    # None if it is plentiful and was not predicted.
    memory: Memory | None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return (self.seconds - self.fixed_seconds) / self.steps


class Predictor:
    """Cached predictions for one device.

    board: a simulated board. rehearse: constructor of rehearsals. ``budgets``: those of ``BUDGETS`` that the method
    supports. ``samples``, ``held_out``: samples per batch in training and in evaluation. ``whole_flops``: FLOPs of a
    step of the full model. Raises the errors of training.
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
        self._task = task
        self._manifest = manifest
        self._settings = settings
        self._rehearse = rehearse or rehearse_torch
        self._method = load_method(settings.method)
        self._timed = timed
        self._memory = memory
        self._board = board
        self._clock = clock
        self._known: dict[float, Prediction] = {}
        self._of_work: dict[tuple[int, int], Prediction] = {}
        # Read once for all budgets, because readings drift by megabytes.
        self._held: int | None = 0 if board else None
        rehearsal = self._rehearsal()
        self.budgets = tuple(budget for budget in BUDGETS if self._possible(rehearsal, budget))
        self.samples = rehearsal.samples
        self.held_out = rehearsal.held_out
        self.whole_flops = rehearsal.flops(rehearsal.samples, None)

    def at(self, budget: float) -> Prediction:
        """Return the prediction for ``budget``.

        Raises BudgetTooSmall if the method cannot train at it, Unpredictable if measured runs differ.
        """
        if budget not in self._known:
            self._known[budget] = self._predict(budget)
        return self._known[budget]

    def _predict(self, budget: float) -> Prediction:
        rehearsal = self._rehearsal()
        effort = self._method.at_budget(rehearsal, budget)
        flops = effort.flops()
        # If the method trains the whole model at any budget, timing noise must not decide between budgets.
        if (flops, effort.values) in self._of_work:
            return replace(self._of_work[flops, effort.values], budget=budget)
        memory = predict_memory(rehearsal, effort, self._held_before) if self._memory else None
        steps = self._settings.local_steps or self._settings.local_epochs * len(self._task.train)
        seconds, fixed = self._seconds(rehearsal, effort, flops, steps)
        down, up = _bytes(effort.values, self._settings)
        found = Prediction(budget, flops, steps, seconds, fixed, down, up, memory)
        self._of_work[flops, effort.values] = found
        return found

    def _seconds(self, rehearsal: Rehearsal, effort: Effort, flops: int, steps: int) -> tuple[float, float]:
        """Return the seconds of a round, and the part independent of the steps."""
        if self._board is not None:
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
        # Made for each prediction, so that its copy of the model is freed before training.
        return self._rehearse(self._task, self._manifest, self._settings, narrow=self._method.narrow, clock=self._clock)

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
    # Imported here, because the other engine needs no PyTorch.
    from ..training.rehearsal import TorchRehearsal

    return TorchRehearsal(task, manifest, settings, narrow=narrow, clock=clock)


def _bytes(values: int, settings: FederationSettings) -> tuple[int, int]:
    size = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
    down, up = (settings.precision_of(way, Kind.train) for way in ("down", "up"))
    return size.get(down, 4) * values, size.get(up, 4) * values


def _timed(train: Callable[[int], list[float]], clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of a step, and those of setting up training."""
    # The first call also loads libraries.
    taken = train(TIMED_STEPS)
    steps = max(TIMED_STEPS, min(30, int(TIMED_SECONDS / max(median(taken), 1e-6))))
    begin = clock()
    taken = train(steps)
    whole = clock() - begin
    # The mean, not the median: occasional slow steps count, too.
    per_step = fmean(taken)
    return per_step, max(0.0, whole - steps * per_step)
