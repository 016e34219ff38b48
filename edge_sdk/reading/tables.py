"""Tables to raw samples, a row each: float32 numbers, and categories by index.

A table is read in blocks, so that its cells are never in memory together as Python strings. The first pass converts
every column as if it held numbers, and counts what it meets; that decides which columns are of names. A second pass
looks these up, if there are any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.preparation import Column, Preparation

from .categories import Names
from .dialect import Block, TextTable, explain
from .errors import DataError
from .labels import Decided, Labels, Question, decide
from .numbers import is_missing
from .options import ReadOptions, Wanted
from .parquet import ParquetBlock, ParquetTable
from .roles import Roles, assign
from .samples import Raw, is_integer, plural, some
from .tally import Tally

Table = TextTable | ParquetTable


@dataclass(frozen=True)
class Rows:
    """A table's rows as samples. kept: which rows of the file they are, None for all; lines: of all rows."""

    raw: Raw
    kept: NDArray[np.bool_] | None
    lines: NDArray[np.int64]


def read_table(table: Table, options: ReadOptions, wanted: Wanted) -> Rows:
    """Return a table's samples, a row each. Raises DataError."""
    source = table.source
    preparation = wanted.preparation
    roles = assign(source, table.names, options, wanted)
    declared = _declared(source, roles, preparation)
    names_only = roles.categories | {place for place, column in declared.items() if column.categories}
    seen = _first_pass(table, roles, names_only, wanted.labelled)
    roles, runs = _settled(table, roles, seen)
    _check_units(table, roles, seen, options)
    categories = {place for place in roles.features if place in names_only or _holds_names(seen.tallies[place])}
    _check_numbers(table, [p for p in roles.features if p not in categories or p in declared], seen, options, declared)
    lines = np.concatenate(seen.lines)
    decided = None
    if wanted.labelled:
        assert roles.label is not None
        decided = decide(seen.labels, question_of(table, roles.label, lines, options, wanted))
    columns, said = _look_up(table, roles, seen, categories, options, declared)
    kept, dropped = _kept(table, roles, seen, decided, lines, options, categories)

    def rows(array: NDArray[Any] | None) -> NDArray[Any] | None:
        return array if array is None or kept is None else array[kept]

    inputs = rows(seen.inputs)
    assert inputs is not None
    raw = Raw(
        source=source,
        reader="rows",
        inputs=np.ascontiguousarray(inputs),
        labels=None if decided is None else rows(decided.labels),
        kind=None if decided is None else decided.kind,
        columns=preparation.columns if preparation else columns,
        label=None if decided is None or roles.label is None else table.names[roles.label],
        people=None if roles.person is None else rows(seen.people.texts()),
        runs=rows(runs),
        said=(*table.said, *roles.said, *said, *(decided.said if decided else ()), *dropped),
    )
    return Rows(raw, kept, lines)


@dataclass
class _Seen:
    """What the first pass has met; inputs [rows, features], NaN for what is no number."""

    inputs: NDArray[np.float32]
    tallies: dict[int, Tally]
    labels: Labels
    people: Names = field(default_factory=Names)
    runs: Names = field(default_factory=Names)
    lines: list[NDArray[np.int64]] = field(default_factory=list)
    counted: bool = True


def _declared(source: str, roles: Roles, preparation: Preparation | None) -> dict[int, Column]:
    """Return the federation's columns by their place in the file."""
    if not roles.features:
        raise DataError(f"{source}: has no column besides labels and people; add columns of measurements")
    if preparation is None:
        return {}
    if preparation.columns:
        return dict(zip(roles.features, preparation.columns, strict=True))
    if preparation.shape != (len(roles.features),) or preparation.dtype != "float32":
        raise DataError(
            f"{source}: has {plural(len(roles.features), 'column')} of numbers, the federation wants samples of shape "
            f"{preparation.shape} as {preparation.dtype}; give the data that the model was published for"
        )
    return {place: Column(name=str(place + 1)) for place in roles.features}


# --- the first pass


def blocks_of(
    table: Table, used: Set[int], texts: Set[int], times: Set[int] = frozenset()
) -> Iterator[Block | ParquetBlock]:
    """Yield the rows of the columns ``used``, as ``ParquetTable.blocks`` does."""
    if isinstance(table, ParquetTable):
        return table.blocks(frozenset(used), frozenset(texts), frozenset(times))
    return table.blocks()


