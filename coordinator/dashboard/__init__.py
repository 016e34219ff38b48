"""The page at ``/``: static files, including uPlot 1.6.32 (MIT, unmodified), without a build step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .. import web

OWN = Path(__file__).with_name("static")
HEADERS = {
    # Browsers revalidate each time, and get 304 if the file is unchanged.
    "Cache-Control": "no-cache",
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
