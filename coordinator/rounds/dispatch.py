"""Dispatch of assignments and payloads to devices, and of returned work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import literal_column, select, update
from sqlalchemy.orm import Session

from sparrow.protocol import messages as wire
from sparrow.protocol.events import EventKind
from sparrow.protocol.failures import in_words
from sparrow.protocol.secure.messages import SecureWork

from ..draws import neurons_of
from ..errors import FederationDeleted, Finished, NotFound, RoundClosed
from ..methods import Situation, load_method, sends_values
from ..models.global_models import Models, settings_of
from ..models.payloads import Packed
from ..storage import events
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation
from .assignments import assign, missed_work, oldest_open, owned, touch
from .candidates import able, most_examples, reaches, situation_of, smallest_budget
from .failing import note_failure, rests
from .secure_answers import ANSWERS, secure_work
from .skew import adjustment

log = logging.getLogger(__name__)

REST_SECONDS = 60.0
"""Time during which a device that returned work is not drawn. The cause (heat, load, a diverging loss) needs time to
pass, and the only device of a federation would otherwise return one round after another."""

REFUSED = "update-refused"
"""The SDK's reason for returning work after a refused update."""

FEW = 20
"""Largest number of waiting devices that are looked up one by one."""


@dataclass(frozen=True)
class Ask:
    """A device's request for work."""

    device_id: str
    # Digest of the mask that it holds.
    mask: str | None = None
    # Digest of the global model that it can rebuild.
    model: str | None = None
    # False for a repeated look within one long poll, which does not mark a device present that has left in the
    # meantime.
    first: bool = True


@dataclass(frozen=True)
class Asked:
    """The answer to a request for work."""

    assignment: wire.Assignment | None
    payload: Packed | None = None
    # The device had been marked absent.
    was_away: bool = False


