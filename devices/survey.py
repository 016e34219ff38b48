"""A survey of a device's sensors, for display."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import battery, cores, heat, jetson, memory, network, pmic, throttle
from .board import BoardInfo, find_board
from .conditions import ConditionsReader
from .estimate import Estimate
from .ina import Ina, Rail, find_ina
from .power import Source, explain, find_sources
from .readings import Quality, ReadError, Reading, Reason
from .system import System
from .termux import HOW_TO_GET, TermuxBattery

_METERED_UNKNOWN = "NetworkManager is missing or does not know; set it by hand"


@dataclass(frozen=True)
class Sensor:
    """One line of a survey."""

    # Power, heat, and so on.
    group: str
    name: str
    reading: Reading
    # Details of the value, or how to get one.
    note: str = ""


class Survey:
    """Reads all sensors of a device. clock: monotonic seconds."""

    def __init__(self, system: System, clock: Callable[[], float] = time.monotonic, storage: Path = Path("/")) -> None:
        self.board: BoardInfo = find_board(system)
        self._system = system
        self._clock = clock
        self._conditions = ConditionsReader(system, clock=clock, storage=storage)
        self._sources = find_sources(system, None, time.process_time)
        self._termux = TermuxBattery(system) if self.board.kind == "phone" else None
        self._last: dict[int, tuple[float, tuple[float, ...]]] = {}

    def read(self) -> list[Sensor]:
        """Return all sensors. Energy counters show joules at the first read and watts from the second on."""
        now = self._clock()
        return [
            *self._power(now),
            *self._heat(now),
            *self._throttle(now),
            *self._clocks(now),
            *self._load(now),
            *self._memory(now),
            *self._supply(now),
            *self._network(now),
        ]

    @property
    def counts(self) -> bool:
        """True if a source is an energy counter, which needs a second read for watts."""
        return any(reading.unit == "J" for source in self._sources for reading in source.read(self._clock()))

    def missing(self, sensors: list[Sensor]) -> list[str]:
        """Return a line for each missing sensor, with its remedy."""
        lines = [f"{each.name}: {each.note}" for each in sensors if each.reading.value is None and each.note]
        if not self._sources:
            lines.append("power: no sensor and no known board; give sparrow join --watts IDLE:MAX for an estimate")
        if self.board.kind == "linux" and self.board.name == "x86" and not any("RAPL" in s.name for s in self._sources):
            lines.append("power: no processor counters; virtual machines and containers hide them")
        return list(dict.fromkeys(lines))

    # --- one method per group

    def _power(self, now: float) -> list[Sensor]:
        found = [self._source(number, source, now) for number, source in enumerate(self._sources)]
        if (ina := find_ina(self._system.files)) is not None:
            found += [self._rail(ina, rail, now) for rail in ina.rails]
        if (chip := pmic.find_pmic(self._system)) is not None:
            found.append(_noted("power", "board input", chip.input_watts(now), "fitted on one board, ±10 % or worse"))
        if self._termux is not None:
            advice = "Android reports current in no reliable unit; use an external meter"
            found.append(Sensor("power", "battery", self._termux.power(now), advice))
        return found

    def _rail(self, ina: Ina, rail: Rail, now: float) -> Sensor:
        limit = rail.current_limit(self._system.files, now).value
        note = "" if limit is None else f"slowed down above {limit:g} A"
        if ina.total is not None and rail.label not in ina.total.rails:
            note = "part of another"
        return _noted("power", f"rail {rail.label}", rail.read(self._system.files, now), note)

    def _source(self, number: int, source: Source, now: float) -> Sensor:
        if isinstance(source, Estimate):
            return _noted("power", source.name, source.watts_now(now), "at the load of the last minute")
        readings = source.read(now)
        lost = next((reading for reading in readings if reading.value is None), None)
        if lost is not None:
            return Sensor("power", source.name, lost, explain(source, lost.reason or Reason.ABSENT))
        values = tuple(reading.value for reading in readings if reading.value is not None)
        before = self._last.get(number)
        self._last[number] = (now, values)
        if all(reading.unit == "W" for reading in readings):
            return Sensor("power", source.name, _sum(source, "W", sum(values), now))
        if before is None or now <= before[0]:
            # Cards of both kinds have no sum yet.
            if any(reading.unit == "W" for reading in readings):
                soon = Reading.failed("W", source.scope, source.name, now, Reason.STALE)
                return Sensor("power", source.name, soon, "needs a second reading; use --watch")
            return Sensor("power", source.name, _sum(source, "J", sum(values), now), "counted so far")
        joules = source.joules(before[1], values, now - before[0])
        if not joules:
            reason = Reason.IMPLAUSIBLE if joules is None else Reason.STALE
            failed = Reading.failed("W", source.scope, source.name, now, reason)
            return Sensor("power", source.name, failed, explain(source, reason))
        return Sensor("power", source.name, _sum(source, "W", joules / (now - before[0]), now))

    def _heat(self, now: float) -> list[Sensor]:
        files = self._system.files
        decisive = heat.Thermometer(files, self.board).read(now)
        note = "the one that makes it throttle"
        if decisive.value is None:
            note = "no processor zone found; virtual machines, containers and Android have none"
        found = [Sensor("heat", "board", decisive, note)]
        found += [Sensor("heat", name, reading) for name, reading in heat.temperatures(files, now).items()]
        others = {"switches off at": heat.critical_temperature(files, now), "fan": heat.fan(files, now)}
        return found + [Sensor("heat", name, each) for name, each in others.items() if each.reason is not Reason.ABSENT]

    def _throttle(self, now: float) -> list[Sensor]:
        conditions = self._conditions.read()
        found = [
            Sensor("throttling", "throttled now", conditions.throttled, self._why_no_throttle(conditions.throttled)),
            Sensor("throttling", "under-voltage now", conditions.under_voltage),
        ]
        if self.board.kind == "raspberry-pi":
            try:
                words = throttle.words(throttle.throttle_word(self._system), throttle.SINCE_BOOT)
            except ReadError:
                return found
            since = Reading(float(bool(words)), "1", "board", Quality.MEASURED, "get_throttled", now)
            found.append(Sensor("throttling", "since the start", since, ", ".join(words)))
        for name, reading in throttle.over_current_events(self._system.files, now).items():
            found.append(Sensor("throttling", f"{name} events", reading))
        return found

    def _why_no_throttle(self, throttled: Reading) -> str:
        if throttled.value is not None or self.board.kind != "raspberry-pi":
            return ""
        return pmic.Pmic.advice.get(throttled.reason or Reason.ABSENT, "")

    def _clocks(self, now: float) -> list[Sensor]:
        files = self._system.files
        online = cores.online_cores(files)
        clock = cores.clock(files, online[0], now)
        top = cores.clock(files, online[0], now, "cpuinfo_max_freq").value
        note = "" if top is None else f"at most {top / 1e6:.0f} MHz, {len(online)} cores"
        found = [_noted("clocks", f"core {online[0]}", clock, note)]
        if self.board.kind == "raspberry-pi":
            found.append(Sensor("clocks", "cores, from the firmware", cores.arm_clock(self._system, now)))
        if self.board.kind == "jetson":
            found.append(Sensor("clocks", "GPU", jetson.gpu_clock(files, now)))
            found.append(self._power_mode(now))
        return found

    def _power_mode(self, now: float) -> Sensor:
        try:
            mode = jetson.power_mode(self._system)
        except ReadError as failure:
            return Sensor("clocks", "power mode", Reading.failed("id", "board", "nvpmodel", now, failure.reason))
        reading = Reading(float(mode.id), "id", "board", Quality.MEASURED, "nvpmodel", now)
        return Sensor("clocks", "power mode", reading, f"{mode.name}, a cap on clocks rather than watts")

    def _load(self, now: float) -> list[Sensor]:
        files = self._system.files
        others = self._conditions.read().load_by_others
        if others.value is not None:
            others = replace(others, value=100 * others.value, unit="%")
        found = [
            Sensor("load", "by other processes", others),
            Sensor("load", "tasks, last minute", cores.load_average(files, now)),
            Sensor("load", "all cores, since the start", cores.busy_seconds(files, now)),
            Sensor("load", "this process", cores.own_seconds(files, now)),
        ]
        if self.board.kind == "jetson":
            found.append(Sensor("load", "GPU", jetson.gpu_load(files, now)))
        return found

    def _memory(self, now: float) -> list[Sensor]:
        files = self._system.files
        limit = memory.memory_limit(files, now)
        quota = memory.core_quota(files, now)
        found = [
            Sensor("memory", "total", memory.total_memory(files, now)),
            Sensor("memory", "free for this process", memory.free_memory(files, now)),
            Sensor("memory", "limit of its control group", limit),
        ]
        if quota.value is not None:
            found.append(Sensor("memory", "cores of its control group", quota))
        found.append(Sensor("memory", "free storage", self._conditions.read().free_storage))
        return found

    def _supply(self, now: float) -> list[Sensor]:
        if self._termux is not None:
            words = ", ".join(f"{key} {word}" for key, word in self._termux.words(now).items())
            charge = self._termux.charge(now)
            return [
                Sensor("supply", "battery", charge, words if charge.value is not None else HOW_TO_GET),
                Sensor("supply", "battery temperature", self._termux.temperature(now)),
                Sensor("supply", "on mains", self._termux.on_mains(now)),
            ]
        files = self._system.files
        found = [Sensor("supply", "on mains", battery.on_mains(files, now))]
        if self.board.supply_milliamperes is not None:
            offered = Reading(self.board.supply_milliamperes / 1e3, "A", "supply", Quality.MEASURED, "device tree", now)
            found.append(Sensor("supply", "the supply offers", offered))
        if (own := battery.find_batteries(files)) is not None:
            found += [
                _noted("supply", "battery", own.charge(now), own.status()),
                Sensor("supply", "battery holds", own.energy_left(now)),
                Sensor("supply", "battery health", own.health(now)),
                Sensor("supply", "battery temperature", own.temperature(now)),
            ]
        return found

    def _network(self, now: float) -> list[Sensor]:
        conditions = self._conditions.read()
        received, sent = network.traffic(self._system.files, now)
        unknown = "" if conditions.metered.value is not None else _METERED_UNKNOWN
        return [
            Sensor("network", "received", received),
            Sensor("network", "sent", sent),
            Sensor("network", "metered", conditions.metered, unknown),
            Sensor("network", "clock synchronised", conditions.clock_synchronised),
        ]


def _noted(group: str, name: str, reading: Reading, note: str) -> Sensor:
    # Without a value, the note would read as advice.
    return Sensor(group, name, reading, note if reading.value is not None else "")


def _sum(source: Source, unit: str, value: float, now: float) -> Reading:
    return Reading(value, unit, source.scope, source.quality, source.name, now)