def _first_pass(table: Table, roles: Roles, names_only: frozenset[int] | set[int], labelled: bool) -> _Seen:
    index = set() if roles.index is None else {roles.index}
    tallied = (set(roles.features) | index) - names_only
    texts = {place for place in (roles.person, roles.run, roles.label if labelled else None) if place is not None}
    seen = _Seen(
        np.empty((0, 0), np.float32), {place: Tally(table.decimal) for place in tallied}, Labels(table.decimal)
    )
    column_of = {place: number for number, place in enumerate(roles.features)}
    matrices = []
    count = 0
    for block in blocks_of(table, tallied | texts | names_only, texts - tallied):
        columns: Sequence[Any] = block.columns
        matrix = np.full((len(block.lines), len(column_of)), np.nan, np.float32)
        for place, tally in seen.tallies.items():
            values = tally.add(columns[place], block.lines)
            if place == roles.index:
                seen.counted = seen.counted and _counts(values, count)
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # the tally keeps what does not fit
                matrix[:, column_of[place]] = values
        if labelled and roles.label is not None:
            seen.labels.add(columns[roles.label])
        if roles.person is not None:
            seen.people.add(columns[roles.person], block.lines)
        if roles.run is not None:
            seen.runs.add(map(_digits, columns[roles.run]), block.lines)
        count += len(block.lines)
        seen.lines.append(block.lines)
        matrices.append(matrix)
    if not matrices:
        raise DataError(f"{table.source}: has a header and no rows; give a row for each sample")
    seen.inputs = np.concatenate(matrices)
    return seen


def _counts(values: NDArray[np.float64], start: int) -> bool:
    """Return whether the values go on counting rows, from 0 or 1."""
    wanted = np.arange(start, start + len(values))
    return bool(np.array_equal(values, wanted) or np.array_equal(values, wanted + 1))


def _digits(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:.0f}" if float(cell).is_integer() else repr(cell)


def _settled(table: Table, roles: Roles, seen: _Seen) -> tuple[Roles, NDArray[np.int64] | None]:
    """Return the roles and runs, now that it is known whether these are whole numbers and an index counts rows."""
    said = list(roles.said)
    if roles.index is not None:
        called = table.names[roles.index] or f"{roles.index + 1}, which has no name,"
        if not seen.counted:
            raise DataError(
                f"{table.source}: column {called} does not count the rows, as pandas' index would; write the table "
                "with to_csv(index=False), or name the column"
            )
        said.append(f"column {called} counts the rows and was left out")
    if roles.run is None:
        return replace(roles, said=tuple(said)), None
    if not all(map(is_integer, seen.runs.found)):
        if roles.run in roles.features:
            return replace(roles, run=None, said=tuple(said)), None
        return replace(roles, run=None, said=(*said, f"the column {table.names[roles.run]} was left out")), None
    said.append(f"the column {table.names[roles.run]} says which recording a sample is of and is not a feature")
    runs = seen.runs.texts().astype(np.int64)
    if roles.run in roles.features:
        seen.inputs = np.delete(seen.inputs, roles.features.index(roles.run), axis=1)
    features = tuple(place for place in roles.features if place != roles.run)
    if not features:
        raise DataError(f"{table.source}: has no column besides labels, people and runs; add columns of measurements")
    return replace(roles, features=features, said=tuple(said)), runs


# --- numbers


def _holds_names(tally: Tally) -> bool:
    return not tally.numeric


def _check_units(table: Table, roles: Roles, seen: _Seen, options: ReadOptions) -> None:
    """Refuse a first row that has no number in most columns of numbers, such as one of units."""
    numeric = [place for place in roles.features if place in seen.tallies and seen.tallies[place].numeric]
    heads = [place for place in numeric if seen.tallies[place].head != "number"]
    texts = [place for place in heads if seen.tallies[place].head == "text"]
    if not texts or len(heads) * 2 <= len(numeric):
        return
    first = seen.tallies[texts[0]].first_text
    assert first is not None
    raise DataError(
        f"{table.source}: {table.unit} {first.line}, column {table.names[texts[0]]}: {first.text!r} is not a number, "
        f"and most cells of this {table.unit} are none, so it looks like units; skip={options.skip + 1} leaves it out"
    )


def _check_numbers(
    table: Table, places: Sequence[int], seen: _Seen, options: ReadOptions, declared: dict[int, Column]
) -> None:
    """Refuse the first cell of a column of numbers that is not one of float32, or missing without an option."""
    numeric = [place for place in places if place in seen.tallies]
    lost = sum(seen.tallies[place].missing for place in numeric)
    for place in numeric:
        name = table.names[place]
        tally = seen.tallies[place]
        here = f"{table.source}: {table.unit} {{}}, column {name}: "
        if tally.first_text is not None:
            line, text = tally.first_text
            if place in declared:
                advice = "the federation takes numbers here; correct it, or remove the row"
            else:
                advice = f"correct it, or leave the column out: drop={name}; if it holds names: categories={name}"
            advice = explain(text, table.decimal, table.delimiter) or advice
            raise DataError(here.format(line) + f"{text!r} is not a number; {advice}")
        if tally.beyond is not None:
            line, text = tally.beyond
            raise DataError(
                here.format(line) + f"{text!r} is infinite or beyond float32; correct it, remove the row, or leave the "
                f"column out: drop={name}"
            )
        if tally.empty and place not in declared:
            raise DataError(f"{table.source}: the column {name} holds no value; leave it out: drop={name}")
        if tally.first_missing is not None and options.missing is None:
            line, text = tally.first_missing
            raise DataError(
                here.format(line) + f"the value is missing ({text!r}; {lost:,} in this file); "
                "missing=drop leaves such rows out, missing=mean puts the column's mean there"
            )


