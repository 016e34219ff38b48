"""Identify every caller, and refuse unknown ones.

If all kinds of tokens are set, a caller without a valid one gets the same 401 for every path, existing or not, except
pages and their files.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...app import Coordinator
from ...calls.problems import CHALLENGE, problem, unavailable
from ...errors import FederationDeleted, NotAuthenticated, TokenExpired, Unavailable
from ...fleet.access import KINDS, PREFIXES, Holder, Kind
from ...fleet.devices import Caller
from ...logs import about
from ..headers import header
from ..sign_in import PAGES, kept_session
from .base import READY, Middleware

TOKEN_NEEDED = (
    "this coordinator needs a token: set SPARROW_ENROLMENT_TOKEN to join, SPARROW_ADMIN_TOKEN to publish, or "
    "SPARROW_OBSERVER_TOKEN to view; its operator makes one with sparrow token create"
)
TOKEN_UNKNOWN = (
    "this coordinator does not know the token that was sent: check it for a typing error, or ask the operator for a "
    "new one (sparrow token create)"
)

OPEN = (READY, "/join/", "/web/", "/page/")
"""Prefixes of paths that need no token: readiness, the device page, and files of pages."""

IDENTIFY_SECONDS = 1.0
"""Longest time that ``/readyz`` waits for its caller's identity, which decides only whether it reports the reason."""


@dataclass(frozen=True)
class Identity:
    """The caller of a request."""

    caller: Caller | Holder | None = None
    # Why its token is not valid.
    failure: NotAuthenticated | None = None
    # The kinds of tokens that are set.
    guarded: frozenset[Kind] = field(default_factory=frozenset)
    # Whether the call was made under a name of this coordinator (``calls.hosts``).
    own_host: bool = True


class Authentication(Middleware):
    """Identify the caller and keep the result as ``request.state.identity``."""

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            looking = _identify_soon if scope["path"] == READY else identify
            identity = await looking(coordinator, scope)
        except Unavailable as error:
            return await unavailable(error)(scope, receive, send)
        scope.setdefault("state", {})["identity"] = identity
        return await self._app(scope, _seen(coordinator, identity, receive), send)


class UnknownCallers(Middleware):
    """Refuse expired tokens, and, if all kinds are guarded, callers without a valid one."""

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        identity: Identity = scope["state"]["identity"]
        refused = _refusal(identity, scope["path"])
        if refused is not None:
            return await refused(scope, receive, send)
        if isinstance(identity.caller, Caller):
            with about(device=identity.caller.device_id, federation=identity.caller.federation):
                return await self._app(scope, receive, send)
        return await self._app(scope, receive, send)


def was_known(coordinator: Coordinator, scope: Scope) -> bool:
    """Return whether the caller was known at its last look-up, without reading the records."""
    token, session = _sent(scope)
    if token is not None:
        return coordinator.devices.was_known(token) or coordinator.tokens.known_holder(token) is not None
    return session is not None and coordinator.sessions.known_holder(session) is not None


def _sent(scope: Scope) -> tuple[str | None, str | None]:
    scheme, _, sent = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return sent.strip() or None, None
    return None, kept_session(scope)


async def identify(coordinator: Coordinator, scope: Scope) -> Identity:
    """Return the identity of a caller. Raises Unavailable."""
    token, session = _sent(scope)
    caller: Caller | Holder | None = None
    failure = None
    try:
        if token is not None:
            caller = coordinator.devices.known_caller(token) or coordinator.tokens.known_holder(token)
            caller = caller or await coordinator.look_ups.run(_look_up, coordinator, token)
        elif session is not None:
            caller = coordinator.sessions.known_holder(session)
            caller = caller or await coordinator.look_ups.run(coordinator.sessions.find, session)
    except NotAuthenticated as error:
        failure = error
    tokens = coordinator.tokens
    guarded = tokens.guarded() if tokens.guarded_known() else await coordinator.look_ups.run(tokens.guarded)
    return Identity(caller, failure, guarded, _own_host(coordinator, scope))


def _own_host(coordinator: Coordinator, scope: Scope) -> bool:
    server = scope.get("server")
    return coordinator.hosts.include(header(scope, b"host"), server[0] if server else None)


async def _identify_soon(coordinator: Coordinator, scope: Scope) -> Identity:
    """Return the identity of a caller of ``/readyz``: unknown if the records cannot be read in time."""
    look_up = asyncio.ensure_future(identify(coordinator, scope))
    # Retrieve the error of a look-up that is no longer awaited.
    look_up.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({look_up}, timeout=IDENTIFY_SECONDS)
    if look_up.done() and not isinstance(look_up.exception(), Unavailable):
        return look_up.result()
    return Identity(guarded=coordinator.tokens.guarded_before(), own_host=_own_host(coordinator, scope))


def _look_up(coordinator: Coordinator, token: str) -> Caller | Holder:
    if token.startswith(PREFIXES["device"]):
        # An operator may have chosen a token with this prefix.
        with suppress(NotAuthenticated):
            return coordinator.devices.authenticate(token)
    found = coordinator.tokens.find(token)
    if found is None and not token.startswith(PREFIXES["device"]):
        raise NotAuthenticated(TOKEN_UNKNOWN)
    return found or coordinator.devices.authenticate(token)


def _seen(coordinator: Coordinator, identity: Identity, receive: Receive) -> Receive:
    """Note that a device was seen, now and with each piece of its body."""
    if not isinstance(identity.caller, Caller):
        return receive
    device_id = identity.caller.device_id
    coordinator.last_seen.note(device_id)

    async def noted() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            coordinator.last_seen.note(device_id)
        return message

    return noted


def _refusal(identity: Identity, path: str) -> Response | None:
    if path in PAGES or path.startswith(OPEN):
        return None
    if isinstance(identity.failure, TokenExpired):
        return problem(401, "TokenExpired", str(identity.failure), CHALLENGE)
    if isinstance(identity.failure, FederationDeleted):
        return problem(410, "FederationDeleted", str(identity.failure))
    if identity.caller is None and len(identity.guarded) == len(KINDS):
        return problem(401, "NotAuthenticated", str(identity.failure or TOKEN_NEEDED), CHALLENGE)
    return None
