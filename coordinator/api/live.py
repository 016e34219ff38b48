"""Server-sent events: a federation at a glance, and what has changed since."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool

from coordinator.api.parts import House
from edge_sdk.protocol.overview import Overview

STILL_HERE_SECONDS = 15.0
LEAST_PAUSE_SECONDS = 0.5
SHARE_OF_TIME = 0.05
"""At most this share of the time goes into looking, for each page that is open, however large the fleet."""


async def follow(house: House, name: str, may_change: bool) -> AsyncIterator[str]:
    """Events named ``overview`` until the process stops: the first is whole, later ones have the points that are new
    or changed. In between, comments keep proxies from closing an idle stream."""
    loop = asyncio.get_running_loop()
    told: dict[int, str] = {}
    before: str | None = None
    span, last = 0, None
    while not house.closing:
        stir = house.stir.next_ring()
        began = loop.time()
        overview = await run_in_threadpool(house.overviews.look, name, last)
        if last is not None and overview.span != span:
            told, last = {}, None
            continue
        span, last = overview.span, overview.federation.round
        points = {point.first: (point, point.model_dump_json()) for point in overview.points}
        fresh = tuple(point for point, text in points.values() if told.get(point.first) != text)
        told |= {first: text for first, (_, text) in points.items()}
        news = overview.model_copy(update={"points": fresh, "may_change": may_change})
        now = news.model_dump_json(exclude={"at"})
        if now != before:
            yield f"event: overview\ndata: {news.model_dump_json()}\n\n"
            before = _without_points(news)
        again = began + max(LEAST_PAUSE_SECONDS, (loop.time() - began) / SHARE_OF_TIME)
        while loop.time() < again and not house.closing:
            await asyncio.sleep(min(LEAST_PAUSE_SECONDS, again - loop.time()))
        if not stir.is_set() and not house.closing:
            try:
                await asyncio.wait_for(stir.wait(), STILL_HERE_SECONDS)
            except asyncio.TimeoutError:
                yield ": still here\n\n"


def _without_points(overview: Overview) -> str:
    return overview.model_copy(update={"points": ()}).model_dump_json(exclude={"at"})