class Dispatch:
    """Answers devices that ask for work."""

    def __init__(self, store: Store, models: Models, clock: Callable[[], float]) -> None:
        self._store = store
        self._models = models
        self._clock = clock

    def answer_all(self, asks: Sequence[Ask]) -> list[Asked | Exception]:
        """Return the oldest open assignment of each device, None if it has none; or the exception of its request.

        Finished: no more work will come. After the end, a device without a model first gets ``adapt``.
        """
        answers: list[Asked | Exception] = []
        with self._store.reading() as db:
            idle = self._idle(db, [ask.device_id for ask in asks if not ask.first])
            found = [None if ask.device_id in idle else _oldest_open_or_error(db, ask.device_id) for ask in asks]
        for ask, work in zip(asks, found, strict=True):
            if work is None:
                answers.append(Asked(None))
            elif isinstance(work, Exception):
                answers.append(work)
            else:
                try:
                    answers.append(self._answer(ask, *work))
                except Exception as error:
                    answers.append(error)
        return answers

    def _idle(self, db: Session, waiting: Sequence[str]) -> set[str]:
        # In a large fleet most waiting devices have no work: find them together.
        if len(waiting) < FEW:
            return set()
        over = select(Federation.id).where(Federation.status.not_in(("waiting", "running")))
        busy = set(db.scalars(select(Assignment.device_id).where(Assignment.status == literal_column("'open'"))))
        if db.scalars(over.limit(1)).first() is not None or any(
            load_method(name).schedule.last_for_everyone for name in db.scalars(select(Federation.method).distinct())
        ):
            return set()
        return set(waiting) - busy

    def _answer(self, ask: Ask, device: Device, federation: Federation, assignment: Assignment | None) -> Asked:
        now = self._clock()
        device_id = ask.device_id
        away = ask.first and not device.present
        ended = federation.status in ("finished", "stopped") and assignment is None and device.holds_model
        leaves = ended and load_method(federation.method).schedule.last_for_everyone is None
        # A poll needs no transaction (``last_seen``), unless the device was marked absent, or holds another mask or
        # model than recorded and may get another payload.
        if away or (ask.first and not leaves and (ask.mask, ask.model) != (device.mask, device.model)):
            holds = {"mask": ask.mask, "model": ask.model, "paused": None}
            with self._store.writing() as db:
                db.execute(update(Device).where(Device.id == device_id).values(present=True, seen_at=now, **holds))
                if device.paused is not None:
                    events.record(db, federation.id, EventKind.resumed, now, device=device.name)
                device = db.get_one(Device, device_id)
        if federation.status == wire.FederationStatus.paused:
            return Asked(None, was_away=away)
        if assignment is None and not rests(device, now):
            assignment = self._late_work(federation, device_id)
        if assignment is None and federation.status in ("finished", "stopped"):
            if device.holds_model:
                raise Finished(
                    f"{federation.name} is {federation.status} after {federation.round} rounds; no work is left; "
                    f"this device keeps its personal model"
                )
            assignment = self._adapt(device_id)
        if assignment is None:
            return Asked(None, was_away=away)
        return Asked(*self._describe(federation, device, assignment, now), was_away=away)

    def payload(self, assignment_id: str, device_id: str) -> Packed:
        """Return the payload of an open assignment of this device. Raises NotFound, NotAllowed, RoundClosed."""
        with self._store.reading() as db:
            assignment, device, federation = owned(db, assignment_id, device_id)
        if assignment.status != "open":
            raise RoundClosed(f"the assignment is {assignment.status}; ask for the next one")
        if not self._has_payload(federation, assignment):
            raise NotFound("this assignment has no payload; carry it out with the personal model")
        return self._models.payload(federation, device, assignment)

    def payloads(self, wanted: Sequence[tuple[str, str]]) -> list[Packed | Exception]:
        """Return the result or exception of ``payload`` for each assignment and device."""
        found: list[Packed | Exception] = []
        for assignment_id, device_id in wanted:
            try:
                found.append(self.payload(assignment_id, device_id))
            except Exception as error:
                found.append(error)
        return found

    def check_open(self, assignment_id: str, device_id: str) -> None:
        """Check that this assignment is open. Raises NotFound, NotAllowed, RoundClosed."""
        with self._store.reading() as db:
            assignment, _, _ = owned(db, assignment_id, device_id)
        if assignment.status != "open":
            raise RoundClosed(f"the assignment is {assignment.status}: its round no longer waits for it")

    def hand_back(self, assignment_id: str, device_id: str, reason: wire.PauseReason | str) -> None:
        """Accept an assignment back from a device that cannot do it; idempotent.

        A device paused by its policy is absent until it asks for work again; others rest for ``REST_SECONDS``.
        """
        text = reason.value if isinstance(reason, wire.PauseReason) else reason
        with self._store.writing() as db:
            assignment, device, federation = owned(db, assignment_id, device_id)
            if assignment.status == "returned":
                return
            if assignment.status != "open":
                raise RoundClosed(f"the assignment is already {assignment.status}; ask for the next one")
            assignment.status = "returned"
            assignment.return_reason = text
            if isinstance(reason, wire.PauseReason):
                device.present = False
                device.paused = text
                events.record(db, federation.id, EventKind.paused, self._clock(), device=device.name, detail=text)
            else:
                # This coordinator has recorded why it refused the update.
                if not (text == REFUSED and device.refusals):
                    note_failure(db, device, assignment, text, self._clock())
                device.rest_until = self._clock() + REST_SECONDS
            touch(db, federation.id, assignment.round)
            log.info(
                "round %s: %s returned %s: %s",
                assignment.round,
                device.name,
                assignment.kind,
                in_words(text),
                extra={"round": assignment.round},
            )

    def _late_work(self, federation: Federation, device_id: str) -> Assignment | None:
        """Return the work of the last round for everyone, if the device has not done it and was not drawn since."""
        schedule = load_method(federation.method).schedule
        # Every poll comes here: return before the settings are validated.
        if schedule.last_for_everyone is None:
            return None
        situation = Situation(self._models.manifest(federation), settings_of(federation), federation.round)
        number = schedule.last_for_everyone(situation)
        if number is None:
            return None
        with self._store.reading() as db:
            if not missed_work(db, device_id, number):
                return None
        with self._store.writing() as db:
            device = db.get_one(Device, device_id)
            # Read again: the model of the earlier read may be deleted.
            federation = db.get_one(Federation, federation.id)
            missed = missed_work(db, device_id, number)
            if not missed or device.status != "active" or not reaches(device.budget, smallest_budget(federation)):
                return None
            found = missed[0]
            if found is None:
                (most,) = most_examples([device], able(db, federation, self._clock()), settings_of(federation))
                found = assign(federation, device, wire.Kind.personalise, number, 0, self._clock(), most_examples=most)
                situation = situation_of(db, self._models, federation, number)
                found.plan = dict(schedule.work(situation).plan) or None
                db.add(found)
            found.status = "open"
            found.model_version = federation.model_version
            found.created_at = self._clock()
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
                assignment = assign(federation, device, wire.Kind.adapt, federation.round, 0, self._clock())
                assignment.plan = adjustment(db, federation) or None
                db.add(assignment)
            if assignment.status == "returned":
                raise Finished(
                    f"{federation.name} is {federation.status}, and this device could not adapt its model "
                    f"({in_words(assignment.return_reason or '')}); restart the device to retry"
                )
            assignment.status = "open"
            assignment.model_version = federation.model_version
            assignment.deadline_at = self._clock() + settings_of(federation).deadline_seconds
            return assignment

    def _describe(
        self, federation: Federation, device: Device, assignment: Assignment, now: float
    ) -> tuple[wire.Assignment, Packed | None]:
        payload = packed = None
        if self._has_payload(federation, assignment):
            packed = self._models.payload(federation, device, assignment)
            payload = wire.Payload(bytes=len(packed.body), sha256=packed.sha256)
        work = None
        if assignment.ratio is not None:
            key = neurons_of(federation.secret, assignment, device.name)
            work = wire.Work(key=key, ratio=assignment.ratio)
        described = wire.Assignment(
            assignment_id=assignment.id,
            kind=wire.Kind(assignment.kind),
            round=assignment.round,
            deadline_seconds=max(0.0, assignment.deadline_at - now),
            settings=settings_of(federation),
            payload=payload,
            work=work,
            plan=assignment.plan or {},
            model_sha256=self._models.digest(federation, assignment.model_version),
            manifest_digest=self._models.manifest(federation).digest,
            secure=self._secure_work(federation, assignment, device.name),
        )
        return described, packed

    def _secure_work(self, federation: Federation, assignment: Assignment, name: str) -> SecureWork | None:
        if not settings_of(federation).secure:
            return None
        with self._store.reading() as db:
            return secure_work(db, federation, assignment, name)

    @staticmethod
    def _has_payload(federation: Federation, assignment: Assignment) -> bool:
        kind = wire.Kind(assignment.kind)
        if assignment.kind in ANSWERS:
            return False
        if kind is wire.Kind.evaluate and not assignment.full:
            return False
        return sends_values(load_method(federation.method), kind, not assignment.full)


def _oldest_open_or_error(
    db: Session, device_id: str
) -> tuple[Device, Federation, Assignment | None] | FederationDeleted:
    try:
        return oldest_open(db, device_id)
    except FederationDeleted as error:
        return error
