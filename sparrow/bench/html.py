"""Convert result pages to HTML."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}"
    "td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:left}th{background:#f5f5f5}"
    "img{max-width:100%}code{background:#f3f3f3;padding:.1em .3em}"
)


def write_html(page: Path) -> Path:
    """Write a page as one HTML file in the same folder, with embedded pictures; return the file.

    Supports only headings, lists, tables, paragraphs, and pictures in the same folder.
    """
    lines = page.read_text().splitlines()
    body = "\n".join(_blocks(lines, page.parent))
    title = html.escape(lines[0].lstrip("# "))
    path = page.with_suffix(".html")
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )
    return path


def _blocks(lines: Sequence[str], folder: Path) -> Iterator[str]:
    for kind, group in groupby(lines, _kind):
        texts = list(group)
        if kind == "#":
            for text in texts:
                level = len(text) - len(text.lstrip("#"))
                yield f"<h{level}>{_inline(text.lstrip('# '), folder)}</h{level}>"
        elif kind == "-":
            yield f"<ul>{''.join(f'<li>{_inline(text[2:], folder)}</li>' for text in texts)}</ul>"
        elif kind == "|":
            head, _, *rows = [[cell.strip() for cell in text.strip("|").split("|")] for text in texts]
            body = "".join(_row(row, "td", folder) for row in rows)
            yield f"<table>{_row(head, 'th', folder)}{body}</table>"
        elif kind:
            yield f"<p>{_inline(' '.join(texts), folder)}</p>"


def _kind(line: str) -> str:
    return line[0] if line[:1] in ("#", "|") else "-" if line.startswith("- ") else "p" if line.strip() else ""


def _row(cells: Sequence[str], tag: str, folder: Path) -> str:
    return f"<tr>{''.join(f'<{tag}>{_inline(cell, folder)}</{tag}>' for cell in cells)}</tr>"


def _inline(text: str, folder: Path) -> str:
    def picture(found: re.Match[str]) -> str:
        content = base64.b64encode((folder / found[2]).read_bytes()).decode()
        return f'<img alt="{found[1]}" src="data:image/png;base64,{content}">'

    text = html.escape(text)
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]*)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"(?<!\w)\*([^*]+)\*(?!\w)", r"<i>\1</i>", text)
    text = re.sub(r"!\[([^]]*)\]\(([^)]*\.png)\)", picture, text)
    return re.sub(r"(?<!!)\[([^]]*)\]\(([^)]*)\)", r'<a href="\2">\1</a>', text)
