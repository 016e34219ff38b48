"""The device half of each method, one file each, named like its server half in ``coordinator/methods``.

A method is state in, state out: ``train`` gets a ``Job`` and returns what to keep and what to send. Session, transport
and telemetry are not its business. A method from outside registers under the entry point ``sparrow.device_methods``.
What several methods do alike is in ``edge_sdk.training``, and ``conclude`` here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_sdk.errors import SdkError
from edge_sdk.protocol.bundle import Bundle
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import Array, Manifest, Tensors
from edge_sdk.protocol.masks import Mask, NeuronDraw, NeuronMask
from edge_sdk.protocol.messages import Assignment, Evaluation
from edge_sdk.tasks import Task
from edge_sdk.training.early_stopping import judge_round
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import (
    Adjustment,
    LocalResult,
    derive_seed,
    evaluate,
    evaluate_held_out,
    get_tensors,
    set_tensors,
    train_locally,
)
from edge_sdk.training.merging import whole_model
from edge_sdk.training.narrow import check_narrow
from edge_sdk.training.rehearsal import Effort, MaskedEffort, Rehearsal
from sparrow.command_line.exits import Exit
from sparrow.command_line.nearest import nearest


@dataclass(frozen=True)
class DeviceState:
    """What a device keeps between rounds.

    personal: every kept tensor of the personal model by name, or None before the first download. memory: the method's
    own JSON-able notes (the last stop-rule loss, say). own: its arrays beside the model, by name. model: the SHA-256 of
    the global model that the method can rebuild from these, so that what changed since is all that need be sent.
    neurons: those that the device has chosen for itself, where its method has it choose; None leaves them as they are.
    """

    personal: Tensors | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    model: str | None = None
    neurons: NeuronMask | None = None


@dataclass(frozen=True)
class Job:
    """One assignment with all that a method needs to carry it out.

    ``model`` is the task's module, whose weights the method overwrites; ``received`` the decoded payload; ``progress``
    is called with (steps done, steps in all, running loss). ``federation`` and ``device`` are their names;
    ``budget`` is what the device says it can afford.
    """

    assignment: Assignment
    manifest: Manifest
    task: Task
    model: nn.Module
    state: DeviceState
    received: Bundle | None
    progress: Callable[[int, int, float], None] = lambda done, total, loss: None
    federation: str = ""
    device: str = ""
    budget: float = 1.0

    def with_settings(self, **changed: object) -> Job:
        """The same work with other settings of the federation."""
        settings = self.assignment.settings.model_copy(update=changed)
        return replace(self, assignment=self.assignment.model_copy(update={"settings": settings}))

    def seed(self, purpose: str) -> int:
        """A seed for torch that follows from federation, its seed, device, round and ``purpose`` alone.

        The first two are written as the draws of masks write their job, ``masks.NeuronDraw``.
        """
        assignment = self.assignment
        return derive_seed(f"{self.federation}:{assignment.settings.seed}", self.device, assignment.round, purpose)


@dataclass(frozen=True)
class Update:
    """What a round sends: values float32 [count_values(manifest, mask)], and the mask's seed form if any.

    gradients: of all maskable weights, float32, in rounds that ask for them. base: the global model that the round
    started from, where its payload was only what had changed of it.
    """

    values: Array
    mask: Mask | None = None
    draw: NeuronDraw | None = None
    gradients: NDArray[np.float32] | None = None
    base: Tensors | None = None


@dataclass(frozen=True)
class Trained:
    """Outcome of local training: the state to keep, what to report, and what to send.

    update: None for ``personalise``, where nothing of the model goes up. flops: what was computed, counted as in
    ``protocol.flops``. validation: the model as training has left it, on validation data; personal_validation: the
    personal model that the state keeps; both None where they were not measured. stopped: early stopping ends this
    device's training with this round. counts: what the method counted, for the round's record.
    """

    state: DeviceState
    update: Update | None
    num_examples: int
    steps: int
    flops: int
    train_loss: float
    validation: Evaluation | None
    stop_loss: float | None
    stopped: bool
    personal_validation: Evaluation | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """Outcome of an evaluation on the device's held-out data; None for a model that there is not.

    validation: the personal model, or where there is none the global one, on validation data; the others on test data.
    others: the method's other ways to predict, by name.
    """

    personal: Evaluation | None
    global_model: Evaluation | None
    validation: Evaluation | None = None
    others: Mapping[str, Evaluation] = field(default_factory=dict)


class UnknownWork(ProtocolError):
    """The coordinator asks for work that the method does not have on this device; it is handed back."""


class BudgetTooSmall(ProtocolError):
    """The method cannot work within the device's budget; the work is handed back."""

    exit_code = Exit.CANNOT


