"""Seconds, bytes and joules of each phase of a round, with their provenance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from devices import EnergyMeter
from devices.simulation import Board
from edge_sdk.protocol.messages import Phase
from edge_sdk.transport import Traffic

COMPUTING = ("train", "evaluate", "adapt")
"""Phases that compute; the others only transfer."""


@dataclass
class Measured:
    """Filled with the phase's cost when it has ended. ``flops``: what was computed in it, set by who knows."""

    flops: int | None = None
    cost: Phase = field(default_factory=Phase)


class Telemetry:
    """Measures phases of one device: the meter gives joules, the transport's counters give bytes."""

    def __init__(self, meter: EnergyMeter, traffic: Traffic, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._traffic = traffic
        self._clock = clock

    def describe(self) -> str:
        """Where joules come from on this device, or why there are none, in one line."""
        return self._meter.describe()

    @contextmanager
    def phase(self, name: str) -> Iterator[Measured]:
        """Measure what happens inside; ``cost`` is there afterwards, not if it raised."""
        measured = Measured()
        begin, down, up = self._clock(), self._traffic.down, self._traffic.up
        with self._meter.phase(name) as phase:
            yield measured
        energy = phase.energy
        measured.cost = Phase(
            seconds=max(0.0, self._clock() - begin),
            bytes_down=self._traffic.down - down,
            bytes_up=self._traffic.up - up,
            joules=energy.joules,
            quality=energy.quality.value,
            source=(energy.source or energy.reason or "")[:300],
        )


class SimulatedTelemetry(Telemetry):
    """What phases would have cost on ``board``: from bytes and FLOPs, not from this machine's clock or sensors.

    A phase whose FLOPs nobody knows has this machine's seconds and no joules.
    """

    def __init__(self, board: Board, traffic: Traffic, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._traffic = traffic
        self._clock = clock

    def describe(self) -> str:
        """Where joules come from."""
        return f"energy: estimated, simulated {self._board.name}"

    @contextmanager
    def phase(self, name: str) -> Iterator[Measured]:
        """Count what happens inside."""
        measured = Measured(flops=None if name in COMPUTING else 0)
        begin, down, up = self._clock(), self._traffic.down, self._traffic.up
        yield measured
        down, up = self._traffic.down - down, self._traffic.up - up
        if measured.flops is None:
            seconds = max(0.0, self._clock() - begin)
            measured.cost = Phase(seconds=seconds, bytes_down=down, bytes_up=up, source="the simulation cannot tell")
            return
        computing, transfer = self._board.computing_seconds(measured.flops), self._board.transfer_seconds(down + up)
        measured.cost = Phase(
            seconds=computing + transfer,
            bytes_down=down,
            bytes_up=up,
            joules=self._board.joules(computing, transfer),
            quality="estimated",
            source=f"simulated {self._board.name}",
        )
