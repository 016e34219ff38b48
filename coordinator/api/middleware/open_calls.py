"""A warning where calls that need no token can be made from the network."""

from __future__ import annotations

import ipaddress
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from ...app import coordinator_of
from ...fleet.access import KINDS
from ...settings import Settings
from .authentication import Identity

log = logging.getLogger(__name__)


class MissingTokenWarning:
    """Logs once if calls without a token arrive at an address beyond loopback."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._set_in_settings = frozenset(settings.tokens())
        self._logged = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the address that the call came in on."""
        if not self._logged and scope["type"] == "http" and _beyond_loopback(scope.get("server")):
            identity: Identity | None = scope.get("state", {}).get("identity")
            guarded = self._set_in_settings | (identity.guarded if identity else frozenset())
            health = identity is None and coordinator_of(scope) is not None  # then the records' tokens are not known
            unguarded = [] if health else [kind for kind in KINDS if kind not in guarded]
            if unguarded:
                self._logged = True
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
