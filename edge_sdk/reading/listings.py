"""Tables that list pictures or sounds: a column of files, of labels, and perhaps of people, beginnings and ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.reading.errors import DataError
from edge_sdk.reading.labels import Decided, Labels, Question, decide
from edge_sdk.reading.media import Listing, medium_named, read_listing
from edge_sdk.reading.numbers import number
from edge_sdk.reading.options import ReadOptions
from edge_sdk.reading.roles import find_label, find_person, folded
from edge_sdk.reading.samples import Raw, plural, some
from edge_sdk.reading.tables import Table, blocks_of
from sparrow.protocol.preparation import Preparation, Targets

FILES = ("file", "path", "filename", "wav", "image")
"""Names of the column of files, in any case."""

SPAN = ("start", "end")


def files_column(table: Table, options: ReadOptions, *, measured: bool) -> int | None:
    """Return the position of a column of pictures or sounds; None if there is none.

    measured: the federation's tables hold measurements.
    """
    if measured or options.time is not None:
        return None
    for place, name in enumerate(table.names):
        if folded(name) in FILES and name not in options.drop and _lists(table, place):
            return place
    return None


def _lists(table: Table, place: int) -> bool:
    blocks = blocks_of(table, {place}, {place})
    return all(medium_named(str(cell).strip()) is not None for block in blocks for cell in block.columns[place])


def read_listed(
    table: Table,
    place: int,
    options: ReadOptions,
    *,
    preparation: Preparation | None = None,
    targets: Targets | None = None,
    labelled: bool = True,
) -> Raw:
    """Return the samples of the files in the column ``place``, in order. Raises DataError."""
    source = table.source
    options.refuse(source, "lists files", "axes", "categories", "time")
    names = table.names
    free = [other for other, name in enumerate(names) if other != place and name not in options.drop]
    span = [other for key in SPAN for other in free if folded(names[other]) == key]
    if len(span) == 1:
        raise DataError(f"{source}: has a column {names[span[0]]}, but not both start and end; add the other")
    free = [other for other in free if other not in span]
    label = find_label(source, names, free, options, targets, labelled)
    person = find_person(source, names, [other for other in free if other != label])
    used = [other for other in (place, label, person, *span) if other is not None]
    cells, lines = _cells(table, used)
    files = [text.strip() for text in cells[place]]
    media = {medium_named(name) for name in files}
    if len(media) > 1:
        raise DataError(f"{source}: lists pictures and sounds; write a table for each")
    medium = media.pop()
    assert medium is not None, "files_column has looked"
    if span and medium == "picture":
        raise DataError(f"{source}: start and end are of sounds, but it lists pictures; leave them out: drop=start+end")
    paths = [table.path.parent / name.replace("\\", "/") for name in files]
    # once for each file, of which there may be many parts
    there = {path: path.is_file() for path in set(paths)}
    lost = [number for number, path in enumerate(paths) if not there[path]]
    if lost:
        raise DataError(
            f"{source}: {table.unit} {lines[lost[0]]}, column {names[place]}: there is no file {files[lost[0]]} in "
            f"{table.path.parent} ({len(lost):,} missing in all); correct the name"
        )
    if not span and len(there) < len(paths):
        twice = next(row for row, path in enumerate(paths) if path in paths[:row])
        raise DataError(
            f"{source}: {table.unit} {lines[twice]}, column {names[place]}: {files[twice]} is listed again; list "
            "a file once, or say which part of it each row is of, in seconds: columns start and end"
        )
    said = [*table.said]
    further = [names[other] for other in range(len(names)) if other not in used and names[other] not in options.drop]
    if label is not None and not labelled:
        further = [name for name in further if name != names[label]]
        said.append(f"the column {names[label]} holds labels and was left out")
    if further:
        said.append(f"{plural(len(further), 'column')} left out: {some(further)}")
    decided = None
    kept: NDArray[np.intp] = np.arange(len(files))
    if labelled:
        assert label is not None, "it is wanted"
        decided = _decide(table, label, cells[label], lines, options, targets)
        said += decided.said
        if decided.missing is not None:
            kept = np.flatnonzero(~decided.missing)
            said.append(f"{plural(len(files) - len(kept), 'row')} of {len(files):,} without a label left out")
    people = None if person is None else _people(table, person, cells[person], lines)[kept]
    spans = [_span(table, span, cells, row, lines) for row in kept.tolist()] if span else None
    listing = Listing(
        source,
        medium,
        tuple(paths[row] for row in kept.tolist()),
        None if decided is None else decided.labels[kept],
        None if decided is None else decided.kind,
        None if decided is None or label is None else names[label],
        people,
        None if spans is None else tuple(spans),
        tuple(said),
    )
    if not listing.paths:
        raise DataError(f"{source}: no row has a label, so missing=drop leaves none; add labels")
    return read_listing(listing, options, preparation)[0]


def _cells(table: Table, used: Sequence[int]) -> tuple[dict[int, list[str]], NDArray[np.int64]]:
    cells: dict[int, list[str]] = {place: [] for place in used}
    lines = []
    for block in blocks_of(table, set(used), set(used)):
        columns: Sequence[Any] = block.columns
        for place, found in cells.items():
            found.extend(map(str, columns[place]))
        lines.append(block.lines)
    return cells, np.concatenate(lines)


def _decide(
    table: Table,
    label: int,
    cells: list[str],
    lines: NDArray[np.int64],
    options: ReadOptions,
    targets: Targets | None,
) -> Decided:
    found = Labels(table.decimal)
    found.add(cells)
    name = table.names[label]
    return decide(
        found,
        Question(
            table.source,
            lambda row: f"{table.unit} {lines[row]}, column {name}",
            options.target,
            targets,
            drop=options.missing == "drop",
        ),
    )


def _people(table: Table, person: int, cells: list[str], lines: NDArray[np.int64]) -> NDArray[np.str_]:
    names = [cell.strip() for cell in cells]
    if "" in names:
        raise DataError(
            f"{table.source}: {table.unit} {lines[names.index('')]}, column {table.names[person]}: it is not said who "
            f"made the sample; add it, or leave the column out: drop={table.names[person]}"
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
                f"{table.source}: {table.unit} {lines[row]}, column {table.names[place]}: {text!r} is no time in "
                "seconds; correct it"
            )
        values.append(value)
    start, end = values
    if end <= start:
        raise DataError(f"{table.source}: {table.unit} {lines[row]}: the part from {start:g} to {end:g} s is empty")
    return start, end
