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
from typing import TYPE_CHECKING, ClassVar

from edge_sdk.arguments import MIB
from edge_sdk.budget.memory import Unpredictable, held, room
from edge_sdk.budget.prediction import Predictor
from edge_sdk.budget.search import NOTHING, BudgetController, Choice, Learned, Limits, choose
from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.errors import BadArgument
from edge_sdk.methods import load_method
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import BudgetLimit, FederationInfo, FederationSettings
from edge_sdk.tasks import Task
from edge_sdk.tasks.compute import Compute
from sparrow.command_line.exits import Exit

if TYPE_CHECKING:
    from edge_sdk.training.rehearsal import Rehearsal

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
    compute: Compute
    deterministic: bool = False
    memory_limit: int | None = None
    duty: Callable[[], float] = lambda: 1.0
    learned: Learned = NOTHING
    keep: Callable[[Learned], None] = lambda learned: None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_budget(self.budget)

    def __call__(self, task: Task, manifest: Manifest, info: FederationInfo) -> Prepared:
        """Return ``task``, computed so, and its budget. Raises DoesNotFit, which names a budget that fits."""
        from edge_sdk.training.rehearsal import Rehearsal

        task, settings = task.on(self.compute), info.settings
        scarce = not self._is_plenty(task, manifest, settings)
        try:
            if self.budget is not None and scarce:
                predictor = Predictor(task, manifest, settings, timed=False)
                self._check(predictor, settings, self.budget)
            if not self.deterministic:
                rehearsal = Rehearsal(task, manifest, settings, narrow=load_method(settings.method).narrow)
                task = task.on(fastest_compute(rehearsal, settings))
            if self.budget is None:
                return Prepared(task, 1.0, self._controller(task, manifest, settings, scarce))
        except (TrainingDiverged, Unpredictable) as error:
            log.warning("training could not be tried on this device before it enrols: %s", error)
        return Prepared(task, 1.0 if self.budget is None else self.budget)

    def _controller(
        self, task: Task, manifest: Manifest, settings: FederationSettings, scarce: bool
    ) -> BudgetController:
        """Return what chooses the budget. Raises DoesNotFit where there is too little memory for the smallest one."""
        timed = not self.deterministic
        predictor = Predictor(task, manifest, settings, timed=timed, memory=scarce, clock=self.clock)
        if not predictor.budgets:
            raise DoesNotFit(
                f"{settings.method} cannot work at any budget with this federation's settings; tell its operator"
            )

        def limits(deadline: float) -> Limits:
            return Limits(self._limit(), deadline if timed else math.inf)

        found = BudgetController(predictor, settings, limits, duty=self.duty, learned=self.learned, keep=self.keep)
        if not found.choice.fits and found.choice.limited_by is BudgetLimit.memory:
            self._check(predictor, settings, found.budget)
        return found

    def _limit(self) -> int:
        return self.memory_limit or room(self.compute.device)

    def _is_plenty(self, task: Task, manifest: Manifest, settings: FederationSettings) -> bool:
        from edge_sdk.training.rehearsal import Rehearsal

        rehearsal = Rehearsal(task, manifest, settings)
        samples = max(rehearsal.samples, rehearsal.held_out)
        needed = PLENTY * (rehearsal.model_bytes + samples * _outputs_bytes(manifest))
        return held(self.compute.device) + needed < self._limit()

    def _check(self, predictor: Predictor, settings: FederationSettings, budget: float) -> None:
        """Raise DoesNotFit where rounds at ``budget`` need more memory than there is."""
        limit = self._limit()
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

    settings: say how long rounds are. Tried are the process's threads, half of them, and so on down to 1, unless the
    compute says how many; then the other memory format. Large batches are tried in part. This process then has the
    threads of what is returned. Raises what training raises.
    """
    import torch
    from torch import nn

    from edge_sdk.training.layout import gains

    usual = rehearsal.task.compute
    steps = settings.local_steps or settings.local_epochs * len(rehearsal.task.train)
    if usual.device != "cpu" or rehearsal.flops(steps * rehearsal.samples, None) < WORTH_TRYING:
        return usual
    begin = time.monotonic()
    few = min(FEW, rehearsal.samples)
    per_sample = min(rehearsal.train(STEPS, samples=few)) / few
    allowed = min(SECONDS, SHARE_OF_ROUND * steps * rehearsal.samples * per_sample)
    samples = max(few, min(rehearsal.samples, int(allowed / 5 / STEPS / max(per_sample, 1e-9))))
    default = torch.get_num_threads()
    best, least = usual, math.inf

    def attempt(candidate: Compute) -> None:
        nonlocal best, least
        if time.monotonic() - begin > allowed - STEPS * samples * per_sample:
            return
        torch.set_num_threads(candidate.threads or default)
        taken = min(rehearsal.train(STEPS, samples=samples, compute=candidate))
        if taken < WORTH * least:
            best, least = candidate, taken

    for threads in [usual.threads] if usual.threads else [default >> shift for shift in range(default.bit_length())]:
        attempt(replace(usual, threads=threads))
    if usual.channels_last is None and any(isinstance(module, nn.Conv2d) for module in rehearsal.model.modules()):
        attempt(replace(best, channels_last=not gains(rehearsal.model)))
    torch.set_num_threads(best.threads or default)
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
