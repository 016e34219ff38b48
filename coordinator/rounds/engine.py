"""The life of a round.

    federation   waiting --(min_devices enrolled)--> running --(all stopped, or last round)--> finished
                 running <--> paused; waiting, running, paused --(operator)--> stopped; reopened: running again
    round        open --(all settled, quorum, or deadline)--> closed; then the next one opens
                 open --(too few updates)--> open, extended: more time, more devices; in the end closed, skipped
    assignment   open --> done (update accepted) | returned (handed back)
                      --> expired (deadline, silence of its device, or the quorum was met)

Here is the order of steps; ``opening`` and ``closing`` begin and end rounds, ``expiry`` the work of devices that are
late or silent. Buffered rounds, which do not wait for their cohort, are in ``buffered``.

If a method has one device prepare the model, that is round 0; it is repeated, with any device that is present, until
an update comes.

Calls from devices only record facts, each in one transaction: enrolled, asked, handed back, sent an update.
``advance`` turns facts into progress: it opens rounds, folds updates into running sums, closes rounds. It is called by
one thread at a time, whenever a fact has come and every tick for the deadlines.

Nothing acknowledged is lost: an update is on disk and in the records before it is answered. The running sums are only
memory: after a restart they are rebuilt from the stored updates. Updates are folded in the order of the cohort (sorted
by device name); one that comes out of turn waits on disk. So the same updates give the same model bit for bit, in
whatever order they arrive, and memory does not grow with the cohort.

Every transaction here is refused where another process has taken over the moving of rounds (``storage.processes``).

Devices that miss a deadline, or are not seen for ``silence_seconds`` while their work is awaited, are not drawn again
until they ask for work; those that hand back are not drawn for a minute. Silence counts only while this process looks:
after a restart, a pause, or a time in which no call could come, it counts anew. A round whose cohort sent nothing is
recorded with no updates and leaves the model as it was; the next opens when somebody is there.
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
        Assignment.kind.in_(PHASES),  # training is one of them
        Assignment.status == literal_column("'open'"),
    )
    .limit(1)
)
_MOVING = select(Federation.id, Federation.name, Federation.status).where(
    Federation.status.in_(("waiting", "running", "stopped"))
)


class Rounds:
    """Runs the rounds of every federation.

    last_seen: when each device was. decoded: accepted updates that are still in memory. longest_pause: the pause, s,
    that a device without work may make because it was asked to. on_closed: called with each round that closes, its
    seconds, and the number of its updates that were left out. progress: called with each step, update and file.
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
        self._calm: dict[int, tuple[int, float]] = {}  # by federation: a round that waits for all, and until when

    def resume_after_restart(self) -> None:
        """Give open rounds their whole deadline again: the time without a coordinator was not the devices' fault."""
        with self._store.writing() as db:
            for federation in db.scalars(select(Federation).where(Federation.status.in_(("running", "waiting")))):
                extend_deadlines(db, federation, self._clock())

    def forget_sums(self) -> None:
        """Forget the running sums, since another process may have moved rounds.

        They are made again from the stored updates.
        """
        with self._advancing:
            self._folding.clear()
            self._closing.forget_all()
            self._expiry.forget_all()

    def advance(self) -> bool:
        """Turn facts into progress; return whether something moved that a device or observer may wait for."""
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
                            if found is Step.opened:  # whose devices have only been asked
                                break
                    except Unavailable:  # the store has logged it, once; the sums are made again
                        self._folding.pop(federation_id, None)
                        self._expiry.forget(federation_id)
                    except Exception:
                        # A lost file or an uninstalled method stops its federation, not the others. Its sums may hold
                        # half an update: they are made again from what is stored.
                        self._folding.pop(federation_id, None)
                        if self._is_deleted(federation_id):  # meanwhile, so that its records or files were missing
                            self._closing.forget(federation_id)
                        else:
                            self._say_stuck(federation_id)
                    else:
                        self._stuck.pop(federation_id, None)
            self._expiry.end_look()
        return moved

    def _is_calm(self, db: Session, federation_id: int, status: str, now: float) -> bool:
        """Return whether there is nothing to do but to wait: a cohort's first updates have come, or none.

        They are folded later, if there are few enough to be in memory by then."""
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
            log.exception("federation %s cannot move on; the others do, and it is tried again", federation_id)

    def _step_whole(self, federation_id: int) -> Step:
        """Do as ``step`` does; where an update that it needs is damaged, have the device send another one.

        Raises Damaged where it is a model: the federation waits until its operator has restored it."""
        try:
            return self.step(federation_id)
        except Damaged as damage:
            self._folding.pop(federation_id, None)
            if not self._ask_again(federation_id, damage.key):
                raise
            return Step.moved

    def step(self, federation_id: int) -> Step:
        """Move one federation on by one step."""
        with self._store.reading() as db:
            federation, current = db.execute(_FEDERATION_AND_ROUND, {"federation_id": federation_id}).one()
            cohort = cohort_of(db, federation, current.number) if current else []
        if federation.status == "waiting" and self._opening.start(federation_id):
            return Step.moved  # before its round, which may be open: paused in round 1, then resumed
        if federation.status == "running" and self._expiry.withdraw_silent(federation, current):
            return Step.moved
        self._models.manifest(federation)  # read and parsed here, and not in a transaction
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
                self._models.sent_digest(federation)  # likewise
            return Step.moved if self._expiry.expire_late(federation_id) else self._opening.open(federation_id)
        return Step.nothing

    def _step_secure(self, federation: Federation, current: Round) -> bool:
        """Move a secure round on by a phase; close it with the sums that came out."""
        ended = self._secure.advance(federation, current)
        if isinstance(ended, bool):
            if not ended and settings_of(federation).quorum == 1:  # else a phase may end while some still train
                self._calm[federation.id] = (current.number, self._clock() + LOOK_SECONDS)
            return ended or self._expiry.expire_late(federation.id)
        folding = self._fold(federation, current)
        folding.take_sums(ended)
        folding.position = ended.notes.get("secure_keys_asked", 0)  # all that were drawn, whoever came
        return self._close(federation, current.number, folding)

    def _step_round(self, federation: Federation, current: Round, cohort: Sequence[Member]) -> bool:
        if current.secure is not None:
            return self._step_secure(federation, current)
        done = [member.id for member in cohort if member.status == "done"]
        waiting = [member.id for member in cohort if member.status == "open"]
        late, stopped = self._clock() >= current.deadline_at, federation.status == "stopped"
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
            if current.target == len(cohort):  # else it may close while some still train
                until = min(current.deadline_at, self._clock() + LOOK_SECONDS)
                self._calm[federation.id] = (current.number, until)
            return self._expiry.expire_late(federation.id)
        why = f"skipped: {len(done)} updates came, and min_updates is {lacking}"
        return self._close(federation, current.number, folding, dict.fromkeys(done, why) if lacking else None)

    def _step_buffered(self, federation: Federation, current: Round) -> bool:
        """Take in what has arrived, keep a cohort at work, and close when the buffer is full (``buffered``)."""
        settings, number = settings_of(federation), current.number
        late, stopped = self._clock() >= current.deadline_at, federation.status == "stopped"
        final = is_final(federation, number)
        folding = self._fold(federation, current)
        with self._store.reading() as db:
            busy = working(db, federation)  # before the arrivals: where nobody trains, none can come after them
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
        """Open the assignment anew whose stored update is damaged; return whether the key is of one.

        Its device trains for it again if it asks before the deadline. Else the round's record says what was left out.
        """
        with self._store.reading() as db:
            if not _is_update(db.get(Assignment, assignment_of(key)), key):
                return False
        # First, for its device may send the same again, to the same key, as soon as it is asked.
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
                "the stored update of %s is damaged and left out; it is asked to train round %s again",
                *(device.name, damaged.round),
                extra={"round": damaged.round},
            )
        return True

    def _fold(self, federation: Federation, current: Round) -> Folding:
        folding, number = self._folding.get(federation.id), current.number
        if folding is None or folding.round != number:
            with self._store.reading() as db:
                situation = situation_of(db, self._models, federation, number)
                length = usual_before(db, federation.id, number)
            folding = Folding(
                *(self._store, self._models, self._decoded, federation, situation),
                usual_length=length,
                progress=self._progress,
            )
            self._folding[federation.id] = folding
        return folding


def _is_update(assignment: Assignment | None, key: str) -> bool:
    """Return whether the update of this assignment that the records name is the one under this key."""
    if assignment is None:
        return False
    return key == update_key(assignment.federation_id, assignment.id, assignment.update_sha256 or "")


def _lacking(settings: FederationSettings, cohort: Sequence[Member], came: int) -> int:
    """Return how many updates a round must have, if fewer came; else 0."""
    if not cohort or cohort[0].kind != Kind.train.value:
        return 0
    if settings.noise_multiplier is not None:  # nobody may know how many came
        return 0
    return settings.min_updates if came < settings.min_updates else 0
