"""Tables of printable text."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Escape unprintable characters as Python does."""
    # Untrusted text may have line breaks, terminal codes and marks that change the direction of text.
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns. head: [columns]. rows: [rows, columns]."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
