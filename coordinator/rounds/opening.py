"""Open rounds: start federations, draw devices, assign work, and extend rounds with too few updates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from sparrow.protocol.events import EventKind
from sparrow.protocol.messages import Kind
from sparrow.protocol.settings import FederationSettings

from ..methods import Work, load_method
from ..models.global_models import Models, settings_of
from ..storage import events
from ..storage.store import Store
from ..storage.tables import Assignment, Federation, Round
from .assignments import (
    JUDGING_KINDS,
    Drawable,
    assign,
    cohort_of,
    drop_late_work,
    extend_deadlines,
    open_round,
)
from .buffered import goes_on, working
from .candidates import (
    chosen_ratios,
    draw,
    drawable,
    fewest_devices,
    is_enough,
    most_examples,
    situation_of,
    why_over,
)
from .evaluations import ask_for_evaluation
from .secure import SecureRounds
from .skew import adjustment

log = logging.getLogger(__name__)

ACCIDENT = 1e-9
"""Tolerance for floating-point error: 0.28 * 25 is 7.000000000000001 and must round up to 7."""


class Step(Enum):
    """The outcome of a step: no change; a change, after which another step may follow; or a new round."""

    nothing = 0
    moved = 1
    opened = 2


class Opening:
    """Open rounds and assign their work."""

    def __init__(self, store: Store, models: Models, clock: Callable[[], float], secure: SecureRounds) -> None:
        self._store = store
        self._models = models
        self._clock = clock
        self._secure = secure
        # By federation: devices that failed to prepare the model and are asked again after all others.
        self._failed_to_prepare: dict[int, set[str]] = {}

    def start(self, federation_id: int) -> bool:
        """Start a waiting federation if enough devices are enrolled; return whether it started."""
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation_id)
            if federation.status != "waiting" or not is_enough(db, federation):
                return False
            federation.status = "running"
            events.record(db, federation.id, EventKind.started, self._clock())
            log.info("%s: starting", federation.name)
            return True

    def open(self, federation_id: int) -> Step:
        """Open the next round, or end the federation."""
        now = self._clock()
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation_id)
            settings = settings_of(federation)
            if federation.status != "running" or open_round(db, federation):
                return Step.nothing
            over = why_over(db, federation)
            going_on = goes_on(db, federation)
            if over and not (over == "all_stopped" and going_on):
                return Step.moved if self._finish(db, federation, over) else Step.nothing
            there = drawable(db, federation, now)
            if len(there) < fewest_devices(settings) and not going_on:
                return Step.nothing
            number, size, work, able = self._next_work(db, federation, settings, there)
            more = 0.0 if work.everyone or work.kind is Kind.prepare else settings.over_selection
            current = Round(federation_id=federation.id, number=number, status="open", stale=True)
            current.opened_at = now
            current.deadline_at = now + settings.deadline_seconds
            current.target = 0
            db.add(current)
            busy = 0 if settings.buffer is None else len(working(db, federation))
            drawn = math.ceil(size * (1 + more) - ACCIDENT) - busy
            secure = settings.secure and work.kind is Kind.train
            asked = replace(work, kind=Kind.keys) if secure else work
            count = self._hand_out(db, federation, current, asked, drawn, able)
            if secure:
                self._secure.begin(db, federation, current, work.plan)
            wanted = settings.quorum * (min(size, count) if more else count)
            current.target = settings.buffer or math.ceil(wanted - ACCIDENT)
            log.info("%s: round %s opened for %s devices", federation.name, number, count, extra={"round": number})
            return Step.opened if settings.buffer is None else Step.moved

    def extend(self, federation_id: int, number: int, *, late: bool) -> bool:
        """Restart a round's deadline and assign its work to one more device per missing update.

        Return False if the deadline has not passed and no further device is free.
        """
        if not late and not self._somebody_is_free(federation_id, number):
            return False
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation_id)
            current = open_round(db, federation)
            if current is None or current.number != number:
                return False
            missing = current.target - sum(member.status == "done" for member in cohort_of(db, federation, number))
            work = Work(plan=situation_of(db, self._models, federation, number).plan)
            there = drawable(db, federation, self._clock())
            more = self._hand_out(db, federation, current, work, missing, there)
            if not more and not late:
                return False
            current.extensions += 1
            extend_deadlines(db, federation, self._clock())
        log.warning(
            "%s: round %s lacks updates; extended its deadline and asked %s more devices",
            federation.name,
            number,
            more,
            extra={"round": number},
        )
        return True

    def top_up(self, federation_id: int, number: int) -> bool:
        """Assign a buffered round's work until a full cohort trains; return True if any device received work."""
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

    def withdraw(self, db: Session, current: Round) -> None:
        """Delete an unanswered preparation round, so that it opens again."""
        # Devices that were not asked yet come first: a device that never answers must not be asked forever.
        of_round = (Assignment.federation_id == current.federation_id, Assignment.round == current.number)
        asked = db.scalars(select(Assignment.device_id).where(*of_round)).all()
        self._failed_to_prepare.setdefault(current.federation_id, set()).update(asked)
        db.execute(delete(Assignment).where(*of_round, Assignment.kind == Kind.prepare.value))
        db.delete(current)

    def _next_work(
        self, db: Session, federation: Federation, settings: FederationSettings, there: Sequence[Drawable]
    ) -> tuple[int, int, Work, Sequence[Drawable]]:
        """Return the next round's number, cohort size, work, and the devices to draw from."""
        method = load_method(federation.method)
        if method.prepares and federation.model_version == 0:
            failed = self._failed_to_prepare.setdefault(federation.id, set())
            others = [device for device in there if device.id not in failed]
            if not others:
                failed.clear()
            return 0, 1, Work(Kind.prepare), others or there
        work = method.schedule.work(situation_of(db, self._models, federation, federation.round + 1))
        work = replace(work, plan={**work.plan, **adjustment(db, federation)})
        return federation.round + work.rounds, len(there) if work.everyone else settings.cohort, work, there

    def _hand_out(
        self, db: Session, federation: Federation, current: Round, work: Work, size: int, there: Sequence[Drawable]
    ) -> int:
        """Assign a round's work to up to ``size`` more of the present devices; return their number."""
        now = self._clock()
        asked, free = _free(db, federation, current.number, there)
        names = draw(db, federation, list(free.values()), size, current.number) if size > 0 else []
        if load_method(federation.method).schedule.last_for_everyone is not None:
            drop_late_work(db, [free[name].id for name in names])
        drawn = [free[name] for name in names]
        limits = most_examples(drawn, there, settings_of(federation))
        ratios = chosen_ratios(db, self._models, federation, drawn, current.number)
        for position, (device, most) in enumerate(zip(drawn, limits, strict=True), start=asked):
            assignment = assign(
                federation,
                device,
                work.kind,
                current.number,
                position,
                now,
                ratio=ratios.get(device.name),
                most_examples=most,
            )
            assignment.plan = dict(work.plan) or None
            db.add(assignment)
        return len(names)

    def _somebody_is_free(self, federation_id: int, number: int) -> bool:
        # A read, to save a transaction that would find no device.
        with self._store.reading() as db:
            federation = db.get_one(Federation, federation_id)
            return bool(_free(db, federation, number, drawable(db, federation, self._clock()))[1])

    def _finish(self, db: Session, federation: Federation, reason: str) -> bool:
        evaluations = select(Assignment.id).where(
            Assignment.federation_id == federation.id, Assignment.kind.in_(JUDGING_KINDS)
        )
        # The last evaluation is still open.
        if db.scalar(evaluations.where(Assignment.status == "open").limit(1)):
            return False
        of_last = evaluations.where(Assignment.round == federation.round, Assignment.kind == Kind.evaluate.value)
        judged = db.scalar(of_last.limit(1))
        if federation.round and not judged and ask_for_evaluation(db, federation, self._clock(), last=True):
            return True
        federation.status = "finished"
        federation.reason = reason
        federation.finished_at = self._clock()
        events.record(db, federation.id, EventKind.finished, federation.finished_at, detail=reason)
        log.info("%s: finished after %s rounds (%s)", federation.name, federation.round, reason)
        return True


def _free(
    db: Session, federation: Federation, number: int, there: Sequence[Drawable]
) -> tuple[int, dict[str, Drawable]]:
    asked = {member.device_id for member in cohort_of(db, federation, number)}
    busy = asked.union(working(db, federation))
    return len(asked), {device.name: device for device in there if device.id not in busy}
