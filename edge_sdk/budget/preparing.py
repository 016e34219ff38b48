"""Before a device enrols: how it will compute, and whether its budget fits into its memory."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from edge_sdk.arguments import MIB
from edge_sdk.budget.demand import Tried
from edge_sdk.budget.footprint import Unpredictable, held, predict_evaluation, predict_training, room, whole_round
from edge_sdk.budget.quickest import quickest
from edge_sdk.budget.search import NOTHING, Budgets, Learned, limits_here
from edge_sdk.errors import BadArgument
from edge_sdk.methods import DeviceMethod, load_method
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.messages import BudgetLimit, FederationInfo
from edge_sdk.tasks import Task
from edge_sdk.tasks.compute import Compute
from edge_sdk.training.local import TrainingDiverged
from edge_sdk.training.rehearsal import Rehearsal
from sparrow.command_line.exits import Exit

log = logging.getLogger(__name__)

PLENTY = 16
"""Where there is this many times what weights and layers' outputs take, training fits without a try."""


class DoesNotFit(BadArgument):
    """Training at the budget needs more memory than the device has."""

    exit_code = Exit.CANNOT


@dataclass(frozen=True)
class Prepared:
    """A task as it is to be computed, and the device's budget: as its user gave it, or as ``budgets`` finds it."""

    task: Task
    budget: float
    budgets: Budgets | None = None

    @property
    def share(self) -> float:
        """The budget now."""
        return self.budgets.share if self.budgets else self.budget

    @property
    def limited_by(self) -> BudgetLimit | None:
        """What keeps it from being larger, where the device chose it."""
        return self.budgets.choice.limited_by if self.budgets else None


@dataclass(frozen=True)
class Preparation:
    """What a device's user wants of its training.

    deterministic: nothing is chosen by its speed, which differs from start to start. memory_limit: bytes that the
    process, or on an accelerator its tensors, may take; what there is by default. budget: None has the device find out
    what it can afford; where nothing may be chosen by its speed, by its memory alone. duty: the share of the time that
    it computes; learned and keep: as ``budget.Budgets`` has them.
    """

    budget: float | None
    compute: Compute
    deterministic: bool = False
    memory_limit: int | None = None
    duty: Callable[[], float] = lambda: 1.0
    learned: Learned = NOTHING
    keep: Callable[[Learned], None] = lambda learned: None

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_budget(self.budget)

    @property
    def _share(self) -> float:
        """The budget that was given, or until it is found out the whole."""
        return 1.0 if self.budget is None else self.budget

    def __call__(self, task: Task, manifest: Manifest, info: FederationInfo) -> Prepared:
        """``task``, computed so, and its budget. Raises DoesNotFit, which names a budget that does."""
        task = task.on(self.compute)
        method = load_method(info.method)
        rehearsal = Rehearsal(task, manifest, info.settings, narrow=method.narrow)
        try:
            if self.budget is not None:
                self._check(self.budget, rehearsal, manifest, method)
            if not self.deterministic:
                task = task.on(quickest(rehearsal, info.settings, method.sample_mask(manifest, self._share)))
            budgets = None if self.budget is not None else self._find_out(task, rehearsal, manifest, info)
            return Prepared(task, self._share, budgets)
        except (TrainingDiverged, Unpredictable) as error:
            log.warning("what training takes on this device could not be tried beforehand: %s", error)
            return Prepared(task, self._share)

    def _find_out(self, task: Task, rehearsal: Rehearsal, manifest: Manifest, info: FederationInfo) -> Budgets:
        """What this device can afford. Raises DoesNotFit where it has not the memory for the smallest budget."""
        needs = Tried(
            task, manifest, info, timed=not self.deterministic, memory=not self._is_plenty(rehearsal, manifest)
        )
        if not needs.tiers:
            raise DoesNotFit(
                f"{info.method} cannot work at any budget with this federation's settings; tell its operator"
            )
        limits = limits_here(task, self.memory_limit, timed=not self.deterministic)
        budgets = Budgets(needs, info, limits, duty=self.duty, learned=self.learned, keep=self.keep)
        if not budgets.choice.fits and budgets.choice.limited_by is BudgetLimit.memory:
            self._check(budgets.share, rehearsal, manifest, load_method(info.method))
        return budgets

    def _is_plenty(self, rehearsal: Rehearsal, manifest: Manifest) -> bool:
        device = self.compute.device
        limit = self.memory_limit or room(device)
        samples = max(rehearsal.samples, rehearsal.held_out)
        return held(device) + PLENTY * (rehearsal.model_bytes + samples * _outputs_bytes(manifest)) < limit

    def _check(self, budget: float, rehearsal: Rehearsal, manifest: Manifest, method: DeviceMethod) -> None:
        if self._is_plenty(rehearsal, manifest):
            return
        device = self.compute.device
        limit = self.memory_limit or room(device)
        evaluation = predict_evaluation(rehearsal)

        def needed(share: float) -> int:
            training = predict_training(rehearsal, method.sample_mask(manifest, share))
            return held(device) + whole_round(rehearsal, training, evaluation)

        wanted = needed(budget)
        if wanted <= limit:
            return
        said = (
            f"a budget of {budget:g} needs {wanted / MIB:,.0f} MiB of memory (predicted, of which "
            f"{held(device) / MIB:,.0f} are held already), and there are {limit / MIB:,.0f}"
        )
        smaller = [tenths / 10 for tenths in range(1, 10) if tenths / 10 < budget]
        fitting = bisect_right(smaller, limit, key=needed)  # the larger the budget, the more it needs
        if fitting:
            raise DoesNotFit(
                f"{said}; a budget of {smaller[fitting - 1]:g} fits: give --budget {smaller[fitting - 1]:g}"
            )
        if held(device) + whole_round(rehearsal, 0, evaluation) > limit:
            raise DoesNotFit(
                f"{said}; no budget fits, for judging the model on {rehearsal.held_out} samples at once takes more by "
                f"itself: free memory, or join a federation with a smaller model"
            )
        raise DoesNotFit(
            f"{said}; no budget fits: free memory, or join a federation with smaller batches (here "
            f"{rehearsal.samples} samples) or a smaller model"
        )


def check_budget(budget: object) -> None:
    """Raise BadArgument unless ``budget`` is a number above 0 and up to 1."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise BadArgument(
            f"budget={budget!r} cannot work; give a number above 0 and up to 1, the share of each layer's neurons that "
            f"this device trains, or None to have it find out what it can afford"
        )


def _outputs_bytes(manifest: Manifest) -> int:
    """Bytes of what the layers that have weights answer to one sample."""
    shapes = {spec.name: spec.shape for spec in manifest.tensors}
    channels = {  # of its output: an embedding's are the columns of its table; a parameter of one number has one
        layer.name: math.prod(shapes[layer.tensors[0]][slice(-1, None) if layer.kind == "embedding" else slice(1)])
        for layer in manifest.layers
        if layer.tensors
    }
    return sum(4 * layer.positions * channels.get(layer.name, 0) for layer in manifest.layers)
