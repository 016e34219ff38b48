"""Seconds, bytes, joules and heat of each phase of a round, with their sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sparrow.command_line.table import printable
from sparrow.devices import EnergyMeter
from sparrow.devices.conditions import Conditions
from sparrow.devices.simulation import Board
from sparrow.protocol.fields import CELSIUS, MOST_JOULES, MOST_SECONDS
from sparrow.protocol.messages import Phase

from .connection import Traffic

# Phases that compute; others only transfer.
COMPUTING = ("train", "evaluate", "adapt")

# Shortest interval between readings of temperature and throttling.
SAMPLE_SECONDS = 2.0


class _Heat:
    """Peak temperature and throttled seconds since creation."""

    def __init__(self, read: Callable[[], Conditions], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self.peak: float | None = None
        self.throttled: float | None = None
        self._seen = clock()
        self._was_throttled: bool | None = None
        self._look(self._seen)

    def sample(self, *, at_end: bool = False) -> None:
        now = self._clock()
        if at_end or now - self._seen >= SAMPLE_SECONDS:
            self._look(now)

    def _look(self, now: float) -> None:
        conditions = self._read()
        celsius = _within(conditions.temperature.value, *CELSIUS)
        if celsius is not None:
            self.peak = celsius if self.peak is None else max(celsius, self.peak)
        throttled = None if conditions.throttled.value is None else conditions.throttled.value > 0
        if throttled is not None and self._was_throttled is not None:
            # Count half of the time between a throttled and an unthrottled reading.
            share = (throttled + self._was_throttled) / 2
            self.throttled = (self.throttled or 0.0) + share * (now - self._seen)
        self._seen = now
        self._was_throttled = throttled


@dataclass
class Measured:
    """The cost of a phase, set when it ends."""

    # Set by the code that computes.
    flops: int | None = None
    cost: Phase = field(default_factory=Phase)


class Telemetry:
    """Measures the phases of one device. read: returns temperature and throttling."""

    def __init__(
        self,
        meter: EnergyMeter,
        traffic: Traffic,
        clock: Callable[[], float] = time.monotonic,
        *,
        read: Callable[[], Conditions] | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._on_phase = on_phase
        self._meter = meter
        self._traffic = traffic
        self._clock = clock
        self._read = read
        self._heat: _Heat | None = None
        self._paused = 0.0

    def sample(self) -> None:
        """Read temperature and throttling; call it repeatedly during long work."""
        if self._heat is not None:
            self._heat.sample()

    def pause(self, seconds: float) -> None:
        """Count ``seconds`` of the current phase as a pause."""
        self._paused += seconds

    def describe(self) -> str:
        """Return one line with the source of joules, or the reason why there is none."""
        return self._meter.describe()

    @contextmanager
    def phase(self, name: str) -> Iterator[Measured]:
        """Context manager: measure the block, and set ``cost`` on a normal exit."""
        self._on_phase(name)
        measured = Measured()
        self._paused = 0.0
        begin = self._clock()
        down = self._traffic.down
        up = self._traffic.up
        earlier = self._traffic.earlier_seconds
        heat = self._heat = _Heat(self._read, self._clock) if self._read and name in COMPUTING else None
        try:
            with self._meter.phase(name) as phase:
                yield measured
            if heat is not None:
                heat.sample(at_end=True)
        finally:
            self._heat = None
        energy = phase.energy
        joules = _within(energy.joules, 0.0, MOST_JOULES)
        measured.cost = Phase(
            seconds=min(max(0.0, self._clock() - begin) + self._traffic.earlier_seconds - earlier, MOST_SECONDS),
            paused_seconds=min(self._paused, MOST_SECONDS),
            throttled_seconds=_within(heat.throttled if heat else None, 0.0, MOST_SECONDS),
            celsius_peak=heat.peak if heat else None,
            bytes_down=self._traffic.down - down,
            bytes_up=self._traffic.up - up,
            joules=joules,
            quality="unavailable" if joules is None else energy.quality.value,
            source=printable(energy.source or energy.reason or "")[:300],
        )


def _within(value: float | None, least: float, most: float) -> float | None:
    # A coordinator would refuse the whole report for an impossible value.
    return value if value is not None and least <= value <= most else None


class SimulatedTelemetry(Telemetry):
    """The costs of phases on a simulated board, computed from bytes and FLOPs."""

    def __init__(self, board: Board, traffic: Traffic, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._traffic = traffic
        self._clock = clock
        self._heat = None

    def describe(self) -> str:
        """Return the source of joules."""
        return f"energy: estimated, simulated {self._board.name}"

    @contextmanager
    def phase(self, name: str) -> Iterator[Measured]:
        """Measure the block's bytes and FLOPs; set ``cost`` afterwards."""
        measured = Measured(flops=None if name in COMPUTING else 0)
        begin = self._clock()
        down_before = self._traffic.down
        up_before = self._traffic.up
        yield measured
        down = self._traffic.down - down_before
        up = self._traffic.up - up_before
        if measured.flops is None:
            seconds = max(0.0, self._clock() - begin)
            measured.cost = Phase(seconds=seconds, bytes_down=down, bytes_up=up, source="unknown to the simulation")
            return
        computing = self._board.computing_seconds(measured.flops)
        transfer = self._board.transfer_seconds(down + up)
        measured.cost = Phase(
            seconds=computing + transfer,
            bytes_down=down,
            bytes_up=up,
            joules=self._board.joules(computing, transfer),
            quality="estimated",
            source=f"simulated {self._board.name}",
        )
