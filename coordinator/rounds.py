"""The life of a round.

    federation   waiting --(min_devices enrolled)--> running --(all stopped, or last round)--> finished
                 running <--> paused; waiting, running, paused --(operator)--> stopped; reopened: running again
    round        open --(all settled, quorum, or deadline)--> closed; then the next one opens
    assignment   open --> done (update accepted) | returned (handed back) | expired (deadline, or the quorum was met)

Where a method has one device prepare the model, that is round 0; it is tried again, with whoever is there, until an
update comes of it.

Calls from devices only record facts, each in one transaction: enrolled, asked, handed back, sent an update.
``advance`` turns facts into progress: it opens rounds, folds updates into running sums, closes rounds. It is called by
one thread at a time, whenever a fact has come and every tick for the deadlines.

Nothing acknowledged is lost: an update is on disk and in the records before it is answered. The running sums are only
memory: after a restart they are rebuilt from the stored updates. Updates are folded in the order of the cohort (sorted
by device name); one that comes out of turn waits on disk. So the same updates give the same model bit for bit, in
whatever order they arrive, and memory does not grow with the cohort.

A round closes in two steps: first the new model's files, then the commit of the transaction that moves everything on.
Killed between them, the coordinator finds the round still open, and does the same again.

Devices that miss a deadline are not drawn again until they ask for work, those that hand back not for a minute. A round
whose cohort sent nothing is recorded with no updates and leaves the model as it was; the next opens when somebody is
there.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from coordinator.assignments import (
    BUNDLE_KINDS,
    Member,
    assign,
    cohort_of,
    drop_late_work,
    extend_deadlines,
    open_round,
    touch,
    update_folder,
    update_key,
)
from coordinator.candidates import devices_of, draw, drawable, situation_of, why_over
from coordinator.costs import UploadCosts
from coordinator.errors import Unavailable
from coordinator.intake import Intake, Update, sums_of
from coordinator.logs import about
from coordinator.methods import GlobalModel, Situation, Work, load_method
from coordinator.models import Models, settings_of
from coordinator.privacy import spent
from coordinator.rollback import carry_out, newest_version
from coordinator.storage.store import Store
from coordinator.storage.tables import Assignment, Device, Federation, Round
from edge_sdk.protocol import bundle
from edge_sdk.protocol import messages as wire
from edge_sdk.protocol.masks import pack

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often evaluations are looked through for late ones, while updates keep coming."""


@dataclass
class _Folding:
    """What has come of one open round: how many of its assignments, in order, were taken in; bytes of their bundles by
    part."""

    round: int
    intake: Intake
    position: int = 0
    parts: Counter[str] = field(default_factory=Counter)


