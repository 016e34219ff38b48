"""Threads for calls that write, and for looking tokens up: some of those that the server has for all calls.

Handlers run in the server's 40 threads. Where a write takes long, because another program has locked the records or a
disk stands still, calls that write would soon be in all of them, and nobody could so much as look. So they are few at a
time; the others wait here without a thread, for as long as writes go on, and are told to come again where none does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from sparrow.coordinator.errors import Unavailable

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

WRITERS = 16
"""Calls that write at a time: one does, and the others have their facts ready to share its commit."""
LOOK_UPS = 8
"""Tokens that are looked up at a time: anybody may send some."""
MOST_WAITING = 2000
"""Calls that wait for a thread: twice as many as there are devices in a large fleet, all of which come at once."""


class Threads:
    """A few threads for one kind of calls. patience: how long none of them may end before those who wait give up, s."""

    def __init__(self, at_once: int, patience: float) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._patience = patience
        self._waiting = 0
        self._moved_at = 0.0  # when a call had last done its work

    async def run(
        self, work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Do a call's work in a thread, when there is one. Raises Unavailable, and what the work raises."""
        await self._take()
        try:
            done = await run_in_threadpool(work, *arguments, **named)
        except Unavailable:
            raise
        except BaseException:
            self._moved_at = time.monotonic()
            raise
        else:
            self._moved_at = time.monotonic()
            return done
        finally:
            self._slots.release()

    async def _take(self) -> None:
        if not self._slots.locked():
            return await self._acquired()
        if self._waiting >= MOST_WAITING:
            raise Unavailable("too many calls wait already; try again in a while")
        came = time.monotonic()
        self._waiting += 1
        try:
            while True:
                left = max(came, self._moved_at) + self._patience - time.monotonic()
                if left <= 0:
                    raise Unavailable("the coordinator's records take long to answer just now; try again in a while")
                try:
                    return await asyncio.wait_for(self._acquired(), left)
                except asyncio.TimeoutError:  # writes may have gone on meanwhile
                    continue
        finally:
            self._waiting -= 1

    async def _acquired(self) -> None:
        await self._slots.acquire()
