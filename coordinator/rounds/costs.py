"""Upload costs and total bytes per device, reported after the upload."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import cast

from sqlalchemy import Table, bindparam, update

from sparrow.protocol.messages import UploadCost

from ..errors import Unavailable
from ..storage.store import Store
from ..storage.tables import Assignment, Device
from .assignments import touch

MOST_OF_ONE = 16
"""Number of latest costs kept per device, more than an honest device uploads in a round."""

_DOWN = (
    update(cast(Table, Device.__table__))
    .where(Device.id == bindparam("device_id"), Device.bytes_down < bindparam("down"))
    .values(bytes_down=bindparam("down"))
)
_UP = (
    update(cast(Table, Device.__table__))
    .where(Device.id == bindparam("device_id"), Device.bytes_up < bindparam("up"))
    .values(bytes_up=bindparam("up"))
)
_COST = (
    update(cast(Table, Assignment.__table__))
    .where(
        Assignment.id == bindparam("cost_of"),
        Assignment.device_id == bindparam("device"),
        Assignment.status == "done",
        Assignment.upload_cost.is_(None),
    )
    .values(upload_cost=bindparam("upload_cost"))
    .returning(Assignment.federation_id, Assignment.round, Assignment.arrival, Assignment.counted_round)
)


class UploadCosts:
    """Upload costs, kept in memory to save transactions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._costs: dict[str, deque[UploadCost]] = {}
        self._lock = threading.Lock()

    def note(self, device_id: str, cost: UploadCost) -> None:
        """Keep the cost of a device's last upload; only the first report of an assignment counts."""
        with self._lock:
            self._costs.setdefault(device_id, deque(maxlen=MOST_OF_ONE)).append(cost)

    def write(self) -> None:
        """Write the kept costs to the records. Raises Unavailable, and keeps them for the next try."""
        with self._lock:
            costs = self._costs
            self._costs = {}
        if not costs:
            return
        try:
            self._write([(device_id, cost) for device_id, of_one in costs.items() for cost in of_one])
        except Unavailable:
            with self._lock:
                for device_id, of_one in costs.items():
                    of_one.extend(self._costs.get(device_id, ()))
                    self._costs[device_id] = of_one
            raise

    def _write(self, costs: Sequence[tuple[str, UploadCost]]) -> None:
        moved = [
            {"device_id": device_id, "down": cost.everything.bytes_down, "up": cost.everything.bytes_up}
            for device_id, cost in costs
        ]
        with self._store.writing() as db:
            connection = db.connection()
            rounds = set[tuple[int, int]]()
            connection.execute(_DOWN, moved)
            connection.execute(_UP, moved)
            for device_id, cost in costs:
                which = {"cost_of": cost.assignment_id, "device": device_id}
                values = {**which, "upload_cost": cost.upload.model_dump(mode="json")}
                found = connection.execute(_COST, values).first()
                if found is None:
                    continue
                federation_id, number, arrival, counted = found
                in_round = number if arrival is None else counted
                # An update that waits in a buffer has no round yet.
                if in_round is not None:
                    rounds.add((federation_id, in_round))
            for federation_id, in_round in sorted(rounds):
                touch(db, federation_id, in_round)
