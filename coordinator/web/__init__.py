"""The device page at ``/join/FEDERATION``: static files without a build step.

``static/join.html`` and ``page.js`` are the user interface. ``worker.js`` is the device; its modules have the names of
the corresponding SDK modules. It trains with onnxruntime-web (``runtime``).
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from ..errors import NotFound

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
}
OWN = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
    "style-src 'self'; connect-src 'self'; manifest-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    # Isolated from other origins, a page may use several threads.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(self), accelerometer=(self), gyroscope=(self), "
    "screen-wake-lock=(self), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}
ASKED_EACH_TIME = "no-cache"
"""Cache-Control of files that may change: browsers revalidate, and get 304 if they are unchanged."""


@dataclass(frozen=True)
class File:
    """A file for browsers."""

    # Its bytes in gzip.
    packed: bytes
    media_type: str

    def body(self, *, packed: bool) -> tuple[bytes, dict[str, str]]:
        """Return the bytes, in gzip if the caller takes it, and the header of the encoding."""
        if packed:
            return self.packed, {"Content-Encoding": "gzip"}
        return self.plain, {}

    @property
    def plain(self) -> bytes:
        """The uncompressed bytes."""
        return gzip.decompress(self.packed)

    def filled(self, **values: str) -> File:
        """Return a copy with each ``{name}`` replaced by HTML-escaped text."""
        text = self.plain.decode()
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", escape(value))
        return File(gzip.compress(text.encode(), mtime=0), self.media_type)


def read(folder: Path, name: str) -> File:
    """Return a file in a folder of static files. Raises NotFound."""
    path = {path.name: path for path in folder.iterdir()}.get(name)
    if path is None:
        raise NotFound(f"the page has no file {name!r}; reload the page")
    return File(gzip.compress(path.read_bytes(), mtime=0), MEDIA_TYPES[path.suffix])


@cache
def load(name: str) -> File:
    """Return a file of the page. Raises NotFound."""
    return read(OWN, name)
