"""Where the figure of a device's energy can come from, best first.

    1. RAPL psys          the whole board, a counter
    2. batteries          the whole device, in watts, while they discharge
    3. RAPL packages      processor, and memory where it counts itself
    4. a power model      the caller's own, else the one of a known board; estimated

All sources look alike to the meter: `read` gives readings, `joules` the energy between two good reads. An unknown
machine without a sensor has none: a wrong default would be worse than no figure.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from devices.battery import find_batteries
from devices.estimate import Estimate, PowerModel, board_model
from devices.rapl import find_packages, find_psys
from devices.readings import Files, Quality, Reading, Reason

__all__ = ["PowerModel", "Source", "explain", "find_sources", "why_unavailable"]


class Source(Protocol):
    """Something that tells energy."""

    @property
    def name(self) -> str:
        """As a person should see it."""
        ...

    @property
    def scope(self) -> str:
        """What the joules cover: board, device, package or package+dram."""
        ...

    @property
    def quality(self) -> Quality:
        """How the joules are come by."""
        ...

    @property
    def shortest_period_seconds(self) -> float:
        """Asking more often than this brings nothing."""
        ...

    @property
    def advice(self) -> Mapping[Reason, str]:
        """What a person should know or do, per reason of failure."""
        ...

    def read(self, now: float) -> tuple[Reading, ...]:
        """Raw readings, all taken at the moment `now`."""
        ...

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float | None:
        """Joules between the values of two complete reads `seconds` apart; None when they cannot both be true."""
        ...

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """Reads further apart than this say nothing about the time between them."""
        ...


def find_sources(files: Files, model: PowerModel | None, cpu_seconds: Callable[[], float]) -> list[Source]:
    """The sources this device has, best first, whether or not they can be read right now."""
    found: list[Source | None] = [find_psys(files), find_batteries(files), find_packages(files)]
    model = model or board_model(files)
    if model is not None:
        found.append(Estimate(files, model, cpu_seconds))
    return [source for source in found if source is not None]


_COMMON_ADVICE: Mapping[Reason, str] = {
    Reason.PERMISSION: "this user may not read it",
    Reason.CHARGING: "it is on external power",
    Reason.STALE: "samples came too rarely; choose a shorter period and let the sampler thread run",
    Reason.IMPLAUSIBLE: "two readings contradicted each other; measure again",
    Reason.PARSE: "what it says is not a number",
    Reason.POWERED_DOWN: "it does not answer at the moment",
    Reason.ABSENT: "it is not there any more",
}
_GIVE_MODEL = "for an estimate give a power model as IDLE:MAX watts, such as 2.3:6.4"


def explain(source: Source, reason: Reason) -> str:
    """One source's failure in words for a person."""
    return f"{source.name}: {source.advice.get(reason, _COMMON_ADVICE[reason])}"


def why_unavailable(troubles: list[tuple[Source, Reason]]) -> str:
    """Why no source gave a figure, and how to get one: the trouble one can do most about."""
    if not troubles:
        return f"no power sensor that can be read here, and no known board; {_GIVE_MODEL}"
    worth = list(Reason)
    return f"{explain(*min(troubles, key=lambda trouble: worth.index(trouble[1])))}; {_GIVE_MODEL}"
