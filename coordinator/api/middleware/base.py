"""Base of the middlewares that need the coordinator."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ...app import Coordinator, coordinator_of

HEALTH = "/healthz"
READY = "/readyz"


class Middleware:
    """Handle calls to a coordinator that has started; pass on other calls, and ``/healthz``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one call, or pass it on."""
        coordinator = coordinator_of(scope) if scope["type"] == "http" and scope["path"] != HEALTH else None
        if coordinator is None:
            return await self._app(scope, receive, send)
        return await self._handle(coordinator, scope, receive, send)

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError
