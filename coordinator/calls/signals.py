"""The wake-up of HTTP calls that wait, long polls and event streams, and what need not be looked up for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from starlette.types import Receive

Holds = tuple[str | None, str | None]
"""The digests of the mask and of the model that a device holds."""


class Signal:
    """Wakes every coroutine that waits for it.

    A waiter takes ``next()`` before it looks at the records, and then awaits that event: nothing that is recorded in
    between is missed.

    Threads: ``send`` may be called from any thread and from a signal handler; ``next`` only in the event loop. The loop
    is that of the first ``next``; before it nobody waits, and ``send`` does nothing. So a signal can be made without a
    running loop.

    count: how often it was sent.
    """

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Return the event that the next ``send`` sets."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._next = loop, asyncio.Event()
        return self._next

    def send(self) -> None:
        """Wake everybody who waits."""
        self.count += 1
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


class LongPoll:
    """One call that waits. It is over when its caller has gone, or a newer call of the same caller has come."""

    def __init__(self, receive: Receive) -> None:
        self.over = False
        self._receive = receive
        self._gone: asyncio.Task[None] | None = None

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for the event, for so many seconds, or until this call is over."""
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
        """End it."""
        self.over = True
        if self._gone is not None:
            self._gone.cancel()

    async def _listen(self) -> None:
        with contextlib.suppress(Exception):  # a body that comes too slowly, or a connection that breaks
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self.over = True


class LongPolls:
    """The calls that wait, one of each caller: a newer one ends the former, whose connection may be broken."""

    def __init__(self) -> None:
        self._newest: dict[str, LongPoll] = {}

    @contextlib.contextmanager
    def newest(self, key: str, receive: Receive) -> Iterator[LongPoll]:
        """Begin a call that waits, and end this caller's former one. It ends with the block."""
        former, poll = self._newest.get(key), LongPoll(receive)
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
    """The devices for which there was no work when their last update was answered, and nothing has moved since: when
    they ask, that is known already."""

    MOST = 10_000

    def __init__(self) -> None:
        self._at: OrderedDict[str, tuple[int, Holds]] = OrderedDict()

    def note(self, device_id: str, moves: int, holding: Holds) -> None:
        """Note that a device was told so, when so many moves had been made."""
        self._at[device_id] = (moves, holding)
        if len(self._at) > self.MOST:
            self._at.popitem(last=False)

    def holds(self, device_id: str, moves: int, holding: Holds) -> bool:
        """Return whether that is so still, and forget it."""
        return self._at.pop(device_id, None) == (moves, holding)

    def forget(self, device_id: str) -> None:
        """Forget what a device was told: it has said something since."""
        self._at.pop(device_id, None)
