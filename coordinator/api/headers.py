"""uvicorn's HTTP protocol with a limit that it lacks: the time in which the head of a request must arrive.

    uvicorn coordinator.main:app --http coordinator.api.headers:TimedHeaders

Without it, connections whose heads never end stay open for ever, and there may be no more of them than files that the
process may open. ``--timeout-keep-alive`` ends connections that are idle between requests.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

HEAD_SECONDS = 20.0
"""From the connection, or a request's first byte, to the end of its headers."""


class TimedHeaders(HttpToolsProtocol):
    """Closes connections on which a request's head takes longer than ``HEAD_SECONDS``."""

    head_seconds = HEAD_SECONDS
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the limit for the head of the first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the limit."""
        self._have_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start the limit at a request's first byte; an idle connection has another limit."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """Cancel the limit, since the head has arrived."""
        self._have_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._have_head()
        self._limit = self.loop.call_later(self.head_seconds, self._give_up)

    def _have_head(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _give_up(self) -> None:
        log.info("a connection from %s was closed: no whole request head in %g s", self.client, self.head_seconds)
        self.transport.close()
