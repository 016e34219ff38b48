"""Cells of a table to numbers, one block of a column at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Cells without a value, in lower case.
MISSING = frozenset(("", "?", "na", "n/a", "nan", "null", "none", "-"))

LARGEST = float(np.finfo(np.float32).max)

_GROUPED = re.compile(
    r"[+-]?[0-9]{1,3}(?:(?P<mark>[ \u00a0\u2009\u202f'\u2019.,])[0-9]{3})(?:(?P=mark)[0-9]{3})*([.,][0-9]+)?"
)
_DECIMAL = {
    ".": re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ",": re.compile(r"[+-]?(?:[0-9]+,[0-9]*|,[0-9]+)(?:[eE][+-]?[0-9]+)?"),
}


def is_missing(text: str) -> bool:
    """Return whether a cell marks a missing value."""
    return text.strip().lower() in MISSING


def is_decimal(text: str, sign: str) -> bool:
    """Return whether the text is a number written with this decimal sign."""
    return _DECIMAL[sign].fullmatch(text) is not None


def is_grouped(text: str) -> bool:
    """Return whether the text looks like a number with a thousands separator."""
    return _GROUPED.fullmatch(text) is not None


def looks_like_number(text: str) -> bool:
    """Return whether the text is a number in any notation, with another decimal sign or with separators."""
    return is_grouped(text) or is_decimal(text, ".") or is_decimal(text, ",")


def number(text: str, decimal: str = ".") -> float | None:
    """Return a cell's number; NaN if it is missing, None if it is text."""
    if is_missing(text):
        return math.nan
    if "_" in text or (decimal == "," and "." in text):
        return None
    try:
        return float(text.replace(",", ".") if decimal == "," else text)
    except ValueError:
        return None


def numbers(cells: Sequence[str], decimal: str = ".") -> tuple[NDArray[np.float64], NDArray[np.bool_] | None]:
    """Return the cells' numbers, NaN for others, and a mask of the texts (None without any)."""
    # A block of plain numbers is converted as a whole; otherwise each distinct text is converted once.
    try:
        return _plain(cells, decimal), None
    except ValueError:
        pass
    table = {text: number(text, decimal) for text in set(cells)}
    odd = [text for text, value in table.items() if value is None]
    values = {text: math.nan if value is None else value for text, value in table.items()}
    found = np.fromiter(map(values.__getitem__, cells), np.float64, len(cells))
    if not odd:
        return found, None
    return found, np.fromiter(map(set(odd).__contains__, cells), np.bool_, len(cells))


def _plain(cells: Sequence[str], decimal: str) -> NDArray[np.float64]:
    joined = "\n".join(cells)
    # Python's float accepts 1_000, and "1.234" has no decimal comma.
    if "_" in joined or (decimal == "," and "." in joined):
        raise ValueError
    if decimal == ",":
        cells = joined.replace(",", ".").split("\n")
    return np.fromiter(map(float, cells), np.float64, len(cells))
