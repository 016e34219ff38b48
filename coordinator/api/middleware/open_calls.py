"""Warn about calls from the network that need no token."""

from __future__ import annotations

import ipaddress
import logging

from starlette.types import Receive, Scope, Send

from ...app import Coordinator
from ...fleet.access import KINDS
from .authentication import Identity
from .base import Middleware

log = logging.getLogger(__name__)


class MissingTokenWarning(Middleware):
    """Log once if a call arrives at an address beyond loopback while a kind of token is not set."""

    _logged = False

    async def _handle(self, coordinator: Coordinator, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._logged and _beyond_loopback(scope.get("server")):
            identity: Identity = scope["state"]["identity"]
            unguarded = [kind for kind in KINDS if kind not in identity.guarded]
            if unguarded:
                self._logged = True
                log.critical(
                    "OPEN TO THE NETWORK: no %s token is set, so everybody who reaches %s may make these calls. Set "
                    "%s, run sparrow token create --records, or listen on 127.0.0.1 only.",
                    " and no ".join(unguarded),
                    scope["server"][0],
                    ", ".join(f"COORDINATOR_{kind.upper()}_TOKEN" for kind in unguarded),
                )
        await self._app(scope, receive, send)


def _beyond_loopback(server: tuple[str, int | None] | None) -> bool:
    try:
        return server is not None and not ipaddress.ip_address(server[0]).is_loopback
    except ValueError:
        # A unix socket or an in-process test client has no address.
        return False
