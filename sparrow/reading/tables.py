"""Tables to raw samples, one row each: float32 numbers, and categories by index.

A table is read in blocks, so that its cells are never all in memory. The first pass converts every column to numbers;
failures identify columns of names, which a second pass converts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.preparation import Column, Preparation
from .categories import Names
from .dialect import TextTable, explain
from .errors import DataError
from .labels import Decided, Labels, Question, decide
from .numbers import is_missing
from .options import ReadOptions, Wanted
from .parquet import ParquetTable
from .roles import assign
from .samples import Raw, is_integer, plural, some
from .tally import Tally

Table = TextTable | ParquetTable


@dataclass(frozen=True)
class Rows:
    """A table's rows as samples."""

    raw: Raw
    # Mask of the file's rows, None for all.
    kept: NDArray[np.bool_] | None
    # Lines of all rows.
    lines: NDArray[np.int64]


def read_table(table: Table, options: ReadOptions, wanted: Wanted) -> Rows:
    """Return a table's samples, one per row. Raises DataError if columns or cells are invalid."""
    return _Reading(table, options, wanted).read()


def question_of(table: Table, label: int, lines: NDArray[np.int64], options: ReadOptions, wanted: Wanted) -> Question:
    """Return the question about the labels in the column ``label``."""

    def at(row: int) -> str:
        return f"{table.unit} {lines[row]}, column {table.names[label]}"

    return Question(table.source, at, options.target, wanted.targets, drop=options.missing == "drop")


