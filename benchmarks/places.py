"""The places of measurements: rows in ``benchmarks/rows``, pages in ``docs/results``."""

from __future__ import annotations

import re
from pathlib import Path

from sparrow.bench import rows
from sparrow.bench.rows import Recorded

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = DOCS / "results"
ROWS = ROOT / "benchmarks" / "rows"
LARGEST = 200_000
"""Bytes of a file of rows that is committed as it is; larger ones are compressed."""


FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#", re.MULTILINE)


def write_section(page: str, name: str, text: str) -> None:
    """Replace a section of a page of results with a text, whose headings go one level down.

    The section stands between ``<!-- section: NAME -->`` and ``<!-- end of NAME -->``.
    """
    path = PAGES / f"{page}.md"
    before, start, rest = path.read_text().partition(f"<!-- section: {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not start or not end:
        raise SystemExit(f"{path} has no section {name}; add its two markers")
    path.write_text(f"{before}{start}{lowered(text)}{end}{after}")


def lowered(text: str) -> str:
    """Return a text for a section: headings one level down, with an empty line around it."""
    parts = FENCED.split(text)
    inside = "".join(HEADING.sub("##", part) if index % 2 == 0 else part for index, part in enumerate(parts))
    return f"\n{inside.strip()}\n\n"


def keep(path: Path, recorded: Recorded) -> None:
    """Append a trial's rows to a file that is committed."""
    rows.append(path, recorded)
    compress(path)


def compress(path: Path) -> None:
    """Store a file of rows compressed if it is large."""
    if path.exists() and path.stat().st_size > LARGEST:
        rows.write_gzip(path.with_name(path.name + rows.GZIP), path.read_bytes())
        path.unlink()
