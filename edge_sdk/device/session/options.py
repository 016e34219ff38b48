"""Options of a session, and a federation's description for it."""

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
    """A device of a session."""

    transport: Transport
    folder: StateFolder
    federation: str
    name: str
    # Returns the task for a federation and its manifest.
    make_task: Callable[[FederationInfo, Manifest], Task]


@dataclass(frozen=True)
class Known:
    """A federation's description for enrolment; a fleet fetches it once."""

    info: FederationInfo
    manifest: Manifest
    trust: Trust
    # Its graph, if any.
    preparation: bytes | None = None

    @classmethod
    def of(cls, transport: Transport, federation: str) -> Known:
        """Fetch the description from the coordinator."""
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
    """Options of a session."""

    # Budget for a device that does not choose its own.
    budget: float = 1.0
    # A choice (``choose_engine``), or an engine that devices share in turn.
    engine: EngineChoice | Engine = "auto"
    # Called before the device enrols with task, manifest, federation and the constructor of rehearsals; returns the
    # prepared task and budget.
    prepare: Prepare | None = None
    # Made from the transport's counters.
    telemetry: Callable[[Traffic], Meter] = lambda traffic: Meter(EnergyMeter(), traffic)
    # Default: this machine's.
    profile: DeviceProfile | None = None
    # Called with (assignment, steps done, steps in all, loss) during training.
    progress: Callable[[Assignment, int, int, float], None] = lambda assignment, done, total, loss: None
    # Enforces the policy.
    watchdog: Watchdog | None = None
    demands: Demands = field(default_factory=Demands)
    # Added to updates.
    local_noise: LocalNoise | None = None
    # Bytes for this process; None: all available memory.
    memory_limit: int | None = None
    # Facts of the federation, otherwise fetched.
    known: Known | None = None
    # Report at the start that an enrolled device is available.
    announce: bool = True
    # The device is one of many that a process runs in turn, and sends no heartbeats.
    hosted: bool = False
    # Report why the device cannot join, if it has not enrolled before.
    report_failure: bool = True
    # Refuse other copies of the state folder.
    take_over: bool = False
    # The device's tags; None: those that it gave before.
    tags: dict[str, str] | None = None


USUAL = SessionOptions()