class _Reading:
    """The reading of one table.

    declared: the federation's columns by position. inputs: [rows, features], NaN for texts.
    """

    def __init__(self, table: Table, options: ReadOptions, wanted: Wanted) -> None:
        self._table = table
        self._options = options
        self._wanted = wanted
        self._roles = assign(table.source, table.names, options, wanted)
        self._declared = self._declare(wanted.preparation)
        named = {place for place, column in self._declared.items() if column.categories}
        self._categories = {*self._roles.categories, *named}
        self._said: list[str] = [*table.said, *self._roles.said]
        self._tallies: dict[int, Tally] = {}
        self._labels = Labels(table.decimal)
        self._people = Names()
        self._runs = Names()
        self._counted = True

    def read(self) -> Rows:
        """Return the rows. Raises DataError."""
        table = self._table
        roles = self._roles
        self._inputs, self._lines = self._first_pass()
        runs = self._settle()
        self._check_units()
        found = [place for place in self._roles.features if place not in self._categories]
        self._categories |= {place for place in found if not self._tallies[place].numeric}
        self._check_numbers()
        decided: Decided | None = None
        if self._wanted.labelled:
            assert roles.label is not None
            question = question_of(table, roles.label, self._lines, self._options, self._wanted)
            decided = decide(self._labels, question)
        columns = self._look_up()
        kept, dropped = self._kept(decided)

        def rows(array: NDArray[Any] | None) -> NDArray[Any] | None:
            return array if array is None or kept is None else array[kept]

        inputs = rows(self._inputs)
        assert inputs is not None
        preparation = self._wanted.preparation
        raw = Raw(
            source=table.source,
            reader="rows",
            inputs=np.ascontiguousarray(inputs),
            labels=None if decided is None else rows(decided.labels),
            kind=None if decided is None else decided.kind,
            columns=preparation.columns if preparation else columns,
            label=None if decided is None or roles.label is None else table.names[roles.label],
            people=None if roles.person is None else rows(self._people.texts()),
            runs=rows(runs),
            said=(*self._said, *(decided.said if decided else ()), *dropped),
        )
        return Rows(raw, kept, self._lines)

    def _error(self, text: str) -> DataError:
        return DataError(f"{self._table.source}: {text}")

    def _here(self, line: int, place: int) -> str:
        return f"{self._table.unit} {line}, column {self._table.names[place]}: "

    def _declare(self, preparation: Preparation | None) -> dict[int, Column]:
        features = self._roles.features
        if not features:
            raise self._error("has no column besides labels and people; add columns of measurements")
        if preparation is None:
            return {}
        if preparation.columns:
            return dict(zip(features, preparation.columns, strict=True))
        if preparation.shape != (len(features),) or preparation.dtype != "float32":
            raise self._error(
                f"has {plural(len(features), 'column')} of numbers, the federation wants samples of shape "
                f"{preparation.shape} as {preparation.dtype}; give the data that the model was published for"
            )
        return {place: Column(name=str(place + 1)) for place in features}

    # --- the first pass

    def _first_pass(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the inputs and the lines of all rows."""
        roles = self._roles
        labelled = self._wanted.labelled
        index = set() if roles.index is None else {roles.index}
        tallied = (set(roles.features) | index) - self._categories
        texts = {place for place in (roles.person, roles.run, roles.label if labelled else None) if place is not None}
        self._tallies = {place: Tally(self._table.decimal) for place in tallied}
        column_of = {place: number for number, place in enumerate(roles.features)}
        matrices = []
        lines = []
        count = 0
        for block in self._table.blocks(tallied | texts | self._categories, texts - tallied):
            matrix = np.full((len(block.lines), len(column_of)), np.nan, np.float32)
            for place, tally in self._tallies.items():
                values = tally.add(block.columns[place], block.lines)
                if place == roles.index:
                    self._counted = self._counted and _counts(values, count)
                    continue
                # The tally keeps values beyond float32.
                with np.errstate(over="ignore", invalid="ignore"):
                    matrix[:, column_of[place]] = values
            if labelled and roles.label is not None:
                self._labels.add(block.columns[roles.label])
            if roles.person is not None:
                self._people.add(block.columns[roles.person], block.lines)
            if roles.run is not None:
                self._runs.add(map(_digits, block.columns[roles.run]), block.lines)
            count += len(block.lines)
            lines.append(block.lines)
            matrices.append(matrix)
        if not matrices:
            raise self._error("has a header and no rows; give a row for each sample")
        return np.concatenate(matrices), np.concatenate(lines)

    def _settle(self) -> NDArray[np.int64] | None:
        """Return the runs if they are integers, and check that an index counts the rows."""
        roles = self._roles
        names = self._table.names
        if roles.index is not None:
            called = names[roles.index] or f"{roles.index + 1}, which has no name,"
            if not self._counted:
                raise self._error(
                    f"column {called} does not count the rows, as pandas' index would; write the table with "
                    "to_csv(index=False), or name the column"
                )
            self._said.append(f"column {called} counts the rows and was left out")
        if roles.run is None:
            return None
        if not all(map(is_integer, self._runs.found)):
            if roles.run not in roles.features:
                self._said.append(f"the column {names[roles.run]} was left out")
            return None
        self._said.append(f"the column {names[roles.run]} identifies recordings and is not a feature")
        if roles.run in roles.features:
            self._inputs = np.delete(self._inputs, roles.features.index(roles.run), axis=1)
        features = tuple(place for place in roles.features if place != roles.run)
        if not features:
            raise self._error("has no column besides labels, people and runs; add columns of measurements")
        self._roles = replace(roles, features=features)
        return self._runs.texts().astype(np.int64)

    # --- numbers

    def _check_units(self) -> None:
        """Refuse a first row without numbers in most numeric columns, such as a row of units."""
        tallies = self._tallies
        numeric = [place for place in self._roles.features if place in tallies and tallies[place].numeric]
        heads = [place for place in numeric if tallies[place].head != "number"]
        texts = [place for place in heads if tallies[place].head == "text"]
        if not texts or len(heads) * 2 <= len(numeric):
            return
        first = tallies[texts[0]].first_text
        assert first is not None
        raise self._error(
            f"{self._here(first.line, texts[0])}{first.text!r} is not a number, like most cells of this "
            f"{self._table.unit}, so it looks like units; skip={self._options.skip + 1} leaves it out"
        )

    def _check_numbers(self) -> None:
        """Refuse a cell of a numeric column that is text, beyond float32, or missing."""
        declared = self._declared
        places = [place for place in self._roles.features if place not in self._categories or place in declared]
        numeric = [place for place in places if place in self._tallies]
        lost = sum(self._tallies[place].missing for place in numeric)
        for place in numeric:
            name = self._table.names[place]
            tally = self._tallies[place]
            if tally.first_text is not None:
                line, text = tally.first_text
                if place in declared:
                    advice = "the federation takes numbers here; correct it, or remove the row"
                else:
                    advice = f"correct it, or leave the column out: drop={name}; if it holds names: categories={name}"
                advice = explain(text, self._table.decimal, self._table.delimiter) or advice
                raise self._error(f"{self._here(line, place)}{text!r} is not a number; {advice}")
            if tally.beyond is not None:
                line, text = tally.beyond
                raise self._error(
                    f"{self._here(line, place)}{text!r} is infinite or beyond float32; correct it, remove the row, or "
                    f"leave the column out: drop={name}"
                )
            if tally.empty and place not in declared:
                raise self._error(f"the column {name} is empty; omit it with drop={name}")
            if tally.first_missing is not None and self._options.missing is None:
                line, text = tally.first_missing
                raise self._error(
                    f"{self._here(line, place)}the value is missing ({text!r}; {lost:,} in this file); missing=drop "
                    "leaves such rows out, missing=mean replaces them by the column's mean"
                )

    # --- the second pass

    def _look_up(self) -> tuple[Column, ...]:
        """Write the indices of categories into the inputs, and return the columns."""
        found = self._names() if self._categories else {}
        columns = []
        for number, place in enumerate(self._roles.features):
            name = self._table.names[place]
            declared = self._declared.get(place)
            known: tuple[str, ...] = ()
            if place in found:
                known = found[place].ordered() if declared is None else declared.categories
                self._inputs[:, number], unknown = found[place].indices(known)
                if lost := found[place].missing(known):
                    text = f"column {name}: no name in {plural(lost, 'row')}, read as none of the categories"
                    self._said.append(text)
                if unknown:
                    self._said.append(f"column {name}: the federation does not know {unknown}")
                if declared is None:
                    self._said.append(f"the column {name} holds categories: {some(known)}")
            columns.append(Column(name=name, categories=known))
        return tuple(columns)

    def _names(self) -> dict[int, Names]:
        found = {place: Names() for place in self._roles.features if place in self._categories}
        for block in self._table.blocks(self._categories, self._categories):
            for place, names in found.items():
                names.add(block.columns[place], block.lines)
                # Stop before many texts are in memory.
                if place not in self._declared and len(names.found) > 2_000:
                    self._check_names(names, place)
        for place, names in found.items():
            if place not in self._declared:
                self._check_names(names, place)
        return found

    def _check_names(self, names: Names, place: int) -> None:
        asked = place in self._roles.categories
        reason = names.too_many(len(self._inputs), asked=asked)
        name = self._table.names[place]
        if reason is None:
            if not names.values():
                raise self._error(f"the column {name} is empty; omit it with drop={name}")
            return
        text, line = next(
            (text, line) for text, line in zip(names.found, names.firsts, strict=True) if not is_missing(text)
        )
        advice = "" if asked else f"; for names of categories: categories={name}"
        short = text if len(text) <= 60 else f"{text[:60]}..."
        raise self._error(
            f"{self._here(line, place)}{short!r} is not a number, and the column holds {reason}; leave it out: "
            f"drop={name}{advice}"
        )

    # --- rows left out

    def _kept(self, decided: Decided | None) -> tuple[NDArray[np.bool_] | None, list[str]]:
        out = np.zeros(len(self._lines), np.bool_)
        if decided is not None and decided.missing is not None:
            out |= decided.missing
        if self._roles.person is not None:
            out |= self._without_person(self._roles.person)
        if self._options.missing == "drop":
            for number, place in enumerate(self._roles.features):
                if place not in self._categories and self._tallies[place].missing:
                    out |= np.isnan(self._inputs[:, number])
        count = int(np.count_nonzero(out))
        if not count:
            return None, []
        if count == len(out):
            raise self._error("every row lacks a value, so missing=drop leaves none; drop columns instead")
        return ~out, [f"{plural(count, 'row')} of {len(out):,} without a value left out"]

    def _without_person(self, place: int) -> NDArray[np.bool_]:
        empty = self._people.found.get("")
        if empty is None:
            return np.zeros(len(self._inputs), np.bool_)
        if self._options.missing != "drop":
            raise self._error(
                f"{self._here(self._people.firsts[empty], place)}there is no value in the column of persons; fill it "
                f"in, skip such rows with missing=drop, or ignore the column with drop={self._table.names[place]}"
            )
        found: NDArray[np.bool_] = self._people.codes() == empty
        return found


def _counts(values: NDArray[np.float64], start: int) -> bool:
    """Return True if the values count the rows from 0 or 1."""
    wanted = np.arange(start, start + len(values))
    return bool(np.array_equal(values, wanted) or np.array_equal(values, wanted + 1))


def _digits(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:.0f}" if float(cell).is_integer() else repr(cell)
