"""Read a device's conditions: temperature, battery, load and network.

    reader = ConditionsReader(System.here())
    conditions = reader.read()
    if conditions.temperature.value is not None and conditions.temperature.value > 80: ...

A field without a value has a reason, and is never 0. `read` may be called every second: slow sources are read only at
the intervals in `_PERIODS`; in between, their last reading is returned with its original time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import battery, network
from .board import find_board
from .cores import LoadOfOthers
from .heat import Thermometer
from .memory import free_memory
from .readings import Quality, Reading, Reason
from .system import System
from .termux import TermuxBattery
from .throttle import Throttle

# Seconds between two reads: a gauge refreshes every few seconds, a command costs a process.
_PERIODS = {"battery": 5.0, "throttle": 5.0, "storage": 10.0, "network": 60.0, "clock": 60.0}
_SHORTEST_PERIOD = 1.0


@dataclass(frozen=True)
class Conditions:
    """One reading of a device.

    on_mains, throttled, under_voltage, metered, clock_synchronised: 1.0 or 0.0.
    """

    # °C of the zone that makes the board throttle.
    temperature: Reading
    battery_temperature: Reading
    # Charge in per cent.
    battery: Reading
    on_mains: Reading
    throttled: Reading
    under_voltage: Reading
    # Share of all cores, 0 to 1.
    load_by_others: Reading
    # Bytes that this process can still get within its control groups.
    free_memory: Reading
    # Bytes.
    free_storage: Reading
    metered: Reading
    clock_synchronised: Reading


class ConditionsReader:
    """Reads a device's conditions. storage: a folder on the disk to check. clock: monotonic seconds."""

    def __init__(
        self, system: System, *, clock: Callable[[], float] = time.monotonic, storage: Path = Path("/")
    ) -> None:
        self._system = system
        self._clock = clock
        self._storage = storage
        self.board = find_board(system)
        self._thermometer = Thermometer(system.files, self.board)
        self._throttle = Throttle(system, self.board)
        self._others = LoadOfOthers(system.files)
        self._termux = TermuxBattery(system) if self.board.kind == "phone" else None
        self._kept: dict[str, tuple[float, tuple[Reading, ...]]] = {}

    def read(self) -> Conditions:
        """Return the conditions now; never raises."""
        files = self._system.files
        now = self._clock()
        (temperature,) = self._every("heat", now, lambda: (self._thermometer.read(now),))
        charge, warmth, mains = self._every("battery", now, lambda: self._battery(now))
        throttled, weak = self._every("throttle", now, lambda: self._throttle.read(now))
        (others,) = self._every("load", now, lambda: (self._others.read(now),))
        (memory,) = self._every("memory", now, lambda: (free_memory(files, now),))
        (storage,) = self._every("storage", now, lambda: (self._free_storage(now),))
        (metered,) = self._every("network", now, lambda: (network.metered(self._system, now),))
        (synchronised,) = self._every("clock", now, lambda: (network.clock_synchronised(self._system, now),))
        return Conditions(
            temperature=temperature,
            battery_temperature=warmth,
            battery=charge,
            on_mains=mains,
            throttled=throttled,
            under_voltage=weak,
            load_by_others=others,
            free_memory=memory,
            free_storage=storage,
            metered=metered,
            clock_synchronised=synchronised,
        )

    def _every(self, name: str, now: float, read: Callable[[], tuple[Reading, ...]]) -> tuple[Reading, ...]:
        kept = self._kept.get(name)
        if kept is None or now - kept[0] >= _PERIODS.get(name, _SHORTEST_PERIOD):
            kept = self._kept[name] = now, read()
        return kept[1]

    def _battery(self, now: float) -> tuple[Reading, ...]:
        if self._termux is not None:
            charge = self._termux.charge(now)
            # Only Termux:API is absent; Android hides the battery from apps.
            if charge.reason is Reason.ABSENT:
                charge = replace(charge, reason=Reason.PERMISSION)
            return charge, self._termux.temperature(now), self._termux.on_mains(now)
        files = self._system.files
        mains = battery.on_mains(files, now)
        own = battery.find_batteries(files)
        if own is None:
            reason = mains.reason or Reason.ABSENT
            failed = [Reading.failed(unit, "battery", battery.POWER_SUPPLY, now, reason) for unit in ("%", "°C")]
            return failed[0], failed[1], mains
        return own.charge(now), own.temperature(now), mains

    def _free_storage(self, now: float) -> Reading:
        source = str(self._storage)
        try:
            value = float(self._system.free_bytes(self._storage))
        except PermissionError:
            return Reading.failed("B", "storage", source, now, Reason.PERMISSION)
        except OSError:
            return Reading.failed("B", "storage", source, now, Reason.ABSENT)
        return Reading(value, "B", "storage", Quality.MEASURED, source, now)