class DeviceMethod(Protocol):
    """What a method's device half can do. Subclass it: work that a method leaves out is handed back.

    Each raises BundleError for a payload that does not fit, TrainingDiverged when the work failed.
    """

    picks_best: bool = True
    """Whether the personal model of any round can be used later just as it was. Where not, a device keeps the last."""

    mixes_global: bool = False
    """Whether a mixture of the personal and the whole global model is a personal model, too. The server half of the
    same name says so as well, and sends the finished global model to every device."""

    needs_coupling: bool = False
    """Whether it trains some neurons of a layer and not others, so that the manifest must say which neurons feed which
    weights. Its server half says the same."""

    narrow: bool = False
    """Whether what ``sample_mask`` leaves out is gone while training, and not frozen."""

    def check_model(self, model: nn.Module, manifest: Manifest, example: torch.Tensor) -> None:
        """Raise ManifestError where rounds would fail with ``model``, tried on ``example`` [N, ...] at publication."""
        if self.narrow:
            check_narrow(model, manifest, example)

    def train(self, job: Job) -> Trained:
        """Merge the payload, train under the assignment's mask, and say what to keep and to send."""
        raise _unknown(self, job)

    def prepare(self, job: Job) -> Trained:
        """Make the model that the federation begins with, before its first round."""
        raise _unknown(self, job)

    def personalise(self, job: Job) -> Trained:
        """Train what stays on the device, and say what to keep; ``update`` is None."""
        raise _unknown(self, job)

    def evaluate(self, job: Job) -> Evaluated:
        """Judge the personal model and, where the payload brings one, the global model on held-out data."""
        raise _unknown(self, job)

    def adapt(self, job: Job) -> DeviceState:
        """Make a personal model from the finished federation's global one."""
        raise _unknown(self, job)

    forward_stays: bool = False
    """Whether a smaller budget leaves the forward pass as it is, so that it saves little."""

    def at_budget(self, rehearsal: Rehearsal, budget: float) -> Effort:
        """What rounds at ``budget`` have to do, to be tried on this device. Raises BudgetTooSmall."""
        return MaskedEffort(rehearsal, self.sample_mask(rehearsal.manifest, budget))

    def sample_mask(self, manifest: Manifest, budget: float) -> NeuronMask | None:
        """A mask as rounds at ``budget`` have them, to predict what they take; None: the whole model is trained."""
        return None


def _unknown(method: DeviceMethod, job: Job) -> UnknownWork:
    kind = job.assignment.kind.value
    return UnknownWork(f"{type(method).__name__} on this device has no work of kind {kind}; update this SDK")


def train_loaded(
    job: Job,
    freezing: Freezing,
    *,
    purpose: str = "train",
    proximal_weight: float = 0.0,
    proximal_centre: Tensors | None = None,
    adjustment: Adjustment | None = None,
) -> LocalResult:
    """Train ``job.model``, loaded with what the round starts from, as the federation's settings say for this round.

    purpose: what batches and dropout are drawn for. The rest is ``train_locally``'s, whose errors it raises.
    """
    settings = job.assignment.settings
    return train_locally(
        job.model,
        job.task,
        settings,
        learning_rate=settings.learning_rate_of(job.assignment.round),
        freezing=freezing,
        proximal_weight=proximal_weight,
        proximal_centre=proximal_centre,
        adjustment=adjustment,
        seed=job.seed(purpose),
        progress=job.progress,
    )


