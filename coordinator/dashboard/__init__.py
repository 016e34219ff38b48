"""The page at ``/``: plain files, uPlot's two (MIT, 1.6.32, as published) among them. There is no build step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from sparrow.coordinator.errors import NotFound

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}
OWN = Path(__file__).with_name("static")
HEADERS = {
    "Cache-Control": "no-cache",  # asked each time, answered by 304 while it is the same
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def load(name: str) -> tuple[bytes, str]:
    """Return a file of the page and its media type. Raises NotFound."""
    path = {path.name: path for path in OWN.iterdir()}.get(name)
    if path is None:
        raise NotFound(f"the page has no file {name!r}")
    return path.read_bytes(), MEDIA_TYPES[path.suffix.removeprefix(".")]
