"""The device half of each method, one file each, named like its server half in ``coordinator/methods``.

A method is a record of functions, ``DeviceMethod``. It is state in, state out: ``train`` gets a ``Job`` and returns
what to keep and what to send. Session, transport and telemetry are not its business. All that a method does beyond that
it declares as a field of the record; session, publisher and budget read these declarations alone. Methods share
functions (``rounds``, ``whole``, ``narrow``, ``choosing``, ``parts`` and ``sparse`` here, and ``edge_sdk.training``);
none is made of another. A method of another package registers its record under the entry point
``sparrow.device_methods``.
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
    """The settings of its own that a device half reads, all of which the coordinator has filled in."""

    model_config = ConfigDict(frozen=True, extra="ignore")


Own = TypeVar("Own", bound=MethodSettings)


@dataclass(frozen=True)
class DeviceState:
    """The state that a device keeps between rounds.

    personal: every kept tensor of the personal model, or None before the first download. memory: the method's own
    JSON-able notes. own: its arrays. model: the SHA-256 of the global model that the method can rebuild from these.
    neurons: those that the device has chosen for itself.
    """

    personal: Tensors | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    model: str | None = None
    neurons: NeuronMask | None = None


@dataclass(frozen=True)
class Job:
    """One assignment with all that a method needs to carry it out.

    task: has the device's data. engine: trains and judges the model, whose tensors the method overwrites. received: the
    decoded payload. progress: is called with (steps done, steps in all, running loss). federation, device: names.
    budget: what the device can afford.
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
        """Return the settings of its own that the method reads here. Raises UnknownWork where one is missing."""
        return own_settings(self.assignment.settings, kind)

    def planned(self, name: str, most: float) -> float:
        """Return a number of the round's plan, 0 where it has none. Raises ProtocolError unless it is in 0..most."""
        value = self.assignment.plan.get(name, 0)
        if isinstance(value, str) or not 0 <= value <= most:
            raise ProtocolError(f"plan.{name} is {str(value)[:40]!r}; a number from 0 to {most:g} is wanted")
        return value

    def with_settings(self, **changed: object) -> Job:
        """Return the same work with other settings of the federation."""
        settings = self.assignment.settings.model_copy(update=changed)
        return replace(self, assignment=self.assignment.model_copy(update={"settings": settings}))

    def seed(self, purpose: str) -> int:
        """Return a seed for torch that follows from federation, its seed, device, round and ``purpose`` alone."""
        assignment = self.assignment
        return derive_seed(f"{self.federation}:{assignment.settings.seed}", self.device, assignment.round, purpose)


@dataclass(frozen=True)
class Update:
    """The update that a round sends: values float32 [count_values(manifest, mask)], and the mask's seed form if any.

    parts: the method's, by name: float32 [n], or signs, int8 [n] in -1..1. base: the global model that the round
    started from, if the payload was another part of it. extras: words after masked values (``secure.fine``).
    """

    values: Array
    mask: Mask | None = None
    draw: NeuronDraw | None = None
    parts: Mapping[str, Numbers] = field(default_factory=dict)
    base: Tensors | None = None
    extras: Words | None = None


@dataclass(frozen=True)
class Trained:
    """Outcome of local training: the state to keep, what to report, and what to send.

    update: None for ``personalise``. flops: as in ``protocol.flops``. validation: the model as training has left it;
    personal_validation: the personal model that is kept; both on validation data, None if not measured. stopped: early
    stopping ends this device's training. counts: for the round's record.
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
    """Outcome of an evaluation on held-out data. validation: the personal, or else the global model on validation data.
    others: other ways to predict, by name. flops: of what was trained to be judged."""

    personal: Evaluation | None
    global_model: Evaluation | None
    validation: Evaluation | None = None
    others: Mapping[str, Evaluation] = field(default_factory=dict)
    flops: int = 0


Compose = Callable[[Manifest, Mapping[GraphName, bytes], FederationSettings], tuple[Manifest, dict[GraphName, bytes]]]


class UnknownWork(ProtocolError):
    """The coordinator asks for work that the method does not have on this device; it is handed back."""

    failure = Failure("unknown-work")


class BudgetTooSmall(ProtocolError):
    """The method cannot work within the device's budget; the work is handed back."""

    exit_code = Exit.CANNOT
    failure = Failure("budget-too-small")


def own_settings(settings: FederationSettings, kind: type[Own]) -> Own:
    """Return the own settings of a federation's method, read as ``kind``. Raises UnknownWork where one is missing."""
    try:
        return kind.model_validate(settings.method_settings)
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise UnknownWork(
            f"method_settings.{name} is missing or is not what {settings.method} expects; use the same version of the "
            f"method on the coordinator and on this device",
            failure=Failure("unknown-work/settings"),
        ) from None


