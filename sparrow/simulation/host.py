"""Host simulated devices in a process or thread: open a device's session, run one step, close it.

A device's state is in its folder between steps, so that any host can run its next step. A host has one model for all
devices. Hosts in threads share connection, tasks and ONNX Runtime's sessions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edge_sdk.device.connection import Traffic
from edge_sdk.device.demands import Demands
from edge_sdk.device.local_noise import LocalNoise
from edge_sdk.device.opening import as_taken, check_model, share_onnx, take_values
from edge_sdk.device.session import Known, Outcome, Session, SessionOptions
from edge_sdk.device.state import Reference, StateFolder
from edge_sdk.device.telemetry import SimulatedTelemetry, Telemetry
from edge_sdk.device.transport import Transport
from edge_sdk.engines import Engine
from edge_sdk.errors import BadArgument
from edge_sdk.methods import load_method
from edge_sdk.tasks import Task, load_task
from edge_sdk.tasks.compute import USUAL, Compute
from sparrow.devices import EnergyMeter
from sparrow.devices.simulation import Board

from ..protocol.manifest import Tensors, TensorSpec
from ..protocol.messages import DeviceProfile, FederationInfo, Kind
from ..transport import httpx

if TYPE_CHECKING:
    from edge_sdk.engines.onnx import Sessions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The devices of a fleet. Device i has the name ``<prefix>-i``."""

    federation: str
    # Number that train.
    devices: int
    # Number of additional devices that only adapt the finished model.
    new: int = 0
    # The devices' ``--data``: a template with ``{index}``, ``{of}`` or ``{name}``, or one to which ``,index=i,of=N``
    # is appended, or a tuple of one text per device.
    data: str | tuple[str, ...] | None = None
    # Assigned in equal parts, in order; empty for the largest that each board can afford.
    budgets: tuple[float, ...] = (1.0,)
    # Assigned likewise; their estimated seconds and joules are reported, without boards those of this machine.
    boards: tuple[Board, ...] = ()
    prefix: str = "device"
    compute: Compute = USUAL
    local_noise: LocalNoise | None = None
    # (index, federation) -> Task, instead of ``data``.
    make_task: Callable[[int, FederationInfo], Task] | None = None
    # Devices of this fleet, if others simulate the rest.
    indices: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.devices < 1 or self.new < 0:
            raise BadArgument(f"{self.devices} devices and {self.new} new ones; give at least 1 device and 0 new ones")
        if isinstance(self.data, tuple) and len(self.data) < self.total:
            raise BadArgument(f"{self.total} devices, but data for {len(self.data)}; give data for each device")
        if not all(0 < budget <= 1 for budget in self.budgets):
            raise BadArgument(f"budgets are {self.budgets}; give numbers above 0 and up to 1")
        if not self.budgets and not self.boards:
            raise BadArgument("automatic budgets depend on boards; give boards, or budgets")

    @property
    def total(self) -> int:
        """The number of devices, including new ones."""
        return self.devices + self.new

    def name(self, index: int) -> str:
        """Return the name of device ``index``."""
        return f"{self.prefix}-{index}"

    def budget(self, index: int) -> float | None:
        """Return the budget of a device, None if its board decides. New devices have those of the first ones."""
        if not self.budgets:
            return None
        return self.budgets[index % self.devices * len(self.budgets) // self.devices]

    def board(self, index: int) -> Board | None:
        """Return the board of a device, None for this machine."""
        return self.boards[index % self.devices * len(self.boards) // self.devices] if self.boards else None

    def task(self, index: int, known: Known) -> Task:
        """Return the prepared task of a device on its own data, without a model.

        Raises DataError if the data cannot be read or do not fit.
        """
        info = known.info
        if self.make_task is not None:
            return known.prepared(self.make_task(index, info))
        task = load_task(
            info.task,
            self.data_of(index),
            device=self.name(index),
            seed=info.settings.seed,
            batch_size=info.settings.batch_size,
            manifest=known.manifest,
        )
        return known.prepared(task)

    def data_of(self, index: int) -> str:
        """Return the ``--data`` of device ``index``."""
        if isinstance(self.data, tuple):
            return self.data[index]
        text = self.data or ""
        if any(field in text for field in ("{index}", "{of}", "{name}")):
            filled = text.replace("{index}", str(index)).replace("{of}", str(self.total))
            return filled.replace("{name}", self.name(index))
        return f"{text},index={index},of={self.total}".lstrip(",")


@dataclass(frozen=True)
class Stepped:
    """The outcome of one step of a device."""

    index: int
    outcome: Outcome
    kind: Kind | None
    # Total duration.
    seconds: float
    # Reason if its work failed.
    failed: str | None = None


class Trainer(Protocol):
    """The model that the devices of a host share."""

    def task(self, task: Task) -> Task:
        """Return a device's task with the shared model."""

    def engine(self, task: Task) -> Engine:
        """Return the engine for a device's task, with local tensors (running statistics) reset."""


class TorchTrainer:
    """Training with PyTorch.

    first: any device's task, checked against the manifest. values: values of frozen tensors, and initial values of
    tensors that stay on devices. Raises BadArgument, and ManifestError if the model does not fit.
    """

    def __init__(self, first: Task, known: Known, compute: Compute, values: Tensors) -> None:
        # imports PyTorch, which the other trainer does not need
        from edge_sdk.training.checking import check_task

        first = load_method(known.info.method).task_of(first, known.manifest, known.info.settings.seed)
        check_model(first.model, known.manifest)
        take_values(first.model, known.manifest, values)
        check_task(first, known.manifest)
        self._known = known
        self._compute = compute
        self._model = first.on(compute).model
        state = self._model.state_dict()
        self._own = {spec.name: state[spec.name].clone() for spec in known.manifest.tensors if _is_own(spec)}

    def task(self, task: Task) -> Task:
        """Return a device's task with the shared model."""
        return replace(task, model=self._model, compute=self._compute)

    def engine(self, task: Task) -> Engine:
        """Return the engine of the shared model."""
        import torch

        from edge_sdk.training.engine import TorchEngine

        state = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in self._own.items():
                state[name].copy_(tensor)
        return TorchEngine(task, self._known.manifest)


class OnnxTrainer:
    """Training with ONNX Runtime.

    first: any device's task, checked against the manifest. sessions: may be shared between threads. Raises BadArgument,
    ManifestError.
    """

    def __init__(self, first: Task, known: Known, sessions: Sessions) -> None:
        self._engine = share_onnx(as_taken(first, known.manifest), known.manifest, known.info, sessions)
        tensors = self._engine.read()
        self._own = {spec.name: tensors[spec.name] for spec in known.manifest.kept if _is_own(spec)}

    def task(self, task: Task) -> Task:
        """Return the task unchanged."""
        return task

    def engine(self, task: Task) -> Engine:
        """Return the shared engine."""
        self._engine.load(self._own)
        return self._engine


def _is_own(spec: TensorSpec) -> bool:
    return spec.policy not in ("shared", "frozen")


class Host:
    """A host of a fleet's devices, one session at a time.

    client: connection to the coordinator. root: folder of the devices' state folders. task_of: device -> its task.
    reference: model from which personal models are stored as differences.
    """

    def __init__(
        self,
        plan: Plan,
        client: httpx.Client,
        root: Path,
        known: Known,
        task_of: Callable[[int], Task],
        trainer: Trainer,
        *,
        reference: Reference | None,
        enrolment_token: str | None = None,
        patience_seconds: float | None = None,
    ) -> None:
        self._plan = plan
        self._client = client
        self._root = root
        self._known = known
        self._task_of = task_of
        self._trainer = trainer
        self._reference = reference
        self._enrolment_token = enrolment_token
        self._patience_seconds = patience_seconds
        self._meter = EnergyMeter()
        self._chosen: dict[int, float] = {}
        load_method(known.info.method)

    def start(self, index: int) -> None:
        """Enrol a device, or announce its return."""
        folder, _ = self._open(index, announce=True)
        folder.close()

    def step(self, index: int) -> Stepped:
        """Run a device's next step."""
        begin = time.monotonic()
        folder, session = self._open(index, announce=False)
        try:
            step = session.step()
        finally:
            folder.close()
        kind = step.assignment.kind if step.assignment else None
        return Stepped(index, step.outcome, kind, time.monotonic() - begin, step.failed)

    def finish(self, index: int) -> Stepped | None:
        """Run a device's remaining steps after the end: send pending updates, adapt the finished model.

        Return the last step that did work, None if there was none.
        """
        last = None
        while (stepped := self.step(index)).outcome is Outcome.worked:
            last = stepped
            # no work follows it, so save the call
            if stepped.kind is Kind.adapt:
                break
        return last

    def _open(self, index: int, *, announce: bool) -> tuple[StateFolder, Session]:
        name = self._plan.name(index)
        folder = StateFolder(self._root / name, durable=False, reference=self._reference)
        board = self._plan.board(index)
        try:
            transport = Transport(self._client, patience_seconds=self._patience_seconds)
            transport.token = self._enrolment_token
            task = self._trainer.task(self._task_of(index))
            session = Session(
                transport,
                folder,
                federation=self._plan.federation,
                name=name,
                make_task=lambda info, manifest: task,
                options=SessionOptions(
                    budget=self._budget(index, board, task),
                    telemetry=self._telemetry if board is None else partial(SimulatedTelemetry, board),
                    profile=None if board is None else _profile(board),
                    known=self._known,
                    announce=announce,
                    hosted=True,
                    engine=self._trainer.engine(task),
                    # A simulated device has no owner with demands.
                    demands=Demands(plain_metrics=True),
                    local_noise=self._plan.local_noise,
                ),
            )
        except BaseException:
            folder.close()
            raise
        return folder, session

    def _budget(self, index: int, board: Board | None, task: Task) -> float:
        given = self._plan.budget(index)
        if given is not None or board is None:
            return 1.0 if given is None else given
        if index not in self._chosen:
            # imports PyTorch
            from edge_sdk.budget.search import board_budget

            choice = board_budget(board, task, self._known.manifest, self._known.info.settings)
            self._chosen[index] = choice.budget
            log.info("%s on a %s: %s", self._plan.name(index), board.name, choice)
        return self._chosen[index]

    def _telemetry(self, traffic: Traffic) -> Telemetry:
        return Telemetry(self._meter, traffic)


def _profile(board: Board) -> DeviceProfile:
    return DeviceProfile(
        board=board.name, system="simulated", cores=board.cores, memory_bytes=board.memory_bytes, sensors=()
    )
