"""Wake-up of waiting calls (long polls and event streams)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from starlette.types import Receive

Holds = tuple[str | None, str | None]
"""Digests of a device's mask and model."""


class Signal:
    """Wake every coroutine that waits for it.

    A waiter takes ``next()`` before it reads the records and then awaits this event, so that it misses no fact recorded
    in between.

    ``send`` may be called from any thread and from a signal handler, ``next`` only in the event loop.
    """

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Return the event that the next ``send`` sets."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._next = asyncio.Event()
        return self._next

    def send(self) -> None:
        """Wake all waiters."""
        self.count += 1
        if self._loop is not None:
            # The loop may be closed, and its waiters with it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


class LongPoll:
    """A waiting call."""

    def __init__(self, receive: Receive) -> None:
        self.over = False
        self._receive = receive
        self._gone: asyncio.Task[None] | None = None

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for the event, at most ``seconds``, or until this call is over."""
        if self.over:
            return
        if self._gone is None:
            self._gone = asyncio.create_task(self._listen())
        moved = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({moved, self._gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()

    def end(self) -> None:
        """End the waiting call."""
        self.over = True
        if self._gone is not None:
            self._gone.cancel()

    async def _listen(self) -> None:
        # The body may be too slow, or the connection may break.
        with contextlib.suppress(Exception):
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self.over = True


class LongPolls:
    """Waiting calls: a caller's newer call ends the former one, whose connection may be broken."""

    def __init__(self) -> None:
        self._newest: dict[str, LongPoll] = {}

    @contextlib.contextmanager
    def newest(self, key: str, receive: Receive) -> Iterator[LongPoll]:
        """Context manager: a waiting call that ends the caller's former one."""
        former = self._newest.get(key)
        poll = LongPoll(receive)
        if former is not None:
            former.end()
        self._newest[key] = poll
        try:
            yield poll
        finally:
            poll.end()
            if self._newest.get(key) is poll:
                del self._newest[key]


class FoundNothing:
    """Devices whose last update was answered without work. Their next call needs no look-up until a round advances."""

    MOST = 10_000

    def __init__(self) -> None:
        self._at: OrderedDict[str, tuple[int, Holds]] = OrderedDict()

    def note(self, device_id: str, moves: int, holding: Holds) -> None:
        """Note that a device was answered without work. moves: the number of changes of rounds."""
        self._at[device_id] = (moves, holding)
        if len(self._at) > self.MOST:
            self._at.popitem(last=False)

    def holds(self, device_id: str, moves: int, holding: Holds) -> bool:
        """Return True if the device still has no work, and remove the note."""
        return self._at.pop(device_id, None) == (moves, holding)

    def forget(self, device_id: str) -> None:
        """Remove the note of a device that has changed."""
        self._at.pop(device_id, None)
