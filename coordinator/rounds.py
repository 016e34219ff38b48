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

import hashlib
import logging
import math
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from pydantic import ValidationError
from sqlalchemy import Table, and_, bindparam, delete, func, select, update
from sqlalchemy.orm import Session

from coordinator.cohort import Candidate, choose, choose_each
from coordinator.errors import (
    BadContent,
    DifferentUpdate,
    Finished,
    NotAllowed,
    NotFound,
    RoundClosed,
    Unavailable,
    WrongMediaType,
)
from coordinator.intake import Intake, Update, sums_of
from coordinator.leftovers import clear, drop_unneeded, update_key
from coordinator.logs import about
from coordinator.methods import GlobalModel, Situation, Work, load_method
from coordinator.models import Models, job_of, settings_of
from coordinator.privacy import spent
from coordinator.rollback import carry_out, newest_version
from coordinator.storage.store import Store
from coordinator.storage.tables import Assignment, Device, Federation, Round
from edge_sdk.protocol import bundle
from edge_sdk.protocol import messages as wire
from edge_sdk.protocol.elements import ElementMask
from edge_sdk.protocol.masks import NeuronMask, count_values, pack, same_mask
from edge_sdk.protocol.neurons import fits_ratio

log = logging.getLogger(__name__)

JSON_TYPE = "application/json"
LARGEST_RECEIPT = 64 * 1024
COHORT_KINDS = (wire.Kind.train.value, wire.Kind.personalise.value, wire.Kind.prepare.value)
"""What a round's cohort can be asked to do; a federation's method decides which of them."""

BUNDLE_KINDS = (wire.Kind.train.value, wire.Kind.prepare.value)
"""What is answered with values of the model."""

LOOK_SECONDS = 0.5
"""How often evaluations are looked through for late ones, while updates keep coming."""

REST_SECONDS = 60.0
"""How long a device that handed its work back is not drawn: what kept it (heat, load, a diverging loss) takes time to
pass, and a lone device would otherwise hand back a federation's rounds one after the other."""


@dataclass
class _Folding:
    """What has come of one open round: how many of its assignments, in order, were taken in; bytes of their bundles by
    part."""

    round: int
    intake: Intake
    position: int = 0
    parts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Asked:
    """What a device that asks for work is given, if anything, and whether it had been thought away."""

    assignment: wire.Assignment | None
    was_away: bool = False