class Rounds:
    """Runs the rounds of every federation. on_closed: told of each that closes: its seconds, and how
    many of its updates were left out."""

    def __init__(
        self,
        store: Store,
        models: Models,
        clock: Callable[[], float],
        costs: UploadCosts,
        on_closed: Callable[[str, float, int], None] = lambda federation, seconds, left_out: None,
    ) -> None:
        self._store = store
        self._models = models
        self._clock = clock
        self._costs = costs
        self._on_closed = on_closed
        self._advancing = threading.Lock()
        self._folding: dict[int, _Folding] = {}
        self._stuck: dict[int, float] = {}
        self._evaluations_seen: dict[int, float] = {}

    def resume_after_restart(self) -> None:
        """Give open rounds their whole deadline again: the time without a coordinator was not the devices' fault."""
        with self._store.writing() as db:
            for federation in db.scalars(select(Federation).where(Federation.status.in_(("running", "waiting")))):
                extend_deadlines(db, federation, self._clock())

    def forget_sums(self) -> None:
        """Running sums of before: another process may have moved rounds since. They are made again from what is
        stored."""
        with self._advancing:
            self._folding.clear()

    def advance(self) -> bool:
        """Turn what has happened into progress; True when something moved that a device or observer may wait for."""
        moved = False
        with self._advancing:
            with self._store.reading() as db:
                moving = select(Federation.id, Federation.name).where(
                    Federation.status.in_(("waiting", "running", "stopped"))
                )
                federations = db.execute(moving).all()
            for federation_id, name in federations:
                with about(federation=name):
                    try:
                        while self._step(federation_id):
                            moved = True
                    except Unavailable:  # the store has said so, once; what is half folded is made again
                        self._folding.pop(federation_id, None)
                    except Exception:
                        # A lost file or an uninstalled method stops its federation, not the others. Its sums may hold
                        # half an update: they are made again from what is stored.
                        self._folding.pop(federation_id, None)
                        self._say_stuck(federation_id)
                    else:
                        self._stuck.pop(federation_id, None)
        return moved

    def _say_stuck(self, federation_id: int) -> None:
        """Log why a federation cannot move on, at most once a minute."""
        now = self._clock()
        if now - self._stuck.get(federation_id, -math.inf) >= 60:
            self._stuck[federation_id] = now
            log.exception("federation %s cannot move on; the others do, and it is tried again", federation_id)

    def _step(self, federation_id: int) -> bool:
        with self._store.reading() as db:
            federation = db.get_one(Federation, federation_id)
            current = open_round(db, federation)
            cohort = cohort_of(db, federation, current.number) if current else []
        if federation.status == "waiting" and self._start(federation_id):
            return True  # before its round, which may be open: paused in round 1, then resumed
        if current is not None:
            return self._step_round(federation, current, cohort)
        if federation.status == "running":
            return self._expire_evaluations(federation_id) or self._open_round(federation_id)
        return False

    def _start(self, federation_id: int) -> bool:
        with self._store.writing() as db:
            federation = db.get_one(Federation, federation_id)
            enrolled = db.scalar(
                select(func.count()).where(Device.federation_id == federation_id, Device.status != "revoked")
            )
            if federation.status != "waiting" or (enrolled or 0) < settings_of(federation).min_devices:
                return False
            federation.status = "running"
            log.info("%s: %s devices enrolled, starts", federation.name, enrolled)
            return True

    def _open_round(self, federation_id: int) -> bool:
        """Open the next round, or end the federation."""
        now = self._clock()
        with self._store.writing() as db:
            federation = db.get_one(Federation, federation_id)
            settings = settings_of(federation)
            if federation.status != "running" or open_round(db, federation):
                return False
            over = why_over(db, federation)
            if over:
                return self._finish(db, federation, over)
            active = {device.name: device for device in drawable(db, federation, now)}
            if not active:
                return False
            method = load_method(federation.method)
            if method.prepares and federation.model_version == 0:
                number, size, work = 0, 1, Work(wire.Kind.prepare)
            else:
                work = method.work(self._situation(db, federation, federation.round + 1))
                number, size = federation.round + work.rounds, len(active) if work.everyone else settings.cohort
            cohort = draw(db, federation, list(active.values()), size, number)
            current = Round(federation_id=federation.id, number=number, status="open", stale=True)
            current.opened_at, current.deadline_at = now, now + settings.deadline_seconds
            db.add(current)
            drop_late_work(db, [active[name].id for name in cohort])
            for position, name in enumerate(cohort):
                assignment = assign(federation, active[name], work.kind, number, position, now)
                assignment.plan = dict(work.plan) or None
                db.add(assignment)
            log.info("%s: round %s opens for %s devices", federation.name, number, len(cohort), extra={"round": number})
            return True

    def _finish(self, db: Session, federation: Federation, reason: str) -> bool:
        evaluations = select(Assignment.id).where(
            Assignment.federation_id == federation.id, Assignment.kind == "evaluate"
        )
        if db.scalar(evaluations.where(Assignment.status == "open").limit(1)):
            return False  # the last evaluation is still being answered
        judged = db.scalar(evaluations.where(Assignment.round == federation.round).limit(1))
        if federation.round and not judged and self._ask_for_evaluation(db, federation, self._clock()):
            return True
        federation.status, federation.reason, federation.finished_at = "finished", reason, self._clock()
        log.info("%s: finished after %s rounds (%s)", federation.name, federation.round, reason)
        return True

    def _step_round(self, federation: Federation, current: Round, cohort: Sequence[Member]) -> bool:
        settings = settings_of(federation)
        done = sum(assignment.status == "done" for assignment in cohort)
        waiting = [assignment for assignment in cohort if assignment.status == "open"]
        late = self._clock() >= current.deadline_at
        # Less an accident of binary floats: 0.28 * 25 is 7.000000000000001.
        enough = done >= math.ceil(settings.quorum * len(cohort) - 1e-9)
        if waiting and (late or enough or federation.status == "stopped"):
            self._expire([assignment.id for assignment in waiting], away=late)
            return True
        folding = self._fold(federation, current.number, cohort)
        if waiting:
            return self._expire_evaluations(federation.id)
        self._close(federation, current.number, folding)
        return True

    def _expire(self, assignment_ids: Sequence[str], *, away: bool) -> None:
        """Close assignments to updates. ``away``: their devices missed a deadline, and are not drawn until they ask."""
        with self._store.writing() as db:
            for assignment in db.scalars(select(Assignment).where(Assignment.id.in_(assignment_ids))):
                if assignment.status == "open":
                    assignment.status = "expired"
                    federation = db.get_one(Federation, assignment.federation_id)
                    touch(db, federation.id, assignment.round)
                    if away:
                        db.get_one(Device, assignment.device_id).present = False

    def _expire_evaluations(self, federation_id: int) -> bool:
        now = self._clock()
        if now - self._evaluations_seen.get(federation_id, -math.inf) < LOOK_SECONDS:
            return False
        self._evaluations_seen[federation_id] = now
        with self._store.reading() as db:
            late = db.scalars(
                select(Assignment.id).where(
                    Assignment.federation_id == federation_id,
                    Assignment.kind == "evaluate",
                    Assignment.status == "open",
                    Assignment.deadline_at <= now,
                )
            ).all()
        if late:
            self._expire(late, away=True)
        return bool(late)

    def _fold(self, federation: Federation, number: int, cohort: Sequence[Member]) -> _Folding:
        """Add to the sums what is next in order and there; stop at the first that is still awaited."""
        folding = self._folding.get(federation.id)
        if folding is None or folding.round != number:
            with self._store.reading() as db:
                situation = self._situation(db, federation, number)
            model = self._models.model(federation, federation.model_version)
            intake = Intake(
                sums_of(load_method(federation.method), model, situation, self._store.folder),
                situation.settings,
                situation.manifest,
                model.tensors,
                lambda key: self._read(federation, key)[0],
            )
            folding = self._folding[federation.id] = _Folding(number, intake)
        while folding.position < len(cohort) and cohort[folding.position].status != "open":
            assignment = cohort[folding.position]
            if assignment.status == "done" and assignment.kind in BUNDLE_KINDS:
                self._fold_one(federation, folding, assignment)
            folding.position += 1
        return folding

    def _fold_one(self, federation: Federation, folding: _Folding, assignment: Member) -> None:
        key = update_key(federation.id, assignment.id, assignment.update_sha256 or "")
        update, parts = self._read(federation, key)
        folding.intake.take(assignment.id, key, update)
        folding.parts.update(parts)

    def _read(self, federation: Federation, key: str) -> tuple[Update, Mapping[str, int]]:
        """A stored update of the open round, and the bytes of its parts."""
        body = self._store.blobs.get(key)
        manifest, model = self._models.manifest(federation), self._models.model(federation, federation.model_version)
        decoded = bundle.decode(body, manifest, model.mask)
        report = wire.UpdateReport.model_validate_json(decoded.report)
        values = decoded.values
        if decoded.precision == "int8":  # a difference from what was sent
            values = values + pack(manifest, model.tensors, decoded.mask)
        return Update(values, decoded.mask, report.num_examples, decoded.gradients), decoded.parts

    def _close(self, federation: Federation, number: int, folding: _Folding) -> None:
        self._costs.write()
        version, digest = federation.model_version, federation.model_sha256
        method, warning = load_method(federation.method), federation.warning
        folding.intake.finish()
        sums, notes = folding.intake.sums, folding.intake.notes()
        model: GlobalModel | None = None
        if folding.intake.moves(folding.position):
            with self._store.reading() as db:
                situation, newest = self._situation(db, federation, number), newest_version(db, federation)
            model = method.close(self._models.model(federation, version), sums, situation)
            notes |= model.notes
            version = newest + 1
            warning = method.warning(model, situation)
            if warning and warning != federation.warning:
                log.warning("%s: %s", federation.name, warning)
        now = self._clock()
        with self._store.writing() as db:
            federation = db.get_one(Federation, federation.id)
            current = open_round(db, federation)
            if current is None or current.number != number:  # another process has closed it meanwhile
                del self._folding[federation.id]
                return
            if model is not None:
                # In this process's turn to write, so that no two write the same file; the records name it afterwards.
                digest = self._models.save(federation.id, version, model)
            before, base = federation.round, federation.model_version
            federation.round, federation.model_version, federation.model_sha256 = number, version, digest
            federation.warning = warning
            current.base_version, current.model_version = base, version
            current.status, current.closed_at, current.model_sha256, current.stale = "closed", now, digest, True
            cost = spent(db, federation.id, number, settings_of(federation))
            current.notes = notes if cost is None else {**notes, "privacy": cost.model_dump()}
            current.parts = dict(folding.parts)
            if method.prepares and version == 0:
                self._withdraw(db, current)
                federation.warning = (
                    "the model has not been prepared yet: the device that was asked did not answer in time, or handed "
                    "back; another one, or the same, is asked again. Where preparing takes long, raise deadline_seconds"
                )
            carry_out(db, federation, self._models)
            interval = settings_of(federation).evaluation_interval
            if federation.status == "running" and interval and number // interval > before // interval:
                self._ask_for_evaluation(db, federation, now)
            in_use = {federation.model_version} | set(
                db.scalars(
                    select(Assignment.model_version).where(
                        Assignment.federation_id == federation.id, Assignment.status == "open"
                    )
                )
            )
            known = select(Device.mask).where(
                Device.federation_id == federation.id, Device.mask.is_not(None), Device.status != "revoked"
            )
            masks = {digest for digest in db.scalars(known) if digest}
        current_mask = self._models.model(federation, federation.model_version).mask
        if current_mask is not None:
            masks.add(current_mask.digest)
        del self._folding[federation.id]
        log.info(
            "%s: round %s closes, %s updates in its model",
            *(federation.name, number, sums.updates),
            extra={"round": number},
        )
        self._on_closed(federation.name, now - current.opened_at, len(notes.get("left_out", {})))
        # Only now, with the new model in the records, may what it was made from go.
        self._models.forget(federation.id, in_use, masks)
        for key in self._store.blobs.keys(update_folder(federation.id)):
            self._store.blobs.delete(key)

    @staticmethod
    def _withdraw(db: Session, current: Round) -> None:
        """Take back a preparation that nobody answered: its round is opened anew, with whoever is there."""
        of_round = (Assignment.federation_id == current.federation_id, Assignment.round == current.number)
        db.execute(delete(Assignment).where(*of_round, Assignment.kind == wire.Kind.prepare.value))
        db.delete(current)

    def _situation(self, db: Session, federation: Federation, number: int) -> Situation:
        return situation_of(db, self._models.manifest(federation), federation, number)

    def _ask_for_evaluation(self, db: Session, federation: Federation, now: float) -> bool:
        """Ask every device that is there, stopped or not, to judge its personal model and the new global one.

        False when nobody is there.
        """
        present = [device for device in devices_of(db, federation, ("active", "stopped")) if device.present]
        for position, device in enumerate(sorted(present, key=lambda device: device.name)):
            db.add(assign(federation, device, wire.Kind.evaluate, federation.round, position, now))
        return bool(present)
