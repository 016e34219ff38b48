"""Events in the records (``sparrow.protocol.events``), each written by the transaction that causes it.

The newest ``MOST_EVENTS`` events of each federation are kept, and the same number of its devices' events, so that a
device's frequent pauses do not displace others.
"""

from __future__ import annotations

from sqlalchemy import ScalarSelect, delete, func, select
from sqlalchemy.orm import Session

from sparrow.protocol.events import EventKind

from .tables import Event, Federation

MOST_EVENTS = 5000
PRUNE_EVERY = 64
"""Number of events between two removals of old events."""


def record(
    db: Session, federation_id: int, kind: EventKind, now: float, *, device: str | None = None, detail: str = ""
) -> None:
    """Record an event. device: its name; None for the whole federation. detail: text for the records, in codes."""
    federation = db.get_one(Federation, federation_id)
    event = Event(federation_id=federation_id, kind=kind.value, at=now, round=federation.round, device=device)
    event.detail = detail
    db.add(event)
    db.flush()
    if event.id % PRUNE_EVERY == 0:
        _prune(db, event)


def newest(federation_id: int) -> ScalarSelect[int]:
    """Return SQL for the id of a federation's newest event, 0 before the first."""
    return select(func.coalesce(func.max(Event.id), 0)).where(Event.federation_id == federation_id).scalar_subquery()


def _prune(db: Session, newest: Event) -> None:
    similar = (
        Event.federation_id == newest.federation_id,
        Event.device.is_(None) if newest.device is None else Event.device.is_not(None),
    )
    oldest = select(Event.id).where(*similar).order_by(Event.id.desc()).offset(MOST_EVENTS).limit(1)
    if (last := db.scalar(oldest)) is not None:
        db.execute(delete(Event).where(*similar, Event.id <= last))
