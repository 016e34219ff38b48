"""The time of each device's last call or last received piece of a body.

Times are kept in memory and written together every ``WRITE_SECONDS``, so that polls and heartbeats need no transaction.
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
    """Times that this process has noted and not yet written to the records."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._at: dict[str, float] = {}
        self._written_at = -math.inf
        self._lock = threading.Lock()

    def note(self, device_id: str) -> None:
        """Note a call of this device; thread-safe."""
        with self._lock:
            self._at[device_id] = self._clock()

    def at(self, device_id: str, seen_at: float) -> float:
        """Return the time at which a device was last seen; seen_at: the time in the records."""
        return max(seen_at, self._at.get(device_id, -math.inf))

    @property
    def lag(self) -> float:
        """Return the largest delay, seconds, of times noted by other processes."""
        return 0.0 if self._store.shared is None else WRITE_SECONDS

    def write(self) -> None:
        """Write the times, at most every ``WRITE_SECONDS``. Raises Unavailable."""
        if self._clock() - self._written_at >= WRITE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the times now. Raises Unavailable."""
        if not self._at:
            return
        self._written_at = self._clock()
        with self._lock:
            written = dict(self._at)
        with self._store.writing() as db:
            db.connection().execute(_WRITE, [{"device_id": key, "heard_at": at} for key, at in written.items()])
        # Drop the written times last: until now, concurrent readers needed them.
        with self._lock:
            self._at = {key: at for key, at in self._at.items() if written.get(key) != at}
