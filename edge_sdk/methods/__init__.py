"""The device half of each method, named like its server half in ``coordinator/methods``.

A method is a record of functions, ``DeviceMethod``. It knows no session, transport or telemetry. Other packages
register a record under the entry point ``sparrow.device_methods``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sparrow.command_line.exits import Exit
from sparrow.command_line.installed import load_method_record
from sparrow.protocol.bundle import Bundle
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import Array, GraphName, Manifest, Tensors
from sparrow.protocol.masks import FULL_RATIO, Mask, NeuronDraw, NeuronMask
from sparrow.protocol.messages import Assignment, Evaluation
from sparrow.protocol.parts import Numbers, Part
from sparrow.protocol.secure.numbers import Words
from sparrow.protocol.settings import FederationSettings

from ..engines import Engine, EngineName
from ..engines.training import derive_seed
from ..errors import SdkError
from ..tasks import Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..engines.rehearsal import Effort, Rehearsal
    from ..training.engine import TorchEngine

__all__ = [
    "ActiveNeurons",
    "BudgetTooSmall",
    "DeviceMethod",
    "DeviceState",
    "Evaluated",
    "Job",
    "MethodSettings",
    "Trained",
    "UnknownMethod",
    "UnknownWork",
    "Update",
    "own_settings",
]


class MethodSettings(BaseModel):
    """A method's own settings that its device half reads."""

    model_config = ConfigDict(frozen=True, extra="ignore")


Own = TypeVar("Own", bound=MethodSettings)


@dataclass(frozen=True)
class DeviceState:
    """The state that a device keeps between rounds.

    personal: every kept tensor of the personal model, or None before the first download. memory: JSON-able notes. own:
    the method's arrays. model: the SHA-256 of the global model that the method can rebuild from these. neurons: the
    device's own choice.
    """

    personal: Tensors | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    model: str | None = None
    neurons: NeuronMask | None = None


@dataclass(frozen=True)
class Job:
    """An assignment and everything that a method needs to do it.

    progress: called with (steps done, total steps, running loss). budget: the largest that the device can afford.
    """

    assignment: Assignment
    manifest: Manifest
    task: Task
    engine: Engine
    state: DeviceState
    received: Bundle | None
    progress: Callable[[int, int, float], None] = lambda done, total, loss: None
    federation: str = ""
    device: str = ""
    budget: float = 1.0

    def own(self, kind: type[Own]) -> Own:
        """Return the method's own settings as ``kind``. Raises UnknownWork if they do not fit."""
        return own_settings(self.assignment.settings, kind)

    def planned(self, name: str, most: float) -> float:
        """Return a number from the round's plan, in 0..most. Raises ProtocolError if it is missing or out of range."""
        value = self.assignment.plan.get(name, 0)
        if isinstance(value, str) or not 0 <= value <= most:
            raise ProtocolError(f"plan.{name} is {str(value)[:40]!r}; expected a number from 0 to {most:g}")
        return value

    def with_settings(self, **changed: object) -> Job:
        """Return the same job with changed federation settings."""
        settings = self.assignment.settings.model_copy(update=changed)
        return replace(self, assignment=self.assignment.model_copy(update={"settings": settings}))

    def seed(self, purpose: str) -> int:
        """Return a seed derived from federation, device, round and ``purpose``."""
        assignment = self.assignment
        return derive_seed(f"{self.federation}:{assignment.settings.seed}", self.device, assignment.round, purpose)


@dataclass(frozen=True)
class Update:
    """The update that a round sends: values float32 [count_values(manifest, mask)], and the mask's seed form, if any.

    parts: name -> float32 [n], or signs, int8 [n] in -1..1. base: the round's starting model, if the payload was
    another part of it. extras: words after masked values (``secure.fine``).
    """

    values: Array
    mask: Mask | None = None
    draw: NeuronDraw | None = None
    parts: Mapping[str, Numbers] = field(default_factory=dict)
    base: Tensors | None = None
    extras: Words | None = None


@dataclass(frozen=True)
class Trained:
    """Outcome of local training.

    update: None for ``personalise``. validation, personal_validation: results on validation data of the trained model
    and of the personal model that is kept; None if not measured. stopped: early stopping ends this device's training.
    """

    state: DeviceState
    update: Update | None
    num_examples: int
    steps: int
    flops: int
    train_loss: float
    validation: Evaluation | None = None
    stop_loss: float | None = None
    stopped: bool = False
    personal_validation: Evaluation | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """Outcome of an evaluation on held-out data.

    validation: the result on validation data of the personal model, or else of the global one. others: name of another
    way to predict -> its result. flops: FLOPs of training before the evaluation.
    """

    personal: Evaluation | None
    global_model: Evaluation | None
    validation: Evaluation | None = None
    others: Mapping[str, Evaluation] = field(default_factory=dict)
    flops: int = 0


Compose = Callable[[Manifest, Mapping[GraphName, bytes], FederationSettings], tuple[Manifest, dict[GraphName, bytes]]]


class UnknownWork(ProtocolError):
    """The method cannot do this work on this device; the assignment is handed back."""

    failure = Failure("unknown-work")


class BudgetTooSmall(ProtocolError):
    """The method needs a larger budget; the assignment is handed back."""

    exit_code = Exit.CANNOT
    failure = Failure("budget-too-small")


def own_settings(settings: FederationSettings, kind: type[Own]) -> Own:
    """Return the own settings of a federation's method as ``kind``. Raises UnknownWork if they do not fit."""
    try:
        return kind.model_validate(settings.method_settings)
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise UnknownWork(
            f"method_settings.{name} is missing or not valid for {settings.method}; use the same version of the "
            f"method on the coordinator and on this device",
            failure=Failure("unknown-work/settings"),
        ) from None


