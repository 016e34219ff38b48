"""Costs of uploads, and all bytes that a device moved so far, which it can report only afterwards."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from edge_sdk.protocol.messages import UploadCost
from sparrow.coordinator.errors import Unavailable
from sparrow.coordinator.rounds.assignments import touch
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Assignment, Device

MOST_OF_ONE = 16
"""Costs of one device that are kept, the latest: more than an honest one uploads until a round closes."""


class UploadCosts:
    """Costs of uploads, kept in memory until a round closes or somebody looks: not worth a transaction of their own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._costs: dict[str, deque[UploadCost]] = {}
        self._lock = threading.Lock()

    def note(self, device_id: str, cost: UploadCost) -> None:
        """Keep what a device's last upload cost it; its first report counts, and only for its own assignment."""
        with self._lock:
            self._costs.setdefault(device_id, deque(maxlen=MOST_OF_ONE)).append(cost)

    def write(self) -> None:
        """Write to the records what was kept in memory."""
        with self._lock:
            costs, self._costs = self._costs, {}
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
        with self._store.writing() as db:
            for device_id, cost in costs:
                device = db.get(Device, device_id)
                if device is not None:
                    device.bytes_down = max(device.bytes_down, cost.everything.bytes_down)
                    device.bytes_up = max(device.bytes_up, cost.everything.bytes_up)
                assignment = db.get(Assignment, cost.assignment_id)
                if assignment is None or assignment.device_id != device_id or assignment.status != "done":
                    continue
                if assignment.upload_cost is None:
                    assignment.upload_cost = cost.upload.model_dump(mode="json")
                    number = assignment.round if assignment.arrival is None else assignment.counted_round
                    if number is not None:  # else it waits in a buffer, and no record that is kept has it
                        touch(db, assignment.federation_id, number)
