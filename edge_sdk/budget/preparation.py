"""Preparation of a device before it enrols: how it computes, and at which budget.

How a device computes, its thread count and memory format, is found by trying. Trying must pay: it may take a twentieth
of a round's training, and never more than about two seconds. Rounds of so little work that not even one try is worth it
are left as they are. What is found differs from machine to machine and from start to start, and with it the last bits
of a result.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from sparrow.command_line.exits import Exit
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import BudgetLimit, FederationInfo
from sparrow.protocol.settings import FederationSettings

from ..arguments import MIB
from ..engines.rehearsal import Rehearsal, Rehearse, Unpredictable
from ..engines.training import TrainingDiverged
from ..errors import BadArgument
from ..methods import load_method
from ..tasks import Task
from ..tasks.compute import Compute
from .prediction import Predictor, held, rehearse_torch, room
from .search import NOTHING, BudgetController, Choice, Learned, Limits, choose

log = logging.getLogger(__name__)

PLENTY = 16
"""Where there is this many times what weights and layers' outputs take, training fits without a prediction."""

SECONDS = 2.0
SHARE_OF_ROUND = 0.05
STEPS = 4
"""Steps of each way to compute that is tried: one that does not count, and three of which the fastest does."""

WORTH_TRYING = 2e10
"""FLOPs of a round: seconds on a small board, one on a large."""

FEW = 8
"""Samples that the first guess is made on."""

WORTH = 0.95
"""A way to compute replaces one that takes longer than this times as long: chance alone makes a few per cent."""


class DoesNotFit(BadArgument):
    """The device has not the memory that training at its budget takes."""

    exit_code: ClassVar[Exit] = Exit.CANNOT


@dataclass(frozen=True)
class Prepared:
    """A task as it is to be computed, and the device's budget: as its user gave it, or as ``controller`` finds it."""

    task: Task
    given: float
    controller: BudgetController | None = None

    @property
    def budget(self) -> float:
        """Return the budget now."""
        return self.controller.budget if self.controller else self.given

    @property
    def choice(self) -> Choice | None:
        """Return how the device chose the budget; None where its user gave it."""
        return self.controller.choice if self.controller else None

    @property
    def limited_by(self) -> BudgetLimit | None:
        """Return why the budget is not larger, where the device chose it."""
        return self.controller.choice.limited_by if self.controller else None


@dataclass(frozen=True)
class Preparation:
    """Wishes of a device's user for its training.

    budget: None has the device find out what it can afford. deterministic: nothing is chosen by its speed, which
    differs from start to start; a budget is then chosen by memory alone. memory_limit: bytes that the process, or on an
    accelerator its tensors, may take; what there is by default. duty, learned and keep: as ``BudgetController`` has
    them. clock: gives seconds, for predictions.
    """

    budget: float | None
    deterministic: bool = False
    memory_limit: int | None = None
    duty: Callable[[], float] = lambda: 1.0
    learned: Learned = NOTHING
    keep: Callable[[Learned], None] = lambda learned: None
    clock: Callable[[], float] = time.perf_counter

    def __call__(
        self, task: Task, manifest: Manifest, info: FederationInfo, rehearse: Rehearse = rehearse_torch
    ) -> Prepared:
        """Return ``task``, computed so, and its budget. rehearse: makes rehearsals of the engine that will train.

        Raises DoesNotFit, which names a budget that fits.
        """
        task, settings = task.on(task.compute), info.settings
        limit = partial(self._limit, task.compute.device)
        scarce = not _is_plenty(rehearse(task, manifest, settings), limit())
        predict = partial(Predictor, manifest=manifest, settings=settings, rehearse=rehearse)
        try:
            if self.budget is not None and scarce:
                _check(predict(task, timed=False), settings, self.budget, limit())
            if not self.deterministic:
                rehearsal = rehearse(task, manifest, settings, narrow=load_method(settings.method).narrow)
                task = task.on(fastest_compute(rehearsal, settings))
            if self.budget is None:
                timed = not self.deterministic
                predictor = predict(task, timed=timed, memory=scarce, clock=self.clock)
                return Prepared(task, 1.0, self._controller(predictor, settings, limit))
        except (TrainingDiverged, Unpredictable) as error:
            log.warning("training could not be tried on this device before it enrols: %s", error)
        return Prepared(task, 1.0 if self.budget is None else self.budget)

    def _controller(
        self, predictor: Predictor, settings: FederationSettings, limit: Callable[[], int]
    ) -> BudgetController:
        """Return what chooses the budget. Raises DoesNotFit where there is too little memory for the smallest one."""
        if not predictor.budgets:
            raise DoesNotFit(
                f"{settings.method} cannot work at any budget with this federation's settings; tell its operator"
            )

        def limits(deadline: float) -> Limits:
            return Limits(limit(), math.inf if self.deterministic else deadline)

        found = BudgetController(predictor, settings, limits, duty=self.duty, learned=self.learned, keep=self.keep)
        if not found.choice.fits and found.choice.limited_by is BudgetLimit.memory:
            _check(predictor, settings, found.budget, limit())
        return found

    def _limit(self, device: str) -> int:
        return self.memory_limit or room(device)


