"""Expiry of work whose deadline has passed or whose device is silent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

from sqlalchemy import ColumnElement, and_, or_, select

from sparrow.protocol.messages import Kind

from ..models.global_models import settings_of
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation, Round
from .assignments import COHORT_KINDS, JUDGING_KINDS, touch
from .failing import note_failure
from .last_seen import LastSeen
from .secure_state import PHASES

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Shortest time between two searches for silent or late devices."""

MOST_SAID = 10
"""Largest number of devices named in a log line."""

GAP_SECONDS = 10.0
"""Longest gap between two searches. After a longer one, which may be a suspension, silence counts from zero."""


class Expiry:
    """Close the work of late or silent devices. longest_pause: returns the longest time
    between two polls of an idle device, in seconds.
    """

    def __init__(
        self, store: Store, clock: Callable[[], float], last_seen: LastSeen, longest_pause: Callable[[], float]
    ) -> None:
        self._store = store
        self._clock = clock
        self._last_seen = last_seen
        self._longest_pause = longest_pause
        self._looked_at = -math.inf
        # By federation: the start of the current time without a gap or a pause.
        self._looking_since: dict[int, float] = {}
        self._late_seen: dict[int, float] = {}
        self._silent_seen: dict[int, float] = {}

    def begin_look(self, federation_ids: Collection[int], now: float) -> None:
        """Begin a search in these federations; after a gap, silence counts from now."""
        since = self._looking_since if now - self._looked_at <= GAP_SECONDS else {}
        self._looking_since = {each: since.get(each, now) for each in federation_ids}

    def end_look(self) -> None:
        """End the search in all federations."""
        self._looked_at = self._clock()

    def forget(self, federation_id: int) -> None:
        """Restart the count of silence in this federation."""
        self._looking_since.pop(federation_id, None)

    def forget_all(self) -> None:
        """Restart the count of silence everywhere."""
        self._looking_since.clear()

    def expire(self, assignment_ids: Sequence[str], *, away: bool) -> None:
        """Close open assignments. away: mark their devices absent until they ask for work."""
        with self._store.moving() as db:
            for assignment in db.scalars(select(Assignment).where(Assignment.id.in_(assignment_ids))):
                if assignment.status == "open":
                    assignment.status = "expired"
                    federation = db.get_one(Federation, assignment.federation_id)
                    touch(db, federation.id, assignment.round)
                    if away:
                        device = db.get_one(Device, assignment.device_id)
                        now = self._clock()
                        late = assignment.deadline_at <= now
                        device.present = False
                        why = "it missed the deadline" if late else "it was silent for too long"
                        note_failure(db, device, assignment, why, now)

    def withdraw_silent(self, federation: Federation, current: Round | None) -> bool:
        """Close the awaited work of devices that were silent for ``silence_seconds``; return True if there was any."""
        now = self._clock()
        if now - self._silent_seen.get(federation.id, -math.inf) < LOOK_SECONDS:
            return False
        self._silent_seen[federation.id] = now
        settings = settings_of(federation)
        before = now - settings.silence_seconds - self._longest_pause() - self._last_seen.lag
        if self._looking_since.get(federation.id, now) > before:
            return False
        awaited: list[ColumnElement[bool]] = [Assignment.kind.in_(JUDGING_KINDS)]
        if current is not None:
            awaited.append(and_(Assignment.kind.in_((*COHORT_KINDS, *PHASES)), Assignment.round == current.number))
        if settings.buffer is not None:
            awaited.append(Assignment.kind == Kind.train.value)
        with self._store.reading() as db:
            rows = db.execute(
                select(Assignment.id, Device.id, Device.name, Device.seen_at)
                .join(Device, Device.id == Assignment.device_id)
                .where(
                    Assignment.federation_id == federation.id,
                    Assignment.status == "open",
                    or_(*awaited),
                    Assignment.created_at <= before,
                    Device.seen_at <= before,
                    Device.hosted.is_(False),
                )
            ).all()
        silent = {row[0]: row[2] for row in rows if self._last_seen.at(row[1], row[3]) <= before}
        if not silent:
            return False
        self.expire(list(silent), away=True)
        names = sorted(set(silent.values()))
        log.warning(
            "%s: no longer waiting for devices silent for more than %g s: %s%s",
            federation.name,
            settings.silence_seconds,
            ", ".join(names[:MOST_SAID]),
            f" and {len(names) - MOST_SAID} more" if len(names) > MOST_SAID else "",
            extra={"round": federation.round + 1},
        )
        return True

    def expire_late(self, federation_id: int) -> bool:
        """Close late evaluations and, in buffered federations, late training; return True if there was any."""
        now = self._clock()
        if now - self._late_seen.get(federation_id, -math.inf) < LOOK_SECONDS:
            return False
        self._late_seen[federation_id] = now
        with self._store.reading() as db:
            buffered = settings_of(db.get_one(Federation, federation_id)).buffer is not None
            kinds = (*JUDGING_KINDS, Kind.train.value) if buffered else JUDGING_KINDS
            late = db.scalars(
                select(Assignment.id).where(
                    Assignment.federation_id == federation_id,
                    Assignment.kind.in_(kinds),
                    Assignment.status == "open",
                    Assignment.deadline_at <= now,
                )
            ).all()
        if late:
            self.expire(late, away=True)
        return bool(late)