# --- labels


def question_of(table: Table, label: int, lines: NDArray[np.int64], options: ReadOptions, wanted: Wanted) -> Question:
    """Return how the labels in the column ``label`` are to be read."""

    def at(row: int) -> str:
        return f"{table.unit} {lines[row]}, column {table.names[label]}"

    return Question(table.source, at, options.target, wanted.targets, drop=options.missing == "drop")


# --- the second pass


def _look_up(
    table: Table,
    roles: Roles,
    seen: _Seen,
    categories: set[int],
    options: ReadOptions,
    declared: dict[int, Column],
) -> tuple[tuple[Column, ...], list[str]]:
    """Put the indices of categories into the inputs. Returns the columns, and remarks."""
    said = []
    found = _names(table, roles, seen, categories, declared) if categories else {}
    columns = []
    for number, place in enumerate(roles.features):
        name = table.names[place]
        known: tuple[str, ...] = ()
        if place in categories:
            known = declared[place].categories if place in declared else found[place].ordered()
            seen.inputs[:, number], unknown = found[place].indices(known)
            if lost := found[place].missing(known):
                said.append(f"column {name}: no name in {plural(lost, 'row')}, taken as none of the categories")
            if unknown:
                said.append(f"column {name}: the federation does not know {unknown}")
            if place not in declared:
                said.append(f"the column {name} holds categories: {some(known)}")
        columns.append(Column(name=name, categories=known))
    return tuple(columns), said


def _names(
    table: Table, roles: Roles, seen: _Seen, categories: set[int], declared: dict[int, Column]
) -> dict[int, Names]:
    found = {place: Names() for place in roles.features if place in categories}
    rows = len(seen.inputs)
    for block in blocks_of(table, categories, categories):
        columns: Sequence[Any] = block.columns
        for place, names in found.items():
            names.add(columns[place], block.lines)
            # stop before many texts are in memory
            if place not in declared and len(names.found) > 2_000:
                _check_names(table, names, place, rows, place in roles.categories)
    for place, names in found.items():
        if place not in declared:
            _check_names(table, names, place, rows, place in roles.categories)
    return found


def _check_names(table: Table, names: Names, place: int, rows: int, asked: bool) -> None:
    reason = names.too_many(rows, asked=asked)
    name = table.names[place]
    if reason is None:
        if not names.values():
            raise DataError(f"{table.source}: the column {name} holds no value; leave it out: drop={name}")
        return
    text, line = next(
        (text, line) for text, line in zip(names.found, names.firsts, strict=True) if not is_missing(text)
    )
    advice = "" if asked else f"; for names of categories: categories={name}"
    short = text if len(text) <= 60 else f"{text[:60]}..."
    raise DataError(
        f"{table.source}: {table.unit} {line}, column {name}: {short!r} is not a number, and the column holds "
        f"{reason}; leave it out: drop={name}{advice}"
    )


# --- rows left out


def _kept(
    table: Table,
    roles: Roles,
    seen: _Seen,
    decided: Decided | None,
    lines: NDArray[np.int64],
    options: ReadOptions,
    categories: set[int],
) -> tuple[NDArray[np.bool_] | None, list[str]]:
    """Return the rows that are kept, None for all, and a remark on the others."""
    out = np.zeros(len(lines), np.bool_)
    if decided is not None and decided.missing is not None:
        out |= decided.missing
    if roles.person is not None:
        out |= _without_person(table, roles.person, seen, options)
    if options.missing == "drop":
        for number, place in enumerate(roles.features):
            if place not in categories and seen.tallies[place].missing:
                out |= np.isnan(seen.inputs[:, number])
    count = int(np.count_nonzero(out))
    if not count:
        return None, []
    if count == len(out):
        raise DataError(f"{table.source}: each row lacks a value, so missing=drop leaves none; drop columns instead")
    return ~out, [f"{plural(count, 'row')} of {len(out):,} without a value left out"]


def _without_person(table: Table, place: int, seen: _Seen, options: ReadOptions) -> NDArray[np.bool_]:
    empty = seen.people.found.get("")
    if empty is None:
        return np.zeros(len(seen.inputs), np.bool_)
    if options.missing != "drop":
        name = table.names[place]
        raise DataError(
            f"{table.source}: {table.unit} {seen.people.firsts[empty]}, column {name}: it is not said who made the "
            f"sample; add it, leave such rows out: missing=drop, or the column: drop={name}"
        )
    found: NDArray[np.bool_] = seen.people.codes() == empty
    return found
