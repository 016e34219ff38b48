"""Limits per caller: simultaneous calls, and calls per second (token buckets).

The library ``limits`` has windows instead of buckets and keeps each caller until its window ends, so that a caller with
many addresses could use unlimited memory.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

BURST_SECONDS = 10.0
"""Capacity of a bucket, in seconds of its rate."""


class RateLimit:
    """Token buckets by key, each stored as the time when it will be full (generic cell rate algorithm, ITU-T I.371).

    most: number of buckets; beyond it the least recently used one is dropped.
    """

    def __init__(self, per_second: float, clock: Callable[[], float], *, most: int = 100_000) -> None:
        self._seconds_per_call = 1 / per_second
        self._clock = clock
        self._most = most
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def take(self, key: str, cost: float = 1.0) -> float:
        """Take ``cost`` calls from the bucket and return 0, or return the seconds until it has them."""
        now = self._clock()
        full_at = max(self._full_at.get(key, now), now) + cost * self._seconds_per_call
        wait = full_at - now - max(BURST_SECONDS, cost * self._seconds_per_call)
        if wait > 1e-9:
            self._full_at.move_to_end(key)
            return wait
        self._keep(key, full_at)
        return 0.0

    def charge(self, key: str, cost: float) -> None:
        """Take ``cost`` calls even if the bucket lacks them; the debt is at most ``BURST_SECONDS``."""
        now = self._clock()
        full_at = max(self._full_at.get(key, now), now) + cost * self._seconds_per_call
        self._keep(key, min(full_at, now + 2 * BURST_SECONDS))

    def wait(self, key: str) -> float:
        """Return the seconds until the bucket holds a call; 0 if it does."""
        return max(0.0, self._full_at.get(key, 0.0) + self._seconds_per_call - self._clock() - BURST_SECONDS)

    def __len__(self) -> int:
        return len(self._full_at)

    def _keep(self, key: str, full_at: float) -> None:
        self._full_at[key] = full_at
        self._full_at.move_to_end(key)
        if len(self._full_at) > self._most:
            self._full_at.popitem(last=False)


class AtOnce:
    """Limit of each caller's simultaneous calls.

    most: calls at a time. waiting: further calls that may wait.
    """

    def __init__(self, most: int = 8, waiting: int = 200) -> None:
        self._most = most
        self._waiting = waiting
        self._callers: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}

    @asynccontextmanager
    async def call(self, key: str) -> AsyncIterator[bool]:
        """Context manager: wait for one of the caller's slots; gives False if too many calls wait already."""
        semaphore, calls = self._callers.setdefault(key, (asyncio.Semaphore(self._most), []))
        if len(calls) >= self._most + self._waiting:
            yield False
            return
        calls.append(None)
        try:
            async with semaphore:
                yield True
        finally:
            calls.pop()
            if not calls:
                del self._callers[key]


class Turns:
    """Limit of the calls that each caller begins per turn of the event loop; others begin in later turns, in order.

    All other work waits for a whole turn. Not thread-safe.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._begun: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def begin(self, key: str) -> None:
        """Wait for a turn in which this caller may begin a call."""
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._begun[key] < self._most:
            self._begun[key] += 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(mine)
        await mine

    def _turn(self) -> None:
        self._begun.clear()
        for key, waiting in list(self._waiting.items()):
            while waiting and self._begun[key] < self._most:
                next_one = waiting.popleft()
                if not next_one.done():
                    next_one.set_result(None)
                    self._begun[key] += 1
            if not waiting:
                del self._waiting[key]
        if self._begun:
            asyncio.get_running_loop().call_soon(self._turn)


def address_key(host: str | None) -> str | None:
    """Return an address, the /64 of an IPv6 address (one customer's), or None for this machine."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        # A unix socket has no address.
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return None
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