def fine_tune(job: Job, freezing: Freezing, *, purpose: str = "adapt") -> LocalResult:
    """Train ``job.model``, a global model loaded, for ``finetune_epochs``, or where that is 0 as long as in a round.

    Raises what ``train_loaded`` does.
    """
    epochs = job.assignment.settings.finetune_epochs
    longer = {"local_epochs": epochs, "local_steps": None} if epochs else {}
    return train_loaded(job.with_settings(**longer), freezing, purpose=purpose)


def conclude(
    job: Job,
    result: LocalResult,
    *,
    personal: Tensors | None,
    update: Update | None,
    counts: Mapping[str, int] | None = None,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Trained:
    """Return the outcome of a round whose training has left ``job.model`` as it is, judged by the stop rule.

    personal: the model that the device keeps until the next round, which is then ``job.model`` as it is; its own arrays
    stay as they are. The FLOPs are those of the samples seen, weight gradients only of what the update's mask lets
    train. forward: how the model is run, where that is not calling it.
    """
    settings = job.assignment.settings
    judged = judge_round(
        job.model,
        job.task,
        settings,
        job.state.memory,
        result.train_loss,
        forward,
        validate=personal is not None and settings.personal_model == "best",
    )
    return Trained(
        state=DeviceState(personal, judged.memory, job.state.own),
        update=update,
        num_examples=result.num_examples,
        steps=result.steps,
        flops=training_flops(job.manifest, result.samples, weight_gradients=update.mask if update else None),
        train_loss=result.train_loss,
        validation=judged.validation,
        personal_validation=judged.validation if personal is not None else None,
        stop_loss=judged.stop_loss,
        stopped=judged.stopped,
        counts=counts or {},
    )


def evaluate_both(job: Job) -> Evaluated:
    """Judge the personal model and, where the payload brings one, the global model on held-out data."""
    personal = global_model = validation = None
    if job.state.personal is not None:
        set_tensors(job.model, job.state.personal)
        personal, validation = evaluate_held_out(job.model, job.task)
    if job.received is not None:
        # Tensors that never travel (local running statistics) stay the personal model's: the global one has none.
        set_tensors(job.model, whole_model(job.manifest, job.received))
        if personal is None:
            return Evaluated(None, *evaluate_held_out(job.model, job.task))
        global_model = evaluate(job.model, job.task, job.task.held_out)
    return Evaluated(personal, global_model, validation)


class UnknownMethod(SdkError):
    """This installation does not have the method."""

    exit_code = Exit.NOT_FOUND


def methods_for_any_model() -> list[str]:
    """The names of the installed methods that take any model."""
    methods = {entry.name: entry.load() for entry in entry_points(group="sparrow.device_methods")}
    return sorted(
        name
        for name, method in methods.items()
        if not method.needs_coupling and method.check_model is DeviceMethod.check_model
    )


@cache  # methods keep no state, and looking through the installed packages takes 20 ms: a device-round of a fleet
def load_method(name: str) -> DeviceMethod:
    """The device half registered as ``name``. Raises UnknownMethod, which names what is installed."""
    found = {entry.name: entry for entry in entry_points(group="sparrow.device_methods")}
    if name not in found:
        raise UnknownMethod(
            f"method: {name!r} is not installed here{nearest(name, found)}; there are {', '.join(sorted(found))}; "
            f"update this SDK, or install the package that provides it"
        )
    method: DeviceMethod = found[name].load()()
    return method


def adapt_as_in_a_round(job: Job, mask: NeuronMask | None = None) -> DeviceState:
    """The received model, fine-tuned under ``mask``: for ``finetune_epochs``, or where that is 0 as long as in a round.

    Raises BundleError for a payload that is missing or partial, TrainingDiverged.
    """
    set_tensors(job.model, whole_model(job.manifest, job.received))
    fine_tune(job, Freezing(job.model, job.manifest, mask))
    return replace(job.state, personal=get_tensors(job.model, job.manifest))
