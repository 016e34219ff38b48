"""The page at ``/``: plain files, uPlot's two (MIT, 1.6.32, as published) among them. There is no build step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .. import web

OWN = Path(__file__).with_name("static")
HEADERS = {
    "Cache-Control": "no-cache",  # asked each time, answered by 304 while it is the same
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}


@cache
def load(name: str) -> web.File:
    """Return a file of the page. Raises NotFound."""
    return web.read(OWN, name)
