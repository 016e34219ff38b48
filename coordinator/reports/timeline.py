"""The timeline of a federation: its events as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, func, or_, select

from sparrow.protocol.events import Event as Told
from sparrow.protocol.events import EventKind, Events
from sparrow.protocol.failures import in_words

from ..clock import iso
from ..fleet.federations import find
from ..storage.store import Store
from ..storage.tables import Event

Owner = Literal["federation", "devices", "marked"]
"""Owner of events: the federation, its devices, or charts, which mark its own events and devices' failures."""


@dataclass(frozen=True)
class EventQuery:
    """A selection of events."""

    # Name of the device.
    device: str | None = None
    # Whose events.
    of: Owner | None = None
    kinds: tuple[EventKind, ...] = ()
    # Ids, exclusive.
    before: int | None = None
    after: int | None = None
    limit: int | None = None


class Timeline:
    """Timelines of all federations."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def look(self, federation_name: str, query: EventQuery | None = None) -> Events:
        """Return the selected events, the newest first, and their number on all pages. Raises NotFound."""
        query = query or EventQuery()
        with self._store.reading() as db:
            those = [Event.federation_id == find(db, federation_name).id]
            if query.device is not None:
                those.append(Event.device == query.device)
            if query.of is not None:
                those.append(_OF[query.of])
            if query.kinds:
                those.append(Event.kind.in_([kind.value for kind in query.kinds]))
            total = db.scalar(select(func.count()).select_from(Event).where(*those)) or 0
            if query.before is not None:
                those.append(Event.id < query.before)
            if query.after is not None:
                those.append(Event.id > query.after)
            page = select(Event).where(*those).order_by(Event.id.desc()).limit(query.limit)
            told = tuple(tell(each) for each in db.scalars(page))
        return Events(events=told, total=total)


_OF: dict[Owner, ColumnElement[bool]] = {
    "federation": Event.device.is_(None),
    "devices": Event.device.is_not(None),
    "marked": or_(Event.device.is_(None), Event.kind == EventKind.failed.value),
}


def tell(event: Event) -> Told:
    """Return a stored event as text."""
    kind = EventKind(event.kind)
    what = _WORDS.get((kind, event.device is not None)) or kind.value.replace("_", " ")
    detail = _REASONS.get(event.detail) or in_words(event.detail)
    return Told(
        id=event.id,
        at=iso(event.at),
        kind=kind,
        round=event.round,
        device=event.device,
        text=f"{what}: {detail}" if detail else what,
    )


_WORDS = {
    (EventKind.stopped, True): "stopped early",
    (EventKind.removed, True): "revoked",
    (EventKind.rolled_back, False): "went back",
    (EventKind.model_replaced, False): "took a new version of its model",
}
_REASONS = {"all_stopped": "every device stopped", "max_rounds": "all rounds done"}
