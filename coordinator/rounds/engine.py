"""The life of a round.

    federation   waiting --(min_devices enrolled)--> running --(all stopped, or last round)--> finished
                 running <--> paused; waiting, running, paused --(operator)--> stopped; reopened: running again
    round        open --(all settled, quorum, or deadline)--> closed; then the next one opens
                 open --(too few updates)--> open, extended: more time, more devices; in the end closed, skipped
    assignment   open --> done (update accepted) | returned (handed back)
                      --> expired (deadline, silence of its device, or the quorum was met)

Round 0 is the preparation of a model by one device, if the method needs it; it repeats until an update comes.

Devices' calls only record facts, each in one transaction. ``advance`` processes them in one thread, after each fact and
at every tick. Its transactions are refused if another process advances the rounds (``storage.processes``).

Running sums are only in memory and are rebuilt after a restart. Updates are folded in the cohort's order (by device
name), so the same updates give the same model bit for bit. Early updates wait on disk.

A device that misses a deadline, or is silent for ``silence_seconds`` while its work is awaited, is not drawn until it
asks for work; one that returns work is not drawn for a minute.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import and_, bindparam, literal_column, select
from sqlalchemy.orm import Session

from sparrow.protocol.messages import Kind
from sparrow.protocol.settings import FederationSettings

from ..errors import Damaged, Unavailable
from ..logs import about
from ..models.global_models import Models, settings_of
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation, Round
from .assignments import (
    DAMAGED,
    Member,
    assignment_of,
    cohort_of,
    extend_deadlines,
    touch,
    update_key,
)
from .buffered import arrivals, is_final, working
from .candidates import situation_of
from .closing import Closing
from .costs import UploadCosts
from .expiry import LOOK_SECONDS, Expiry
from .intake import DecodedUpdates, Folding
from .last_seen import LastSeen
from .lengths import usual_before
from .opening import Opening, Step
from .secure import SecureRounds
from .secure_state import PHASES

log = logging.getLogger(__name__)

_FEDERATION_AND_ROUND = (
    select(Federation, Round)
    .outerjoin(Round, and_(Round.federation_id == Federation.id, Round.status == "open"))
    .where(Federation.id == bindparam("federation_id"))
)
_SOMEBODY_TRAINS = (
    select(Assignment.id)
    .where(
        Assignment.federation_id == bindparam("federation_id"),
        Assignment.round == bindparam("number"),
        # The phases include training.
        Assignment.kind.in_(PHASES),
        Assignment.status == literal_column("'open'"),
    )
    .limit(1)
)
_MOVING = select(Federation.id, Federation.name, Federation.status).where(
    Federation.status.in_(("waiting", "running", "stopped"))
)


class Rounds:
    """Run the rounds of all federations.

    longest_pause: longest pause between polls, seconds. on_closed: called with federation name, seconds and number of
    excluded updates.
    """

    def __init__(
        self,
        store: Store,
        models: Models,
        clock: Callable[[], float],
        costs: UploadCosts,
        last_seen: LastSeen,
        decoded: DecodedUpdates,
        *,
        longest_pause: Callable[[], float] = lambda: 0.0,
        on_closed: Callable[[str, float, int], None] = lambda federation, seconds, left_out: None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._models = models
        self._clock = clock
        self._decoded = decoded
        self._progress = progress
        self._expiry = Expiry(store, clock, last_seen, longest_pause)
        self._secure = SecureRounds(store, models, clock, self._expiry.expire)
        self._opening = Opening(store, models, clock, self._secure)
        self._closing = Closing(store, models, clock, costs, decoded, self._opening, on_closed, progress)
        self._advancing = threading.Lock()
        self._folding: dict[int, Folding] = {}
        self._stuck: dict[int, float] = {}
        # By federation: a round that waits for its whole cohort, and the time of the next look.
        self._calm: dict[int, tuple[int, float]] = {}

    def resume_after_restart(self) -> None:
        """Restart the deadlines of open rounds, because devices could not report while the coordinator was down."""
        with self._store.writing() as db:
            for federation in db.scalars(select(Federation).where(Federation.status.in_(("running", "waiting")))):
                extend_deadlines(db, federation, self._clock())

    def forget_sums(self) -> None:
        """Discard the running sums, because another process may have advanced rounds."""
        with self._advancing:
            self._folding.clear()
            self._closing.forget_all()
            self._expiry.forget_all()

    def advance(self) -> bool:
        """Process recorded facts; return True if devices or observers may see a change."""
        moved = False
        with self._advancing:
            now = self._clock()
            with self._store.reading() as db:
                federations = db.execute(_MOVING).all()
                calm = {row[0] for row in federations if self._is_calm(db, row[0], row[2], now)}
            self._expiry.begin_look([row[0] for row in federations], now)
            for federation_id, name, _ in federations:
                if federation_id in calm:
                    continue
                with about(federation=name):
                    try:
                        while (found := self._step_whole(federation_id)) is not Step.nothing:
                            moved = True
                            self._progress()
                            # No device can have answered a round that has just opened.
                            if found is Step.opened:
                                break
                    except Unavailable:
                        # The store has logged the failure. Rebuild the sums from the stored updates.
                        self._folding.pop(federation_id, None)
                        self._expiry.forget(federation_id)
                    except Exception:
                        # A lost file or an uninstalled method stops only its own federation. The sums may hold half an
                        # update, so rebuild them. A federation that was deleted meanwhile needs no log line.
                        self._folding.pop(federation_id, None)
                        if self._is_deleted(federation_id):
                            self._closing.forget(federation_id)
                        else:
                            self._say_stuck(federation_id)
                    else:
                        self._stuck.pop(federation_id, None)
            self._expiry.end_look()
        return moved

    def _is_calm(self, db: Session, federation_id: int, status: str, now: float) -> bool:
        # The round only waits for its cohort. Its first updates are folded later, if they fit in memory.
        number, until = self._calm.get(federation_id, (0, -math.inf))
        if status != "running" or not now < until or not self._decoded.has_room:
            return False
        return db.execute(_SOMEBODY_TRAINS, {"federation_id": federation_id, "number": number}).first() is not None

    def _is_deleted(self, federation_id: int) -> bool:
        with self._store.reading() as db:
            return db.get(Federation, federation_id) is None

    def _say_stuck(self, federation_id: int) -> None:
        now = self._clock()
        if now - self._stuck.get(federation_id, -math.inf) >= 60:
            self._stuck[federation_id] = now
            log.exception("federation %s is stuck; other federations continue; retrying", federation_id)

    def _step_whole(self, federation_id: int) -> Step:
        """Advance by one step; if a stored update is damaged, request it again.

        Raises Damaged for a damaged model.
        """
        try:
            return self.step(federation_id)
        except Damaged as damage:
            self._folding.pop(federation_id, None)
            if not self._ask_again(federation_id, damage.key):
                raise
            return Step.moved

    def step(self, federation_id: int) -> Step:
        """Advance one federation by one step."""
        with self._store.reading() as db:
            federation, current = db.execute(_FEDERATION_AND_ROUND, {"federation_id": federation_id}).one()
            cohort = cohort_of(db, federation, current.number) if current else []
        # A waiting federation may have an open round: paused in round 1, then resumed.
        if federation.status == "waiting" and self._opening.start(federation_id):
            return Step.moved
        if federation.status == "running" and self._expiry.withdraw_silent(federation, current):
            return Step.moved
        # Cache the manifest, and below the digest, so that no transaction reads files.
        self._models.manifest(federation)
        if current is not None:
            if self._closing.is_made(federation, current):
                if self._closing.record(federation):
                    self._folding.pop(federation_id, None)
                return Step.moved
            if settings_of(federation).buffer is not None:
                return Step.moved if self._step_buffered(federation, current) else Step.nothing
            return Step.moved if self._step_round(federation, current, cohort) else Step.nothing
        if federation.status == "running":
            if settings_of(federation).secure:
                self._models.sent_digest(federation)
            return Step.moved if self._expiry.expire_late(federation_id) else self._opening.open(federation_id)
        return Step.nothing

    def _step_secure(self, federation: Federation, current: Round) -> bool:
        ended = self._secure.advance(federation, current)
        if isinstance(ended, bool):
            # With a quorum below 1, a phase may end while devices still train.
            if not ended and settings_of(federation).quorum == 1:
                self._calm[federation.id] = (current.number, self._clock() + LOOK_SECONDS)
            return ended or self._expiry.expire_late(federation.id)
        folding = self._fold(federation, current)
        folding.take_sums(ended)
        # The number of devices drawn, including those that vanished.
        folding.position = ended.notes.get("secure_keys_asked", 0)
        return self._close(federation, current.number, folding)

    def _step_round(self, federation: Federation, current: Round, cohort: Sequence[Member]) -> bool:
        if current.secure is not None:
            return self._step_secure(federation, current)
        done = [member.id for member in cohort if member.status == "done"]
        waiting = [member.id for member in cohort if member.status == "open"]
        late = self._clock() >= current.deadline_at
        stopped = federation.status == "stopped"
        settings = settings_of(federation)
        lacking = _lacking(settings, cohort, len(done))
        if lacking and not stopped and (late or not waiting) and current.extensions < settings.extensions:
            extended = self._opening.extend(federation.id, current.number, late=late)
            return extended or self._expiry.expire_late(federation.id)
        if waiting and (late or len(done) >= current.target or stopped):
            self._expiry.expire(waiting, away=late)
            return True
        folding = self._fold(federation, current)
        folding.take_in_order(cohort)
        if waiting:
            # With a smaller target, the round may close while devices still train.
            if current.target == len(cohort):
                until = min(current.deadline_at, self._clock() + LOOK_SECONDS)
                self._calm[federation.id] = (current.number, until)
            return self._expiry.expire_late(federation.id)
        why = f"skipped: {len(done)} updates arrived, but min_updates is {lacking}"
        return self._close(federation, current.number, folding, dict.fromkeys(done, why) if lacking else None)

    def _step_buffered(self, federation: Federation, current: Round) -> bool:
        """Fold the arrivals, keep a cohort at work, and close the round when the buffer is full."""
        settings = settings_of(federation)
        number = current.number
        late = self._clock() >= current.deadline_at
        stopped = federation.status == "stopped"
        final = is_final(federation, number)
        folding = self._fold(federation, current)
        with self._store.reading() as db:
            # Read before the arrivals: if no device trains now, no later arrival can be missed.
            busy = working(db, federation)
            room = None if final else max(0, current.target - len(folding.taken))
            arrived = arrivals(db, federation, folding.last, room)
        folding.take_arrivals(arrived)
        if len(folding.taken) < current.target and not late and not stopped:
            if len(busy) < settings.cohort and self._opening.top_up(federation.id, number):
                return True
            if busy:
                return self._expiry.expire_late(federation.id)
        if final and busy:
            self._expiry.expire(list(busy.values()), away=False)
            return True
        return self._close(federation, number, folding)

    def _close(
        self, federation: Federation, number: int, folding: Folding, skipped: Mapping[str, str] | None = None
    ) -> bool:
        if self._closing.close(federation, number, folding, skipped):
            self._folding.pop(federation.id, None)
        return True

    def _ask_again(self, federation_id: int, key: str) -> bool:
        """Reopen the assignment of a damaged update; return True if the key belongs to an update.

        The device trains again if it asks before the deadline; else the round's record lists the update as left out.
        """
        with self._store.reading() as db:
            if not _is_update(db.get(Assignment, assignment_of(key)), key):
                return False
        # Delete first: the reopened device may send the same update to the same key.
        self._store.blobs.delete(key)
        with self._store.moving() as db:
            damaged = db.get(Assignment, assignment_of(key))
            if damaged is None or not _is_update(damaged, key):
                return True
            device = db.get_one(Device, damaged.device_id)
            damaged.status = "open" if device.status != "revoked" else "expired"
            damaged.return_reason = DAMAGED
            damaged.update_sha256 = damaged.update_bytes = damaged.report = damaged.arrival = None
            touch(db, federation_id, damaged.round)
            log.warning(
                "the stored update of %s is damaged and left out; the device is asked to train round %s again",
                device.name,
                damaged.round,
                extra={"round": damaged.round},
            )
        return True

    def _fold(self, federation: Federation, current: Round) -> Folding:
        folding = self._folding.get(federation.id)
        number = current.number
        if folding is None or folding.round != number:
            with self._store.reading() as db:
                situation = situation_of(db, self._models, federation, number)
                length = usual_before(db, federation.id, number)
            folding = Folding(
                self._store,
                self._models,
                self._decoded,
                federation,
                situation,
                usual_length=length,
                progress=self._progress,
            )
            self._folding[federation.id] = folding
        return folding


def _is_update(assignment: Assignment | None, key: str) -> bool:
    if assignment is None:
        return False
    return key == update_key(assignment.federation_id, assignment.id, assignment.update_sha256 or "")


def _lacking(settings: FederationSettings, cohort: Sequence[Member], came: int) -> int:
    """Return the required number of updates if fewer came, else 0."""
    if not cohort or cohort[0].kind != Kind.train.value:
        return 0
    # Under noise the number of updates is private.
    if settings.noise_multiplier is not None:
        return 0
    return settings.min_updates if came < settings.min_updates else 0
