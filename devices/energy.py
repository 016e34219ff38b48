"""Energy use of a phase of work.

    with EnergyMeter() as meter:
        with meter.phase("train") as phase:
            train()
        print(phase.energy.joules, phase.energy.quality)

All power sources are read at the start and the end of a phase, and in between by a background thread. The energy comes
from the best source that covered the phase (order: `devices.power`, selection: `devices.integral`). Counters and
processor time are exact between two reads; watts are integrated by the trapezoid rule. Missing readings lower the
coverage.
"""

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from .integral import Integral, best
from .power import PowerModel, explain, find_sources, why_unavailable
from .readings import Quality, Reason
from .system import System


@dataclass(frozen=True)
class Energy:
    """The energy of one phase."""

    # Joules of the covered time, not extrapolated; None if unavailable.
    joules: float | None
    quality: Quality
    source: str
    # Board, device, package, package+dram; "" if unavailable.
    scope: str
    # Share of the time with good readings, 0 to 1.
    coverage: float
    # Length of the phase.
    seconds: float
    # Why joules are missing or incomplete, with advice. Raises ValueError if the fields contradict each other.
    reason: str | None = None

    def __post_init__(self) -> None:
        if (self.joules is None) != (self.quality is Quality.UNAVAILABLE):
            raise ValueError(f"energy of {self.joules} J cannot be {self.quality}; only missing joules are unavailable")
        if self.joules is not None and not 0 <= self.joules < math.inf:
            raise ValueError(f"energy must be finite and not negative, not {self.joules} J")
        if self.joules is None and not self.reason:
            raise ValueError("unavailable energy needs a reason")
        if not 0 <= self.coverage <= 1:
            raise ValueError(f"coverage is a share from 0 to 1, not {self.coverage}")


class Phase:
    """A measured period of work; a context manager, created by `EnergyMeter.phase`."""

    def __init__(self, meter: "EnergyMeter", name: str) -> None:
        self.name = name
        self._meter = meter
        self._integrals: list[Integral] = []
        self._started = 0.0
        self._energy: Energy | None = None
        self._began_at = 0.0
        self._ended_at = 0.0

    def __enter__(self) -> "Phase":
        self._meter._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter._end(self)

    @property
    def energy(self) -> Energy:
        """The energy of the phase. Raises RuntimeError before the phase has ended."""
        if self._energy is None:
            raise RuntimeError(f"phase {self.name!r} has not ended: ask for its energy after the `with` block")
        return self._energy

    @property
    def span(self) -> tuple[float, float]:
        """Start and end as Unix timestamps. Raises RuntimeError before the phase has ended."""
        if self._energy is None:
            raise RuntimeError(f"phase {self.name!r} has not ended: ask for its span after the `with` block")
        return self._began_at, self._ended_at

    def _begin(self, integrals: list[Integral], now: float, wall: float) -> None:
        self._integrals = integrals
        self._started = now
        self._energy = None
        self._began_at = wall
        self._sample(now)

    def _sample(self, now: float, *, at_end: bool = False) -> None:
        for integral in self._integrals:
            integral.sample(now, at_end=at_end)

    def _end(self, now: float, wall: float) -> None:
        self._sample(now, at_end=True)
        self._ended_at = wall
        self._energy = energy_of(self._integrals, now - self._started)


# Below 1 to allow for rounding.
_WHOLE = 0.999


def energy_of(integrals: list[Integral], seconds: float) -> Energy:
    """Return the energy of a phase of this length from the best source."""
    chosen = best(integrals, seconds)
    if chosen is None:
        why = why_unavailable([(i.source, i.trouble or Reason.STALE) for i in integrals])
        return Energy(None, Quality.UNAVAILABLE, "", "", 0.0, seconds, why)
    coverage = min(1.0, chosen.covered_seconds / seconds) if seconds > 0 else 1.0
    source = chosen.source
    missing = explain(source, chosen.trouble) if chosen.trouble is not None and coverage < _WHOLE else None
    return Energy(chosen.joules, source.quality, source.name, source.scope, coverage, seconds, missing)


class EnergyMeter:
    """Measures the energy of phases of work, which may overlap.

    system: the device, by default this machine. model: power model for estimates if no sensor works. period_seconds:
    interval of the background thread. background: False for no thread; then call `sample` during long phases. Raises
    ValueError unless period_seconds is finite and positive.

    Close the meter, or use it as a context manager, to stop the thread. After a fork, the child process starts its own
    thread with its next phase.
    """

    def __init__(
        self,
        system: System | None = None,
        *,
        model: PowerModel | None = None,
        period_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[], float] = time.process_time,
        background: bool = True,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < period_seconds < math.inf:
            raise ValueError(f"period_seconds must be above 0 and finite, not {period_seconds}")
        self._sources = find_sources(system or System.here(), model, cpu_seconds)
        self._period_seconds = period_seconds
        self._clock = clock
        self._wall_clock = wall_clock
        self._background = background
        self._running: list[Phase] = []
        self.lock = threading.Lock()
        self._stop = threading.Event()
        self.thread: threading.Thread | None = None
        _meters.add(self)

    def __enter__(self) -> "EnergyMeter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, name: str) -> Phase:
        """Return a context manager that measures a phase, even if the phase raises."""
        return Phase(self, name)

    def sample(self) -> None:
        """Read all sources that are due, for every running phase. The background thread calls this method."""
        with self.lock:
            now = self._clock()
            for phase in self._running:
                phase._sample(now)

    def describe(self) -> str:
        """Describe the source in use and its quality, or why no source works, in one line."""
        now = self._clock()
        troubles = []
        for source in self._sources:
            reason = next((reading.reason for reading in source.read(now) if reading.reason is not None), None)
            if reason is None:
                return f"energy: {source.quality}, {source.name} (scope {source.scope})"
            troubles.append((source, reason))
        return f"energy: unavailable, {why_unavailable(troubles)}"

    def close(self) -> None:
        """Stop the background thread permanently. Running phases can still end."""
        self._stop.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _begin(self, phase: Phase) -> None:
        with self.lock:
            integrals = [Integral(source, self._period_seconds) for source in self._sources]
            self._start_thread(min((integral.wake_seconds for integral in integrals), default=math.inf))
            phase._begin(integrals, self._clock(), self._wall_clock())
            self._running.append(phase)

    def _end(self, phase: Phase) -> None:
        with self.lock:
            self._running.remove(phase)
            phase._end(self._clock(), self._wall_clock())

    def _start_thread(self, wake_seconds: float) -> None:
        wanted = self._background and self._sources and not self._stop.is_set()
        if self.thread is not None or not wanted:
            return
        thread = threading.Thread(target=self._run, args=(self._stop, wake_seconds), name="energy-meter", daemon=True)
        try:
            thread.start()
        # No more threads: the ends of each phase are still read.
        except RuntimeError:
            return
        self.thread = thread

    def _after_fork(self) -> None:
        # The child has no sampler, and may have inherited the lock while the parent's sampler held it.
        self.lock = threading.Lock()
        if not self._stop.is_set():
            self._stop = threading.Event()
        self.thread = None

    def _run(self, stop: threading.Event, wake_seconds: float) -> None:
        while not stop.wait(wake_seconds):
            self.sample()


_meters: "weakref.WeakSet[EnergyMeter]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for meter in list(_meters):
        meter._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
