"""Prepare a device before it enrols: choose thread count, memory format and budget.

Thread count and memory format are chosen by timing, which takes at most 5 % of a round's training and about two
seconds. The choice, and so the last bits of a result, may differ between starts.
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
from sparrow.protocol.failures import Failure
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

# With this multiple of the memory of weights and layers' outputs, training fits without a prediction.
PLENTY = 16

# Limits of timing, in seconds and as a share of a round.
SECONDS = 2.0
SHARE_OF_ROUND = 0.05

# Steps per candidate: one to warm up, then the fastest of the others counts.
STEPS = 4

# Smallest FLOPs of a round worth timing: about a second on a large board.
WORTH_TRYING = 2e10

# Samples for the first guess.
FEW = 8

# A candidate must be at least 5 % faster, because timings vary by a few per cent.
WORTH = 0.95


class DoesNotFit(BadArgument):
    """The device has too little memory to train at its budget."""

    exit_code: ClassVar[Exit] = Exit.CANNOT
    failure = Failure("no-memory")


@dataclass(frozen=True)
class Prepared:
    """A task with its compute, and its budget, given or chosen by ``controller``."""

    task: Task
    given: float
    controller: BudgetController | None = None

    @property
    def budget(self) -> float:
        """The current budget."""
        return self.controller.budget if self.controller else self.given

    @property
    def choice(self) -> Choice | None:
        """The reasons for the budget; None if the user gave it."""
        return self.controller.choice if self.controller else None

    @property
    def limited_by(self) -> BudgetLimit | None:
        """The reason why a chosen budget is not larger."""
        return self.controller.choice.limited_by if self.controller else None


@dataclass(frozen=True)
class Preparation:
    """A user's options for preparing a device."""

    # None: choose an affordable one.
    budget: float | None
    # Choose a budget only by memory, and nothing by timing.
    deterministic: bool = False
    # Bytes for the process, or its tensors on an accelerator.
    memory_limit: int | None = None
    # As in ``BudgetController``.
    duty: Callable[[], float] = lambda: 1.0
    learned: Learned = NOTHING
    keep: Callable[[Learned], None] = lambda learned: None
    clock: Callable[[], float] = time.perf_counter

    def __call__(
        self, task: Task, manifest: Manifest, info: FederationInfo, rehearse: Rehearse = rehearse_torch
    ) -> Prepared:
        """Choose compute and budget.

        rehearse: constructor of rehearsals. Raises DoesNotFit if memory is too short for the budget.
        """
        task = task.on(task.compute)
        settings = info.settings
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
        if not predictor.budgets:
            raise DoesNotFit(
                f"{settings.method} cannot work at any budget with this federation's settings; ask its operator to "
                f"change them"
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
    if not predictor.budgets:
        return
    # A device with too small a budget for the method adapts the finished model, at the smallest possible budget.
    memory = predictor.at(max(budget, predictor.budgets[0])).memory
    if memory is None or memory.total <= limit:
        return
    said = (
        f"a budget of {budget:g} needs {memory.total / MIB:,.0f} MiB of memory (predicted, including "
        f"{memory.held / MIB:,.0f} already in use), and {limit / MIB:,.0f} are available"
    )
    smaller = [each for each in predictor.budgets if each < budget]
    if smaller and (choice := choose(predictor, Limits(limit, math.inf), settings, among=smaller)).fits:
        raise DoesNotFit(f"{said}; a budget of {choice.budget:g} fits: give --budget {choice.budget:g}")
    if memory.without_training > limit:
        raise DoesNotFit(
            f"{said}; no budget fits, because even evaluating the model on {predictor.held_out} samples at once needs "
            f"more: free memory, or join a federation with a smaller model"
        )
    raise DoesNotFit(
        f"{said}; no budget fits: free memory, or join a federation with smaller batches (here "
        f"{predictor.samples} samples) or a smaller model"
    )


def check_budget(budget: object) -> None:
    """Raise BadArgument unless ``budget`` is a number above 0 and up to 1."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise BadArgument(
            f"budget={budget!r} is invalid; give the share of each layer's neurons to train, above 0 and up to 1, or "
            f"None to choose an affordable one"
        )


def fastest_compute(rehearsal: Rehearsal, settings: FederationSettings) -> Compute:
    """Return the compute with the fastest thread count and memory format; unchanged if timing is not worth it."""
    usual = rehearsal.task.compute
    steps = settings.local_steps or settings.local_epochs * len(rehearsal.task.train)
    if usual.device != "cpu" or rehearsal.flops(steps * rehearsal.samples, None) < WORTH_TRYING:
        return usual
    begin = time.monotonic()
    few = min(FEW, rehearsal.samples)
    per_sample = min(rehearsal.train(STEPS, samples=few)) / few
    allowed = min(SECONDS, SHARE_OF_ROUND * steps * rehearsal.samples * per_sample)
    samples = max(few, min(rehearsal.samples, int(allowed / 5 / STEPS / max(per_sample, 1e-9))))
    best = usual
    least = math.inf

    def attempt(candidate: Compute) -> None:
        nonlocal best, least
        if time.monotonic() - begin > allowed - STEPS * samples * per_sample:
            return
        taken = min(rehearsal.train(STEPS, samples=samples, compute=candidate))
        if taken < WORTH * least:
            best = candidate
            least = taken

    most = rehearsal.threads
    for threads in [usual.threads] if usual.threads else [most >> shift for shift in range(most.bit_length())]:
        attempt(replace(usual, threads=threads))
    for other in rehearsal.formats(best):
        attempt(other)
    rehearsal.task.on(best)
    return best


def _outputs_bytes(manifest: Manifest) -> int:
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    # Output channels: the columns of an embedding's table; 1 for a scalar parameter.
    channels = {
        layer.name: math.prod(shapes[layer.tensors[0]][slice(-1, None) if layer.kind == "embedding" else slice(1)])
        for layer in manifest.layers
        if layer.tensors
    }
    return sum(4 * layer.positions * channels.get(layer.name, 0) for layer in manifest.layers)
