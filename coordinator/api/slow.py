"""A body that dribbles in keeps a connection, memory and a place in line: it is given up after a while.

Who sends has ``patience_seconds``, and for every ``bytes_per_second`` bytes that have come one second more. So a slow
link may take as long as it needs, and who stops half way, or sends a byte now and then, may not.
"""

from __future__ import annotations

import asyncio
import logging
import math

import anyio
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparrow.coordinator.settings import Settings

log = logging.getLogger(__name__)

SAY_SECONDS = 60.0
"""Slow clients are logged at most this often."""


class TooSlow(HTTPException):
    """The body did not come in time."""


class SlowBodies:
    """Middleware that ends calls whose body comes too slowly, with 408."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._patience = settings.body_patience_seconds
        self._rate = settings.body_bytes_per_second
        self._said = -math.inf
        self._ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Watch what the call receives until its body is whole."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        loop, received, whole, since = asyncio.get_running_loop(), 0, False, math.nan

        async def watched() -> Message:
            nonlocal received, whole, since
            if whole:
                return await receive()
            if math.isnan(since):
                since = loop.time()
            until = since + self._patience + received / self._rate
            message: Message | None = None
            with anyio.move_on_after(max(0.0, until - loop.time())):  # asyncio's wait_for makes a task for each piece
                message = await receive()
            if message is None:
                self._say(scope, received)
                raise TooSlow(
                    408,
                    f"only {received} bytes of the body came in {loop.time() - since:.0f} s, so it was given up; send "
                    f"it again, at {self._rate} bytes/s at least",
                    {"Connection": "close", "Retry-After": "5"},
                )
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            return message

        return await self._app(scope, watched, send)

    def _say(self, scope: Scope, received: int) -> None:
        self._ended += 1
        now = asyncio.get_running_loop().time()
        if now - self._said >= SAY_SECONDS:
            client = scope.get("client") or ("?", 0)
            log.warning(
                "slow clients: %s calls were ended whose bodies did not come in time, the last from %s after %s bytes",
                self._ended,
                client[0],
                received,
            )
            self._said, self._ended = now, 0
