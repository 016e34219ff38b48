"""Server-sent events of a federation's overview."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from sparrow.protocol.overview import Overview, RoundPoint

from ..calls.live_views import LiveView
from ..errors import NotAuthenticated, NotFound, Unavailable
from ..fleet.access import Holder
from .access import is_admin, makes_tokens, own_federation
from .middleware.authentication import Identity

STILL_HERE_SECONDS = 15.0


async def follow(view: LiveView, admit: Callable[[], Awaitable[Identity]]) -> AsyncIterator[str]:
    """Yield events named ``overview`` until the process stops.

    The first is complete; later ones have only new and changed points. Comments in between keep proxies from closing
    an idle stream.

    admit: called for each event. The stream ends if it raises NotAuthenticated, if the records cannot be read, or if
    the federation is deleted.
    """
    loop = asyncio.get_running_loop()
    had: Overview | None = None
    sent: dict[int, RoundPoint] = {}
    before = ""
    sent_at = loop.time()
    while True:
        try:
            overview = await view.after(had)
            if overview is None:
                return
            identity = await admit()
        except (NotAuthenticated, NotFound, Unavailable):
            return
        fresh = tuple(point for point in overview.points if sent.get(point.first) is not point)
        sent = {point.first: point for point in overview.points}
        had = overview
        news = seen_by(identity, overview.model_copy(update={"points": ()}))
        now = news.model_dump_json(exclude={"at", "ends_at"})
        if fresh or now != before:
            yield f"event: overview\ndata: {news.model_copy(update={'points': fresh}).model_dump_json()}\n\n"
            before = now
            sent_at = loop.time()
        elif loop.time() - sent_at >= STILL_HERE_SECONDS:
            yield ": still here\n\n"
            sent_at = loop.time()


def seen_by(identity: Identity, overview: Overview) -> Overview:
    """Return an overview limited to the caller's federations, with the caller's rights."""
    only = own_federation(identity)
    lines = tuple(line for line in overview.federations if only in (None, line.name))
    rights = {
        "enrolment_guarded": "enrolment" in identity.guarded,
        "may_change": is_admin(identity),
        "makes_tokens": makes_tokens(identity),
        "signed_in": isinstance(identity.caller, Holder),
    }
    return overview.model_copy(update={"federations": lines, **rights})
