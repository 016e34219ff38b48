"""Server-sent events: the overview of a federation, and its changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from sparrow.protocol.overview import Overview, RoundPoint

from ..calls.live_views import LiveView
from ..errors import NotAuthenticated, NotFound, Unavailable
from ..fleet.access import Holder
from .access import is_admin, own_federation
from .middleware.authentication import Identity

STILL_HERE_SECONDS = 15.0


async def follow(view: LiveView, admit: Callable[[], Awaitable[Identity]]) -> AsyncIterator[str]:
    """Yield events named ``overview`` until the process stops.

    The first is whole, later ones have the points that are new or changed. In between, comments keep proxies from
    closing an idle stream.

    The stream ends if ``admit``, which is called for each event, raises NotAuthenticated, since a token may be revoked;
    and if the records cannot be read, or the federation is deleted: the next call gets the reason.
    """
    loop = asyncio.get_running_loop()
    had: Overview | None = None
    told: dict[int, RoundPoint] = {}
    before, said = "", loop.time()
    while True:
        try:
            overview = await view.after(had)
            if overview is None:
                return
            identity = await admit()
        except (NotAuthenticated, NotFound, Unavailable):
            return
        fresh = tuple(point for point in overview.points if told.get(point.first) is not point)
        told = {point.first: point for point in overview.points}
        had = overview
        news = seen_by(identity, overview.model_copy(update={"points": ()}))
        now = news.model_dump_json(exclude={"at", "ends_at"})
        if fresh or now != before:
            yield f"event: overview\ndata: {news.model_copy(update={'points': fresh}).model_dump_json()}\n\n"
            before, said = now, loop.time()
        elif loop.time() - said >= STILL_HERE_SECONDS:
            yield ": still here\n\n"
            said = loop.time()


def seen_by(identity: Identity, overview: Overview) -> Overview:
    """Return an overview with what is the caller's own: of federations its own, if its token is for one, and its
    rights."""
    only = own_federation(identity)
    lines = tuple(line for line in overview.federations if only in (None, line.name))
    rights = {
        "enrolment_guarded": "enrolment" in identity.guarded,
        "may_change": is_admin(identity),
        "signed_in": isinstance(identity.caller, Holder),
    }
    return overview.model_copy(update={"federations": lines, **rights})
