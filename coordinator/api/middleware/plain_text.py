"""Calls whose address or headers hold a NUL are refused: PostgreSQL stores no such text, and no honest call has any.

Bodies are looked at where they are read: the messages of ``sparrow.protocol`` refuse it in each of their texts.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from ...app import Coordinator
from ...calls.problems import problem
from .base import Middleware


class PlainText(Middleware):
    """Answers 422 to such calls."""

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        if _has_nul(scope):
            what = "the address or a header holds a NUL character, which no text here may; leave it out"
            return await problem(422, "BadContent", what)(scope, receive, send)
        return await self._app(scope, receive, send)


def _has_nul(scope: Scope) -> bool:
    query: bytes = scope["query_string"]
    if "\0" in scope["path"] or b"%00" in query or b"\0" in query:
        return True
    return any(b"\0" in value for _, value in scope["headers"])
