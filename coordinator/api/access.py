"""Whether a caller may. Where no token of a kind is set, its calls are open. Who it is, ``door`` has found out."""

from __future__ import annotations

import ipaddress
import logging
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from sparrow.coordinator.api.door import Visit
from sparrow.coordinator.errors import NotAuthenticated
from sparrow.coordinator.fleet.access import KINDS, Holder, Kind
from sparrow.coordinator.fleet.devices import UNKNOWN, Caller
from sparrow.coordinator.settings import Settings

log = logging.getLogger(__name__)

bearer = HTTPBearer(auto_error=False)  # read at the door; here so that the OpenAPI document says that there is one


async def get_visit(request: Request, _: Annotated[object, Depends(bearer)]) -> Visit:
    """Who makes this call."""
    visit: Visit = request.state.visit
    return visit


TheVisit = Annotated[Visit, Depends(get_visit)]


async def known_device(visit: TheVisit) -> Caller:
    """The calling device. Raises NotAuthenticated."""
    if isinstance(visit.caller, Caller):
        return visit.caller
    if visit.failure is None and visit.caller is None:
        raise NotAuthenticated("send the device's token: Authorization: Bearer <token>; enrolling gives one")
    raise NotAuthenticated(UNKNOWN)


def check_admin(visit: Visit) -> None:
    """Let administrators pass."""
    _need(visit, None, "admin")


def is_admin(visit: Visit) -> bool:
    """Whether the caller may do what administrators may."""
    try:
        check_admin(visit)
    except NotAuthenticated:
        return False
    return True


async def admin(visit: TheVisit) -> None:
    """Let administrators pass."""
    check_admin(visit)


async def enroller(visit: TheVisit, request: Request) -> None:
    """Let those pass who may enrol a device in this federation."""
    _need(visit, _named(request), "enrolment", "admin")


async def observer(visit: TheVisit, request: Request) -> None:
    """Let observers and administrators pass: they see everybody's work, a device only its own."""
    _need(visit, _named(request), "observer", "admin")


async def onlooker(visit: TheVisit) -> None:
    """Let everybody pass who may look at some federation."""
    _need(visit, own_federation(visit), "observer", "admin")


def own_federation(visit: Visit) -> str | None:
    """The only federation that an operator's token is for; None for all."""
    return visit.caller.federation if isinstance(visit.caller, Holder) else None


async def member(visit: TheVisit, request: Request) -> None:
    """Let observers pass, and the devices of this federation."""
    if not _is_device_of(visit, request):
        _need(visit, _named(request), "observer", "admin")


async def joiner(visit: TheVisit, request: Request) -> None:
    """Let members pass, and those who may enrol a device: it must read what it is to join."""
    if not _is_device_of(visit, request):
        _need(visit, _named(request), "observer", "admin", "enrolment")


def _is_device_of(visit: Visit, request: Request) -> bool:
    return isinstance(visit.caller, Caller) and visit.caller.federation == request.path_params["name"]


def _named(request: Request) -> str | None:
    """The federation in a call's path."""
    name: str | None = request.path_params.get("name")
    return name


def _need(visit: Visit, name: str | None, kind: Kind, *others: Kind) -> None:
    """Let a caller pass where no token of this kind is set, or with a token of these kinds that reaches so far."""
    if kind not in visit.guarded:
        return
    holder = visit.caller
    if isinstance(holder, Holder) and holder.kind in (kind, *others) and holder.reaches(name):
        return
    raise NotAuthenticated(
        f"an {kind} token is needed here: set SPARROW_{kind.upper()}_TOKEN, or send Authorization: Bearer <token>"
    )


class OpenHouseWarning:
    """Middleware that says loudly, once, when calls without a token arrive at an address beyond loopback."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._set_in_settings = frozenset(settings.tokens())
        self._said = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the address that the call came in on."""
        if not self._said and scope["type"] == "http" and _beyond_loopback(scope.get("server")):
            visit: Visit | None = scope.get("state", {}).get("visit")
            guarded = self._set_in_settings | (visit.guarded if visit else frozenset())
            health = visit is None and hasattr(scope["app"].state, "house")  # then the records' tokens are not known
            unguarded = [] if health else [kind for kind in KINDS if kind not in guarded]
            if unguarded:
                self._said = True
                log.critical(
                    "OPEN TO THE NETWORK: no %s token is set, so anybody who reaches %s may make these calls. Set %s, "
                    "make them with sparrow token, or listen on 127.0.0.1 only.",
                    " and no ".join(unguarded),
                    scope["server"][0],
                    ", ".join(f"COORDINATOR_{kind.upper()}_TOKEN" for kind in unguarded),
                )
        await self._app(scope, receive, send)


def _beyond_loopback(server: tuple[str, int | None] | None) -> bool:
    try:
        return server is not None and not ipaddress.ip_address(server[0]).is_loopback
    except ValueError:  # a unix socket, or an in-process test client
        return False


AdminOnly = Depends(admin)
ObserverOnly = Depends(observer)
OnlookerOnly = Depends(onlooker)
MemberOnly = Depends(member)
JoinerOnly = Depends(joiner)
EnrollerOnly = Depends(enroller)
KnownDevice = Annotated[Caller, Depends(known_device)]
