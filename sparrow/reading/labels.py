"""Labels of tables and npz files to classes or numbers.

Labels are class names: text, and integers as digits. If all labels are numbers and one has a decimal sign or exponent,
or a float type, they are the numbers of a regression. The option ``target`` and the federation's targets override this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..protocol.preparation import MOST_CLASSES, Targets
from .categories import Names
from .errors import BadOption, DataError
from .numbers import LARGEST, is_missing, number, numbers
from .samples import Kind, is_integer, some

# Most classes without target=class.
MOST_GUESSED = 1_000

# From this many rows on, mostly distinct integers may be numbers, so the kind must be given.
FEW_ROWS = 20

Cell = tuple[int, str]
"""Position of a sample, and its text."""


@dataclass
class Labels:
    """Labels of all samples."""

    decimal: str = "."
    # As names and as numbers (NaN: not a number); each stops growing once labels cannot be of that kind.
    named: Names = field(default_factory=Names)
    values: list[NDArray[np.float64]] = field(default_factory=list)
    # The first label that is neither a number nor missing.
    text: Cell | None = None
    # Whether a number is written as a float.
    decimals: bool = False
    stripped: str | None = None
    count: int = 0

    def add(self, cells: Sequence[str]) -> None:
        """Add the next samples' labels."""
        start = self.count
        self.count += len(cells)
        clean = list(map(str.strip, cells))
        if self.stripped is None and clean != list(cells):
            self.stripped = next(text for text, short in zip(cells, clean, strict=True) if text != short)
        if self.text is None:
            self._add_numbers(clean, start)
        # An empty label is not a class.
        if len(self.named.found) <= MOST_CLASSES + 1:
            self.named.add(clean, np.arange(start, self.count))

    def _add_numbers(self, cells: list[str], start: int) -> None:
        values, odd = numbers(cells, self.decimal)
        self.values.append(values)
        if odd is not None:
            first = int(odd.argmax())
            self.text = start + first, cells[first]
        if not self.decimals:
            signs = (".", "e", "E") if self.decimal == "." else (",", "e", "E")
            numeric = cells if odd is None and np.isfinite(values).all() else _numeric(cells, self.decimal)
            joined = "\n".join(numeric)
            self.decimals = any(sign in joined for sign in signs)


def _numeric(cells: Sequence[str], decimal: str) -> list[str]:
    return [text for text in cells if math.isfinite(number(text, decimal) or 0.0) and not is_missing(text)]


@dataclass(frozen=True)
class Decided:
    """Converted labels: names or float32 numbers [N]. missing: samples without a label [N], None if all have one."""

    labels: NDArray[Any]
    kind: Kind
    missing: NDArray[np.bool_] | None
    said: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """The required kind of labels, and their position for messages."""

    source: str
    # A sample's position in words.
    at: Callable[[int], str]
    target: Literal["class", "number"] | None = None
    targets: Targets | None = None
    # Classes that the file declares.
    declared: tuple[str, ...] = ()
    # Leave out samples without a label.
    drop: bool = False

    def wanted(self) -> Kind | None:
        """Return the kind that the federation or an option requires. Raises BadOption if they differ."""
        asked: Kind | None = None if self.target is None else "classes" if self.target == "class" else "numbers"
        if self.targets is None:
            return asked
        if asked not in (None, self.targets.kind):
            raise BadOption(
                f"--data: target={self.target}, but the federation's labels are {self.targets.kind}; leave target out"
            )
        return self.targets.kind


def decide(found: Labels, question: Question) -> Decided:
    """Return the labels as classes or numbers.

    Raises DataError if they do not fit the federation's targets or the options.
    """
    wanted = question.wanted()
    said = []
    if found.stripped is not None:
        said.append(f"blanks around labels were removed: {found.stripped!r} was read as {found.stripped.strip()!r}")
    if wanted is None:
        numeric = found.text is None and found.decimals and not question.declared
        wanted = "numbers" if numeric else "classes"
    if wanted == "numbers":
        values, missing = _as_numbers(found, question)
        return Decided(values, "numbers", missing, tuple(said))
    names, missing = _as_classes(found, question, said)
    return Decided(names, "classes", missing, tuple(said))


