"""Times of a recording's rows, numbers or ISO 8601 text, to seconds.

The unit of numbers follows from the column's name, such as ``time_ms``; else from their size if they count since 1970;
else from the median step: the unit nearest to the wanted rate or, without one, the unit with a rate of 1 to 1,000 per
second. A step that may be seconds or milliseconds is refused.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..command_line.nearest import nearest
from .errors import BadOption, DataError
from .numbers import is_missing, numbers
from .options import ReadOptions
from .roles import columns_of, find
from .tables import Table

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

_SPELLINGS = {
    "s": r"s|secs?|seconds?",
    "ms": r"ms|msecs?|millis|milliseconds?",
    "us": r"us|µs|μs|usecs?|micros|microseconds?",
    "ns": r"ns|nsecs?|nanos|nanoseconds?",
}
_UNIT = "|".join(_SPELLINGS.values())
_NAME = re.compile(
    rf"(?:elapsed[\s_\-]*)?(?:times?|timestamps?|datetime|date|t)(?:[\s_\-.,:/(\[]*(?P<unit>{_UNIT}))?[)\]]*"
    r"|(?P<alone>ms|secs?|seconds?|millis|milliseconds?|microseconds?|nanoseconds?)"
)

_ISO = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ]+(?P<time>[0-9]{2}:[0-9]{2}(?::[0-9]{2})?)"
    r"(?:[.,](?P<part>[0-9]{1,9}))?\s*(?:(?P<zulu>Z|UTC)|(?P<sign>[+-])(?P<hours>[0-9]{2}):?(?P<minutes>[0-9]{2})?)?)?",
    re.IGNORECASE,
)

# Fewest seconds that count as a date; they are in 1979.
_SINCE_1970 = 3e8


def is_time(name: str) -> bool:
    """Return whether a column's name denotes times; ``t`` does not, because it may be a temperature."""
    return name.strip().casefold() != "t" and _NAME.fullmatch(name.strip().casefold()) is not None


def time_column(table: Table, options: ReadOptions) -> int:
    """Return the position of the column of times. Raises BadOption if there is none or several."""
    names = table.names
    if options.time is not None:
        place = find(options.time, names)
        if place is None:
            raise BadOption(
                f"{table.source}: time={options.time}{nearest(options.time, names)}, but {columns_of(names)}; correct "
                "time="
            )
        return place
    found = [
        place
        for place, name in enumerate(names)
        if name not in (*options.drop, options.label) and _NAME.fullmatch(name.strip().casefold())
    ]
    if len(found) > 1:
        one, two = (names[place] for place in found[:2])
        raise BadOption(
            f"{table.source}: both {one} and {two} may be the time; name it, as in time={one}, and leave the other "
            f"out, as in drop={two}"
        )
    if not found:
        raise BadOption(
            f"{table.source}: no column is called time or timestamp; {columns_of(names)}. Windows need times: name the "
            "column, time=NAME"
        )
    return found[0]


def read_times(
    table: Table, place: int, lines: NDArray[np.int64], options: ReadOptions
) -> tuple[NDArray[np.float64], bool]:
    """Return the times of all rows, float64 with NaN if missing, and whether they are dates in seconds.

    Raises DataError for a time that is unreadable, or missing without an option.
    """
    cells: list[Any] = []
    for block in table.blocks({place}, times={place}):
        cells.extend(block.columns[place])
    here = f"{table.source}: {table.unit} {{}}, column {table.names[place]}: "
    dates = False
    if cells and isinstance(cells[0], str):
        cells = list(map(str.strip, cells))
        first = next((text for text in cells if not is_missing(text)), "")
        dates = _ISO.fullmatch(first) is not None
        values, wrong = _of_dates(cells) if dates else numbers(cells, table.decimal)
        if wrong is not None and wrong.any():
            row = int(wrong.argmax())
            raise DataError(
                here.format(lines[row]) + f"{cells[row]!r} is not a time; write numbers, or dates as in "
                "2026-05-01T12:30:00.25"
            )
    else:
        values = np.array(cells, np.float64)
    infinite = np.isinf(values)
    if infinite.any():
        raise DataError(here.format(lines[int(infinite.argmax())]) + "the time is infinite; correct it")
    lost = np.isnan(values)
    if lost.any() and options.missing != "drop":
        raise DataError(
            here.format(lines[int(lost.argmax())])
            + f"the time is missing ({np.count_nonzero(lost):,} in all); missing=drop leaves such rows out"
        )
    return values, dates


def _of_dates(cells: list[str]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return seconds since the first date, and a mask of the cells that are not dates."""
    seconds = np.full(len(cells), np.nan)
    wrong = np.zeros(len(cells), np.bool_)
    origin: int | None = None
    for row, text in enumerate(cells):
        if is_missing(text):
            continue
        found = _ISO.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            moment = int(np.datetime64(f"{found['date']}T{found['time'] or '00:00'}", "s").astype(np.int64))
        except ValueError:
            wrong[row] = True
            continue
        shift = 3_600 * int(found["hours"] or 0) + 60 * int(found["minutes"] or 0)
        moment += shift if found["sign"] == "-" else -shift
        # float64 has too few digits for microseconds since 1970.
        origin = moment if origin is None else origin
        seconds[row] = moment - origin + float(f"0.{found['part'] or 0}")
    return seconds, wrong


def unit_named(name: str) -> str | None:
    """Return the unit in a column's name, if any."""
    found = _NAME.fullmatch(name.strip().casefold())
    word = (found["unit"] or found["alone"]) if found else None
    if word is None:
        # A column that time= names.
        parts = re.split(r"[\s_\-.,:/()\[\]]+", name.strip().casefold().rstrip(")]"))
        word = parts[-1] if len(parts) > 1 else None
    return next((unit for unit, words in _SPELLINGS.items() if word and re.fullmatch(words, word)), None)


def unit_found(first: float, step: float, wanted: float | None) -> str | None:
    """Return the unit of numbers with this first value and median step; None if it may be s or ms.

    wanted: samples per second.
    """
    for unit, seconds in UNITS.items():
        if _SINCE_1970 <= first * seconds < 10 * _SINCE_1970:
            return unit
    if wanted is not None:
        return min(UNITS, key=lambda unit: abs(math.log(step * UNITS[unit] * wanted)))
    return "s" if step < 1 else None if step < 1e3 else "us" if step < 1e6 else "ns"


def said_of_unit(name: str, unit: str, step: float) -> str:
    """Return a remark on a unit that the column's name does not give."""

    return (
        f"{name}, with a median step of {step:.6g}, was read as {_WORDS[unit]}; for others add the unit to its name, "
        f"as in {name}_s or {name}_ms"
    )
