"""The page that is a device, at ``/join/FEDERATION``: plain files without a build step.

``static/join.html`` and ``page.js`` are its screen; ``worker.js`` behind it is the device, whose modules are named like
those of the SDK that they translate. It trains with onnxruntime-web (``runtime``).
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
}
OWN = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
    "style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
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
"""For what changes under the same address: answered by 304 while it is the same."""


@dataclass(frozen=True)
class File:
    """A file for browsers. packed: its bytes in gzip."""

    packed: bytes
    media_type: str

    def body(self, *, packed: bool) -> tuple[bytes, dict[str, str]]:
        """Return its bytes, in gzip for a caller who takes that, and the headers that say so."""
        if packed:
            return self.packed, {"Content-Encoding": "gzip"}
        return self.plain, {}

    @property
    def plain(self) -> bytes:
        """Its bytes as they are."""
        return gzip.decompress(self.packed)

    def filled(self, **values: str) -> File:
        """Return the same file with ``{name}`` replaced by text that is escaped for HTML."""
        text = self.plain.decode()
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", escape(value))
        return File(gzip.compress(text.encode(), mtime=0), self.media_type)


def read(folder: Path, name: str) -> File:
    """Return a file in a folder of files for browsers. Raises NotFound."""
    path = {path.name: path for path in folder.iterdir()}.get(name)
    if path is None:
        raise NotFound(f"the page has no file {name!r}")
    return File(gzip.compress(path.read_bytes(), mtime=0), MEDIA_TYPES[path.suffix])


@cache
def load(name: str) -> File:
    """Return a file of the page. Raises NotFound."""
    return read(OWN, name)
