"""Compressed answers (gzip) for the pages' calls, if the caller accepts them.

Models and updates would not become smaller.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

SMALLEST = 1400
"""Length from which on answers are compressed, in bytes; shorter ones fit one packet."""

LEVEL = 5
HEADERS = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}


def takes_gzip(request: Request) -> bool:
    """Return True if the caller accepts gzip."""
    return "gzip" in request.headers.get("accept-encoding", "").lower()


class PackedRoute(APIRoute):
    """Route that compresses long JSON answers."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the handler of a call."""
        answered = super().get_route_handler()

        async def packed(request: Request) -> Response:
            answer = await answered(request)
            long = answer.media_type == "application/json" and len(answer.body) >= SMALLEST
            if not long or "no-transform" in answer.headers.get("Cache-Control", ""):
                return answer
            answer.headers["Vary"] = HEADERS["Vary"]
            if takes_gzip(request):
                answer.body = await run_in_threadpool(gzip.compress, bytes(answer.body), LEVEL)
                answer.headers.update({**HEADERS, "Content-Length": str(len(answer.body))})
            return answer

        return packed


async def packed_events(events: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Yield a compressed stream, flushed after each event."""
    packer = zlib.compressobj(LEVEL, wbits=31)
    async for event in events:
        yield packer.compress(event.encode()) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()
