"""Publications and test data that arrive in parts, for proxies that limit the length of a body.

    POST /v1/federations/from-model     Sparrow-Body-SHA256: D, Content-Range: bytes FIRST-LAST/TOTAL

Each part except the last is answered with 202 and the number of bytes received. A part may be sent again. Parts are
files named by digest in a folder that all processes of a machine share; they are removed an hour after their last byte.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from pathlib import Path

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from ..errors import BadContent, LengthRequired, TooLarge, Unavailable, WrongRange
from ..storage.blobs import make_folder, private
from ..storage.store import Store
from .bodies import read_body

DIGEST_HEADER = "Sparrow-Body-SHA256"
KEEP_SECONDS = 3600.0
AT_ONCE = 8
"""Largest number of incomplete bodies."""


class Parts:
    """Incomplete bodies of admins, as files in ``folder``."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder = folder
        self._store = store
        self._lock = threading.Lock()

    async def receive(self, request: Request, limit: int) -> bytes | int:
        """Return a whole body, or the number of bytes received so far if more parts are to follow.

        Raises LengthRequired, TooLarge, BadContent, WrongRange, Unavailable.
        """
        if "content-range" not in request.headers:
            return await read_body(request, limit)
        asked = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", request.headers["content-range"])
        digest = request.headers.get(DIGEST_HEADER, "")
        if asked is None or not re.fullmatch("[0-9a-f]{64}", digest):
            raise BadContent(f"Content-Range: send bytes FIRST-LAST/TOTAL, with the body's SHA-256 in {DIGEST_HEADER}")
        first, last, total = map(int, asked.groups())
        if total > limit:
            raise TooLarge(f"the body has {total} bytes, nothing valid here is longer than {limit}")
        if not first <= last < total:
            raise WrongRange("Content-Range: send a range within the body")
        part = await read_body(request, last + 1 - first)
        if len(part) != last + 1 - first:
            raise LengthRequired("Content-Length must be the length of Content-Range; send both")
        return await run_in_threadpool(self._add, digest, first, total, part)

    def _add(self, digest: str, first: int, total: int, part: bytes) -> bytes | int:
        path = self._folder / f"{digest}.{total}.part"
        with self._lock, self._store.troubles.of_blobs(len(part)):
            self._sweep()
            received = path.stat().st_size if path.exists() else 0
            if first > received:
                raise WrongRange(f"{received} bytes of this body have arrived; continue with the next byte")
            if not received and len(list(self._folder.glob("*.part"))) >= AT_ONCE:
                raise Unavailable("too many bodies are being sent in parts; retry later")
            make_folder(self._folder)
            with os.fdopen(private(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
                file.seek(first)
                file.write(part)
                file.truncate()
                if first + len(part) < total:
                    return first + len(part)
                file.seek(0)
                body = file.read()
            path.unlink(missing_ok=True)
        if hashlib.sha256(body).hexdigest() != digest:
            raise WrongRange("the body does not match its announced digest; send it again from its first byte")
        return body

    def _sweep(self) -> None:
        """Remove abandoned bodies."""
        for path in self._folder.glob("*.part"):
            if time.time() - path.stat().st_mtime > KEEP_SECONDS:
                path.unlink(missing_ok=True)
