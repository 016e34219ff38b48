"""Limits of how often, and how many at a time, somebody may call: devices are counted each, all others by address.

An address that has sent too much waits before its token is looked up; identified callers are counted afterwards.
"""

from __future__ import annotations

import math
import re

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparrow.coordinator.api.buckets import RateLimit, address_key
from sparrow.coordinator.api.middleware.authentication import Identity, secret_of
from sparrow.coordinator.api.middleware.base import Middleware
from sparrow.coordinator.api.problems import problem
from sparrow.coordinator.app import Coordinator
from sparrow.coordinator.fleet.devices import Caller

FAILURE_COST = 20.0
"""Calls that a wrong token counts as."""


WAITS = re.compile(r"GET /v1/federations/[^/]+/(assignments?|events)|PUT /v1/assignments/[^/]+/update")
"""Calls that wait for long without a thread, for work, for news or for a body: they are not counted at a time."""


class AddressLimits(Middleware):
    """Answers 429 to addresses that have called too often, before their token is looked up.

    A caller whose token was valid lately passes, so that one bad device does not block others that share its address.
    """

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        address, limit = _address(coordinator, scope), coordinator.by_address
        if limit is not None and address is not None:
            secret = secret_of(HTTPConnection(scope))
            wait = 0.0 if secret is not None and coordinator.was_known(secret) else limit.wait(address)
            if wait:
                return await _too_many(wait)(scope, receive, send)
        return await self._app(scope, receive, send)


class CallerLimits(Middleware):
    """Counts each call of an identified caller, and answers 429 if there are too many; a few at a time go on."""

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        identity: Identity = scope["state"]["identity"]
        address = _address(coordinator, scope)
        wait = _count(coordinator, address, identity)
        if wait:
            return await _too_many(wait)(scope, receive, send)
        if address is None or WAITS.fullmatch(f"{scope['method']} {scope['path']}"):
            return await self._app(scope, receive, send)
        key = identity.caller.device_id if isinstance(identity.caller, Caller) else address
        async with coordinator.at_once.call(key) as may:
            answer = self._app if may else _too_many(1.0)
            return await answer(scope, receive, send)


def _address(coordinator: Coordinator, scope: Scope) -> str | None:
    """Return what the caller's address is counted under; None for this machine, unless it is limited, too."""
    address = address_key(scope["client"][0] if scope.get("client") else None)
    return "loopback" if address is None and coordinator.settings.limit_loopback else address


def _count(coordinator: Coordinator, address: str | None, identity: Identity) -> float:
    """Count a call; return the seconds that its caller must wait first."""
    limit: RateLimit | None
    if isinstance(identity.caller, Caller):
        limit, key = coordinator.by_device, identity.caller.device_id if address is not None else None
    else:
        limit, key = coordinator.by_address, address
    if limit is None or key is None:
        return 0.0
    if identity.failure is not None:
        limit.charge(key, FAILURE_COST)
        return 0.0
    return limit.take(key)


def _too_many(wait: float) -> Response:
    seconds = math.ceil(wait)
    detail = f"too many calls from here; wait {seconds} s, as Retry-After says"
    return problem(429, "TooManyRequests", detail, {"Retry-After": str(seconds)})