def _as_numbers(found: Labels, question: Question) -> tuple[NDArray[np.float32], NDArray[np.bool_] | None]:
    if found.text is not None:
        place, text = found.text
        advice = "the federation predicts numbers" if question.targets else "for classes, leave target=number out"
        raise DataError(f"{question.source}: {question.at(place)}: the label {text!r} is not a number; {advice}")
    values = np.concatenate(found.values)
    wrong = np.abs(values) > LARGEST
    if wrong.any():
        place = int(wrong.argmax())
        raise DataError(
            f"{question.source}: {question.at(place)}: the label {values[place]:g} is infinite or beyond float32; "
            "correct or remove it"
        )
    return values.astype(np.float32), _missing(np.isnan(values), question)


def _missing(lost: NDArray[np.bool_], question: Question) -> NDArray[np.bool_] | None:
    if not lost.any():
        return None
    if not question.drop:
        raise DataError(
            f"{question.source}: {question.at(int(lost.argmax()))}: the label is missing ({np.count_nonzero(lost):,} "
            "in all); missing=drop leaves such samples out"
        )
    return lost


def _as_classes(
    found: Labels, question: Question, said: list[str]
) -> tuple[NDArray[np.str_], NDArray[np.bool_] | None]:
    known = (question.targets.names if question.targets else ()) or question.declared
    asked = question.target is not None or question.targets is not None or bool(known)
    _check_number_of_classes(found, question, asked=asked)
    codes = found.named.codes()
    written = list(found.named.found)
    names = written
    if found.text is None and found.decimals:
        names = [
            _whole(text, place, known, found, question) for text, place in zip(names, found.named.firsts, strict=True)
        ]
        changed = next(((old, new) for old, new in zip(written, names, strict=True) if old != new), None)
        if changed:
            said.append(f"labels are classes: {changed[0]} was read as {changed[1]}")
    for text, place in zip(names, found.named.firsts, strict=True):
        if len(text) > 200 or "\0" in text:
            raise DataError(
                f"{question.source}: {question.at(place)}: the label {text[:40]!r}... is not a class name: it has "
                f"{len(text)} characters; use at most 200"
            )
    empty = found.named.found.get("")
    missing = None if empty is None else _missing(codes == empty, question)
    return np.array(names, np.str_)[codes], missing


def _check_number_of_classes(found: Labels, question: Question, *, asked: bool) -> None:
    """Refuse too many classes, or labels that may be numbers. asked: they must be classes."""
    limit = MOST_CLASSES if asked else MOST_GUESSED
    texts = [text for text in found.named.found if text]
    if len(texts) > limit:
        advice = "for numbers, add target=number" if found.text is None else "name another column: label=NAME"
        raise DataError(f"{question.source}: has more than {limit:,} different labels ({some(texts, 3)}); {advice}")
    most_differ = found.count >= FEW_ROWS and len(texts) > found.count / 2
    if most_differ and not asked and all(map(is_integer, texts)):
        raise DataError(
            f"{question.source}: the labels {some(texts, 3)} are {len(texts):,} different integers in "
            f"{found.count:,} samples; for numbers, add target=number; for classes, target=class"
        )


def _whole(text: str, place: int, known: Sequence[str], found: Labels, question: Question) -> str:
    """Return a class's name: ``1`` for ``1.0``, unless a class is named 1.0."""
    value = number(text, found.decimal)
    if text in known or value is None or math.isnan(value) or is_integer(text):
        return text
    # Infinity is not an integer either.
    if not value.is_integer():
        asks = "the federation's labels are classes" if question.targets else "for numbers, leave target=class out"
        raise DataError(f"{question.source}: {question.at(place)}: the label {text} is a fraction, not a class; {asks}")
    return str(int(value))
