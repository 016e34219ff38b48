"""The page at ``/``: plain files, and a chart library out of a Python package. No build step, nothing from outside."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import Path

from sparrow.coordinator.errors import NotFound

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
OWN = Path(__file__).with_name("static")
CHARTS = "uplot-python"
"""The distribution that carries uPlot (MIT), of which nothing else is used: it is never imported."""

FROM_CHARTS = {"uPlot.js": "uplot/static/uPlot.iife.js", "uPlot.css": "uplot/static/uPlot.min.css"}

HEADERS = {
    "Cache-Control": "no-cache",  # asked each time, answered by 304 while it is the same
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def load(name: str) -> tuple[bytes, str]:
    """Return a file of the page, and its media type. Raises NotFound."""
    own = {path.name: path for path in OWN.iterdir()}
    path = _chart_file(name) if name in FROM_CHARTS else own.get(name)
    if path is None:
        raise NotFound(f"the page has no file {name!r}")
    return path.read_bytes(), MEDIA_TYPES[path.suffix.removeprefix(".")]


def _chart_file(name: str) -> Path:
    try:
        return Path(str(importlib.metadata.distribution(CHARTS).locate_file(FROM_CHARTS[name])))
    except importlib.metadata.PackageNotFoundError:
        raise NotFound(f"charts need {CHARTS}: pip install 'sparrow-fl[coordinator]'") from None
