"""The polling schedule: devices without work ask again at different moments, however many there are.

A fleet of n devices that may make r calls for work a second comes round once in a cycle of n / r seconds. In each cycle
every device has one moment of its own, which follows from its id and the cycle's number: spread evenly, never the same
neighbours twice, the same for one that asks twice. So after an outage, when all come back together, the next
cycle is calm. Fleets that r calls a second suffice for are told the usual pause.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from sqlalchemy import func, select

from sparrow.protocol.messages import FederationStatus

from ..storage.store import Store
from ..storage.tables import Device, Federation

COUNT_SECONDS = 10.0
"""The time for which a count of the fleet is used."""

OVER = (FederationStatus.finished.value, FederationStatus.stopped.value)


class Polling:
    """The polling schedule of devices without work. least: the usual pause, s. calls: most calls for work a second."""

    def __init__(self, store: Store, clock: Callable[[], float], *, least: int, calls: float) -> None:
        self._store = store
        self._clock = clock
        self._least = least
        self._calls = calls
        self._counted_at = -math.inf
        self._devices = 0

    def known_pause(self, device_id: str) -> int | None:
        """Return what ``retry_after`` does where that takes no look at the records; None otherwise."""
        return self.retry_after(device_id) if self._clock() - self._counted_at < COUNT_SECONDS else None

    def retry_after(self, device_id: str) -> int:
        """Return the whole seconds after which this device shall ask again."""
        now = self._clock()
        cycle = self._count(now) / self._calls
        if cycle <= self._least:
            return self._least
        number = math.floor(now / cycle) + 1
        digest = hashlib.sha256(f"pace|{device_id}|{number}".encode()).digest()
        share = int.from_bytes(digest[:6], "big") / 2**48
        return math.ceil((number + share) * cycle - now)

    def longest(self) -> float:
        """Return the longest pause, s, that a device without work is asked for now."""
        cycle = self._count(self._clock()) / self._calls
        return self._least if cycle <= self._least else math.ceil(2 * cycle)

    def _count(self, now: float) -> int:
        """Return the number of devices that ask for work: those of federations that are not over."""
        if now - self._counted_at >= COUNT_SECONDS:
            asking = (
                select(func.count())
                .select_from(Device)
                .join(Federation, Federation.id == Device.federation_id)
                .where(Device.status != "revoked", Federation.status.not_in(OVER))
            )
            with self._store.reading() as db:
                self._devices = db.scalar(asking) or 0
            self._counted_at = now
        return self._devices
