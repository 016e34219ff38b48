"""The life of a round.

    federation   waiting --(min_devices enrolled)--> running --(all stopped, or last round)--> finished
                 running <--> paused; waiting, running, paused --(operator)--> stopped; reopened: running again
    round        open --(all settled, quorum, or deadline)--> closed; then the next one opens
                 open --(too few updates)--> open, extended: more time, more devices; in the end closed, skipped
    assignment   open --> done (update accepted) | returned (handed back)
                      --> expired (deadline, silence of its device, or the quorum was met)

Buffered rounds, which do not wait for their cohort, are in ``buffered``.

If a method has one device prepare the model, that is round 0; it is repeated, with any device that is present, until
an update comes.

Calls from devices only record facts, each in one transaction: enrolled, asked, handed back, sent an update.
``advance`` turns facts into progress: it opens rounds, folds updates into running sums, closes rounds. It is called by
one thread at a time, whenever a fact has come and every tick for the deadlines.

Nothing acknowledged is lost: an update is on disk and in the records before it is answered. The running sums are only
memory: after a restart they are rebuilt from the stored updates. Updates are folded in the order of the cohort (sorted
by device name); one that comes out of turn waits on disk. So the same updates give the same model bit for bit, in
whatever order they arrive, and memory does not grow with the cohort.

A round closes in two steps: first the new model's files, outside of any transaction, for slow storage may take a
minute; then a short transaction that looks whether the round is still open, records the model and moves everything on.
Killed between them, the coordinator finds the round still open, and does the same again; files that no record names are
never served. Where only the second step fails, it is repeated with the model that was made: noise is drawn once.

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
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, delete, func, literal_column, or_, select
from sqlalchemy.orm import Session

from sparrow.protocol import messages as wire
from sparrow.protocol.settings import FederationSettings

from ..errors import Damaged, Unavailable
from ..logs import about
from ..methods import GlobalModel, Situation, Work, load_method
from ..models.global_models import ModelFiles, Models, carry_out_replacement, settings_of
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation, Round
from .assignments import (
    COHORT_KINDS,
    DAMAGED,
    JUDGING_KINDS,
    Drawable,
    Member,
    assign,
    assignment_of,
    cohort_of,
    drop_late_work,
    extend_deadlines,
    note_failure,
    open_round,
    touch,
    update_folder,
    update_key,
)
from .buffered import arrivals, count_in, working
from .candidates import chosen_ratios, draw, drawable, most_examples, situation_of, why_over
from .cleanup import clear, models_in_use
from .costs import UploadCosts
from .evaluations import ask_for_evaluation
from .intake import DecodedUpdates, Folding, next_model
from .last_seen import LastSeen
from .lengths import usual_before
from .privacy import spent
from .rollback import carry_out, newest_version
from .secure import PHASES, SecureRounds
from .skew import adjustment, note_of

log = logging.getLogger(__name__)

ACCIDENT = 1e-9
"""The error of binary floats: 0.28 * 25 is 7.000000000000001, and seven are enough."""

LOOK_SECONDS = 0.5
"""The time between two looks at open work for silent devices, and at work without a round for late ones, while
updates keep coming."""

MOST_SAID = 10
"""Devices that a line of the log names."""

GAP_SECONDS = 10.0
"""The longest gap between two looks; after a longer one silence counts anew, for the process may have stood still."""

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


class Step(Enum):
    """The outcome of a step: nothing; something moved, so that there may be more to do; or a round opened."""

    nothing = 0
    moved = 1
    opened = 2


@dataclass(frozen=True)
class _Closing:
    """What the close of a round is to record: made once, and kept until it is recorded.

    last: in a buffered round the last arrival that counts in it. files: those of its new model; None for none.
    """

    round: int
    base: int
    files: ModelFiles | None
    updates: int
    notes: dict[str, Any]
    parts: dict[str, int]
    last: int
    warning: str | None


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
        self._costs = costs
        self._last_seen = last_seen
        self._decoded = decoded
        self._longest_pause = longest_pause
        self._on_closed = on_closed
        self._progress = progress
        self._secure = SecureRounds(store, models, clock, self._expire)
        self._advancing = threading.Lock()
        self._folding: dict[int, Folding] = {}
        self._closing: dict[int, _Closing] = {}
        # By federation: devices that did not prepare it, since the others were asked.
        self._failed_to_prepare: dict[int, set[str]] = {}
        self._stuck: dict[int, float] = {}
        self._calm: dict[int, tuple[int, float]] = {}  # by federation: a round that waits for all, and until when
        self._late_seen: dict[int, float] = {}
        self._silent_seen: dict[int, float] = {}
        self._looked_at = -math.inf
        self._looking_since: dict[int, float] = {}  # by federation: without a gap, and while it was not paused

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
            self._closing.clear()
            self._looking_since.clear()

    def advance(self) -> bool:
        """Turn facts into progress; return whether something moved that a device or observer may wait for."""
        moved = False
        with self._advancing:
            now = self._clock()
            with self._store.reading() as db:
                federations = db.execute(_MOVING).all()
                calm = {row[0] for row in federations if self._is_calm(db, row[0], row[2], now)}
            since = self._looking_since if now - self._looked_at <= GAP_SECONDS else {}
            self._looking_since = {row[0]: since.get(row[0], now) for row in federations}
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
                        self._looking_since.pop(federation_id, None)
                    except Exception:
                        # A lost file or an uninstalled method stops its federation, not the others. Its sums may hold
                        # half an update: they are made again from what is stored.
                        self._folding.pop(federation_id, None)
                        if self._is_deleted(federation_id):  # meanwhile, so that its records or files were missing
                            self._closing.pop(federation_id, None)
                        else:
                            self._say_stuck(federation_id)
                    else:
                        self._stuck.pop(federation_id, None)
            self._looked_at = self._clock()
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
        """Log why a federation cannot move on, at most once a minute."""
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
        if federation.status == "waiting" and self._start(federation_id):
            return Step.moved  # before its round, which may be open: paused in round 1, then resumed
        if federation.status == "running" and self._withdraw_silent(federation, current):
            return Step.moved
        self._models.manifest(federation)  # read and parsed here, and not in a transaction
        if current is not None:
            closing = self._closing.get(federation_id)
            if closing is not None and (closing.round, closing.base) == (current.number, federation.model_version):
                self._record_close(federation, closing)
                return Step.moved
            if settings_of(federation).buffer is not None:
                return Step.moved if self._step_buffered(federation, current) else Step.nothing
            return Step.moved if self._step_round(federation, current, cohort) else Step.nothing
        if federation.status == "running":
            if settings_of(federation).secure:
                self._models.sent_digest(federation)  # likewise
            return Step.moved if self._expire_late(federation_id) else self._open_round(federation_id)
        return Step.nothing

    def _start(self, federation_id: int) -> bool:
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation_id)
            enrolled = db.scalar(
                select(func.count()).where(Device.federation_id == federation_id, Device.status != "revoked")
            )
            if federation.status != "waiting" or (enrolled or 0) < settings_of(federation).min_devices:
                return False
            federation.status = "running"
            log.info("%s: %s devices enrolled, starts", federation.name, enrolled)
            return True

    def _open_round(self, federation_id: int) -> Step:
        """Open the next round, or end the federation."""
        now = self._clock()
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation_id)
            settings = settings_of(federation)
            if federation.status != "running" or open_round(db, federation):
                return Step.nothing
            over, going_on = why_over(db, federation), self._goes_on(db, federation)
            if over and not (over == "all_stopped" and going_on):
                return Step.moved if self._finish(db, federation, over) else Step.nothing
            there = drawable(db, federation, now)
            if not there and not going_on:
                return Step.nothing
            number, size, work, able = self._next_work(db, federation, settings, there)
            more = 0.0 if work.everyone or work.kind is wire.Kind.prepare else settings.over_selection
            current = Round(federation_id=federation.id, number=number, status="open", stale=True)
            current.opened_at, current.deadline_at = now, now + settings.deadline_seconds
            current.target = 0
            db.add(current)
            busy = 0 if settings.buffer is None else len(working(db, federation))
            drawn = math.ceil(size * (1 + more) - ACCIDENT) - busy
            secure = settings.secure and work.kind is wire.Kind.train
            asked = replace(work, kind=wire.Kind.keys) if secure else work
            count = self._hand_out(db, federation, current, asked, drawn, able)
            if secure:
                self._secure.begin(db, federation, current, work.plan)
            wanted = settings.quorum * (min(size, count) if more else count)
            current.target = settings.buffer or math.ceil(wanted - ACCIDENT)
            log.info("%s: round %s opens for %s devices", federation.name, number, count, extra={"round": number})
            return Step.opened if settings.buffer is None else Step.moved

    def _next_work(
        self, db: Session, federation: Federation, settings: FederationSettings, there: Sequence[Drawable]
    ) -> tuple[int, int, Work, Sequence[Drawable]]:
        """Return the number of the next round, how many devices it is for, its work, and the devices to draw from."""
        method = load_method(federation.method)
        if method.prepares and federation.model_version == 0:
            failed = self._failed_to_prepare.setdefault(federation.id, set())
            others = [device for device in there if device.id not in failed]
            if not others:
                failed.clear()
            return 0, 1, Work(wire.Kind.prepare), others or there
        work = method.schedule.work(self._situation(db, federation, federation.round + 1))
        work = replace(work, plan={**work.plan, **adjustment(db, federation)})
        return federation.round + work.rounds, len(there) if work.everyone else settings.cohort, work, there

    @staticmethod
    def _goes_on(db: Session, federation: Federation) -> bool:
        """Return whether devices train, or updates wait, that count in the next round whoever is drawn for it."""
        if settings_of(federation).buffer is None:
            return False
        return bool(working(db, federation) or arrivals(db, federation, most=1))

    def _hand_out(
        self, db: Session, federation: Federation, current: Round, work: Work, size: int, there: Sequence[Drawable]
    ) -> int:
        """Have up to ``size`` devices more, of those that are present, do a round's work; return their number."""
        now, (asked, free) = self._clock(), self._free(db, federation, current.number, there)
        names = draw(db, federation, list(free.values()), size, current.number) if size > 0 else []
        if load_method(federation.method).schedule.last_for_everyone is not None:
            drop_late_work(db, [free[name].id for name in names])
        drawn = [free[name] for name in names]
        limits = most_examples(drawn, there, settings_of(federation))
        ratios = chosen_ratios(db, self._models.manifest(federation), federation, drawn, current.number)
        for position, (device, most) in enumerate(zip(drawn, limits, strict=True), start=asked):
            assignment = assign(
                *(federation, device, work.kind, current.number, position, now),
                ratio=ratios.get(device.name),
                most_examples=most,
            )
            assignment.plan = dict(work.plan) or None
            db.add(assignment)
        return len(names)

    @staticmethod
    def _free(
        db: Session, federation: Federation, number: int, there: Sequence[Drawable]
    ) -> tuple[int, dict[str, Drawable]]:
        """Return how many devices round ``number`` was given to, and the others, by name, that could have it."""
        asked = {member.device_id for member in cohort_of(db, federation, number)}
        busy = asked.union(working(db, federation))
        return len(asked), {device.name: device for device in there if device.id not in busy}

    def _somebody_is_free(self, federation_id: int, number: int) -> bool:
        """Return whether a round can be given to more devices: looked up before a transaction is begun for it."""
        with self._store.reading() as db:
            federation = db.get_one(Federation, federation_id)
            return bool(self._free(db, federation, number, drawable(db, federation, self._clock()))[1])

    def _finish(self, db: Session, federation: Federation, reason: str) -> bool:
        evaluations = select(Assignment.id).where(
            Assignment.federation_id == federation.id, Assignment.kind.in_(JUDGING_KINDS)
        )
        if db.scalar(evaluations.where(Assignment.status == "open").limit(1)):
            return False  # the last evaluation is still being answered
        of_last = evaluations.where(Assignment.round == federation.round, Assignment.kind == wire.Kind.evaluate.value)
        judged = db.scalar(of_last.limit(1))
        if federation.round and not judged and ask_for_evaluation(db, federation, self._clock(), last=True):
            return True
        federation.status, federation.reason, federation.finished_at = "finished", reason, self._clock()
        log.info("%s: finished after %s rounds (%s)", federation.name, federation.round, reason)
        return True

    def _step_secure(self, federation: Federation, current: Round) -> bool:
        """Move a secure round on by a phase; close it with the sums that came out."""
        ended = self._secure.advance(federation, current)
        if isinstance(ended, bool):
            if not ended and settings_of(federation).quorum == 1:  # else a phase may end while some still train
                self._calm[federation.id] = (current.number, self._clock() + LOOK_SECONDS)
            return ended or self._expire_late(federation.id)
        folding = self._fold(federation, current)
        folding.take_sums(ended)
        folding.position = ended.notes.get("secure_keys_asked", 0)  # all that were drawn, whoever came
        self._close(federation, current.number, folding)
        return True

    def _step_round(self, federation: Federation, current: Round, cohort: Sequence[Member]) -> bool:
        if current.secure is not None:
            return self._step_secure(federation, current)
        done = [member.id for member in cohort if member.status == "done"]
        waiting = [member.id for member in cohort if member.status == "open"]
        late, stopped = self._clock() >= current.deadline_at, federation.status == "stopped"
        settings = settings_of(federation)
        lacking = _lacking(settings, cohort, len(done))
        if lacking and not stopped and (late or not waiting) and current.extensions < settings.extensions:
            return self._extend(federation.id, current.number, late=late) or self._expire_late(federation.id)
        if waiting and (late or len(done) >= current.target or stopped):
            self._expire(waiting, away=late)
            return True
        folding = self._fold(federation, current)
        folding.take_in_order(cohort)
        if waiting:
            if current.target == len(cohort):  # else it may close while some still train
                until = min(current.deadline_at, self._clock() + LOOK_SECONDS)
                self._calm[federation.id] = (current.number, until)
            return self._expire_late(federation.id)
        why = f"skipped: {len(done)} updates came, and min_updates is {lacking}"
        self._close(federation, current.number, folding, dict.fromkeys(done, why) if lacking else None)
        return True

    def _extend(self, federation_id: int, number: int, *, late: bool) -> bool:
        """Give a round another deadline, and its work to as many further devices as updates are missing.

        False where nobody is there to ask before the deadline: somebody may come.
        """
        if not late and not self._somebody_is_free(federation_id, number):
            return False
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation_id)
            current = open_round(db, federation)
            if current is None or current.number != number:
                return False
            missing = current.target - sum(member.status == "done" for member in cohort_of(db, federation, number))
            work = Work(plan=self._situation(db, federation, number).plan)
            there = drawable(db, federation, self._clock())
            more = self._hand_out(db, federation, current, work, missing, there)
            if not more and not late:
                return False
            current.extensions += 1
            extend_deadlines(db, federation, self._clock())
        log.warning(
            "%s: round %s lacks updates; it is extended, and given to %s devices more",
            *(federation.name, number, more),
            extra={"round": number},
        )
        return True

    def _step_buffered(self, federation: Federation, current: Round) -> bool:
        """Take in what has arrived, keep a cohort at work, and close when the buffer is full (``buffered``)."""
        settings, number = settings_of(federation), current.number
        late, stopped = self._clock() >= current.deadline_at, federation.status == "stopped"
        final = self._is_final(federation, number)
        folding = self._fold(federation, current)
        with self._store.reading() as db:
            busy = working(db, federation)  # before the arrivals: where nobody trains, none can come after them
            room = None if final else max(0, current.target - len(folding.taken))
            arrived = arrivals(db, federation, folding.last, room)
        folding.take_arrivals(arrived)
        if len(folding.taken) < current.target and not late and not stopped:
            if len(busy) < settings.cohort and self._top_up(federation.id, number):
                return True
            if busy:
                return self._expire_late(federation.id)
        if final and busy:
            self._expire(list(busy.values()), away=False)
            return True
        self._close(federation, number, folding)
        return True

    @staticmethod
    def _is_final(federation: Federation, number: int) -> bool:
        """Return whether a buffered round is the last one: it takes all that came, and waits for nobody."""
        stopped, last = federation.status == "stopped", settings_of(federation).rounds
        asked = federation.rollback_version is not None or federation.replacement is not None
        return stopped or number >= last or asked

    def _top_up(self, federation_id: int, number: int) -> bool:
        """Give a buffered round's work to so many more devices that a cohort trains; False where nobody is there."""
        if not self._somebody_is_free(federation_id, number):
            return False
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation_id)
            current = open_round(db, federation)
            if federation.status != "running" or current is None or current.number != number:
                return False
            room = settings_of(federation).cohort - len(working(db, federation))
            work = Work(plan=adjustment(db, federation))
            return bool(self._hand_out(db, federation, current, work, room, drawable(db, federation, self._clock())))

    def _expire(self, assignment_ids: Sequence[str], *, away: bool) -> None:
        """Close assignments to updates. ``away``: their devices missed a deadline, and are not drawn until they ask."""
        with self._store.moving() as db:
            for assignment in db.scalars(select(Assignment).where(Assignment.id.in_(assignment_ids))):
                if assignment.status == "open":
                    assignment.status = "expired"
                    federation = db.get_one(Federation, assignment.federation_id)
                    touch(db, federation.id, assignment.round)
                    if away:
                        device, now = db.get_one(Device, assignment.device_id), self._clock()
                        late = assignment.deadline_at <= now
                        device.present = False
                        why = "it missed the deadline" if late else "it was silent for too long"
                        note_failure(device, assignment, why, now)

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

    def _withdraw_silent(self, federation: Federation, current: Round | None) -> bool:
        """Close the awaited work of devices that were not seen for ``silence_seconds``; return whether there was any.

        Work that nobody waits for stays: adapting the finished model, and work for everyone of an earlier round.
        """
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
            awaited.append(Assignment.kind == wire.Kind.train.value)
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
        self._expire(list(silent), away=True)
        names = sorted(set(silent.values()))
        log.warning(
            "%s: silent for more than %g s, so nobody waits for %s%s",
            *(federation.name, settings.silence_seconds, ", ".join(names[:MOST_SAID])),
            f" and {len(names) - MOST_SAID} more" if len(names) > MOST_SAID else "",
            extra={"round": federation.round + 1},
        )
        return True

    def _expire_late(self, federation_id: int) -> bool:
        """Close the evaluations whose deadline has passed, and the training that belongs to no round of its own."""
        now = self._clock()
        if now - self._late_seen.get(federation_id, -math.inf) < LOOK_SECONDS:
            return False
        self._late_seen[federation_id] = now
        with self._store.reading() as db:
            buffered = settings_of(db.get_one(Federation, federation_id)).buffer is not None
            kinds = (*JUDGING_KINDS, wire.Kind.train.value) if buffered else JUDGING_KINDS
            late = db.scalars(
                select(Assignment.id).where(
                    Assignment.federation_id == federation_id,
                    Assignment.kind.in_(kinds),
                    Assignment.status == "open",
                    Assignment.deadline_at <= now,
                )
            ).all()
        if late:
            self._expire(late, away=True)
        return bool(late)

    def _fold(self, federation: Federation, current: Round) -> Folding:
        """Return the sums of the open round; begin them if there are none."""
        folding, number = self._folding.get(federation.id), current.number
        if folding is None or folding.round != number:
            with self._store.reading() as db:
                situation = self._situation(db, federation, number)
                length = usual_before(db, federation.id, number)
            folding = Folding(
                *(self._store, self._models, self._decoded, federation, situation),
                usual_length=length,
                progress=self._progress,
            )
            self._folding[federation.id] = folding
        return folding

    def _close(
        self, federation: Federation, number: int, folding: Folding, skipped: Mapping[str, str] | None = None
    ) -> None:
        """Make the next model, and close. skipped: assignment id -> why its update is not in it, where none is made."""
        version = federation.model_version
        method, warning = load_method(federation.method), federation.warning
        folding.finish()
        sums, notes = folding.intake.sums, folding.intake.notes() | folding.notes
        if settings_of(federation).buffer is not None:
            notes |= {"stale_updates": sum(map(bool, folding.behind)), "most_stale": max(folding.behind, default=0)}
        model: GlobalModel | None = None
        if skipped is not None:
            notes["left_out"] = dict(skipped)
        elif folding.intake.moves(folding.position):
            with self._store.reading() as db:
                situation, newest = self._situation(db, federation, number), newest_version(db, federation)
            made = next_model(method, self._models.model(federation, version), sums, situation)
            if isinstance(made, str):
                warning = f"round {number} made no model, the one before stays: {made}"
                notes["left_out"] = {**dict.fromkeys(folding.taken, warning), **notes.get("left_out", {})}
            else:
                model, version = made, newest + 1
                notes |= model.notes
                warning = method.warning(model, situation)
            if warning and warning != federation.warning:
                log.warning("%s: %s", federation.name, warning)
        with self._store.reading() as db:
            notes |= note_of(db, federation, number, notes)
            cost = spent(db, federation.id, number, settings_of(federation))
        self._closing[federation.id] = closing = _Closing(
            number,
            federation.model_version,
            None if model is None else self._models.files(federation.id, version, model),
            0 if model is None else sums.updates,
            notes if cost is None else {**notes, "privacy": cost.model_dump()},
            dict(folding.sizes),
            folding.last,
            warning,
        )
        self._record_close(federation, closing)

    def _record_close(self, federation: Federation, closing: _Closing) -> None:
        """Write the next model's files, and then, in a transaction, what its close changes."""
        number, files, notes = closing.round, closing.files, closing.notes
        method, now = load_method(federation.method), self._clock()
        self._costs.write()
        if files is not None:
            self._models.write(federation.id, files, self._progress)
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation.id)
            current = open_round(db, federation)
            version = federation.model_version if files is None else files.version
            outdated = files is not None and version != newest_version(db, federation) + 1
            if outdated or current is None or (current.number, federation.model_version) != (number, closing.base):
                self._forget(federation.id)  # another process has closed it meanwhile
                return
            if self._is_final(federation, number) and working(db, federation):
                del self._closing[federation.id]
                return  # an operator has just said so: who trains is told first
            if files is not None:
                self._models.record(db, federation.id, files)
                federation.model_version, federation.model_sha256 = version, files.sha256
            before, digest = federation.round, federation.model_sha256
            federation.round, federation.warning = number, closing.warning
            current.base_version, current.model_version = closing.base, version
            current.status, current.closed_at, current.model_sha256, current.stale = "closed", now, digest, True
            current.notes, current.parts = notes, closing.parts
            if closing.last:
                count_in(db, federation, number, closing.last)
            left_out = self._names(db, notes.get("left_out", {}))
            if method.prepares and version == 0:
                self._withdraw(db, current)
                federation.warning = (
                    "the model has not been prepared yet: the device that was asked did not answer in time, or handed "
                    "back; another one, or the same, is asked again. Where preparing takes long, raise deadline_seconds"
                )
            carry_out(db, federation)
            carry_out_replacement(federation)
            if federation.status == "running":
                self._evaluate_in_between(db, federation, before, now)
            self._models.drop_old(db, federation, models_in_use(db, federation))
        if files is not None and federation.model_sha256 == files.sha256:
            self._models.remember(federation.id, files)
        self._forget(federation.id)
        log.info(
            "%s: round %s closes, %s updates in its model",
            *(federation.name, number, closing.updates),
            extra={"round": number},
        )
        if left_out:
            log.warning("%s: round %s leaves out %s", federation.name, number, left_out, extra={"round": number})
        self._on_closed(federation.name, now - current.opened_at, len(notes.get("left_out", {})))
        # Only now, with the new model in the records, may its updates be removed.
        self._decoded.forget(update_folder(federation.id))
        clear(self._store, self._models, federation.id)

    def _forget(self, federation_id: int) -> None:
        """Forget the sums of a round that is closed."""
        self._folding.pop(federation_id, None)
        self._closing.pop(federation_id, None)

    @staticmethod
    def _names(db: Session, left_out: Mapping[str, str]) -> str:
        """Return for the log whose updates were left out, and why the first of them was."""
        if not left_out:
            return ""
        first = list(left_out)[:MOST_SAID]
        whose = select(Assignment.id, Device.name).join(Device, Device.id == Assignment.device_id)
        found = {row[0]: row[1] for row in db.execute(whose.where(Assignment.id.in_(first)))}
        more = f" and {len(left_out) - MOST_SAID} more" if len(left_out) > MOST_SAID else ""
        return f"{', '.join(found[each] for each in first)}{more}: {left_out[first[0]]}"

    def _withdraw(self, db: Session, current: Round) -> None:
        """Take back a preparation that nobody answered: its round is opened anew, with the devices that are present.

        Those that were not asked yet come first, or one that never answers would be asked for ever."""
        of_round = (Assignment.federation_id == current.federation_id, Assignment.round == current.number)
        asked = db.scalars(select(Assignment.device_id).where(*of_round)).all()
        self._failed_to_prepare.setdefault(current.federation_id, set()).update(asked)
        db.execute(delete(Assignment).where(*of_round, Assignment.kind == wire.Kind.prepare.value))
        db.delete(current)

    def _situation(self, db: Session, federation: Federation, number: int) -> Situation:
        return situation_of(db, self._models.manifest(federation), federation, number)

    @staticmethod
    def _evaluate_in_between(db: Session, federation: Federation, before: int, now: float) -> None:
        """Ask for the evaluations that are due after a round; ``before``: the number of the round before it."""
        settings, number = settings_of(federation), federation.round

        def is_due(interval: int) -> bool:
            return interval > 0 and number // interval > before // interval

        with_global = is_due(settings.global_evaluation_interval)
        if with_global or is_due(settings.evaluation_interval):
            last = why_over(db, federation) is not None
            ask_for_evaluation(db, federation, now, with_global=with_global, last=last)


def _is_update(assignment: Assignment | None, key: str) -> bool:
    """Return whether the update of this assignment that the records name is the one under this key."""
    if assignment is None:
        return False
    return key == update_key(assignment.federation_id, assignment.id, assignment.update_sha256 or "")


def _lacking(settings: FederationSettings, cohort: Sequence[Member], came: int) -> int:
    """Return how many updates a round must have, if fewer came; else 0."""
    if not cohort or cohort[0].kind != wire.Kind.train.value:
        return 0
    if settings.noise_multiplier is not None:  # nobody may know how many came
        return 0
    return settings.min_updates if came < settings.min_updates else 0
