"""The way a session works, and the facts of a federation that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sparrow.devices import EnergyMeter
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.messages import Assignment, DeviceProfile, FederationInfo

from ...engines import Engine, EngineChoice
from ...tasks import Task
from ...tasks.intake import take_in
from ..connection import Traffic
from ..demands import Demands
from ..local_noise import LocalNoise
from ..opening import Prepare, as_taken, check_digest
from ..state import StateFolder
from ..telemetry import Telemetry as Meter
from ..transport import Transport
from ..trust import Trust
from ..watchdog import Watchdog


@dataclass(frozen=True)
class Device:
    """A device of a session. make_task: gives the task once the federation's settings and its manifest are known."""

    transport: Transport
    folder: StateFolder
    federation: str
    name: str
    make_task: Callable[[FederationInfo, Manifest], Task]


@dataclass(frozen=True)
class Known:
    """The facts of a federation that a device needs before it can enrol; a fleet asks for them once.

    preparation: the graph; None if the model takes samples as they are. trust: the rules of the fleet.
    """

    info: FederationInfo
    manifest: Manifest
    trust: Trust
    preparation: bytes | None = None

    @classmethod
    def of(cls, transport: Transport, federation: str) -> Known:
        """Ask for them."""
        info = transport.federation(federation)
        manifest = transport.manifest(federation)
        trust = Trust(federation, Demands())
        trust.admit(info, manifest, lambda: transport.publication(federation))
        graph = None
        if manifest.preparation is not None:
            graph = transport.graph(federation, "preparation")
            check_digest(manifest, "preparation", graph)
        return cls(info, manifest, trust, graph)

    def prepared(self, task: Task) -> Task:
        """Return a hosted device's task, its data checked and its samples prepared."""
        if task.prepared is not None:
            return task
        if self.preparation is None:
            return take_in(as_taken(task, self.manifest), self.manifest)
        task = take_in(task, self.manifest)
        from ...tasks.prepared import prepared_hosted

        return prepared_hosted(task, self.manifest, self.preparation)


@dataclass(frozen=True)
class SessionOptions:
    """The way a session works.

    budget: of a device that does not choose its own. engine: what trains (``choose_engine``); ONNX Runtime needs only
    the task's data; or an engine itself, which devices may use one after another. prepare: given task, manifest,
    federation and what makes the engine's rehearsals before the device enrols; returns the task as it is to be
    computed, or raises if that cannot be. telemetry: made from the transport's counters. profile: the device's
    description of itself, this machine's by default. progress: called with (assignment, steps done, steps in all, loss)
    while the device trains. watchdog: holds the device to its policy, between assignments and between batches.
    local_noise: added to each update before it is sent. memory_limit: bytes that the process may hold; None: what there
    is. known: the facts of a federation that would be asked for otherwise. announce: whether a device that is enrolled
    reports that it is there. hosted: whether it is one of many that a process hosts in turn: such a device may be
    silent, and sends no heartbeats.
    """

    budget: float = 1.0
    engine: EngineChoice | Engine = "auto"
    prepare: Prepare | None = None
    telemetry: Callable[[Traffic], Meter] = lambda traffic: Meter(EnergyMeter(), traffic)
    profile: DeviceProfile | None = None
    progress: Callable[[Assignment, int, int, float], None] = lambda assignment, done, total, loss: None
    watchdog: Watchdog | None = None
    demands: Demands = field(default_factory=Demands)
    local_noise: LocalNoise | None = None
    memory_limit: int | None = None
    known: Known | None = None
    announce: bool = True
    hosted: bool = False


USUAL = SessionOptions()
