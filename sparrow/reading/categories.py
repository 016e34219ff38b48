"""Names in a table's columns, converted to indices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..protocol.preparation import MOST_CATEGORIES, UNKNOWN
from .numbers import is_missing
from .samples import class_order, plural, some

# Maximum number of names of a column that counts as categories without an option; also at most a fifth of the rows.
FEW = 50

_TRUTHS = frozenset(("true", "false"))


@dataclass
class Names:
    """Stripped texts of a column, numbered in the order of their first row."""

    found: dict[str, int] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=list)
    blocks: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, cells: Iterable[str], lines: NDArray[np.int64]) -> None:
        """Add a block's cells."""
        clean = list(map(str.strip, cells))
        for text in dict.fromkeys(clean):
            if text not in self.found:
                self.found[text] = len(self.found)
                self.firsts.append(int(lines[clean.index(text)]))
        self.blocks.append(np.fromiter(map(self.found.__getitem__, clean), np.int32, len(clean)))

    def codes(self) -> NDArray[np.int32]:
        """Return the number of each row's text."""
        return np.concatenate(self.blocks)

    def texts(self) -> NDArray[np.str_]:
        """Return each row's text."""
        return np.array(list(self.found), np.str_)[self.codes()]

    def values(self) -> list[str]:
        """Return the distinct texts that are not missing; case does not count for true and false."""
        names = [name for name in self.found if not is_missing(name)]
        if all(name.casefold() in _TRUTHS for name in names):
            return list(dict.fromkeys(name.casefold() for name in names))
        return names

    def too_many(self, rows: int, *, asked: bool) -> str | None:
        """Return the reason why these are not categories of a column of ``rows``, or None.

        asked: whether an option requests categories.
        """
        names = self.values()
        long = next((name for name in names if len(name) > 200 or "\0" in name), None)
        if long is not None:
            return f"a text of {len(long)} characters"
        if asked:
            return f"more than {MOST_CATEGORIES:,} different texts" if len(names) > MOST_CATEGORIES else None
        if len(names) > FEW:
            return f"more than {FEW} different texts"
        if len(names) * 5 > rows and not _TRUTHS.issuperset(names):
            return f"{plural(len(names), 'different text')} in {plural(rows, 'row')}"
        return None

    def indices(self, known: tuple[str, ...]) -> tuple[NDArray[np.float32], str | None]:
        """Return each row's index among the ``known`` names (-1: unknown or missing), and a remark on unknown ones."""
        place = {name: index for index, name in enumerate(known)}
        table = np.array([_index(text, place) for text in self.found], np.float32)
        codes = self.codes()
        unknown = [number for text, number in self.found.items() if table[number] == UNKNOWN and not is_missing(text)]
        if not unknown:
            return table[codes], None
        count = Counter(codes[np.isin(codes, unknown)].tolist())
        names = list(self.found)
        return table[codes], some(f"{names[number]} ({times:,} times)" for number, times in count.most_common())

    def missing(self, known: tuple[str, ...]) -> int:
        """Return the number of rows without a name; the ``known`` names never count as missing."""
        codes = [number for text, number in self.found.items() if is_missing(text) and text not in known]
        return int(np.isin(self.codes(), codes).sum())

    def ordered(self) -> tuple[str, ...]:
        """Return the categories in order."""
        return class_order(self.values())


def _index(text: str, place: dict[str, int]) -> int:
    if text in place:
        return place[text]
    if text.casefold() in _TRUTHS:
        return place.get(text.casefold(), UNKNOWN)
    return UNKNOWN