def torch_engine(job: Job) -> TorchEngine:
    """Return the job's engine. Raises UnknownWork where it is not PyTorch's."""
    from ..training.engine import TorchEngine

    if not isinstance(job.engine, TorchEngine):
        raise UnknownWork(
            f"{job.assignment.settings.method} needs PyTorch for this: join with --engine torch",
            failure=Failure("unknown-work/torch"),
        )
    return job.engine


def hand_back(job: Job) -> Trained:
    """Raise UnknownWork: the method has no work of this kind."""
    raise UnknownWork(
        f"{job.assignment.settings.method} on this device has no work of kind {job.assignment.kind.value}; update this "
        f"SDK"
    )


@dataclass(frozen=True, kw_only=True)
class ActiveNeurons:
    """Rounds train some neurons of each layer, as many as the budget says; the server half declares the same.

    The manifest then says which neurons feed which weights. sample: returns a mask as rounds at a budget have it, to
    predict what they take. narrow: what the mask leaves out is gone while training, and not frozen.
    """

    sample: Callable[[Manifest, float], NeuronMask]
    narrow: bool = False


@dataclass(frozen=True, kw_only=True)
class DeviceMethod:
    """A method's device half. Work of a kind that it does not declare is handed back.

    Each function raises BundleError for a payload that does not fit, CannotNarrow for a model that does not run with
    fewer neurons, TrainingDiverged when the work failed.

    evaluate: judges the personal and, if the payload brings one, the global model on held-out data. adapt: makes a
    personal model from the finished global one. train: merges the payload, trains under the assignment's mask, says
    what to keep and to send. personalise: trains what stays on the device. prepare: makes the model that the federation
    begins with. active: rounds train some neurons of each layer.

    check: raises ManifestError if rounds would fail with a model, tried on an example [N, ...] at publication.
    check_data: raises BadArgument if rounds would fail with a device's data. network: returns the task with the model
    that the server half ``compose``s, for PyTorch. effort: returns what rounds at a budget have to do, to be tried; by
    default what ``active`` says. compose: makes manifest and graphs of the federation's model of the published ones.

    picks_best: the personal model of any round can be used later; otherwise a device keeps the last. mixes_global: a
    mixture of the personal and the global model is a personal model; the server half says the same. finish: trains a
    mixture once more, at the end; returns model and FLOPs. payload_parts: what payloads may bring beside values, with
    ``Part.count`` at most. sums: the server half needs sums of updates' values only, so that secure rounds are
    possible. engines: that can train its rounds. adds_local_noise: rounds send only values, under a mask that does not
    depend on the data (``device.local_noise``).

    acts: names of counts, or of the server half's notes, that prove that the method acted: if one is zero, the bench
    says so. act_on: such counts -> the count of all that they might have been.
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
        """True if rounds train a network of the active neurons alone."""
        return self.active is not None and self.active.narrow

    @property
    def forward_stays(self) -> bool:
        """True if a smaller budget leaves the forward pass as it is, so that it saves little."""
        return self.active is not None and not self.active.narrow

    @property
    def takes_any_model(self) -> bool:
        """True if no model is refused at publication."""
        return self.active is None and self.check is None

    def check_model(self, model: nn.Module, manifest: Manifest, example: torch.Tensor) -> None:
        """Raise ManifestError where rounds would fail with ``model``, tried on ``example`` [N, ...]."""
        if self.narrow:
            from ..training.narrow import check_narrow  # here, because devices need no PyTorch

            check_narrow(model, manifest, example)
        if self.check is not None:
            self.check(model, manifest, example)

    def task_of(self, task: Task, manifest: Manifest, seed: int) -> Task:
        """Return the task with the model of a federation of this ``manifest`` and ``seed``. Raises BadArgument."""
        task = task.seeded(seed)
        return self.network(task, manifest) if self.network else task

    def sample_mask(self, manifest: Manifest, budget: float) -> NeuronMask | None:
        """Return a mask as rounds at ``budget`` have it; None: the whole model is trained."""
        return self.active.sample(manifest, budget) if self.active and budget < FULL_RATIO else None

    def at_budget(self, rehearsal: Rehearsal, budget: float) -> Effort:
        """Return what rounds at ``budget`` have to do, to be tried on this device. Raises BudgetTooSmall."""
        if self.effort is not None:
            return self.effort(rehearsal, budget)
        from ..engines.rehearsal import MaskedEffort

        return MaskedEffort(rehearsal, self.sample_mask(rehearsal.manifest, budget))


class UnknownMethod(SdkError):
    """This installation does not have the method."""

    exit_code = Exit.NOT_FOUND


@cache  # looking through the installed packages takes 20 ms: a device-round of a fleet
def load_method(name: str) -> DeviceMethod:
    """Return the device half registered as ``name``. Raises UnknownMethod, which names what is installed."""
    advice = "; update this SDK, or install the package that provides it"
    return load_method_record("sparrow.device_methods", name, DeviceMethod, UnknownMethod, advice=advice)
