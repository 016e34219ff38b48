"""Limits of bodies: how long they may be, and how slowly they may come.

A body that comes slowly keeps a connection, memory and a place in line. In every ``patience_seconds`` as many bytes
must come as ``bytes_per_second`` says, however many have come before. So a slow link may take as long as it needs, and
a sender that stops, be it at the last byte, or sends a byte now and then, is ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re

import anyio
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...app import Coordinator
from ...calls.problems import problem
from ...errors import RequestError
from .base import Middleware

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0
"""Slow clients are logged at most this often."""

SMALL_REQUEST = 16 * 1024
"""Longest body, in bytes, of calls whose body the framework reads and decodes before the caller is checked."""

READS_ITSELF = re.compile(
    r"POST /v1/federations(/from-model|/[^/]+/model/evaluation)?|PATCH /v1/federations/[^/]+/model"
    r"|PUT /v1/assignments/[^/]+/update"
)
"""Calls whose handlers read the body with ``read_body``, once they know who is calling."""


class TooSlow(RequestError, HTTPException):
    """The body did not arrive in time.

    It is an HTTPException as well: FastAPI, which reads small bodies itself, passes no other error on.
    """

    def __init__(self, detail: str) -> None:
        HTTPException.__init__(self, 408, detail, {"Connection": "close", "Retry-After": "5"})


class SmallBodies(Middleware):
    """Refuses long bodies where the framework reads them itself, before the caller is checked.

    Updates, new federations, models and test data are read with ``read_body``, by callers that are known, up to limits
    of their own.
    """

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        # The server sees to it that the declared length is kept.
        if READS_ITSELF.fullmatch(f"{scope['method']} {scope['path']}"):
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers:
            answer = problem(
                411, "LengthRequired", "declare the body's length: send Content-Length, not a chunked body"
            )
        elif not 0 <= _declared(headers) <= SMALL_REQUEST:
            answer = problem(413, "TooLarge", f"nothing valid here is longer than {SMALL_REQUEST} bytes; send less")
        else:
            return await self._app(scope, receive, send)
        return await answer(scope, receive, send)


def _declared(headers: dict[bytes, bytes]) -> int:
    """Return the length that a call declares; -1 for one that is no number."""
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() and len(text) <= 18 else -1


class SlowBodies(Middleware):
    """Ends calls whose body comes too slowly, with 408."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._logged_at = -math.inf
        self._ended = 0

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        patience, rate = coordinator.settings.body_patience_seconds, coordinator.settings.body_bytes_per_second
        loop = asyncio.get_running_loop()
        received = 0
        lately = 0
        whole = False
        since = math.nan

        async def timed() -> Message:
            nonlocal received, lately, whole, since
            if whole:
                return await receive()
            if math.isnan(since):
                since = loop.time()
            message: Message | None = None
            # asyncio's wait_for makes a task for each piece
            with anyio.move_on_after(max(0.0, since + patience - loop.time())):
                message = await receive()
            if message is None:
                self._log(scope, received)
                raise TooSlow(
                    f"only {lately} bytes of the body came in {loop.time() - since:.0f} s, so it was given up; send it "
                    f"again, at {rate:g} bytes/s at least"
                )
            size = len(message.get("body", b""))
            received, lately = received + size, lately + size
            if lately >= rate * patience:
                lately, since = 0, loop.time()
            whole = not message.get("more_body", False)
            return message

        return await self._app(scope, timed, send)

    def _log(self, scope: Scope, received: int) -> None:
        self._ended += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_SECONDS:
            client = scope.get("client") or ("?", 0)
            log.warning(
                "slow clients: %s calls were ended whose bodies did not come in time, the last from %s after %s bytes",
                self._ended,
                client[0],
                received,
            )
            self._logged_at, self._ended = now, 0
