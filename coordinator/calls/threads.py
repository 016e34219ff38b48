"""Threads for calls that write, and for looking tokens up: some of those that the server has for all calls; and
calls that come in numbers, done together by a thread of their own.

Handlers run in the server's 40 threads. Where a write takes long, because another program has locked the records or a
disk stands still, calls that write would soon be in all of them, and nobody could so much as look. So they are few at a
time; the others wait here without a thread, for as long as writes go on, and are told to come again where none does.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ..errors import Unavailable

Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

WRITERS = 16
"""Calls that write at a time: one does, and the others have their facts ready to share its commit."""
LOOK_UPS = 8
"""Tokens that are looked up at a time: anybody may send some."""
PUBLICATIONS = 2
"""Models that are published at a time: the check of their graphs takes seconds of a core."""
EVALUATIONS, WAITING_EVALUATIONS = 1, 4
"""Evaluations of global models at a time, and evaluations that wait. One may take gigabytes."""
MOST_WAITING = 2000
"""Calls that wait for a thread: twice as many as there are devices in a large fleet, all of which come at once."""


class Threads:
    """A few threads for one kind of calls.

    patience: how long none of them may end before those who wait give up, s. most_waiting: calls that wait for a
    thread; further ones are refused. busy: what a caller that gives up is told.
    """

    def __init__(
        self,
        at_once: int,
        patience: float,
        *,
        most_waiting: int = MOST_WAITING,
        busy: str = "the coordinator's records take long to answer just now",
    ) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._patience = patience
        self._most_waiting, self._busy = most_waiting, busy
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
            await self._slots.acquire()
            return
        if self._waiting >= self._most_waiting:
            raise Unavailable("too many calls wait already; try again in a while")
        came = time.monotonic()
        self._waiting += 1
        try:
            while True:
                left = max(came, self._moved_at) + self._patience - time.monotonic()
                if left <= 0:
                    raise Unavailable(f"{self._busy}; try again in a while")
                try:
                    await asyncio.wait_for(self._slots.acquire(), left)
                    return
                except asyncio.TimeoutError:  # writes may have gone on meanwhile
                    continue
        finally:
            self._waiting -= 1


class Batches(Generic[Item, Result]):
    """Calls that are done together: those that come while the thread is at work are its next batch.

    A hand-over to a thread takes longer than most of these calls. work: does a batch; returns for each item its result,
    or its error. patience: how long a batch may take before those behind it give up, s.
    """

    def __init__(
        self, name: str, work: Callable[[Sequence[Item]], Sequence[Result | BaseException]], patience: float
    ) -> None:
        self._name, self._work, self._patience = name, work, patience
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._batches: queue.SimpleQueue[list[tuple[Item, asyncio.Future[Result]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_work = False
        self._limit: asyncio.TimerHandle | None = None

    async def run(self, item: Item) -> Result:
        """Return what the work returns for ``item``. Raises its error; Unavailable."""
        if len(self._waiting) >= MOST_WAITING:
            raise Unavailable("too many calls wait already; try again in a while")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, done))
        if not self._at_work:
            self._at_work = True
            loop.call_soon(self._begin, loop)  # with all that are ready in this turn of the loop
        return await done

    def close(self) -> None:
        """End the thread when its work is done."""
        self._batches.put(None)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._waiting = self._waiting, []
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
            self._thread.start()
        self._limit = loop.call_later(self._patience, self._give_up, loop)
        self._batches.put(batch)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                results = self._work([item for item, _ in batch])
            except Exception as error:
                results = [error] * len(batch)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._end, loop, batch, results)

    def _end(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Sequence[tuple[Item, asyncio.Future[Result]]],
        results: Sequence[Result | BaseException],
    ) -> None:
        if self._limit is not None:
            self._limit.cancel()
        for (_, done), result in zip(batch, results, strict=True):
            if done.done():  # its caller has gone
                continue
            if isinstance(result, BaseException):
                done.set_exception(result)
            else:
                done.set_result(result)
        self._at_work = bool(self._waiting)
        if self._waiting:
            self._begin(loop)

    def _give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell those who wait behind a batch that takes long."""
        waiting, self._waiting = self._waiting, []
        for _, done in waiting:
            if not done.done():
                done.set_exception(
                    Unavailable("the coordinator's records take long to answer just now; try again in a while")
                )
        self._limit = loop.call_later(self._patience, self._give_up, loop)
