"""Bodies of requests and answers: bounded reads, and byte ranges that resume a broken download."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Any

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..errors import BadContent, LengthRequired, TooLarge
from .problems import problem

LARGEST_REQUEST = 64 * 1024
"""Longest JSON body, in bytes, because the validation of 80,000 wrong fields, in 1 MiB, takes half a second."""

PART_BYTES = 256 * 1024
"""Size of the slices, not copied, in which a long answer goes to the server."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body, of at most ``limit`` bytes and a declared length.

    Raises LengthRequired, TooLarge, BadContent.
    """
    declared = request.headers.get("content-length")
    if declared is None or not declared.isdigit():
        raise LengthRequired("declare the body's length: send Content-Length, not a chunked body")
    if int(declared) > limit:
        raise TooLarge(f"the body has {declared} bytes; it must have at most {limit}: send only the masked values")
    try:
        parts = [part async for part in request.stream()]
    except ClientDisconnect:
        # Not an error of the coordinator, and the answer reaches no caller.
        raise BadContent("the connection broke before the body was complete; send it again") from None
    return b"".join(parts)


class Downloads:
    """Bodies being downloaded, of at most ``limit`` bytes in total; a body with several callers counts once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._callers: Counter[int] = Counter()

    def has_room(self, body: bytes | memoryview) -> bool:
        """Return True if another caller may download this body."""
        key, size = _identity(body)
        return key in self._callers or not self._bytes or self._bytes + size <= self._limit

    def take(self, body: bytes | memoryview) -> bool:
        """Count another caller of this body; return False if there is no room."""
        if not self.has_room(body):
            return False
        key, size = _identity(body)
        if key not in self._callers:
            self._bytes += size
        self._callers[key] += 1
        return True

    def give_back(self, body: bytes | memoryview) -> None:
        """Release a caller's share."""
        key, size = _identity(body)
        self._callers[key] -= 1
        if not self._callers[key]:
            del self._callers[key]
            self._bytes -= size


def _identity(body: bytes | memoryview) -> tuple[int, int]:
    """Return the id and size of the buffer that holds the body."""
    whole = body.obj if isinstance(body, memoryview) else body
    return id(whole), memoryview(whole).nbytes


class InParts(Response):
    """Body that is sent in slices as fast as the caller reads; the server would copy all of it at once."""

    def __init__(self, body: bytes | memoryview, downloads: Downloads, *, first: bytes = b"", **named: Any) -> None:
        super().__init__(body, **named)
        self._downloads = downloads
        self._first = first
        if first:
            self.headers["content-length"] = str(len(first) + len(body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body, or 503 if there is no room for it."""
        if not self._downloads.take(self.body):
            detail = "too many downloads are in progress; try again after the seconds in Retry-After"
            return await problem(503, "Unavailable", detail, {"Retry-After": "5"})(scope, receive, send)
        body = memoryview(self.body)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            for start in range(0, len(body), PART_BYTES):
                await send({"type": "http.response.body", "body": body[start : start + PART_BYTES], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._downloads.give_back(self.body)


def ranged(request: Request, body: bytes, media_type: str, digest: str | None = None) -> Response:
    """Return ``body`` with its ETag: in full, the requested range, or 304 if the caller has it.

    digest: its SHA-256, if known.
    """
    etag = f'"{digest or hashlib.sha256(body).hexdigest()}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes"}
    downloads: Downloads = request.app.state.coordinator.downloads
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    asked = re.fullmatch(r"bytes=(\d{1,18})-(\d{0,18})", request.headers.get("range", ""))
    if asked is None or request.headers.get("if-range", etag) != etag:
        return InParts(body, downloads, media_type=media_type, headers=headers)
    first = int(asked[1])
    last = min(int(asked[2]) if asked[2] else len(body) - 1, len(body) - 1)
    if first >= len(body) or first > last:
        detail = f"the body has {len(body)} bytes; request a range that begins before its end"
        return problem(416, "RangeNotSatisfiable", detail, {**headers, "Content-Range": f"bytes */{len(body)}"})
    headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
    wanted = memoryview(body)[first : last + 1]
    return InParts(wanted, downloads, status_code=206, media_type=media_type, headers=headers)
