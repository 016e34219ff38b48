"""Refuse callers that use another version of the HTTP contract."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from sparrow.protocol.wire import WIRE, WIRE_HEADER

from ...app import Coordinator
from ...calls.problems import STATUS, problem
from ...errors import OtherVersion
from ..headers import header
from .base import Middleware

FIRST_SLASHES = 3
_HEADER = WIRE_HEADER.lower().encode()


class Versions(Middleware):
    """Answer 400 to a caller that names another version, and to devices of Sparrow too old to name one."""

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        # Health checks and requests for the pages and their files name no version.
        if not scope["path"].startswith("/v1/"):
            return await self._app(scope, receive, send)
        named = header(scope, _HEADER)
        if named == str(WIRE) or (named is None and not _is_old_device(scope)):
            return await self._app(scope, receive, send)
        used = "none" if named is None else f"{named[:20]!r}"
        detail = (
            f"the caller names {used} as its version of the HTTP contract, this coordinator uses {WIRE}; upgrade the "
            f"older Sparrow (other clients send {WIRE_HEADER}: {WIRE})"
        )
        return await problem(STATUS[OtherVersion], OtherVersion.__name__, detail)(scope, receive, send)


def _is_old_device(scope: Scope) -> bool:
    """Return whether a first call, such as ``/v1/federations/NAME``, has the headers of devices without a version."""
    agent = header(scope, b"user-agent") or ""
    first = scope["path"].count("/") <= FIRST_SLASHES
    return first and agent.startswith("python-httpx") and header(scope, b"accept-encoding") == "identity"
