"""Tables of long recordings, one row per reading, to windows: float32 [N, T, C].

A recording ends if the label, the person, or a column such as ``recording`` changes, or if the time decreases or jumps
by more than ``JUMP`` periods. The rate is 1 / usual step. Rows missing within a recording are interpolated. Windows do
not cross recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.preparation import Column, Preparation
from .categories import Names
from .errors import DataError
from .media import other_reader, take
from .options import ReadOptions, Wanted
from .roles import find, folded
from .samples import Raw, plural, some
from .tables import Rows, Table, read_table
from .times import UNITS, read_times, said_of_unit, time_column, unit_found, unit_named
from .windows import cut_of, rate_of, remark, starts

# Names of columns that identify a row's recording, in any case.
SESSIONS = ("recording", "run", "session", "file")

# Periods between two rows above which they belong to two recordings.
JUMP = 5

# Periods between two rows above which rows are missing between them.
GAP = 1.5

# Relative difference of two rates below which rows are not resampled.
LIKE = 0.01


def read_recordings(table: Table, options: ReadOptions, wanted: Wanted) -> Raw:
    """Return the windows of a table's recordings. Raises DataError if columns or times are invalid."""
    source = table.source
    preparation = wanted.preparation
    if preparation is not None and preparation.axes == "T":
        raise other_reader(source, "is a table of measurements", preparation)
    options.refuse(source, "holds recordings", "axes", "categories", "unreadable")
    cut = cut_of(source, options, preparation)
    wanted_rate = rate_of(source, options, preparation)
    time = time_column(table, options)
    sessions = _sessions(table, time, options, wanted)
    aside = tuple(table.names[place] for place in (time, *sessions))
    own = replace(options, drop=(*options.drop, *aside), time=None)
    rows = read_table(table, own, replace(wanted, preparation=_by_name(preparation)))
    _check_channels(rows.raw, preparation)
    values, dates = read_times(table, time, rows.lines, options)
    kept = ~np.isnan(values)
    if rows.kept is not None:
        kept &= rows.kept
    raw = _of_rows(rows, kept)
    values = values[kept]
    codes: list[NDArray[np.integer]] = [_codes(table, place)[kept] for place in sessions]
    codes += [np.unique(each, return_inverse=True)[1] for each in (raw.labels, raw.people) if each is not None]
    together = np.logical_and.reduce([np.ones(len(values) - 1, np.bool_), *(np.diff(each) == 0 for each in codes)])
    name = table.names[time]
    said = list(raw.said)
    step = _median(source, name, np.diff(values)[together])
    unit = "s" if dates else _unit(source, name, float(values[0]), step, wanted_rate, said)
    clock = _Clock(values, UNITS[unit], step, together)
    rate = clock.rate if wanted_rate is None else wanted_rate
    resampled = wanted_rate is not None and abs(clock.rate / wanted_rate - 1) > LIKE
    said.append(f"rows have {clock.rate:g} per second" + (f" and were resampled to {rate:g}" if resampled else ""))
    said += clock.said_of_gaps()
    window, shift = cut.samples(source, rate)
    return _windows(replace(raw, said=tuple(said), rate=rate, step=shift / rate), clock, window, shift, resampled)


def _windows(raw: Raw, clock: _Clock, window: int, shift: int, resampled: bool) -> Raw:
    """Return the windows of rows; ``raw`` has the rate and step of the windows."""
    assert isinstance(raw.inputs, np.ndarray), "of a table"
    assert raw.rate is not None, "set by read_recordings"
    pieces: list[NDArray[Any]] = []
    firsts: list[int] = []
    runs: list[int] = []
    counts: list[int] = []
    for start, end in clock.recordings():
        piece = raw.inputs[start:end]
        if resampled or clock.gaps[start : end - 1].any():
            piece = _resampled(clock.seconds[start:end], piece, raw.rate)
        number = len(starts(len(piece), window, shift))
        if number:
            views = np.lib.stride_tricks.sliding_window_view(piece, window, axis=0)[::shift]
            pieces.append(np.ascontiguousarray(views.transpose(0, 2, 1)))
            firsts += [start] * number
            runs += [len(counts)] * number
        counts.append(number)
    begins = [start for start, _ in clock.recordings()]
    counted = remark(raw.source, counts, None if raw.labels is None else raw.labels[begins])
    channels = tuple(column.name for column in raw.columns)
    return replace(
        take(raw, np.array(firsts)),
        inputs=np.concatenate(pieces),
        runs=np.array(runs, np.int64),
        columns=(),
        channels=channels,
        axes="TC",
        said=(*raw.said, counted, f"channels: {some(channels, 12)}"),
        reader="recordings",
    )


def _sessions(table: Table, time: int, options: ReadOptions, wanted: Wanted) -> list[int]:
    """Return the columns that identify a row's recording."""
    label = options.label or (wanted.targets.column if wanted.targets else None)
    used = (time, None if label is None else find(label, table.names))
    return [
        place
        for place, name in enumerate(table.names)
        if folded(name) in SESSIONS and place not in used and name not in options.drop
    ]


