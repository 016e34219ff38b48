"""Compressed answers (gzip) of the calls that people's pages make, where their caller says that it takes them.

Models and updates are not compressed: their values do not become smaller.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

SMALLEST = 1400
"""Shorter answers, in bytes, fit one packet as they are."""

LEVEL = 5
HEADERS = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}


def takes_gzip(request: Request) -> bool:
    """Return whether the caller takes compressed answers."""
    return "gzip" in request.headers.get("accept-encoding", "").lower()


class PackedRoute(APIRoute):
    """A route whose long JSON answers are compressed."""

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
    """Yield a stream compressed, each event complete as it comes."""
    packer = zlib.compressobj(LEVEL, wbits=31)
    async for event in events:
        yield packer.compress(event.encode()) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()
