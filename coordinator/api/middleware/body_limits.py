"""Limits of the length and the transfer time of bodies.

In each interval of ``patience_seconds``, at least ``bytes_per_second`` bytes per second must arrive. The total time is
not limited.
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
"""Shortest time between two log lines about slow clients."""

SMALL_REQUEST = 16 * 1024
"""Longest body, in bytes, that the framework reads before the caller is checked."""

READS_ITSELF = re.compile(
    r"POST /v1/federations(/from-model|/[^/]+/model/evaluation)?|PATCH /v1/federations/[^/]+/model"
    r"|PUT /v1/assignments/[^/]+/update"
)
"""Calls whose handlers read the body with ``read_body`` after they have checked the caller."""


class TooSlow(RequestError, HTTPException):
    """The body did not arrive in time.

    It is an HTTPException as well, because FastAPI passes on no other error.
    """

    def __init__(self, detail: str) -> None:
        HTTPException.__init__(self, 408, detail, {"Connection": "close", "Retry-After": "5"})


class SmallBodies(Middleware):
    """Refuse long bodies of calls that the framework reads itself, before the caller is checked.

    ``read_body`` reads updates, new federations, models and test data of known callers, with separate limits.
    """

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        # The server enforces the declared length.
        if READS_ITSELF.fullmatch(f"{scope['method']} {scope['path']}"):
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers:
            answer = problem(
                411, "LengthRequired", "declare the body's length: send Content-Length, not a chunked body"
            )
        elif not 0 <= _declared(headers) <= SMALL_REQUEST:
            answer = problem(413, "TooLarge", f"the body is too long; send at most {SMALL_REQUEST} bytes")
        else:
            return await self._app(scope, receive, send)
        return await answer(scope, receive, send)


def _declared(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() and len(text) <= 18 else -1


class SlowBodies(Middleware):
    """End calls whose body arrives too slowly, with 408."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._logged_at = -math.inf
        self._ended = 0

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        patience = coordinator.settings.body_patience_seconds
        rate = coordinator.settings.body_bytes_per_second
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
            # asyncio's wait_for would create a task for each piece.
            with anyio.move_on_after(max(0.0, since + patience - loop.time())):
                message = await receive()
            if message is None:
                self._log(scope, received)
                raise TooSlow(
                    f"the body arrives too slowly: {lately} bytes in {loop.time() - since:.0f} s; send it again, at "
                    f"{rate:g} bytes/s or more"
                )
            size = len(message.get("body", b""))
            received += size
            lately += size
            if lately >= rate * patience:
                lately = 0
                since = loop.time()
            whole = not message.get("more_body", False)
            return message

        return await self._app(scope, timed, send)

    def _log(self, scope: Scope, received: int) -> None:
        self._ended += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_SECONDS:
            client = scope.get("client") or ("?", 0)
            log.warning(
                "slow clients: ended %s calls whose bodies were too slow, the last from %s after %s bytes",
                self._ended,
                client[0],
                received,
            )
            self._logged_at = now
            self._ended = 0
