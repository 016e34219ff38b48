"""Roles of a table's columns: label, person, recording, or feature."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..command_line.nearest import nearest
from ..protocol.preparation import MOST_COLUMNS, Preparation
from .errors import BadOption, DataError
from .numbers import number
from .options import ReadOptions, Wanted
from .samples import plural, some

# Names of the entry or column of a sample's maker, device or domain. Case and blanks do not count.
PEOPLE = ("person", "subject", "people", "device", "writer", "speaker", "role", "domain")

# Names of the column of labels, in any case.
LABELS = ("label", "y", "target", "class")

# Name of the entry or column of unbroken recordings.
RUN = "run"

# Names of the column that pandas writes for an index; a first column without a name may be one too.
INDEXES = ("Unnamed: 0", "__index_level_0__")


def folded(name: str) -> str:
    """Return a name without case and blanks."""
    return re.sub(r"\s+", "", name).casefold()


def is_person(name: str) -> bool:
    """Return whether a column or entry of this name identifies people."""
    return folded(name) in PEOPLE


def find(name: str, names: Sequence[str]) -> int | None:
    """Return the position of ``name``, or of the only column that differs in case and outer blanks."""
    if name in names:
        return names.index(name)
    alike = [place for place, other in enumerate(names) if other.strip().casefold() == name.strip().casefold()]
    return alike[0] if len(alike) == 1 else None


@dataclass(frozen=True)
class Roles:
    """Positions of columns by role."""

    # Features in the order of a raw row.
    features: tuple[int, ...]
    label: int | None
    person: int | None
    run: int | None
    # A column that must count the rows.
    index: int | None
    # Features that hold names.
    categories: frozenset[int]
    said: tuple[str, ...]


def assign(source: str, names: Sequence[str], options: ReadOptions, wanted: Wanted) -> Roles:
    """Return the roles of a file's columns. names: stripped. Raises DataError if a role is missing or ambiguous."""
    said: list[str] = []
    kept = _kept(source, names, options)
    chosen = _federation_columns(source, names, kept, wanted.preparation, said)
    categories = {_named(source, "categories", name, names) for name in options.categories}
    label = find_label(source, names, [place for place in kept if place not in chosen], options, wanted)
    free = [place for place in kept if place not in (label, *chosen, *categories)]
    person = find_person(source, names, free)
    run = next((place for place in free if names[place].casefold() == RUN), None)
    if person is not None:
        said.append(_said_of_person(names[person]))
    if label is not None and not wanted.labelled:
        said.append(f"the column {names[label]} holds labels and was left out")
    others = [place for place in kept if place not in (label, person)]
    if chosen:
        said += _said_of_unused(names, [place for place in others if place not in (*chosen, run)])
        return Roles(tuple(chosen), label, person, run, None, frozenset(), tuple(said))
    index = next((place for place in others if _is_index(names, place)), None)
    features = tuple(place for place in others if place != index)
    _check_named(source, names, features)
    return Roles(features, label, person, run, index, frozenset(categories), tuple(said))


def _kept(source: str, names: Sequence[str], options: ReadOptions) -> list[int]:
    """Return the columns that are not dropped, after a check of their names."""
    if len(names) > MOST_COLUMNS:
        raise DataError(f"{source}: has {len(names):,} columns; the maximum is {MOST_COLUMNS:,}; leave others out")
    dropped = {_named(source, "drop", name, names) for name in options.drop}
    kept = [place for place, name in enumerate(names) if place not in dropped and name not in options.drop]
    _check_names(source, [names[place] for place in kept])
    return kept


def _federation_columns(
    source: str, names: Sequence[str], kept: Sequence[int], preparation: Preparation | None, said: list[str]
) -> list[int]:
    """Return the columns of a federation's preparation, in its order; [] without one."""
    wanted = [column.name for column in preparation.columns] if preparation else []
    chosen: list[int] = []
    for name in wanted:
        # A column is used once: names that differ only in case are matched as written.
        free = [place for place in kept if place not in chosen and (names[place] == name or names[place] not in wanted)]
        chosen.append(_wanted(source, name, names, free, said))
    return chosen


def _said_of_person(name: str) -> str:
    return f"the column {name} identifies people and is not a feature; categories={name} makes it one"


def _is_index(names: Sequence[str], place: int) -> bool:
    return names[place] in INDEXES or (place == 0 and not names[0])


