"""The wake-up of HTTP calls that wait: long polls and event streams."""

from __future__ import annotations

import asyncio
import contextlib


class Signal:
    """Wakes every coroutine that waits for it.

    A waiter takes ``next()`` before it looks at the records, and then awaits that event: nothing that is recorded in
    between is missed.

    Threads: ``send`` may be called from any thread and from a signal handler; ``next`` only in the event loop. The loop
    is that of the first ``next``; before it nobody waits, and ``send`` does nothing. So a signal can be made without a
    running loop.
    """

    def __init__(self) -> None:
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
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