class Rounds:
    """Runs the rounds of every federation. on_closed: told of each that closes: its seconds, and how
    many of its updates were left out."""

    def __init__(
        self,
        store: Store,
        models: Models,
        clock: Callable[[], float],
        on_closed: Callable[[str, float, int], None] = lambda federation, seconds, left_out: None,
    ) -> None:
        self._store = store
        self._models = models
        self._clock = clock
        self._on_closed = on_closed
        self._advancing = threading.Lock()
        self._folding: dict[int, _Folding] = {}
        self._stuck: dict[int, float] = {}
        self._costs: deque[tuple[str, wire.UploadCost]] = deque(maxlen=100_000)
        self._evaluations_seen: dict[int, float] = {}

    # --- what devices ask ----------------------------------------------------------------------------------------

    def next_assignment(
        self, device_id: str, mask: str | None = None, model: str | None = None, *, asked: bool = True
    ) -> Asked:
        """The device's oldest open assignment, or none. Raises Finished when there will be none.

        A device that comes after the end, without a model, is given ``adapt`` first. mask: the digest of the mask that
        it holds; model: that of the global model that it can rebuild. asked: False for another look within one long
        poll: whoever has left since it asked, perhaps without a word to the poll, stays away.
        """
        now = self._clock()
        with self._store.reading() as db:
            device, federation, assignment = _open_assignment(db, device_id)
        away = asked and not device.present
        # A poll is no fact worth a write, unless the device was thought away, has not been seen for a while, or holds
        # another mask or model than it did.
        if away or (asked and (now - device.seen_at > 30 or (mask, model) != (device.mask, device.model))):
            holds = {"mask": mask, "model": model, "paused": None}
            with self._store.writing() as db:
                db.execute(update(Device).where(Device.id == device_id).values(present=True, seen_at=now, **holds))
                device = db.get_one(Device, device_id)
        if federation.status == wire.FederationStatus.paused:
            return Asked(None, away)
        if assignment is None:
            assignment = self._late_work(federation, device_id)
        if assignment is None and federation.status in ("finished", "stopped"):
            if device.holds_model:
                raise Finished(
                    f"{federation.name} is {federation.status} after {federation.round} rounds; nothing is left to do, "
                    f"your personal model stays with you"
                )
            assignment = self._adapt(device_id)
        return Asked(None if assignment is None else self._describe(federation, device, assignment, now), away)

    def _late_work(self, federation: Federation, device_id: str) -> Assignment | None:
        """The work of the last round for everyone, for a device that has not done it and was not drawn since."""
        method = load_method(federation.method)
        if not method.for_everyone:  # asked at every poll: what follows validates the settings
            return None
        situation = Situation(self._models.manifest(federation), settings_of(federation), federation.round)
        number = method.last_for_everyone(situation)
        if number is None:
            return None
        with self._store.reading() as db:
            if not _missed(db, device_id, number):
                return None
        with self._store.writing() as db:
            device = db.get_one(Device, device_id)
            federation = db.get_one(Federation, federation.id)  # as it is now: models of before may be gone
            missed = _missed(db, device_id, number)
            if not missed or device.status != "active" or not reaches(device.budget, smallest_budget(federation)):
                return None
            found = missed[0]
            if found is None:
                found = _assign(federation, device, wire.Kind.personalise, number, 0, self._clock())
                found.plan = dict(method.work(self._situation(db, federation, number)).plan) or None
                db.add(found)
            found.status = "open"
            found.model_version = federation.model_version
            found.deadline_at = self._clock() + settings_of(federation).deadline_seconds
            touch(db, federation.id, number)
            return found

    def _adapt(self, device_id: str) -> Assignment:
        with self._store.writing() as db:
            device = db.get_one(Device, device_id)
            federation = db.get_one(Federation, device.federation_id)
            assignment = db.scalar(
                select(Assignment).where(
                    Assignment.device_id == device_id,
                    Assignment.kind == "adapt",
                    Assignment.round == federation.round,
                )
            )
            if assignment is None:
                assignment = _assign(federation, device, wire.Kind.adapt, federation.round, 0, self._clock())
                db.add(assignment)
            if assignment.status == "returned":
                raise Finished(
                    f"{federation.name} is {federation.status}, and this device could not adapt its model "
                    f"({assignment.return_reason}); start the device again to try once more"
                )
            assignment.status = "open"
            assignment.model_version = federation.model_version
            assignment.deadline_at = self._clock() + settings_of(federation).deadline_seconds
            return assignment

    def _describe(self, federation: Federation, device: Device, assignment: Assignment, now: float) -> wire.Assignment:
        payload = None
        if self._has_payload(federation, assignment):
            body = self._models.payload(federation, device, assignment)
            payload = wire.Payload(bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        work = None
        if assignment.ratio is not None:
            work = wire.Work(job=job_of(federation), round=assignment.round, device=device.name, ratio=assignment.ratio)
        return wire.Assignment(
            assignment_id=assignment.id,
            kind=wire.Kind(assignment.kind),
            round=assignment.round,
            deadline_seconds=max(0.0, assignment.deadline_at - now),
            settings=settings_of(federation),
            payload=payload,
            work=work,
            plan=assignment.plan or {},
            model_sha256=self._models.digest(federation, assignment.model_version),
        )

    def _has_payload(self, federation: Federation, assignment: Assignment) -> bool:
        return load_method(federation.method).sends_values(wire.Kind(assignment.kind), not assignment.full)

    def payload(self, assignment_id: str, device_id: str) -> bytes:
        """The bundle of an open assignment of this device. Raises NotFound, NotAllowed, RoundClosed."""
        with self._store.reading() as db:
            assignment, device, federation = _owned(db, assignment_id, device_id)
        if assignment.status != "open":
            raise RoundClosed(f"the assignment is {assignment.status}; ask for the next one")
        if not self._has_payload(federation, assignment):
            raise NotFound("this assignment has no payload; carry it out with the personal model")
        return self._models.payload(federation, device, assignment)

    def hand_back(self, assignment_id: str, device_id: str, reason: wire.PauseReason | str) -> None:
        """The device cannot do it: it is out of this round. Handing back twice is the same as once.

        One whose policy says so stays away until it asks for work again; others rest.
        """
        text = reason.value if isinstance(reason, wire.PauseReason) else reason
        with self._store.writing() as db:
            assignment, device, federation = _owned(db, assignment_id, device_id)
            if assignment.status == "returned":
                return
            if assignment.status != "open":
                raise RoundClosed(f"the assignment is {assignment.status} already; nothing to hand back")
            assignment.status, assignment.return_reason = "returned", text
            if isinstance(reason, wire.PauseReason):
                device.present, device.paused = False, text
            else:
                device.rest_until = self._clock() + REST_SECONDS
            touch(db, federation.id, assignment.round)
            log.info(
                "round %s: %s hands back %s: %s",
                *(assignment.round, device.name, assignment.kind, text),
                extra={"round": assignment.round},
            )

    def note_upload_cost(self, device_id: str, cost: wire.UploadCost) -> None:
        """Keep what a device's last upload cost it; the first word counts, and a stranger's none.

        Kept in memory until a round closes or somebody looks: it is telemetry, and not worth a transaction of its own.
        """
        self._costs.append((device_id, cost))

    def write_upload_costs(self) -> None:
        """Bring what was kept in memory to the records."""
        costs: list[tuple[str, wire.UploadCost]] = []
        while self._costs:
            costs.append(self._costs.popleft())
        if not costs:
            return
        with self._store.writing() as db:
            for device_id, cost in costs:
                assignment = db.get(Assignment, cost.assignment_id)
                if assignment is None or assignment.device_id != device_id or assignment.status != "done":
                    continue
                if assignment.upload_cost is None:
                    assignment.upload_cost = cost.upload.model_dump(mode="json")
                    touch(db, assignment.federation_id, assignment.round)

    # --- what devices send ---------------------------------------------------------------------------------------

    def check_owner(self, assignment_id: str, device_id: str) -> None:
        """Raise NotFound or NotAllowed unless it is an assignment of this device."""
        with self._store.reading() as db:
            _owned(db, assignment_id, device_id)

    def check_envelope(self, assignment_id: str, device_id: str, media_type: str) -> int:
        """Before a byte of an update is read: may this device send this? Returns the longest body accepted, in bytes.

        Raises NotFound, NotAllowed, WrongMediaType.
        """
        with self._store.reading() as db:
            assignment, device, federation = _owned(db, assignment_id, device_id)
        wanted = bundle.MEDIA_TYPE if assignment.kind in BUNDLE_KINDS else JSON_TYPE
        if media_type != wanted:
            raise WrongMediaType(f"an update of kind {assignment.kind} is sent as {wanted}, not as {media_type!r}")
        if assignment.kind not in BUNDLE_KINDS:
            return LARGEST_RECEIPT
        manifest, mask = self._models.manifest(federation), None
        if assignment.status == "open":  # else the model may be gone, and all that is left to say is that it is settled
            mask, _ = self._models.mask(federation, device, assignment)
        return bundle.largest_bundle(
            # Devices may have masks of elements of their own, with more elements than the global one.
            count_values(manifest, None if isinstance(mask, ElementMask) else mask),
            settings_of(federation).precision_of("up", wire.Kind(assignment.kind)),
            manifest,
            elements=mask is None or isinstance(mask, ElementMask),
            gradients=load_method(federation.method).wants_gradients(assignment.plan or {}),
        )

    def accept_update(self, assignment_id: str, device_id: str, body: bytes) -> bool:
        """Check, store and acknowledge an update; True when it is new, False for the same one again.

        Raises BadContent, DifferentUpdate, RoundClosed, NotAllowed, NotFound. When it returns, the update survives a
        power cut and counts in its round exactly once.
        """
        digest = hashlib.sha256(body).hexdigest()
        with self._store.reading() as db:
            assignment, device, federation = _owned(db, assignment_id, device_id)
        if self._settled(assignment, digest):
            return False
        report, chosen = self._check_update(federation, device, assignment, body)
        changed: dict[str, Any] = {}
        keys: list[str] = []
        if assignment.kind in BUNDLE_KINDS:
            # Who trained holds the model's mask, though it has not said so yet: it may not be lost with this round.
            mask = self._models.model(federation, assignment.model_version).mask
            held = mask.digest if mask is not None else self._models.keep_mask(federation, chosen) if chosen else None
            if held is not None and held != device.mask:
                changed["mask"] = held
            keys = [update_key(federation.id, assignment.id, digest)]
            self._store.blobs.write(keys[0], body)
        if not device.holds_model and _leaves_model(federation, assignment):
            changed["holds_model"] = True
        if isinstance(report, wire.UpdateReport) and report.status == "stopped":
            changed |= {"status": "stopped", "stopped_round": assignment.round}
        if isinstance(report, wire.UpdateReport) and report.num_examples != device.num_examples:
            changed["num_examples"] = report.num_examples

        def write_down(db: Session) -> bool:
            # Only while it is still open: the round may have closed since, or the same update have come twice.
            values = {"update_sha256": digest, "update_bytes": len(body), "report": report.model_dump(mode="json")}
            if not db.connection().execute(_ACCEPT, {"open_id": assignment_id, "status": "done", **values}).rowcount:
                return not self._settled(_owned(db, assignment_id, device_id)[0], digest)
            if changed:
                db.execute(update(Device).where(Device.id == device_id).values(**changed))
            if assignment.kind not in BUNDLE_KINDS:  # a round that is open has no cached record
                touch(db, federation.id, assignment.round)
            return True

        try:
            new = self._store.record(write_down, keys)
        except (DifferentUpdate, RoundClosed):
            for key in keys:
                drop_unneeded(self._store, federation.id, key)
            raise
        if not new:
            for key in keys:
                drop_unneeded(self._store, federation.id, key)
        return new

    @staticmethod
    def _settled(assignment: Assignment, digest: str) -> bool:
        """True for the same update again. Raises where the assignment takes no update any more."""
        if assignment.status == "done":
            if assignment.update_sha256 == digest:
                return True
            raise DifferentUpdate("another update was accepted for this assignment; ask for the next one")
        if assignment.status != "open":
            raise RoundClosed(
                f"the assignment is {assignment.status}: round {assignment.round} does not take it any more; keep the "
                f"personal model and ask for the next assignment"
            )
        return False

    def _check_update(
        self, federation: Federation, device: Device, assignment: Assignment, body: bytes
    ) -> tuple[wire.UpdateReport | wire.Receipt, NeuronMask | None]:
        """The report, and the neurons that the device has chosen, if that is what it does."""
        try:
            if assignment.kind == wire.Kind.personalise:
                return wire.UpdateReport.model_validate_json(body), None
            if assignment.kind not in BUNDLE_KINDS:
                return wire.Receipt.model_validate_json(body), None
            model = self._models.model(federation, assignment.model_version)
            decoded = bundle.decode(body, self._models.manifest(federation), model.mask)
            report = wire.UpdateReport.model_validate_json(decoded.report)
        except ValidationError as error:
            raise BadContent(explain(error)) from None
        precision = settings_of(federation).precision_of("up", wire.Kind(assignment.kind))
        if decoded.precision != precision:
            raise BadContent(f"values: sent as {decoded.precision}, the federation's precision is {precision}")
        method, plan = load_method(federation.method), assignment.plan or {}
        mask, _ = self._models.mask(federation, device, assignment)
        situation = Situation(self._models.manifest(federation), settings_of(federation), assignment.round, plan)
        if assignment.kind == wire.Kind.prepare and decoded.mask is None:
            raise BadContent("mask: an update that prepares the model says what exists of it; send it with its mask")
        if method.devices_choose and mask is None and assignment.ratio is not None:
            if not fits_ratio(situation.manifest, decoded.mask, assignment.ratio):
                raise BadContent(
                    f"mask: of the n neurons of each group a device chooses max(1, floor(p n)) at a budget of "
                    f"p = {assignment.ratio:g}, and these are not so many; fetch the assignment again"
                )
        elif not same_mask(decoded.mask, mask):
            if not isinstance(decoded.mask, method.mask_type):
                kept = f"that {device.name} chose and keeps" if method.devices_choose else f"for {device.name}"
                raise BadContent(
                    f"mask: it is not the one of round {assignment.round} {kept}; fetch the assignment again"
                )
            method.check_mask(model, decoded.mask, situation)
        if (decoded.gradients is not None) != method.wants_gradients(plan) or decoded.signs is not None:
            wanted = "with" if method.wants_gradients(plan) else "without"
            raise BadContent(f"an update of this round is sent {wanted} gradients, and without signs; update this SDK")
        limit = settings_of(federation).update_norm_limit
        if limit is not None:
            change = decoded.values.astype(np.float64)
            if decoded.precision != "int8":
                change -= pack(self._models.manifest(federation), model.tensors, decoded.mask)
            norm = float(np.linalg.norm(change))
            if norm > limit:
                raise BadContent(
                    f"values: they moved by {norm:.3g} from what was sent (2-norm), the federation allows {limit:g}; "
                    f"hand the assignment back, or train with a lower learning rate or a clip"
                )
        chosen = decoded.mask if method.devices_choose and isinstance(decoded.mask, NeuronMask) else None
        return report, chosen

    # --- progress ------------------------------------------------------------------------------------------------

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
            current = _open_round(db, federation)
            cohort = _cohort(db, federation, current.number) if current else []
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
            if federation.status != "running" or _open_round(db, federation):
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
            cohort = _draw(db, federation, list(active.values()), size, number)
            current = Round(federation_id=federation.id, number=number, status="open", stale=True)
            current.opened_at, current.deadline_at = now, now + settings.deadline_seconds
            db.add(current)
            _drop_late_work(db, [active[name].id for name in cohort])
            for position, name in enumerate(cohort):
                assignment = _assign(federation, active[name], work.kind, number, position, now)
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

    def _step_round(self, federation: Federation, current: Round, cohort: Sequence[_Member]) -> bool:
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

    def _fold(self, federation: Federation, number: int, cohort: Sequence[_Member]) -> _Folding:
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

    def _fold_one(self, federation: Federation, folding: _Folding, assignment: _Member) -> None:
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
        self.write_upload_costs()
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
            current = _open_round(db, federation)
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
        del self._folding[federation.id]
        log.info(
            "%s: round %s closes, %s updates in its model",
            *(federation.name, number, sums.updates),
            extra={"round": number},
        )
        self._on_closed(federation.name, now - current.opened_at, len(notes.get("left_out", {})))
        # Only now, with the new model in the records, may what it was made from go.
        clear(self._store, self._models, federation.id)

    @staticmethod
    def _withdraw(db: Session, current: Round) -> None:
        """Take back a preparation that nobody answered: its round is opened anew, with whoever is there."""
        of_round = (Assignment.federation_id == current.federation_id, Assignment.round == current.number)
        db.execute(delete(Assignment).where(*of_round, Assignment.kind == wire.Kind.prepare.value))
        db.delete(current)

    def _situation(self, db: Session, federation: Federation, number: int) -> Situation:
        """What a method knows of round ``number`` when it opens, and when it closes."""
        enrolled = [
            device
            for device in _devices(db, federation, ("active", "stopped"))
            if device.status == "active" or device.stopped_round == number  # with this round's update, which counts
        ]
        asked = select(Assignment.plan).where(
            Assignment.federation_id == federation.id, Assignment.round == number, Assignment.kind.in_(COHORT_KINDS)
        )
        return Situation(
            self._models.manifest(federation),
            settings_of(federation),
            number,
            db.scalars(asked.limit(1)).first() or {},
            devices=len(enrolled),
            num_examples=sum(device.num_examples or 0 for device in enrolled),
        )

    def _ask_for_evaluation(self, db: Session, federation: Federation, now: float) -> bool:
        """Ask every device that is there, stopped or not, to judge its personal model and the new global one.

        False when nobody is there.
        """
        present = [device for device in _devices(db, federation, ("active", "stopped")) if device.present]
        for position, device in enumerate(sorted(present, key=lambda device: device.name)):
            db.add(_assign(federation, device, wire.Kind.evaluate, federation.round, position, now))
        return bool(present)


def what_is_missing(db: Session, federation: Federation, now: float) -> str | None:
    """What keeps a running federation from opening its next round, in words, or None."""
    if federation.status != "running" or _open_round(db, federation) or drawable(db, federation, now):
        return None
    if why_over(db, federation):
        return None
    if _active(db, federation, now):
        return (
            f"a device with a budget of at least {smallest_budget(federation):g}, which {federation.method} needs; "
            f"those that are there have less"
        )
    paused = Counter(device.paused for device in _devices(db, federation, ("active",)) if device.paused)
    if paused:
        words = ", ".join(f"{count} {word}" for word, count in sorted(paused.items()))
        return f"a device whose policy lets it work (paused: {words})"
    return "a device that still trains and is there; the others may wait or leave"


def extend_deadlines(db: Session, federation: Federation, now: float) -> None:
    """Start the clock of everything open anew."""
    deadline = now + settings_of(federation).deadline_seconds
    db.execute(
        update(Round).where(Round.federation_id == federation.id, Round.status == "open").values(deadline_at=deadline)
    )
    db.execute(
        update(Assignment)
        .where(Assignment.federation_id == federation.id, Assignment.status == "open")
        .values(deadline_at=deadline)
    )


def explain(error: ValidationError) -> str:
    """A pydantic error in one line: where, what was wrong."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "body"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}; see docs/settings.md and the OpenAPI page at /docs"


def _missed(db: Session, device_id: str, number: int) -> tuple[Assignment | None] | None:
    """None for a device that has done the work of round ``number``, handed it back, or was drawn since; else its
    assignment, if it ever had one."""
    since = select(Assignment).where(Assignment.device_id == device_id, Assignment.round >= number)
    found = db.scalars(since.where(Assignment.kind.in_(COHORT_KINDS)).order_by(Assignment.round.desc())).first()
    settled = found is not None and (found.status in ("done", "returned") or found.kind != wire.Kind.personalise.value)
    if found is not None and (found.round > number or settled):
        return None
    return (found,)


def _draw(db: Session, federation: Federation, active: Sequence[Device], size: int, number: int) -> list[str]:
    """The names of a round's cohort, sorted; who is drawn, and how, is in ``cohort``, and in ``privacy``."""
    settings, job = settings_of(federation), job_of(federation)
    if settings.noise_multiplier is not None:
        enrolled = len(_devices(db, federation, ("active", "stopped")))
        names = [device.name for device in active]
        return choose_each(names, min(1.0, size / enrolled), job=job, round_number=number)
    last: dict[str, int] = {}
    if settings.cohort_policy == "least_recently":
        drawn = select(Assignment.device_id, func.max(Assignment.round)).where(
            Assignment.federation_id == federation.id, Assignment.kind.in_(COHORT_KINDS)
        )
        last = {row[0]: row[1] for row in db.execute(drawn.group_by(Assignment.device_id))}
    candidates = [Candidate(device.name, device.budget, last.get(device.id, -1)) for device in active]
    return choose(candidates, size, job=job, round_number=number, policy=settings.cohort_policy)


def _drop_late_work(db: Session, device_ids: Sequence[str]) -> None:
    """Devices that are drawn again need not do any more what they missed."""
    late = update(Assignment).where(Assignment.device_id.in_(device_ids), Assignment.status == "open")
    db.execute(late.where(Assignment.kind == wire.Kind.personalise.value).values(status="expired"))


def _assign(
    federation: Federation, device: Device, kind: wire.Kind, number: int, position: int, now: float
) -> Assignment:
    method = load_method(federation.method)
    return Assignment(
        id=uuid.uuid4().hex,
        federation_id=federation.id,
        device_id=device.id,
        kind=kind.value,
        round=number,
        position=position,
        status="open",
        model_version=federation.model_version,
        full=kind not in COHORT_KINDS or not (device.holds_model or method.narrow),
        ratio=None if kind == wire.Kind.evaluate else method.active_ratio(device.budget),
        created_at=now,
        deadline_at=now + settings_of(federation).deadline_seconds,
    )


# Statements of every call of a device, made once: SQLAlchemy takes longer to put one together than SQLite to answer it.
_OWNED = (
    select(Assignment, Device, Federation)
    .join(Device, Device.id == Assignment.device_id)
    .join(Federation, Federation.id == Assignment.federation_id)
    .where(Assignment.id == bindparam("assignment_id"))
)
_OLDEST_OPEN = (
    select(Device, Federation, Assignment)
    .join(Federation, Federation.id == Device.federation_id)
    .outerjoin(Assignment, and_(Assignment.device_id == Device.id, Assignment.status == "open"))
    .where(Device.id == bindparam("asking_id"))
    .order_by(Assignment.round, Assignment.created_at)
    .limit(1)
)
_OPEN_ROUND = select(Round).where(Round.federation_id == bindparam("federation_id"), Round.status == "open")
_COHORT = (
    select(Assignment.id, Assignment.kind, Assignment.status, Assignment.update_sha256)
    .where(
        Assignment.federation_id == bindparam("federation_id"),
        Assignment.round == bindparam("number"),
        Assignment.kind.in_(COHORT_KINDS),
    )
    .order_by(Assignment.position)
)
_ACCEPT = (
    update(cast(Table, Assignment.__table__))
    .where(Assignment.id == bindparam("open_id"), Assignment.status == "open")
    .values(
        status=bindparam("status"),
        update_sha256=bindparam("update_sha256"),
        update_bytes=bindparam("update_bytes"),
        report=bindparam("report"),
    )
)


def _owned(db: Session, assignment_id: str, device_id: str) -> tuple[Assignment, Device, Federation]:
    row = db.execute(_OWNED, {"assignment_id": assignment_id}).first()
    if row is None:
        raise NotFound("there is no such assignment; ask for the next one")
    assignment, device, federation = row
    if device.id != device_id:
        raise NotAllowed("this assignment belongs to another device; ask for your own")
    return assignment, device, federation


def _open_assignment(db: Session, device_id: str) -> tuple[Device, Federation, Assignment | None]:
    """A device, its federation and its oldest open assignment: an evaluation before the round after it."""
    device, federation, assignment = db.execute(_OLDEST_OPEN, {"asking_id": device_id}).one()
    return device, federation, assignment


def _open_round(db: Session, federation: Federation) -> Round | None:
    return db.scalar(_OPEN_ROUND, {"federation_id": federation.id})


@dataclass(frozen=True)
class _Member:
    """What moving a round needs to know of one of its assignments."""

    id: str
    kind: str
    status: str
    update_sha256: str | None


def _cohort(db: Session, federation: Federation, number: int) -> list[_Member]:
    rows = db.execute(_COHORT, {"federation_id": federation.id, "number": number})
    return [_Member(*row) for row in rows]


def _devices(db: Session, federation: Federation, statuses: Sequence[str]) -> list[Device]:
    return list(db.scalars(select(Device).where(Device.federation_id == federation.id, Device.status.in_(statuses))))


def drawable(db: Session, federation: Federation, now: float) -> list[Device]:
    """The devices that a cohort can be drawn from: not stopped, there, not resting, and with a budget that reaches."""
    smallest = smallest_budget(federation)
    return [device for device in _active(db, federation, now) if reaches(device.budget, smallest)]


def _active(db: Session, federation: Federation, now: float) -> list[Device]:
    """The devices that could train now, whatever their budget."""
    active = _devices(db, federation, ("active",))
    return [device for device in active if device.present and device.rest_until <= now]


def smallest_budget(federation: Federation) -> float:
    """The budget below which a device is not drawn."""
    return load_method(federation.method).smallest_budget(settings_of(federation))


def reaches(budget: float, smallest: float) -> bool:
    """Whether a device of this budget is drawn."""
    return budget >= smallest - 1e-9  # less an accident of binary floats: 1 - 0.7 exceeds 0.3


def _leaves_model(federation: Federation, assignment: Assignment) -> bool:
    """Whether a device that answered this assignment holds a personal model from then on."""
    if assignment.kind in BUNDLE_KINDS:
        return load_method(federation.method).personal_models
    return assignment.kind != wire.Kind.evaluate


def forget_adapted(db: Session, federation: Federation) -> None:
    """Before a federation goes on: what devices without personal models adapted will not be its last global model."""
    if load_method(federation.method).personal_models:
        return
    db.execute(update(Device).where(Device.federation_id == federation.id).values(holds_model=False))
    adapting = update(Assignment).where(Assignment.federation_id == federation.id, Assignment.kind == "adapt")
    db.execute(adapting.where(Assignment.status.in_(("open", "returned"))).values(status="expired"))


def why_over(db: Session, federation: Federation) -> str | None:
    """The reason why no round follows, or None."""
    if federation.round >= settings_of(federation).rounds:
        return "max_rounds"
    enrolled = db.execute(
        select(Device.status, Device.budget).where(Device.federation_id == federation.id, Device.status != "revoked")
    ).all()
    # One that was never drawn, because its budget does not reach, keeps nobody waiting who has stopped.
    smallest = smallest_budget(federation)
    statuses = [status for status, budget in enrolled if status == "stopped" or reaches(budget, smallest)]
    return "all_stopped" if statuses and all(status == "stopped" for status in statuses) else None


def touch(db: Session, federation_id: int, number: int) -> None:
    """A fact about a round has come: its cached record is stale."""
    db.execute(update(Round).where(Round.federation_id == federation_id, Round.number == number).values(stale=True))