def _unit(source: str, name: str, first: float, step: float, rate: float | None, said: list[str]) -> str:
    """Return the unit of numeric times, from the column's name or else from their size."""
    named = unit_named(name)
    if named is not None:
        return named
    unit = unit_found(first, step, rate)
    if unit is None:
        raise DataError(
            f"{source}: {name} has a median step of {step:.6g}, which may be seconds or milliseconds; add the unit "
            f"to its name, as in {name}_s or {name}_ms, or give the readings per second, as in rate=50"
        )
    said.append(said_of_unit(name, unit, step))
    return unit


class _Clock:
    """The times of all rows.

    unit: seconds per unit of ``values``. together: rows with the same session, label and person as the next. gaps: rows
    after which others are missing.
    """

    def __init__(self, values: NDArray[np.float64], unit: float, step: float, together: NDArray[np.bool_]) -> None:
        self.seconds = (values - values[0]) * unit
        self.rate = _plain(1 / (step * unit))
        self._step = step
        self._steps = np.diff(values)
        self._breaks = ~together | (self._steps < 0) | (self._steps > JUMP * step * (1 + 1e-9))
        self.gaps = ~self._breaks & (self._steps > GAP * step)

    def recordings(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each recording."""
        return pairwise([0, *(np.flatnonzero(self._breaks) + 1).tolist(), len(self.seconds)])

    def said_of_gaps(self) -> list[str]:
        """Return a remark on missing rows."""
        if not self.gaps.any():
            return []
        lost = int(np.rint(self._steps[self.gaps] / self._step - 1).sum())
        gaps = plural(int(self.gaps.sum()), "gap")
        return [f"interpolated: {plural(lost, 'missing reading')} in {gaps}"]


def _by_name(preparation: Preparation | None) -> Preparation | None:
    if preparation is None or not preparation.channels:
        return None
    columns = tuple(Column(name=name) for name in preparation.channels)
    return Preparation(reader="rows", shape=(len(columns),), columns=columns, missing=preparation.missing)


def _check_channels(raw: Raw, preparation: Preparation | None) -> None:
    if raw.kind == "numbers":
        raise DataError(
            f"{raw.source}: the labels of a recording's rows are numbers; windows need classes: for classes add "
            "target=class, or name another column: label=NAME"
        )
    named = next((column.name for column in raw.columns if column.categories), None)
    if named is not None:
        raise DataError(
            f"{raw.source}: the column {named} holds names, and a recording's channels are numbers; leave it out: "
            f"drop={named}"
        )
    if preparation is not None and preparation.shape[1] != len(raw.columns):
        raise DataError(
            f"{raw.source}: has {len(raw.columns)} channels ({some((column.name for column in raw.columns), 12)}), the "
            f"federation's recordings have {preparation.shape[1]}; leave others out with drop="
        )


def _of_rows(rows: Rows, kept: NDArray[np.bool_]) -> Raw:
    if not kept.any():
        raise DataError(
            f"{rows.raw.source}: every row lacks a value, so missing=drop leaves none; drop columns instead"
        )
    chosen = kept if rows.kept is None else kept[rows.kept]
    return take(rows.raw, np.flatnonzero(chosen))


def _codes(table: Table, place: int) -> NDArray[np.int32]:
    names = Names()
    for block in table.blocks({place}, {place}):
        names.add(map(str, block.columns[place]), block.lines)
    return names.codes()


def _median(source: str, name: str, steps: NDArray[np.float64]) -> float:
    """Return the usual positive step: the mean of steps near the median.

    Raises DataError if most rows repeat the time of the row before.
    """
    forwards = steps[steps > 0]
    if not len(forwards):
        raise DataError(
            f"{source}: {name} does not increase from row to row; sort the rows by time within each recording"
        )
    if np.count_nonzero(steps == 0) > len(forwards):
        raise DataError(
            f"{source}: most rows repeat the {name} of the row before, so the rate is unknown; write times with more "
            "digits, or sort the rows by recording"
        )
    median = np.median(forwards)
    # Jittered or rounded times are right on average; the median would be one of the rounded steps.
    return float(forwards[(forwards > 0.5 * median) & (forwards < GAP * median)].mean())


def _plain(rate: float) -> float:
    """Return a rate, rounded to an integer if it differs only by jitter."""
    near = round(rate)
    return float(near) if near and abs(rate / near - 1) < LIKE / 2 else float(f"{rate:.6g}")


def _resampled(seconds: NDArray[np.float64], piece: NDArray[Any], rate: float) -> NDArray[np.float32]:
    """Return rows at ``rate`` per second, interpolated linearly."""
    count = int((seconds[-1] - seconds[0]) * rate + 1e-6) + 1
    grid = seconds[0] + np.arange(count) / rate
    made = np.empty((count, piece.shape[1]), np.float32)
    for channel in range(piece.shape[1]):
        made[:, channel] = np.interp(grid, seconds, piece[:, channel])
    return made
