"""Counts of numbers and texts in a table's column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .numbers import LARGEST, looks_like_number, numbers

Cells = Sequence[str] | NDArray[np.float64]


class Cell(NamedTuple):
    """A cell that a message names."""

    line: int
    text: str


@dataclass
class Tally:
    """Counts of a column's cells so far, and the first of each kind."""

    decimal: str
    # Converted cells.
    numbers: int = 0
    # Numbers with another decimal sign or with separators.
    alike: int = 0
    # Other cells that are not missing.
    texts: int = 0
    missing: int = 0
    first_text: Cell | None = None
    first_missing: Cell | None = None
    # The first that is infinite or too large for float32.
    beyond: Cell | None = None
    # The kind of the first row.
    head: Literal["number", "text", "nothing"] | None = None

    def add(self, cells: Cells, lines: NDArray[np.int64]) -> NDArray[np.float64]:
        """Count a block's cells; return their numbers, NaN for others."""
        odd: NDArray[np.bool_] | None = None
        if isinstance(cells, np.ndarray):
            values = cells
        else:
            values, odd = numbers(cells, self.decimal)
        missing = np.isnan(values)
        if odd is not None:
            missing &= ~odd
            self._add_texts([str(cells[place]).strip() for place in np.flatnonzero(odd).tolist()])
            self.first_text = self.first_text or _first(cells, lines, odd)
        lost = int(np.count_nonzero(missing))
        if lost:
            self.first_missing = self.first_missing or _first(cells, lines, missing)
        beyond = np.abs(values) > LARGEST
        if self.beyond is None and beyond.any():
            self.beyond = _first(cells, lines, beyond)
        if self.head is None:
            word = odd is not None and odd[0] and _is_word(str(cells[0]).strip())
            self.head = "nothing" if missing[0] else "text" if word else "number"
        self.missing += lost
        self.numbers += len(values) - lost - (0 if odd is None else int(np.count_nonzero(odd)))
        return values

    def _add_texts(self, texts: Sequence[str]) -> None:
        for text, count in Counter(texts).items():
            if looks_like_number(text):
                self.alike += count
            else:
                self.texts += count

    @property
    def numeric(self) -> bool:
        """Return whether most of the column's values are numbers."""
        return self.numbers + self.alike >= self.texts

    @property
    def empty(self) -> bool:
        """Return True if the column is empty."""
        return self.numbers + self.alike + self.texts == 0


def _is_word(text: str) -> bool:
    return not looks_like_number(text) and not text[:1].isdigit()


def _first(cells: Cells, lines: NDArray[np.int64], where: NDArray[np.bool_]) -> Cell:
    place = int(where.argmax())
    return Cell(int(lines[place]), str(cells[place]).strip())
