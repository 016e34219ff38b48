"""The time at which each device was last seen: at any of its calls, and with each piece of a body that it sends.

It is noted in memory, at every call, and brought to the records all at once every ``WRITE_SECONDS``: a device that asks
for work, or sends a heartbeat, costs no transaction. What another process of the same coordinator has heard is known
here so much later.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import cast

from sqlalchemy import Table, bindparam, update

from ..storage.store import Store
from ..storage.tables import Device

WRITE_SECONDS = 15.0

_devices = cast(Table, Device.__table__)
_WRITE = (
    update(_devices)
    .where(_devices.c.id == bindparam("device_id"), _devices.c.seen_at < bindparam("heard_at"))
    .values(seen_at=bindparam("heard_at"))
)


class LastSeen:
    """The times at which this process has seen devices and which the records do not have yet."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._at: dict[str, float] = {}
        self._written_at = -math.inf
        self._lock = threading.Lock()

    def note(self, device_id: str) -> None:
        """Note a call of this device. Any thread may do so."""
        with self._lock:
            self._at[device_id] = self._clock()

    def at(self, device_id: str, seen_at: float) -> float:
        """Return when a device was last seen; seen_at: the time in the records."""
        return max(seen_at, self._at.get(device_id, -math.inf))

    @property
    def lag(self) -> float:
        """Return by how many seconds other processes may know better."""
        return 0.0 if self._store.shared is None else WRITE_SECONDS

    def write(self) -> None:
        """Write the times to the records, unless that was done a moment ago. Raises Unavailable."""
        now = self._clock()
        if not self._at or now - self._written_at < WRITE_SECONDS:
            return
        self._written_at = now
        with self._lock:
            written = dict(self._at)
        with self._store.writing() as db:
            db.connection().execute(_WRITE, [{"device_id": key, "heard_at": at} for key, at in written.items()])
        with self._lock:  # only now: a reader meanwhile found it here
            self._at = {key: at for key, at in self._at.items() if written.get(key) != at}
