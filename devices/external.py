"""Recordings of an external power meter: a CSV file of times and watts, integrated to joules per phase.

`offset_seconds` is added to the meter's times to align its clock. Power is interpolated linearly between readings; gaps
of more than five periods of the meter are not covered.

    time,watts
    2026-11-22T10:00:00Z,3.1
    2026-11-22T10:00:01Z,3.4
"""

import csv
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from .energy import Energy, energy_of
from .integral import Integral
from .rails import PowerSource
from .readings import BadFigures, Quality, Reading, Reason


class ExternalMeter(PowerSource):
    """A meter's recording as a power source.

    times: Unix timestamps, increasing. watts: one per time. Raises BadFigures for fewer than two readings, non-finite
    values, negative powers and unsorted times.
    """

    scope = "external meter"
    quality = Quality.MEASURED
    shortest_period_seconds = 0.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.STALE: "the meter has no readings for that time; check the offset between its clock and the device's"
    }

    def __init__(self, times: Sequence[float], watts: Sequence[float], name: str = "external meter") -> None:
        if len(times) < 2 or len(times) != len(watts):
            raise BadFigures(f"{name}: {len(times)} times and {len(watts)} powers; give at least two readings")
        for index, (time, power) in enumerate(zip(times, watts, strict=True)):
            if not math.isfinite(time) or not 0 <= power < math.inf:
                raise BadFigures(
                    f"{name}: reading {index + 1} is {power} W at {time} s; both must be finite, power not below 0"
                )
            if index and time <= times[index - 1]:
                raise BadFigures(f"{name}: reading {index + 1} is not after the one before it; sort the file by time")
        self.name = name
        self._times = list(times)
        self._watts = list(watts)
        self.period_seconds = statistics.median(b - a for a, b in pairwise(times))

    @classmethod
    def load(cls, path: Path, offset_seconds: float = 0.0) -> "ExternalMeter":
        """Read a CSV file with a column of times (seconds or ISO 8601 dates) and a column of watts.

        A header with `time` and `watts` selects the columns. Raises BadFigures with the line number, or OSError.
        """
        times = []
        watts = []
        for line, row in _rows(path, ("time", "watts")):
            try:
                times.append(_seconds(row[0]) + offset_seconds)
                watts.append(float(row[1]))
            except ValueError as error:
                raise BadFigures(
                    f"{path}, line {line}: {error}; write a time and watts, such as 1763800000,3.1"
                ) from None
        return cls(times, watts, path.name)

    def energy(self, start: float, end: float) -> Energy:
        """Return the joules between two Unix timestamps. Raises BadFigures if end is before start."""
        if not start <= end:
            raise BadFigures(f"a phase cannot end at {end} when it starts at {start}")
        integral = Integral(self, self.period_seconds)
        inside = self._times[bisect_right(self._times, start) : bisect_left(self._times, end)]
        for moment in (start, *inside, end):
            integral.sample(moment, at_end=True)
        return energy_of([integral], end - start)

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return the power at this time, interpolated between two readings."""
        after = bisect_left(self._times, now)
        if after < len(self._times) and self._times[after] == now:
            return (Reading(self._watts[after], "W", self.scope, self.quality, self.name, now),)
        if after in (0, len(self._times)) or self._times[after] - self._times[after - 1] > self.longest_gap_seconds(
            0.0
        ):
            return (Reading.failed("W", self.scope, self.name, now, Reason.STALE),)
        t0, t1 = self._times[after - 1 : after + 1]
        p0, p1 = self._watts[after - 1 : after + 1]
        value = p0 + (p1 - p0) * (now - t0) / (t1 - t0)
        return (Reading(value, "W", self.scope, self.quality, self.name, now),)

    def longest_gap_seconds(self, _period_seconds: float) -> float:
        """Return five times the meter's period."""
        return 5 * self.period_seconds


def load_phases(path: Path) -> list[tuple[str, float, float]]:
    """Read phases from a CSV file: name, start, end (Unix timestamps or ISO 8601 dates).

    Raises BadFigures with the line number, or OSError.
    """
    phases = []
    for line, row in _rows(path, ("name", "start", "end")):
        try:
            phases.append((row[0], _seconds(row[1]), _seconds(row[2])))
        except ValueError as error:
            raise BadFigures(f"{path}, line {line}: {error}; write a name, a start and an end") from None
    if not phases:
        raise BadFigures(f"{path}: no phases; write a line NAME,START,END for each")
    return phases


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[int, list[str]]]:
    """Return the selected columns of each non-empty line, with its line number."""
    places = list(range(len(columns)))
    rows: list[tuple[int, list[str]]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        for line, row in enumerate(csv.reader(file), start=1):
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            names = [cell.lower() for cell in cells]
            if not rows and set(columns) <= set(names):
                places = [names.index(column) for column in columns]
                continue
            if len(cells) <= max(places):
                raise BadFigures(
                    f"{path}, line {line}: must have the columns {', '.join(columns)}, with commas between"
                )
            rows.append((line, [cells[place] for place in places]))
    return rows


def _seconds(text: str) -> float:
    """Return a Unix timestamp; a date without a time zone is local time."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return (
            datetime.fromisoformat(text[:-1] + "+00:00" if text[-1:] in ("Z", "z") else text).astimezone().timestamp()
        )
    except ValueError:
        raise BadFigures(f"{text!r} is not a time") from None
