"""The one way in: who is calling, whether they call too often, and what the log and the metrics say of it.

Every call passes here before it is routed. Where all kinds of tokens are set, a caller without a valid one gets the
same 401 for every path, whether anything is there or not; a route that forgets to ask who is calling is shut, too.
"""

from __future__ import annotations

import base64
import logging
import math
import re
import secrets
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparrow.coordinator.api.parts import House
from sparrow.coordinator.api.problems import challenge, problem
from sparrow.coordinator.api.rate_limits import RateLimit, address_key
from sparrow.coordinator.errors import FederationDeleted, NotAuthenticated, TokenExpired
from sparrow.coordinator.fleet.access import KINDS, Holder, Kind
from sparrow.coordinator.fleet.devices import Caller
from sparrow.coordinator.logs import about

log = logging.getLogger(__name__)

HEALTH = ("/healthz", "/readyz")
FAILURE_COST = 20.0
"""Calls that a wrong token counts as."""

SAFE = ("GET", "HEAD", "OPTIONS")
CROSS_SITE = "a page of another site may not make this call; use the coordinator's own page, or send a token as Bearer"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
STRANGER = (
    "a token is needed here, and none was sent that is valid: Authorization: Bearer <token>. An enrolment token is "
    "needed to join (SPARROW_ENROLMENT_TOKEN), an admin token to publish (SPARROW_ADMIN_TOKEN), an observer token to "
    "look; the operator makes them with sparrow token"
)


@dataclass(frozen=True)
class Visit:
    """Who makes a call. ``failure``: why the token that was sent is none. ``guarded``: kinds of tokens that are set."""

    caller: Caller | Holder | None = None
    failure: NotAuthenticated | None = None
    guarded: frozenset[Kind] = field(default_factory=frozenset)


class Door:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a call in, or answer it here."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        connection = HTTPConnection(scope)
        sent = connection.headers.get("x-request-id", "")
        request_id = sent if REQUEST_ID.fullmatch(sent) else secrets.token_hex(8)
        house: House | None = getattr(scope["app"].state, "house", None)
        status, began = 500, time.perf_counter()

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        with about(request=request_id):
            try:
                await self._enter(scope, connection, house, receive, answer)
            finally:
                if house is not None:
                    route = getattr(scope.get("route"), "path", "none")
                    method = scope["method"] if route != "none" else "none"  # or strangers could make up labels
                    house.metrics.requests.labels(method, route, status).observe(time.perf_counter() - began)

    async def _enter(
        self, scope: Scope, connection: HTTPConnection, house: House | None, receive: Receive, send: Send
    ) -> None:
        if scope["path"] == HEALTH[0] or house is None:
            return await self._app(scope, receive, send)
        if _from_another_site(scope["method"], connection):
            return await problem(403, "CrossSite", CROSS_SITE)(scope, receive, send)
        secret = secret_of(connection)
        address = address_key(scope["client"][0] if scope.get("client") else None)
        if address is None and house.settings.limit_loopback:
            address = "loopback"
        refused = _in_debt(house, address, secret)
        if refused is None:
            visit = await identify(house, secret)
            receive = _heard(house, visit, receive)
            refused = _too_often(house, address, visit) or _stranger(house, visit, scope["path"])
        if refused is not None:
            return await refused(scope, receive, send)
        scope.setdefault("state", {})["visit"] = visit
        if isinstance(visit.caller, Caller):
            with about(device=visit.caller.device_id, federation=visit.caller.federation):
                return await self._app(scope, receive, send)
        return await self._app(scope, receive, send)


def secret_of(connection: HTTPConnection) -> str | None:
    """The token that was sent: as such, or by a browser as the password that it asked its user for."""
    scheme, _, sent = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            sent = base64.b64decode(sent, validate=True).decode().partition(":")[2]
        except ValueError:
            return None
    elif scheme.lower() != "bearer":
        return None
    return sent.strip() or None


def _from_another_site(method: str, connection: HTTPConnection) -> bool:
    """Whether a page of another site has a browser make a call that changes something: the browser adds the password,
    and where no token is set it needs none."""
    headers = connection.headers
    if method in SAFE or headers.get("authorization", "")[:7].lower() == "bearer ":
        return False
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


async def identify(house: House, secret: str | None) -> Visit:
    """Who it is that sent this token."""
    caller: Caller | Holder | None = None
    failure = None
    if secret is not None:
        caller = house.devices.known_caller(secret) or house.tokens.known_holder(secret)
        try:
            caller = caller or await run_in_threadpool(_look_up, house, secret)
        except NotAuthenticated as error:
            failure = error
    known = house.tokens.guarded_known()
    return Visit(caller, failure, house.tokens.guarded() if known else await run_in_threadpool(house.tokens.guarded))


def _heard(house: House, visit: Visit, receive: Receive) -> Receive:
    """Note that a device is there, at once and with each piece of a body that it sends."""
    if not isinstance(visit.caller, Caller):
        return receive
    device_id = visit.caller.device_id
    house.heard.note(device_id)

    async def noted() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            house.heard.note(device_id)
        return message

    return noted


def _look_up(house: House, secret: str) -> Caller | Holder:
    return house.tokens.find(secret) or house.devices.authenticate(secret)


def _in_debt(house: House, address: str | None, secret: str | None) -> Response | None:
    """Whose address has sent too much waits, before its token is looked up; but for who was known here lately, so that
    one bad device keeps none from work that shares its address."""
    if house.by_address is None or address is None or (secret is not None and house.was_here(secret)):
        return None
    wait = house.by_address.wait(address)
    return _later(wait) if wait else None


def _too_often(house: House, address: str | None, visit: Visit) -> Response | None:
    """Devices are counted each, wherever they are; everybody else by address."""
    limit: RateLimit | None
    if isinstance(visit.caller, Caller):
        limit, key = house.by_device, visit.caller.device_id if address is not None else None
    else:
        limit, key = house.by_address, address
    if limit is None or key is None:
        return None
    if visit.failure is not None:
        limit.charge(key, FAILURE_COST)
        return None
    wait = limit.take(key)
    return _later(wait) if wait else None


def _later(wait: float) -> Response:
    seconds = math.ceil(wait)
    detail = f"too many calls from here; wait {seconds} s, as Retry-After says"
    return problem(429, "TooManyRequests", detail, {"Retry-After": str(seconds)})


def _stranger(house: House, visit: Visit, path: str) -> Response | None:
    if isinstance(visit.failure, TokenExpired):
        return problem(401, "TokenExpired", str(visit.failure), challenge(path))
    if isinstance(visit.failure, FederationDeleted):
        return problem(410, "FederationDeleted", str(visit.failure))
    if visit.caller is None and len(visit.guarded) == len(KINDS) and path not in HEALTH:
        return problem(401, "NotAuthenticated", STRANGER, challenge(path))
    return None
