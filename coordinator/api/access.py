"""Who is calling, and whether they may. Where no token of a kind is set, its calls are open."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import SecretStr
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.parts import House, TheHouse
from coordinator.devices import Caller
from coordinator.errors import NotAuthenticated
from coordinator.settings import Settings

log = logging.getLogger(__name__)

Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


async def known_device(bearer: Bearer, house: TheHouse) -> Caller:
    """The calling device. Raises NotAuthenticated."""
    if bearer is None:
        raise NotAuthenticated("send the device's token: Authorization: Bearer <token>; enrolling gives one")
    known = house.devices.known_caller(bearer.credentials)
    if known is None:
        known = await run_in_threadpool(house.devices.authenticate, bearer.credentials)
    return known


def admin(bearer: Bearer, house: TheHouse) -> None:
    """Let administrators pass."""
    _need(bearer, "admin", house.settings.admin_token)


def enroller(bearer: Bearer, house: TheHouse) -> None:
    """Let those pass who may enrol a device."""
    _need(bearer, "enrolment", house.settings.enrolment_token, house.settings.admin_token)


def observer(bearer: Bearer, house: TheHouse) -> None:
    """Let observers, administrators and devices pass."""
    if house.settings.observer_token is None or may_observe(bearer, house):
        return
    raise NotAuthenticated("an observer token is needed here: Authorization: Bearer <token>")


def joiner(bearer: Bearer, house: TheHouse) -> None:
    """Let observers pass, and those who may enrol a device: it must read what it is to join."""
    if bearer is None or not _matches(bearer, house.settings.enrolment_token):
        observer(bearer, house)


def may_observe(bearer: HTTPAuthorizationCredentials | None, house: House) -> bool:
    """Whether a token was sent that may look: an observer's, an administrator's or a device's."""
    if bearer is None:
        return False
    if _matches(bearer, house.settings.observer_token, house.settings.admin_token):
        return True
    try:
        house.devices.authenticate(bearer.credentials)
    except NotAuthenticated:
        return False
    return True


def _need(bearer: HTTPAuthorizationCredentials | None, kind: str, *tokens: SecretStr | None) -> None:
    if tokens[0] is not None and not (bearer and _matches(bearer, *tokens)):
        raise NotAuthenticated(f"an {kind} token is needed here: Authorization: Bearer <token>")


def _matches(bearer: HTTPAuthorizationCredentials, *tokens: SecretStr | None) -> bool:
    sent = bearer.credentials.encode()
    return any(token is not None and hmac.compare_digest(sent, token.get_secret_value().encode()) for token in tokens)


class OpenHouseWarning:
    """Middleware that says loudly, once, when calls without a token arrive at an address beyond loopback."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        kinds = ("admin", "enrolment", "observer")
        self._open = [kind for kind in kinds if getattr(settings, f"{kind}_token") is None]
        self._said = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the address that the call came in on."""
        if not self._said and self._open and scope["type"] == "http" and _beyond_loopback(scope.get("server")):
            self._said = True
            log.critical(
                "OPEN TO THE NETWORK: no %s token is set, so anybody who reaches %s may make these calls. Set %s, or "
                "listen on 127.0.0.1 only.",
                " and no ".join(self._open),
                scope["server"][0],
                ", ".join(f"COORDINATOR_{kind.upper()}_TOKEN" for kind in self._open),
            )
        await self._app(scope, receive, send)


def _beyond_loopback(server: tuple[str, int | None] | None) -> bool:
    try:
        return server is not None and not ipaddress.ip_address(server[0]).is_loopback
    except ValueError:  # a unix socket, or an in-process test client
        return False


AdminOnly = Depends(admin)
ObserverOnly = Depends(observer)
JoinerOnly = Depends(joiner)
EnrollerOnly = Depends(enroller)
KnownDevice = Annotated[Caller, Depends(known_device)]