def _is_plenty(rehearsal: Rehearsal, limit: int) -> bool:
    samples = max(rehearsal.samples, rehearsal.held_out)
    needed = PLENTY * (rehearsal.model_bytes + samples * _outputs_bytes(rehearsal.manifest))
    return held(rehearsal.task.compute.device) + needed < limit


def _check(predictor: Predictor, settings: FederationSettings, budget: float, limit: int) -> None:
    """Raise DoesNotFit where rounds at ``budget`` need more than ``limit`` bytes of memory."""
    if not predictor.budgets:
        return
    # A device whose budget is too small for its method's rounds adapts the finished model, at the smallest of all.
    memory = predictor.at(max(budget, predictor.budgets[0])).memory
    if memory is None or memory.total <= limit:
        return
    said = (
        f"a budget of {budget:g} needs {memory.total / MIB:,.0f} MiB of memory (predicted, of which "
        f"{memory.held / MIB:,.0f} are held already), and there are {limit / MIB:,.0f}"
    )
    smaller = [each for each in predictor.budgets if each < budget]
    if smaller and (choice := choose(predictor, Limits(limit, math.inf), settings, among=smaller)).fits:
        raise DoesNotFit(f"{said}; a budget of {choice.budget:g} fits: give --budget {choice.budget:g}")
    if memory.without_training > limit:
        raise DoesNotFit(
            f"{said}; no budget fits, because evaluating the model on {predictor.held_out} samples at once takes "
            f"more by itself: free memory, or join a federation with a smaller model"
        )
    raise DoesNotFit(
        f"{said}; no budget fits: free memory, or join a federation with smaller batches (here "
        f"{predictor.samples} samples) or a smaller model"
    )


def check_budget(budget: object) -> None:
    """Raise BadArgument unless ``budget`` is a number above 0 and up to 1."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise BadArgument(
            f"budget={budget!r} cannot work; give a number above 0 and up to 1, the share of each layer's neurons that "
            f"this device trains, or None to have it find out what it can afford"
        )


def fastest_compute(rehearsal: Rehearsal, settings: FederationSettings) -> Compute:
    """Return the task's compute with the thread count and memory format that are fastest; as it is where trying cannot
    pay.

    settings: say how long rounds are. Tried are the rehearsal's threads, half of them, and so on down to 1, unless the
    compute says how many; then the other memory format. Large batches are tried in part. This process then has the
    threads of what is returned. Raises what training raises.
    """
    usual = rehearsal.task.compute
    steps = settings.local_steps or settings.local_epochs * len(rehearsal.task.train)
    if usual.device != "cpu" or rehearsal.flops(steps * rehearsal.samples, None) < WORTH_TRYING:
        return usual
    begin = time.monotonic()
    few = min(FEW, rehearsal.samples)
    per_sample = min(rehearsal.train(STEPS, samples=few)) / few
    allowed = min(SECONDS, SHARE_OF_ROUND * steps * rehearsal.samples * per_sample)
    samples = max(few, min(rehearsal.samples, int(allowed / 5 / STEPS / max(per_sample, 1e-9))))
    best, least = usual, math.inf

    def attempt(candidate: Compute) -> None:
        nonlocal best, least
        if time.monotonic() - begin > allowed - STEPS * samples * per_sample:
            return
        taken = min(rehearsal.train(STEPS, samples=samples, compute=candidate))
        if taken < WORTH * least:
            best, least = candidate, taken

    most = rehearsal.threads
    for threads in [usual.threads] if usual.threads else [most >> shift for shift in range(most.bit_length())]:
        attempt(replace(usual, threads=threads))
    for other in rehearsal.formats(best):
        attempt(other)
    rehearsal.task.on(best)
    return best


def _outputs_bytes(manifest: Manifest) -> int:
    """Return the bytes of the outputs for one sample of the layers that have weights."""
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    channels = {  # of its output: an embedding's are the columns of its table; a parameter of one number has one
        layer.name: math.prod(shapes[layer.tensors[0]][slice(-1, None) if layer.kind == "embedding" else slice(1)])
        for layer in manifest.layers
        if layer.tensors
    }
    return sum(4 * layer.positions * channels.get(layer.name, 0) for layer in manifest.layers)
