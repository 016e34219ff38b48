"""Limits of calls per second and simultaneous calls: per device, and per address for other callers.

An address beyond its limit waits before its token is looked up; identified callers are counted afterwards.
"""

from __future__ import annotations

import math
import re

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...app import Coordinator
from ...calls.buckets import RateLimit, address_key
from ...calls.problems import problem
from ...fleet.devices import Caller
from .. import connections
from .authentication import Identity, was_known
from .base import Middleware

FAILURE_COST = 20.0
"""Cost of a call with a wrong token, in calls."""

CALLS_AT_ONCE = 4
"""Number of simultaneous calls of one device: a call, a heartbeat, and two on broken, still open connections."""

EVENTS = re.compile(r"GET /v1/federations/[^/]+/events")
"""Long-running calls without a thread, which do not count as simultaneous calls."""


class AddressLimits(Middleware):
    """Limit the calls of an address before its token is looked up: a few per turn of the event loop; 429 if too many.

    A caller with a recently valid token passes, so that a bad device does not block others.
    """

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        address = _address(coordinator, scope)
        limit = coordinator.by_address
        if address is not None and not was_known(coordinator, scope):
            await coordinator.turns.begin(address)
            wait = 0.0 if limit is None else limit.wait(address)
            if wait:
                return await _too_many(wait)(scope, receive, send)
        return await self._app(scope, receive, send)


class CallerLimits(Middleware):
    """Count the calls of identified callers: 429 if there are too many, and a few at a time per address without a
    device.
    """

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        identity: Identity = scope["state"]["identity"]
        address = _address(coordinator, scope)
        wait = _count(coordinator, address, identity)
        if wait:
            return await _too_many(wait)(scope, receive, send)
        # ``CallsAtOnce`` limits those of devices.
        counted = not isinstance(identity.caller, Caller)
        if address is None or not counted or EVENTS.fullmatch(f"{scope['method']} {scope['path']}"):
            return await self._app(scope, receive, send)
        async with coordinator.at_once.call(address) as may:
            answer = self._app if may else _too_many(1.0)
            return await answer(scope, receive, send)


class CallsAtOnce(Middleware):
    """Answer 429 to a device with too many calls in progress, and count its connection for it."""

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope["state"]["identity"].caller
        open_calls = coordinator.open_calls
        if not isinstance(caller, Caller):
            return await self._app(scope, receive, send)
        place: connections.Place | None = scope["state"].get(connections.STATE)
        if place is not None:
            place.belongs_to(caller.device_id)
        if open_calls[caller.device_id] >= CALLS_AT_ONCE:
            detail = f"this device has {CALLS_AT_ONCE} calls in progress; wait until one of them ends"
            return await problem(429, "TooManyRequests", detail, {"Retry-After": "1"})(scope, receive, send)
        open_calls[caller.device_id] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            open_calls[caller.device_id] -= 1
            if not open_calls[caller.device_id]:
                del open_calls[caller.device_id]


def _address(coordinator: Coordinator, scope: Scope) -> str | None:
    """Return the key of the caller's address; None for this machine, unless it is limited, too."""
    address = address_key(scope["client"][0] if scope.get("client") else None)
    return "loopback" if address is None and coordinator.settings.limit_loopback else address


def _count(coordinator: Coordinator, address: str | None, identity: Identity) -> float:
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
    detail = f"too many calls; wait {seconds} s (Retry-After)"
    return problem(429, "TooManyRequests", detail, {"Retry-After": str(seconds)})
