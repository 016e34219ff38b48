"""Refuse calls that a browser makes for a page of another site."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from ...app import Coordinator
from ...calls.problems import problem
from ..headers import header
from .base import Middleware

SAFE = ("GET", "HEAD", "OPTIONS")
CROSS_SITE = "pages of other sites may not make this call; use the coordinator's own page, or send a Bearer token"


class CrossSite(Middleware):
    """Answer 403 to a call that changes something and comes from a page of another host or origin."""

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        if _from_another_site(scope):
            return await problem(403, "CrossSite", CROSS_SITE)(scope, receive, send)
        return await self._app(scope, receive, send)


def _from_another_site(scope: Scope) -> bool:
    # The browser adds the session by itself, or no token is set at all.
    if scope["method"] in SAFE or (header(scope, b"authorization") or "")[:7].lower() == "bearer ":
        return False
    site = header(scope, b"sec-fetch-site")
    origin = header(scope, b"origin")
    host = header(scope, b"host")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin not in (f"http://{host}", f"https://{host}")
