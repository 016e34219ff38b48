"""Refuse calls with a NUL in their address or headers, because PostgreSQL cannot store it."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from ...app import Coordinator
from ...calls.problems import problem
from .base import Middleware


class PlainText(Middleware):
    """Answer 422 to a call with a NUL in its address or headers."""

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        if _has_nul(scope):
            detail = "the address or a header contains a NUL character; leave it out"
            return await problem(422, "BadContent", detail)(scope, receive, send)
        return await self._app(scope, receive, send)


def _has_nul(scope: Scope) -> bool:
    query: bytes = scope["query_string"]
    if "\0" in scope["path"] or b"%00" in query or b"\0" in query:
        return True
    return any(b"\0" in value for _, value in scope["headers"])
