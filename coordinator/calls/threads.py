"""Limited use of the server's threads, and batches of frequent calls in a separate thread.

Handlers run in the server's 40 threads. If writes are slow, they would soon occupy all of them. Therefore only a few
write at a time; others wait without a thread while writes make progress, and get 503 otherwise.
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
"""Number of simultaneous writing calls: one writes while the others prepare for a shared commit."""
LOOK_UPS = 8
"""Number of simultaneous look-ups of tokens, which any caller can cause."""
PUBLICATIONS = 2
"""Number of simultaneous publications, whose checks of graphs take seconds of a core."""
EVALUATIONS = 1
"""Number of simultaneous evaluations of global models, which may need gigabytes each."""
WAITING_EVALUATIONS = 4
MOST_WAITING = 2000
"""Largest number of calls that wait for a thread: twice the devices of a large fleet."""


class Threads:
    """Limited number of threads for one kind of calls.

    patience: seconds without a finished call after which waiting calls give up. most_waiting: waiting calls; further
    ones are refused.
    """

    def __init__(
        self,
        at_once: int,
        patience: float,
        *,
        most_waiting: int = MOST_WAITING,
        busy: str = "the coordinator's database is slow at the moment",
    ) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._patience = patience
        self._most_waiting = most_waiting
        self._busy = busy
        self._waiting = 0
        self._moved_at = 0.0

    async def run(
        self, work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Run ``work`` in a thread when one is free. Raises Unavailable, and the errors of ``work``."""
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
            raise Unavailable("too many calls are waiting; retry later")
        came = time.monotonic()
        self._waiting += 1
        try:
            while True:
                left = max(came, self._moved_at) + self._patience - time.monotonic()
                if left <= 0:
                    raise Unavailable(f"{self._busy}; retry later")
                try:
                    await asyncio.wait_for(self._slots.acquire(), left)
                    return
                except asyncio.TimeoutError:
                    # Other calls may have finished meanwhile.
                    continue
        finally:
            self._waiting -= 1


class Batches(Generic[Item, Result]):
    """Group calls: those that arrive during a batch form the next one.

    Handing a call to a thread takes longer than most of these calls. work: returns a result or an error for each item.
    patience: seconds that a batch may take before waiting calls give up.
    """

    def __init__(
        self, name: str, work: Callable[[Sequence[Item]], Sequence[Result | BaseException]], patience: float
    ) -> None:
        self._name = name
        self._work = work
        self._patience = patience
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._batches: queue.SimpleQueue[list[tuple[Item, asyncio.Future[Result]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_work = False
        self._limit: asyncio.TimerHandle | None = None

    async def run(self, item: Item) -> Result:
        """Return the result of ``item``. Raises its error, and Unavailable."""
        if len(self._waiting) >= MOST_WAITING:
            raise Unavailable("too many calls are waiting; retry later")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, done))
        if not self._at_work:
            self._at_work = True
            # Calls of the same turn of the loop join the batch.
            loop.call_soon(self._begin, loop)
        return await done

    def close(self) -> None:
        """End the thread after its current batch."""
        self._batches.put(None)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        batch = self._waiting
        self._waiting = []
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
            # The loop may be closed.
            with suppress(RuntimeError):
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
            # The caller may have disconnected.
            if done.done():
                continue
            if isinstance(result, BaseException):
                done.set_exception(result)
            else:
                done.set_result(result)
        self._at_work = bool(self._waiting)
        if self._waiting:
            self._begin(loop)

    def _give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail the calls that wait behind a slow batch."""
        waiting = self._waiting
        self._waiting = []
        for _, done in waiting:
            if not done.done():
                done.set_exception(Unavailable("the coordinator's database is slow at the moment; retry later"))
        self._limit = loop.call_later(self._patience, self._give_up, loop)
