"""What uploads cost the devices, and all that they moved so far, which they can tell only afterwards."""

from __future__ import annotations

from collections import deque

from edge_sdk.protocol.messages import UploadCost
from sparrow.coordinator.rounds.assignments import touch
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Assignment, Device


class UploadCosts:
    """Kept in memory until a round closes or somebody looks: not worth a transaction of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._costs: deque[tuple[str, UploadCost]] = deque(maxlen=100_000)

    def note(self, device_id: str, cost: UploadCost) -> None:
        """Keep what a device's last upload cost it; the first word counts, and a stranger's none."""
        self._costs.append((device_id, cost))

    def write(self) -> None:
        """Bring what was kept in memory to the records."""
        costs: list[tuple[str, UploadCost]] = []
        while self._costs:
            costs.append(self._costs.popleft())
        if not costs:
            return
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