def torch_engine(job: Job) -> TorchEngine:
    """Return the job's engine. Raises UnknownWork unless it is PyTorch's."""
    from ..training.engine import TorchEngine

    if not isinstance(job.engine, TorchEngine):
        raise UnknownWork(
            f"{job.assignment.settings.method} needs PyTorch for this: join with --engine torch",
            failure=Failure("unknown-work/torch"),
        )
    return job.engine


def hand_back(job: Job) -> Trained:
    """Raise UnknownWork: the method does not support this kind of work."""
    raise UnknownWork(
        f"{job.assignment.settings.method} does not support work of kind {job.assignment.kind.value} on this device; "
        f"update this SDK"
    )


@dataclass(frozen=True, kw_only=True)
class ActiveNeurons:
    """Rounds train some neurons of each layer, depending on the budget.

    sample: a mask like those of rounds at a budget, for predictions of cost. narrow: neurons outside the mask are
    removed while training, not frozen.
    """

    sample: Callable[[Manifest, float], NeuronMask]
    narrow: bool = False


@dataclass(frozen=True, kw_only=True)
class DeviceMethod:
    """A method's device half. Work of a kind that it does not declare is handed back.

    Functions raise BundleError for a payload that does not fit, CannotNarrow for a model that does not run with fewer
    neurons, TrainingDiverged if training failed.

    adapt: makes a personal model from the finished global one. personalise: trains the part that stays on the device.
    prepare: makes the federation's first model.

    check: raises ManifestError if rounds would fail with a model, tried on an example [N, ...] at publication.
    check_data: raises BadArgument if rounds would fail with a device's data. compose: builds manifest and graphs of the
    federation's model from the published ones; network: the task with that model, for PyTorch. effort: the work of
    rounds at a budget; by default derived from ``active``.

    picks_best: personal models of earlier rounds stay usable; otherwise a device keeps the last. mixes_global: a
    mixture of the personal and the global model is a valid personal model. finish: trains such a mixture once more;
    returns model and FLOPs. payload_parts: additional parts of payloads. sums: the server half only needs sums of
    updates' values, so that secure aggregation is possible. adds_local_noise: rounds send only values, under a mask
    independent of the data (``device.local_noise``).

    acts: counts, or names in the server half's notes, that prove an effect. act_on: such a count -> the count that
    bounds it.
    """

    evaluate: Callable[[Job], Evaluated]
    adapt: Callable[[Job], DeviceState]
    train: Callable[[Job], Trained] = hand_back
    personalise: Callable[[Job], Trained] = hand_back
    prepare: Callable[[Job], Trained] = hand_back
    active: ActiveNeurons | None = None
    check: Callable[[nn.Module, Manifest, torch.Tensor], None] | None = None
    check_data: Callable[[Task, FederationSettings], None] | None = None
    network: Callable[[Task, Manifest], Task] | None = None
    effort: Callable[[Rehearsal, float], Effort] | None = None
    picks_best: bool = True
    mixes_global: bool = False
    finish: Callable[[Job, Tensors], tuple[Tensors, int]] | None = None
    compose: Compose | None = None
    payload_parts: tuple[Part, ...] = ()
    sums: bool = False
    engines: tuple[EngineName, ...] = ("onnx", "torch")
    adds_local_noise: bool = False
    acts: tuple[str, ...] = ()
    act_on: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_coupling(self) -> bool:
        """True if the manifest must say which neurons feed which weights."""
        return self.active is not None

    @property
    def narrow(self) -> bool:
        """True if rounds train a network of only the active neurons."""
        return self.active is not None and self.active.narrow

    @property
    def forward_stays(self) -> bool:
        """True if a smaller budget leaves the forward pass unchanged."""
        return self.active is not None and not self.active.narrow

    @property
    def takes_any_model(self) -> bool:
        """True if publication accepts any model."""
        return self.active is None and self.check is None

    def check_model(self, model: nn.Module, manifest: Manifest, example: torch.Tensor) -> None:
        """Raise ManifestError if rounds would fail with ``model``, tried on ``example`` [N, ...]."""
        if self.narrow:
            # Devices may lack PyTorch.
            from ..training.narrow import check_narrow

            check_narrow(model, manifest, example)
        if self.check is not None:
            self.check(model, manifest, example)

    def task_of(self, task: Task, manifest: Manifest, seed: int) -> Task:
        """Return the task with the model of a federation with this ``manifest`` and ``seed``.

        Raises BadArgument if they do not fit the task.
        """
        task = task.seeded(seed)
        return self.network(task, manifest) if self.network else task

    def sample_mask(self, manifest: Manifest, budget: float) -> NeuronMask | None:
        """Return a mask like those of rounds at ``budget``; None if the full model is trained."""
        return self.active.sample(manifest, budget) if self.active and budget < FULL_RATIO else None

    def at_budget(self, rehearsal: Rehearsal, budget: float) -> Effort:
        """Return the work of rounds at ``budget``, for rehearsals on this device.

        Raises BudgetTooSmall if the method cannot train at it.
        """
        if self.effort is not None:
            return self.effort(rehearsal, budget)
        from ..engines.rehearsal import MaskedEffort

        return MaskedEffort(rehearsal, self.sample_mask(rehearsal.manifest, budget))


class UnknownMethod(SdkError):
    """The method is not installed."""

    exit_code = Exit.NOT_FOUND


# Searching the installed packages takes 20 ms, which every device-round of a fleet would pay.
@cache
def load_method(name: str) -> DeviceMethod:
    """Return the device half registered as ``name``. Raises UnknownMethod if it is not installed."""
    advice = "; update this SDK, or install the package that provides it"
    return load_method_record("sparrow.device_methods", name, DeviceMethod, UnknownMethod, advice=advice)
