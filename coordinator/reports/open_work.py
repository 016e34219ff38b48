"""Open assignments of federations."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from sparrow.protocol.messages import FederationStatus, Kind, OpenAssignment, OpenWork

from ..clock import iso
from ..fleet.federations import find
from ..rounds.last_seen import LastSeen
from ..storage.store import Store
from ..storage.tables import Assignment, Device


class OpenAssignments:
    """Open assignments of all federations."""

    def __init__(self, store: Store, clock: Callable[[], float], last_seen: LastSeen) -> None:
        self._store = store
        self._clock = clock
        self._last_seen = last_seen

    def list(self, federation_name: str) -> OpenWork:
        """Return the open assignments, oldest first. Raises NotFound."""
        with self._store.reading() as db:
            federation = find(db, federation_name)
            assignments = self.awaited(db, Assignment.federation_id == federation.id)
        return OpenWork(
            at=iso(self._clock()),
            status=FederationStatus(federation.status),
            round=federation.round,
            assignments=assignments,
        )

    def awaited(self, db: Session, *those: ColumnElement[bool], most: int | None = None) -> tuple[OpenAssignment, ...]:
        """Return the first ``most`` of the selected open assignments, oldest first."""
        rows = db.execute(
            select(
                Assignment.id,
                Device.name,
                Assignment.kind,
                Assignment.round,
                Assignment.created_at,
                Device.id,
                Device.seen_at,
            )
            .join(Device, Device.id == Assignment.device_id)
            .where(Assignment.status == "open", *those)
            .order_by(Assignment.round, Assignment.kind, Assignment.position)
            .limit(most)
        )
        return tuple(
            OpenAssignment(
                assignment_id=assignment_id,
                device=name,
                kind=Kind(kind),
                round=number,
                since=iso(since),
                heard_at=iso(self._last_seen.at(device_id, seen_at)),
            )
            for assignment_id, name, kind, number, since, device_id, seen_at in rows
        )
