"""Accept updates and receipts: check, store durably, and acknowledge each once.

A device with ``MOST_REFUSALS`` refused updates in a row loses its assignment and receives no work for a while, because
rounds would wait for it. After this pause, a single refusal causes the next one, until accepted work ends the failure
(``failing``).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from sqlalchemy import Table, bindparam, func, select, update
from sqlalchemy.orm import Session

from sparrow.protocol import bundle
from sparrow.protocol import messages as wire
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.events import EventKind
from sparrow.protocol.masks import Mask, NeuronMask, count_values
from sparrow.protocol.parts import expected

from ..errors import (
    BadContent,
    DifferentUpdate,
    NotFound,
    RequestError,
    RoundClosed,
    TooLarge,
    WrongMediaType,
    callers_data,
)
from ..methods import Situation, load_method
from ..models.global_models import Models, settings_of
from ..storage import events
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation
from .assignments import (
    BUNDLE_KINDS,
    COHORT_KINDS,
    JUDGING_KINDS,
    owned,
    touch,
    update_key,
    weight_of,
)
from .buffered import number_arrival
from .checking import check_form, check_mask, check_parts, check_values
from .cleanup import drop_unneeded
from .failing import MOST_REFUSALS, note_failure, recovers
from .intake import DecodedUpdates
from .secure_answers import ANSWERS, check_answer, check_statement_of

log = logging.getLogger(__name__)

WRONG = (BadContent, TooLarge, WrongMediaType)
"""Refusals that are the device's failures."""

JSON_TYPE = "application/json"
LARGEST_RECEIPT = 64 * 1024

REST_MINUTES = 10

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


@dataclass(frozen=True)
class Sent:
    """A received update; see ``Acceptance.accept_update``."""

    assignment_id: str
    device_id: str
    body: bytes | memoryview
    media_type: str
    digest: str | None = None
    file: Path | None = None
    intact: bool = False


@dataclass(frozen=True)
class _Checked:
    federation_id: int
    # Blobs written for it.
    keys: Sequence[str]
    write_down: Callable[[Session], bool]


