"""Power and energy sources of a device, in order of preference.

    1. RAPL psys          the whole board, a counter
    2. INA total rail     a Jetson's module or board, in watts; through jetson-stats if files are unreadable
    3. batteries          the whole device, in watts, while they discharge
    4. RAPL packages      processor, with separately counted memory and NVIDIA's cards
    5. rails              of a Jetson without a total or a Raspberry Pi 5, added up: not the whole board
    6. a power model      the caller's, else a known board's; estimated
    7. NVIDIA's cards     if there is no other source

An unknown machine without a sensor has no source, because a wrong default would be worse than no value.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

from sparrow.command_line.installed import installed, load
from sparrow.protocol.errors import MissingPart

from .battery import find_batteries
from .board import find_board
from .estimate import Estimate, PowerModel, board_model
from .ina import find_ina
from .jetson_stats import JetsonStats, find_jetson_stats
from .nvml import find_cards
from .pmic import find_pmic
from .rails import worst
from .rapl import find_packages, find_psys
from .readings import Quality, Reading, Reason
from .system import System

__all__ = ["PowerModel", "Source", "explain", "find_sources", "why_unavailable"]


class Source(Protocol):
    """A source of power or energy readings."""

    @property
    def name(self) -> str:
        """The display name."""
        ...

    @property
    def scope(self) -> str:
        """The scope of the measured energy: board, device, module, package, package+dram, accelerator, rails, or a
        sum.
        """
        ...

    @property
    def quality(self) -> Quality:
        """The quality of the energy values."""
        ...

    @property
    def shortest_period_seconds(self) -> float:
        """The sensor's update period."""
        ...

    @property
    def advice(self) -> Mapping[Reason, str]:
        """Remedies by reason of failure."""
        ...

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return raw readings, with the time `now`."""
        ...

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float | None:
        """Return joules between two complete reads `seconds` apart; None if the values are inconsistent."""
        ...

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """Return the longest gap between two reads that still counts as covered, in seconds."""
        ...


class Together:
    """The sum of two sources that cover different components; both must have values."""

    def __init__(self, first: Source, second: Source) -> None:
        self._parts = (first, second)
        self._first_count = 0
        self.name = f"{first.name} + {second.name}"
        self.scope = f"{first.scope}+{second.scope}"
        self.quality = worst([first.quality, second.quality])
        self.shortest_period_seconds = max(first.shortest_period_seconds, second.shortest_period_seconds)
        self.advice = {**first.advice, **second.advice}

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return the readings of the first source, followed by the readings of the second."""
        first = self._parts[0].read(now)
        self._first_count = len(first)
        return first + self._parts[1].read(now)

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float | None:
        """Return the sum of both sources; None if either has no value."""
        cut = self._first_count
        first = self._parts[0].joules(before[:cut], after[:cut], seconds)
        second = self._parts[1].joules(before[cut:], after[cut:], seconds)
        return None if first is None or second is None else first + second

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """Return the shorter of both sources' gaps."""
        return min(part.longest_gap_seconds(period_seconds) for part in self._parts)


# Searching the installed packages takes milliseconds.
@cache
def installed_sources() -> tuple[Callable[[System], Source | None], ...]:
    """Return the finders that other packages register under ``sparrow.power_sources``: name -> finder."""
    found = installed("sparrow.power_sources").values()
    return tuple(load(entry, MissingPart, what="power source") for entry in found)


def find_sources(system: System, model: PowerModel | None, cpu_seconds: Callable[[], float]) -> list[Source]:
    """Return this device's sources, best first, whether readable or not; sources of other packages precede built-in
    sources.
    """
    files = system.files
    ina = find_ina(files)
    packages = find_packages(files)
    cards = find_cards(system)
    whole = ina is not None and ina.scope != "rails"
    found: list[Source | None] = [find(system) for find in installed_sources()]
    found += [find_psys(files), ina if whole else None, _jetson_stats(system, ina)]
    found += [find_batteries(files), Together(packages, cards) if packages and cards else None, packages]
    found += [None if whole else ina, find_pmic(system)]
    model = model or board_model(files)
    found.append(Estimate(files, model, cpu_seconds) if model is not None else None)
    found.append(cards)
    return [source for source in found if source is not None]


def _jetson_stats(system: System, ina: Source | None) -> JetsonStats | None:
    """Return jetson-stats unless the board's own files are readable, because its client needs a thread."""
    if ina is not None and all(reading.reason is None for reading in ina.read(0.0)):
        return None
    return find_jetson_stats(system, find_board(system))


_COMMON_ADVICE: Mapping[Reason, str] = {
    Reason.PERMISSION: "this user may not read it",
    Reason.CHARGING: "it is on external power",
    Reason.STALE: "samples were too rare; choose a shorter period and let the sampler thread run",
    Reason.IMPLAUSIBLE: "two readings contradicted each other; measure again",
    Reason.PARSE: "its value is not a number",
    Reason.POWERED_DOWN: "it does not respond at the moment",
    Reason.UNRELIABLE: "its unit differs from maker to maker",
    Reason.ABSENT: "it is no longer present",
}
_GIVE_MODEL = "for an estimate give --watts IDLE:MAX, such as 2.3:6.4"


def explain(source: Source, reason: Reason) -> str:
    """Describe the failure of a source."""
    return f"{source.name}: {source.advice.get(reason, _COMMON_ADVICE.get(reason, reason.value))}"


def why_unavailable(troubles: list[tuple[Source, Reason]]) -> str:
    """Describe why no source has a value, and how to fix the problem that is easiest to solve."""
    if not troubles:
        return f"no readable power sensor and no known board; {_GIVE_MODEL}"
    worth = list(Reason)
    return f"{explain(*min(troubles, key=lambda trouble: worth.index(trouble[1])))}; {_GIVE_MODEL}"
