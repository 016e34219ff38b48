"""Rows as a table of text, of characters that a terminal prints."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Return text with each character that is not printable written as an escape, as Python does (of a line break: two
    characters). Text of others may hold line breaks, terminal codes, and marks that turn the direction of text."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart; ``head`` [columns] comes first, ``rows`` are as long."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
