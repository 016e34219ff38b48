"""Overviews of federations, computed once for all open pages of a federation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool

from sparrow.protocol.overview import Overview

from ..reports.overview import Overviews
from .signals import Signal

LONGEST_REST_SECONDS = 15.0
LEAST_PAUSE_SECONDS = 0.5
SHARE_OF_TIME = 0.05
"""Maximum processor time that the overviews of a federation may take, as a fraction."""


@dataclass(frozen=True)
class _Look:
    """An overview at one point in time."""

    overview: Overview
    # Set when anything was recorded since.
    changed: asyncio.Event
    # The loop's time of the next look.
    again: float


class LiveView:
    """The overview of one federation, for all of its open pages."""

    def __init__(self, views: LiveViews, name: str) -> None:
        self._views = views
        self._name = name
        self._latest: _Look | None = None
        self._turn = asyncio.Lock()

    async def after(self, had: Overview | None) -> Overview | None:
        """Return the next overview after ``had``: after the next recorded fact, or after some seconds.

        With None, return an overview at once. Returns None when the process stops. Raises Unavailable.
        """
        loop = asyncio.get_running_loop()
        while not self._views.closing():
            latest = self._latest
            if latest is not None and latest.overview is not had:
                if loop.time() < latest.again or not latest.changed.is_set():
                    return latest.overview
            elif latest is not None:
                await self._pause(latest)
                if self._latest is not latest:
                    continue
            async with self._turn:
                if self._latest is latest and not self._views.closing():
                    await self._look()
        return None

    async def _pause(self, latest: _Look) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(latest.changed.wait(), LONGEST_REST_SECONDS)
        while (left := latest.again - loop.time()) > 0 and not self._views.closing():
            await asyncio.sleep(min(LEAST_PAUSE_SECONDS, left))

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        changed = self._views.changed.next()
        began = loop.time()
        known = None if self._latest is None else self._latest.overview
        overview, seconds = await run_in_threadpool(self._timed, known)
        again = began + max(LEAST_PAUSE_SECONDS, seconds / SHARE_OF_TIME)
        self._latest = _Look(overview, changed, again)

    def _timed(self, known: Overview | None) -> tuple[Overview, float]:
        # On a busy machine, wall time would include waiting.
        began = time.thread_time()
        return self._compare(known), time.thread_time() - began

    def _compare(self, known: Overview | None) -> Overview:
        """Return the overview; unchanged points are the same objects as in ``known``."""
        look = self._views.overviews.look
        if known is None:
            return look(self._name)
        rounds = (known.federation.round, known.evaluating_since)
        news = look(self._name, min(number for number in rounds if number is not None))
        if news.span != known.span:
            return look(self._name)
        points = {point.first: point for point in known.points}
        points |= {point.first: point for point in news.points if points.get(point.first) != point}
        return news.model_copy(update={"points": tuple(points.values())})


@dataclass
class LiveViews:
    """Live views by federation."""

    overviews: Overviews
    # Sent when anything was recorded.
    changed: Signal
    closing: Callable[[], bool]

    def __post_init__(self) -> None:
        self._open: WeakValueDictionary[str, LiveView] = WeakValueDictionary()

    def of(self, name: str) -> LiveView:
        """Return a federation's view, shared by all callers."""
        return self._open.setdefault(name, LiveView(self, name))