class Acceptance:
    """Accepts updates and receipts. decoded: cache of updates for the round's sums."""

    def __init__(self, store: Store, models: Models, decoded: DecodedUpdates, clock: Callable[[], float]) -> None:
        self._store = store
        self._models = models
        self._decoded = decoded
        self._clock = clock

    def check_owner(self, assignment_id: str, device_id: str) -> None:
        """Raise NotFound or NotAllowed unless the assignment is this device's."""
        with self._store.reading() as db:
            owned(db, assignment_id, device_id)

    def check_envelope(self, assignment_id: str, device_id: str, media_type: str) -> int:
        """Return the longest valid body of an update, in bytes, before it is read.

        Raises NotFound, NotAllowed, WrongMediaType.
        """
        with self._store.reading() as db:
            assignment, device, federation = owned(db, assignment_id, device_id)
        return self._envelope(assignment, device, federation, media_type)[0]

    def _envelope(
        self, assignment: Assignment, device: Device, federation: Federation, media_type: str
    ) -> tuple[int, Mask | None]:
        """Return the longest valid body, and the mask of an open assignment. Raises WrongMediaType."""
        wanted = bundle.MEDIA_TYPE if assignment.kind in BUNDLE_KINDS else JSON_TYPE
        if media_type != wanted:
            raise WrongMediaType(f"send an update of kind {assignment.kind} as {wanted}, not as {media_type!r}")
        if assignment.kind not in BUNDLE_KINDS:
            return LARGEST_RECEIPT, None
        manifest = self._models.manifest(federation)
        mask = None
        method = load_method(federation.method)
        plan = assignment.plan or {}
        # For a settled assignment the model may be gone, and its update is not decoded.
        if assignment.status == "open":
            mask, _ = self._models.mask(federation, device, assignment)
        longest = bundle.largest_bundle(
            # Devices may have their own element masks, with more elements than the global one.
            count_values(manifest, None if isinstance(mask, ElementMask) else mask),
            settings_of(federation).precision_of("up", wire.Kind(assignment.kind)),
            manifest,
            elements=mask is None or isinstance(mask, ElementMask),
            parts=expected(method.parts, manifest, plan),
        )
        return longest, mask

    def accept_update(
        self,
        assignment_id: str,
        device_id: str,
        body: bytes | memoryview,
        media_type: str = bundle.MEDIA_TYPE,
        digest: str | None = None,
        file: Path | None = None,
        *,
        intact: bool = False,
    ) -> bool:
        """Authorise, check, store and record an update; return False if the same update was accepted before.

        digest: its SHA-256, if known. file: a local file with its content. intact: whether it matched the sender's
        digest.

        Raises NotFound, NotAllowed, WrongMediaType, TooLarge, RoundClosed, DifferentUpdate, BadContent.
        """
        (outcome,) = self.accept_all([Sent(assignment_id, device_id, body, media_type, digest, file, intact)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def accept_all(self, updates: Sequence[Sent]) -> list[bool | BaseException]:
        """Accept updates in one transaction; return for each the result or error of ``accept_update``."""
        outcomes: list[bool | BaseException] = [False] * len(updates)
        checked: dict[int, _Checked] = {}
        for index, sent in enumerate(updates):
            try:
                found = self._check(sent)
            except WRONG as error:
                outcomes[index] = self.count_refusal(sent.assignment_id, sent.device_id, error)
            except Exception as error:
                outcomes[index] = error
            else:
                if found is not None:
                    checked[index] = found
        recorded = self._store.record_all([(each.write_down, each.keys) for each in checked.values()])
        for (index, each), outcome in zip(checked.items(), recorded, strict=True):
            outcomes[index] = outcome
            late = isinstance(outcome, (DifferentUpdate, NotFound, RoundClosed))
            if late:
                for key in each.keys:
                    self._decoded.take(key)
            if late or outcome is False:
                drop_unneeded(self._store, each.federation_id, each.keys)
        return outcomes

    def count_refusal(self, assignment_id: str, device_id: str, error: RequestError) -> RequestError:
        """Record a refusal, and return the caller's error."""
        with self._store.writing() as db:
            assignment, device, federation = owned(db, assignment_id, device_id)
            if assignment.status != "open":
                return error
            device.refusals += 1
            now = self._clock()
            if device.refusals < MOST_REFUSALS:
                note_failure(db, device, assignment, f"its update was refused: {error}", now)
                return error
            rest = f"it gets no work for {REST_MINUTES} minutes"
            why = f"{device.refusals} updates in a row were refused; {rest}: {error}"
            assignment.status = "returned"
            assignment.return_reason = "update-refused"
            note_failure(db, device, assignment, why, now)
            device.rest_until = now + 60 * REST_MINUTES
            touch(db, federation.id, assignment.round)
            name = device.name
            refusals = device.refusals
        log.warning(
            "%s: %s updates of %s in a row were refused, so %s: %s",
            federation.name,
            refusals,
            name,
            rest,
            error,
            extra={"round": assignment.round},
        )
        return type(error)(
            f"{error}; {refusals} updates in a row were refused, so this device gets no work for {REST_MINUTES} minutes"
        )

    def _check(self, sent: Sent) -> _Checked | None:
        """Authorise, check and store an update; return its record, or None for a repetition."""
        assignment_id = sent.assignment_id
        device_id = sent.device_id
        body = sent.body
        digest = sent.digest or hashlib.sha256(body).hexdigest()
        with self._store.reading() as db:
            assignment, device, federation = owned(db, assignment_id, device_id)
        longest, mask = self._envelope(assignment, device, federation, sent.media_type)
        if len(body) > longest:
            raise TooLarge(f"the body has {len(body)} bytes; it must have at most {longest}: send only masked values")
        if self._settled(assignment, digest):
            return None
        report, decoded, chosen = self._check_update(federation, device, assignment, mask, sent)
        if isinstance(report, wire.UpdateReport) and report.status == "stopped":
            self._check_stop(federation, assignment)
        changed = _changes_of(federation, device, assignment, report)
        keys: list[str] = []
        if assignment.kind in BUNDLE_KINDS:
            held = self._mask_held_after(federation, assignment, chosen)
            if held is not None and held != device.mask:
                changed["mask"] = held
            keys = [self._keep(federation, assignment, sent, digest, decoded)]
        values = {"update_sha256": digest, "update_bytes": len(body), "report": report.model_dump(mode="json")}
        buffered = assignment.kind == wire.Kind.train and settings_of(federation).buffer is not None

        def write_down(db: Session) -> bool:
            # The round may have closed meanwhile, or the same update may have arrived twice.
            if not db.connection().execute(_ACCEPT, {"open_id": assignment_id, "status": "done", **values}).rowcount:
                return not self._settled(owned(db, assignment_id, device_id)[0], digest)
            if changed:
                db.execute(update(Device).where(Device.id == device_id).values(**changed))
            for kind in _events_of(changed):
                events.record(db, federation.id, kind, self._clock(), device=device.name)
            if buffered:
                number_arrival(db, federation.id, assignment_id)
            # Updates belong to an open round, which has no cached record.
            if assignment.kind not in BUNDLE_KINDS:
                touch(db, federation.id, assignment.round)
            return True

        return _Checked(federation.id, keys, write_down)

    def _mask_held_after(self, federation: Federation, assignment: Assignment, chosen: NeuronMask | None) -> str | None:
        """Return the digest of the mask that the device now holds."""
        mask = self._models.model(federation, assignment.model_version).mask
        if mask is not None:
            return mask.digest
        return self._models.keep_mask(federation, chosen) if chosen else None

    def _keep(
        self, federation: Federation, assignment: Assignment, sent: Sent, digest: str, decoded: bundle.Bundle | None
    ) -> str:
        key = update_key(federation.id, assignment.id, digest)
        self._store.blobs.write(key, sent.body, sent.file)
        if decoded is not None and decoded.masked is None and self._store.shared is None:
            self._decoded.put(key, decoded)
        return key

    def _check_stop(self, federation: Federation, assignment: Assignment) -> None:
        """Raise BadContent unless a device may stop training permanently with this assignment."""
        # A federation whose devices have all stopped is over: no device may say so before its rule could.
        settings = settings_of(federation)
        limited = settings.joules_per_device is not None
        if assignment.kind == wire.Kind.prepare or (settings.early_stopping == "off" and not limited):
            raise BadContent(
                "status: no device stops early here (early_stopping is off and joules_per_device unset, or the model "
                "is only being prepared); send the update as active, and update this SDK"
            )
        # Only the device knows the joules that it has spent.
        if limited:
            return
        least = settings.min_participations if settings.early_stopping == "validation" else 1
        with self._store.reading() as db:
            given = db.scalar(
                select(func.count()).where(
                    Assignment.device_id == assignment.device_id, Assignment.kind.in_(COHORT_KINDS)
                )
            )
        if (given or 0) < max(least, settings.stop_patience):
            raise BadContent(
                f"status: this device was asked to train {given} times, and stops at the earliest after "
                f"{max(least, settings.stop_patience)} (min_participations, patience); send the update as active"
            )

    @staticmethod
    def _settled(assignment: Assignment, digest: str) -> bool:
        """Return True if the same update was already accepted. Raises DifferentUpdate or RoundClosed otherwise."""
        if assignment.status == "done":
            if assignment.update_sha256 == digest:
                return True
            raise DifferentUpdate("another update was accepted for this assignment; ask for the next one")
        if assignment.status != "open":
            raise RoundClosed(
                f"the assignment is {assignment.status}: round {assignment.round} no longer accepts it; keep the "
                f"personal model and ask for the next assignment"
            )
        return False

    def _check_update(
        self,
        federation: Federation,
        device: Device,
        assignment: Assignment,
        mask: Mask | None,
        sent: Sent,
    ) -> tuple[BaseModel, bundle.Bundle | None, NeuronMask | None]:
        """Return the report, and the bundle and the chosen neurons, if any. Raises BadContent."""
        if assignment.kind not in BUNDLE_KINDS:
            if assignment.kind in ANSWERS:
                return self._check_answer(federation, device, assignment, sent), None, None
            form = wire.UpdateReport if assignment.kind == wire.Kind.personalise else wire.Receipt
            with callers_data():
                return form.model_validate_json(bytes(sent.body)), None, None
        manifest = self._models.manifest(federation)
        model = self._models.model(federation, assignment.model_version)
        plan = assignment.plan or {}
        parts = expected(load_method(federation.method).parts, manifest, plan)
        with callers_data():
            decoded = bundle.decode(sent.body, manifest, model.mask, parts=parts, intact=sent.intact)
            report = wire.UpdateReport.model_validate_json(decoded.report)
        settings = settings_of(federation)
        kind = wire.Kind(assignment.kind)
        situation = Situation(manifest, settings, assignment.round, plan)
        check_form(decoded, kind, situation)
        chosen = check_mask(decoded, assignment, mask, model, situation, device=device.name)
        check_parts(decoded, parts)
        # Masked values cannot be checked.
        if settings.secure and kind is wire.Kind.train:
            if assignment.status == "open":
                with self._store.reading() as db:
                    check_statement_of(db, federation, assignment, device, report.secure)
            return report, decoded, None
        check_values(decoded, model, situation)
        return report, decoded, chosen

    def _check_answer(self, federation: Federation, device: Device, assignment: Assignment, sent: Sent) -> BaseModel:
        with callers_data():
            answer = ANSWERS[assignment.kind].model_validate_json(bytes(sent.body))
        if assignment.status == "open":
            with self._store.reading() as db:
                check_answer(db, federation, assignment, device, answer)
        return answer


def _changes_of(federation: Federation, device: Device, assignment: Assignment, report: BaseModel) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if not device.holds_model and _leaves_model(federation, assignment):
        changed["holds_model"] = True
    if recovers(device, assignment.kind):
        changed |= {"failure": None, "refusals": 0}
    if device.exported and assignment.kind in COHORT_KINDS:
        changed["exported"] = False
    if isinstance(report, wire.UpdateReport):
        changed["seconds"] = report.telemetry.download.seconds + report.telemetry.train.seconds
        if report.status == "stopped":
            changed |= {"status": "stopped", "stopped_round": assignment.round}
        if device.num_examples is None:
            changed["num_examples"] = weight_of(report.num_examples, assignment.most_examples)
    if isinstance(report, wire.Receipt) and (judged := report.personal or report.global_model) is not None:
        changed["accuracy"] = judged.accuracy
        alone = report.others.get("alone")
        if alone is not None:
            changed["accuracy_alone"] = alone.accuracy
    return changed


def _events_of(changed: Mapping[str, Any]) -> Iterable[EventKind]:
    if changed.get("failure", ...) is None:
        yield EventKind.recovered
    if changed.get("status") == "stopped":
        yield EventKind.stopped


def _leaves_model(federation: Federation, assignment: Assignment) -> bool:
    if assignment.kind in BUNDLE_KINDS:
        return load_method(federation.method).personal_models
    return assignment.kind not in (*JUDGING_KINDS, *ANSWERS)
