"""Tables of printable text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone


def printable(text: str) -> str:
    """Escape unprintable characters as Python does."""
    # Untrusted text may have line breaks, terminal codes and marks that change the direction of text.
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def percent(share: float, digits: int = 1) -> str:
    """Return a share as per cent."""
    return f"{100 * share:.{digits}f} %"


def moment(text: str) -> str:
    """Return a time in ISO 8601 in seconds of UTC, such as 2026-11-29T01:03:30Z."""
    when = datetime.fromisoformat(text).astimezone(timezone.utc)
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns. head: [columns]. rows: [rows, columns]."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
