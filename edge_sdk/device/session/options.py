"""Options of a session, and the facts of a federation that it needs."""

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
    """A device of a session. make_task: returns the task for a federation and its manifest."""

    transport: Transport
    folder: StateFolder
    federation: str
    name: str
    make_task: Callable[[FederationInfo, Manifest], Task]


@dataclass(frozen=True)
class Known:
    """The facts of a federation that a device needs to enrol; a fleet fetches them once.

    preparation: its graph, if any.
    """

    info: FederationInfo
    manifest: Manifest
    trust: Trust
    preparation: bytes | None = None

    @classmethod
    def of(cls, transport: Transport, federation: str) -> Known:
        """Fetch them from the coordinator."""
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
        """Check a hosted device's data, and return the task with prepared samples."""
        if task.prepared is not None:
            return task
        if self.preparation is None:
            return take_in(as_taken(task, self.manifest), self.manifest)
        task = take_in(task, self.manifest)
        from ...tasks.prepared import prepared_hosted

        return prepared_hosted(task, self.manifest, self.preparation)


@dataclass(frozen=True)
class SessionOptions:
    """Options of a session.

    budget: for a device that does not choose its own. engine: a choice (``choose_engine``), or an engine that devices
    share in turn. prepare: called before the device enrols with task, manifest, federation and the constructor of
    rehearsals; returns the prepared task and budget. telemetry: made from the transport's counters. profile: default:
    this machine's. progress: called with (assignment, steps done, steps in all, loss) during training. watchdog:
    enforces the policy. local_noise: added to updates. memory_limit: bytes for this process; None: all available
    memory. known: facts of the federation, otherwise fetched. announce: report at the start that an enrolled device is
    available. hosted: the device is one of many that a process runs in turn, and sends no heartbeats.
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
