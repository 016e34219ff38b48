"""Tables that list pictures or sounds: columns of files and labels, optionally of people, starts and ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .labels import Labels, decide
from .media import Listing, Medium, medium_named, read_listing
from .numbers import number
from .options import ReadOptions, Wanted
from .roles import find_label, find_person, folded
from .samples import Raw, plural, some
from .tables import Table, question_of

# Names of the column of files, in any case.
FILES = ("file", "path", "filename", "wav", "image")

SPAN = ("start", "end")


def files_column(table: Table, options: ReadOptions, *, measured: bool) -> int | None:
    """Return the position of a column of pictures or sounds. measured: the federation's tables have measurements."""
    if measured or options.time is not None:
        return None
    for place, name in enumerate(table.names):
        if folded(name) in FILES and name not in options.drop and _lists(table, place):
            return place
    return None


def _lists(table: Table, place: int) -> bool:
    blocks = table.blocks({place}, {place})
    return all(medium_named(str(cell).strip()) is not None for block in blocks for cell in block.columns[place])


def read_listed(table: Table, place: int, options: ReadOptions, wanted: Wanted) -> Raw:
    """Return the samples of the files in the column ``place``, in order.

    Raises DataError if a file is missing or unreadable, or a column is ambiguous.
    """
    source = table.source
    options.refuse(source, "lists files", "axes", "categories", "time")
    names = table.names
    free = [other for other, name in enumerate(names) if other != place and name not in options.drop]
    span = _span_columns(table, free)
    free = [other for other in free if other not in span]
    label = find_label(source, names, free, options, wanted)
    person = find_person(source, names, [other for other in free if other != label])
    used = [other for other in (place, label, person, *span) if other is not None]
    cells, lines = _cells(table, used)
    files = [text.strip() for text in cells[place]]
    medium = _medium_of(source, files, parts=bool(span))
    paths = _paths_of(table, place, files, lines, parts=bool(span))
    said = [*table.said, *_said_of_columns(table, used, None if wanted.labelled else label, options)]
    labels = kind = named = None
    kept: NDArray[np.intp] = np.arange(len(files))
    if wanted.labelled:
        assert label is not None, "it is wanted"
        found = Labels(table.decimal)
        found.add(cells[label])
        decided = decide(found, question_of(table, label, lines, options, wanted))
        said += decided.said
        if decided.missing is not None:
            kept = np.flatnonzero(~decided.missing)
            said.append(f"{plural(len(files) - len(kept), 'row')} of {len(files):,} without a label left out")
        labels, kind, named = decided.labels[kept], decided.kind, names[label]
    if not len(kept):
        raise DataError(f"{source}: no row has a label, so missing=drop leaves none; add labels")
    listing = Listing(
        source,
        medium,
        tuple(paths[row] for row in kept.tolist()),
        labels,
        kind,
        named,
        None if person is None else _people(table, person, cells[person], lines)[kept],
        tuple(_span(table, span, cells, row, lines) for row in kept.tolist()) if span else None,
        tuple(said),
    )
    return read_listing(listing, options, wanted.preparation)[0]


def _said_of_columns(table: Table, used: Sequence[int], unused: int | None, options: ReadOptions) -> Iterator[str]:
    """Yield a remark on unused columns. unused: labels that are not wanted."""
    if unused is not None:
        yield f"the column {table.names[unused]} holds labels and was left out"
    further = [name for place, name in enumerate(table.names) if place not in used and name not in options.drop]
    if further:
        yield f"{plural(len(further), 'column')} left out: {some(further)}"


def _span_columns(table: Table, free: Sequence[int]) -> list[int]:
    """Return the positions of the columns start and end of a part of a sound, or []."""
    names = table.names
    span = [other for key in SPAN for other in free if folded(names[other]) == key]
    if len(span) == 1:
        raise DataError(f"{table.source}: has a column {names[span[0]]}, but not both start and end; add the other")
    return span


def _medium_of(source: str, files: Sequence[str], *, parts: bool) -> Medium:
    """Return the medium of the listed files. parts: rows are parts of files."""
    media = {medium_named(name) for name in files}
    if len(media) > 1:
        raise DataError(f"{source}: lists pictures and sounds; write a table for each")
    medium = media.pop()
    assert medium is not None, "checked by files_column"
    if parts and medium == "picture":
        raise DataError(f"{source}: start and end need sounds, but it lists pictures; leave them out: drop=start+end")
    return medium


def _paths_of(table: Table, place: int, files: Sequence[str], lines: NDArray[np.int64], *, parts: bool) -> list[Path]:
    where = f"column {table.names[place]}"
    paths = [table.path.parent / name.replace("\\", "/") for name in files]
    # Once per file, which may have many parts.
    there = {path: path.is_file() for path in set(paths)}
    lost = [number for number, path in enumerate(paths) if not there[path]]
    if lost:
        raise DataError(
            f"{table.source}: {table.unit} {lines[lost[0]]}, {where}: the file {files[lost[0]]} is missing in "
            f"{table.path.parent} ({len(lost):,} missing in all); correct the name"
        )
    if not parts and len(there) < len(paths):
        twice = next(row for row, path in enumerate(paths) if path in paths[:row])
        raise DataError(
            f"{table.source}: {table.unit} {lines[twice]}, {where}: {files[twice]} is listed again; list "
            "a file once, or add columns start and end, in seconds, for the part of it in each row"
        )
    return paths


def _cells(table: Table, used: Sequence[int]) -> tuple[dict[int, list[str]], NDArray[np.int64]]:
    cells: dict[int, list[str]] = {place: [] for place in used}
    lines = []
    for block in table.blocks(set(used), set(used)):
        for place, found in cells.items():
            found.extend(map(str, block.columns[place]))
        lines.append(block.lines)
    return cells, np.concatenate(lines)


def _people(table: Table, person: int, cells: list[str], lines: NDArray[np.int64]) -> NDArray[np.str_]:
    names = [cell.strip() for cell in cells]
    if "" in names:
        raise DataError(
            f"{table.source}: {table.unit} {lines[names.index('')]}, column {table.names[person]}: the person is "
            f"missing; add it, or leave the column out: drop={table.names[person]}"
        )
    return np.array(names, np.str_)


def _span(
    table: Table, span: Sequence[int], cells: dict[int, list[str]], row: int, lines: NDArray[np.int64]
) -> tuple[float, float]:
    values = []
    for place in span:
        text = cells[place][row].strip()
        value = number(text, table.decimal)
        if value is None or not math.isfinite(value) or value < 0:
            raise DataError(
                f"{table.source}: {table.unit} {lines[row]}, column {table.names[place]}: {text!r} is not a time in "
                "seconds; correct it"
            )
        values.append(value)
    start, end = values
    if end <= start:
        raise DataError(f"{table.source}: {table.unit} {lines[row]}: the part from {start:g} to {end:g} s is empty")
    return start, end
