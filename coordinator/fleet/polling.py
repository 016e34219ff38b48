"""The polling schedule, which spreads the calls of devices without work evenly over time.

A fleet of n devices that may make r calls per second needs a cycle of n / r seconds. In each cycle every device has one
slot, derived from its id and the cycle's number. After an outage that synchronises the devices, calls are therefore
spread again within one cycle. Small fleets get the usual pause.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from sqlalchemy import func, select

from sparrow.protocol.messages import FederationStatus

from ..rounds.candidates import ENROLLED
from ..storage.store import Store
from ..storage.tables import Device, Federation

COUNT_SECONDS = 10.0
"""Lifetime of a count of the fleet."""

OVER = (FederationStatus.finished.value, FederationStatus.stopped.value)


class Polling:
    """Polling schedule of devices without work. least: the usual pause, s. calls: most calls for work per second."""

    def __init__(self, store: Store, clock: Callable[[], float], *, least: int, calls: float) -> None:
        self._store = store
        self._clock = clock
        self._least = least
        self._calls = calls
        self._counted_at = -math.inf
        self._devices = 0

    def known_pause(self, device_id: str) -> int | None:
        """Return ``retry_after`` if it needs no query now, otherwise None."""
        return self.retry_after(device_id) if self._clock() - self._counted_at < COUNT_SECONDS else None

    def retry_after(self, device_id: str) -> int:
        """Return the whole seconds until this device should ask again."""
        now = self._clock()
        cycle = self._count(now) / self._calls
        if cycle <= self._least:
            return self._least
        number = math.floor(now / cycle) + 1
        digest = hashlib.sha256(f"pace|{device_id}|{number}".encode()).digest()
        share = int.from_bytes(digest[:6], "big") / 2**48
        return math.ceil((number + share) * cycle - now)

    def longest(self) -> float:
        """Return the longest current pause of a device without work, s."""
        cycle = self._count(self._clock()) / self._calls
        return self._least if cycle <= self._least else math.ceil(2 * cycle)

    def _count(self, now: float) -> int:
        """Return the number of devices in active federations."""
        if now - self._counted_at >= COUNT_SECONDS:
            asking = (
                select(func.count())
                .select_from(Device)
                .join(Federation, Federation.id == Device.federation_id)
                .where(Device.status.in_(ENROLLED), Federation.status.not_in(OVER))
            )
            with self._store.reading() as db:
                self._devices = db.scalar(asking) or 0
            self._counted_at = now
        return self._devices
