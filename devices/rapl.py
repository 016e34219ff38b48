"""RAPL: the energy counters of x86 processors, read through Linux powercap.

Each zone in /sys/class/powercap counts microjoules and wraps to 0 after `max_energy_range_uj`. Zones are nested, so
only some can be summed:

    psys                     the platform, which contains all others
      package-0              cores, uncore and integrated graphics
        core, uncore         already in the package: never added
      dram                   outside the package: added to it

`intel-rapl-mmio:*` duplicates the packages and is ignored. Some AMD processors report the same counter for several dies
(`package-0-die-0`, `package-0-die-1`): equal counters of a package are used once. Sources: the kernel's powercap
documentation; CVE-2020-8694 ("PLATYPUS"), after which Linux 5.10 made the counters root-only.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .readings import Files, Quality, ReadError, Reading, Reason

POWERCAP = "sys/class/powercap"

HOW_TO_GRANT = (
    "let a group read them: an administrator runs after each boot: sudo groupadd -f power; "
    "sudo chgrp power /sys/class/powercap/intel-rapl:*/energy_uj; "
    "sudo chmod 0440 /sys/class/powercap/intel-rapl:*/energy_uj; sudo usermod -aG power USER"
)

_ZONE = re.compile(r"intel-rapl:\d+(:\d+)*")
_PACKAGE = re.compile(r"(package-\d+)(-die-\d+)?")

# A reset counter looks like one that wrapped and shows kilowatts. Real power exceeds the processor's rated watts for
# seconds (a 15 W part may burst at 64 W, a 35 W part at 106 W), hence factor and floor.
_RATED_TIMES = 3
_LIMIT_FLOOR_WATTS = 250.0
_LIMIT_UNRATED_WATTS = 1000.0
# Counters move about once a millisecond: a very short interval may hold one step too many.
_SHORTEST_JUDGED_SECONDS = 0.01
# Mirrored dies are read one after the other: at a kilowatt a joule passes in a millisecond.
_MIRROR_JOULES = 1.0


@dataclass(frozen=True)
class Zone:
    """One counter."""

    path: str
    name: str
    # Value at which it wraps.
    range_joules: float
    # Larger steps are refused.
    limit_watts: float

    def step(self, before: float, after: float, seconds: float) -> float | None:
        """Return joules between two counter values, assuming at most one wrap; None if implausible."""
        joules = after - before if after >= before else after - before + self.range_joules
        plausible = 0 <= joules <= self.limit_watts * max(seconds, _SHORTEST_JUDGED_SECONDS)
        return joules if plausible else None


class Rapl:
    """A set of counters whose sum is a source of energy."""

    quality = Quality.MEASURED
    shortest_period_seconds = 0.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.PERMISSION: f"energy counters are readable by root only; {HOW_TO_GRANT}",
        Reason.STALE: "the counter did not change, as in some virtual machines, or was read too rarely",
        Reason.IMPLAUSIBLE: "the counter moved by more than this hardware can draw (was it reset?); measure again",
    }

    def __init__(self, files: Files, scope: str, zones: list[Zone]) -> None:
        self.name = "RAPL " + " + ".join(dict.fromkeys(zone.name for zone in zones))
        self.scope = scope
        self._files = files
        self._zones = zones

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return the counters in joules, one per zone."""
        return tuple(self._counter(zone, now) for zone in self._zones)

    def _counter(self, zone: Zone, now: float) -> Reading:
        reading = self._files.reading(f"{zone.path}/energy_uj", "J", self.scope, now, 1e-6)
        if reading.value is not None and reading.value < 0:
            return Reading.failed("J", self.scope, reading.source, now, Reason.IMPLAUSIBLE)
        return reading

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float | None:
        """Return joules between two reads; None if a counter made an implausible step."""
        total = 0.0
        seen: list[tuple[str, float, float]] = []
        for zone, first, last in zip(self._zones, before, after, strict=True):
            package = _PACKAGE.fullmatch(zone.name)
            if package and any(
                package[1] == other and abs(first - start) <= _MIRROR_JOULES and abs(last - end) <= _MIRROR_JOULES
                for other, start, end in seen
            ):
                continue
            if package:
                seen.append((package[1], first, last))
            step = zone.step(first, last, seconds)
            if step is None:
                return None
            total += step
        return total

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """Return the time within which no counter can wrap twice, regardless of the period."""
        return min(zone.range_joules / zone.limit_watts for zone in self._zones)


def find_psys(files: Files) -> Rapl | None:
    """Return the platform counter (psys), if it exists."""
    zones = [zone for zone in _zones(files) if zone.name == "psys"]
    return Rapl(files, "board", zones[:1]) if zones else None


def find_packages(files: Files) -> Rapl | None:
    """Return the counters of all packages, and of memory that is counted separately."""
    zones = _zones(files)
    packages = [zone for zone in zones if _PACKAGE.fullmatch(zone.name)]
    dram = [zone for zone in zones if zone.name == "dram"]
    if not packages:
        return None
    return Rapl(files, "package+dram" if dram else "package", packages + dram)


def _zones(files: Files) -> list[Zone]:
    # A nested zone appears as a folder in its parent and as a link beside it: folder names are unique.
    paths = {name: f"{POWERCAP}/{name}" for name in _zone_names(files, POWERCAP)}
    for path in list(paths.values()):
        for child in _zone_names(files, path):
            paths.setdefault(child, f"{path}/{child}")
    return [zone for path in sorted(paths.values()) if (zone := _zone(files, path)) is not None]


def _zone_names(files: Files, folder: str) -> list[str]:
    try:
        return [name for name in files.children(folder) if _ZONE.fullmatch(name)]
    except ReadError:
        return []


def _zone(files: Files, path: str) -> Zone | None:
    try:
        name = files.text(f"{path}/name")
        range_joules = files.number(f"{path}/max_energy_range_uj") * 1e-6
    except ReadError:
        return None
    rated = files.reading(f"{path}/constraint_0_max_power_uw", "W", "package", 0.0, 1e-6).value
    limit = max(_RATED_TIMES * rated, _LIMIT_FLOOR_WATTS) if rated else _LIMIT_UNRATED_WATTS
    return Zone(path, name, range_joules, limit) if range_joules > 0 else None