def _said_of_unused(names: Sequence[str], unused: Sequence[int]) -> list[str]:
    further = [names[place] or "(without a name)" for place in unused]
    if not further:
        return []
    return [f"the federation does not use {plural(len(further), 'column')}, left out: {some(further)}"]


def columns_of(names: Iterable[str]) -> str:
    """Return the names of a file's columns for a message."""
    return f"it has the columns {some((name or '(without a name)' for name in names), 12)}"


def _check_named(source: str, names: Sequence[str], features: Sequence[int]) -> None:
    for place in features:
        if not names[place]:
            raise DataError(
                f"{source}: column {place + 1} has no name; write one into the first line, or remove the column"
            )


def _check_names(source: str, names: Sequence[str]) -> None:
    double = [name for name, count in Counter(names).items() if name and count > 1]
    if double:
        raise DataError(
            f"{source}: two columns are called {double[0]}; rename one"
            + ("" if double[0].casefold() in LABELS else f", or leave both out: drop={double[0]}")
        )
    wrong = next((name for name in names if len(name) > 200 or "\0" in name), None)
    if wrong is not None:
        raise DataError(
            f"{source}: the name of the column {wrong[:40]!r}... has {len(wrong)} characters; use at most 200"
        )


def _named(source: str, key: str, name: str, names: Sequence[str]) -> int:
    place = find(name, names)
    if place is None:
        raise BadOption(f"{source}: {key}={name}{nearest(name, names)}, but {columns_of(names)}; correct {key}=")
    return place


def _wanted(source: str, name: str, names: Sequence[str], kept: Sequence[int], said: list[str]) -> int:
    place = find(name, names)
    if place is None or place not in kept:
        left_out = " after drop=" if place is not None else ""
        raise BadOption(
            f"{source}: has no column {name}{left_out}{nearest(name, names) if place is None else ''}, which the "
            f"federation uses; {columns_of(names)}"
        )
    if names[place] != name:
        said.append(f"the column {names[place]!r} was used as the federation's {name!r}")
    return place


def find_label(
    source: str, names: Sequence[str], kept: Sequence[int], options: ReadOptions, wanted: Wanted
) -> int | None:
    """Return the position of the labels among ``kept``. Raises BadOption if they are required and missing."""
    name = options.label or (wanted.targets.column if wanted.targets else None)
    if name is None:
        return _usual_label(source, names, kept, wanted.labelled)
    place = find(name, names)
    if place is not None and place in kept:
        return place
    if not wanted.labelled and options.label is None:
        return None
    given = f"label={name}" if options.label else f"the federation's labels are called {name}"
    if place is not None:
        raise BadOption(f"{source}: {given}, but that column is a feature or dropped; correct label= or drop=")
    raise BadOption(f"{source}: {given}{nearest(name, names)}, but {columns_of(names)}; name the column: label=NAME")


def _usual_label(source: str, names: Sequence[str], kept: Sequence[int], labelled: bool) -> int | None:
    """Return the one column with a usual name of labels."""
    folded_names = {place: names[place].casefold() for place in kept}
    found = [place for place, name in folded_names.items() if name in LABELS]
    # Accelerometers have x, y and z; their y is not a label.
    if {"x", "y", "z"} <= set(folded_names.values()):
        found = [place for place in found if folded_names[place] != "y"]
    if len(found) > 1:
        alike = [names[place] for place in found]
        raise BadOption(
            f"{source}: {' and '.join(alike)} may each be the label; name the column, as in label={alike[0]}"
        )
    if not found and labelled:
        usual = f"{', '.join(LABELS[:-1])} or {LABELS[-1]}"
        raise BadOption(
            f"{source}: no column is called {usual}; {columns_of(names)}. Name the one with the labels: label=NAME"
            + ("; if its first line is a row, write the columns' names above it" if any(map(_is_value, names)) else "")
        )
    return found[0] if found else None


def _is_value(name: str) -> bool:
    """Return whether a column's name looks like a value of its first row; integers are usual names."""
    return number(name) is not None and not name.strip().isdecimal()


def find_person(source: str, names: Sequence[str], free: Sequence[int]) -> int | None:
    """Return the position of the column of people among ``free``. Raises BadOption if there are several."""
    found = [place for place in free if is_person(names[place])]
    if len(found) > 1:
        one, two = (names[place] for place in found[:2])
        raise BadOption(
            f"{source}: both {one} and {two} say who made a sample; leave one out, as in drop={two}, or make it a "
            f"feature: categories={two}"
        )
    return found[0] if found else None
