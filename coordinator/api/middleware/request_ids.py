"""Request ids in logs and answers, and durations in the metrics."""

from __future__ import annotations

import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparrow.protocol.wire import WIRE, WIRE_HEADER

from ...app import coordinator_of
from ...logs import about
from ..headers import header

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


_WIRE = (WIRE_HEADER.lower().encode(), str(WIRE).encode())


class RequestIds:
    """Give each request an id, the caller's if it is well-formed, and observe its duration."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = header(scope, b"x-request-id") or ""
        request_id = sent if REQUEST_ID.fullmatch(sent) else secrets.token_hex(8)
        coordinator = coordinator_of(scope)
        status = 500
        began = time.perf_counter()

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode()), _WIRE]
            await send(message)

        with about(request=request_id):
            try:
                await self._app(scope, receive, answer)
            finally:
                if coordinator is not None:
                    route = getattr(scope.get("route"), "path", "none")
                    # Callers must not be able to add labels.
                    method = scope["method"] if route != "none" else "none"
                    coordinator.metrics.requests.labels(method, route, status).observe(time.perf_counter() - began)
        return None
