"""Devices: enrolment, tokens, and what changes about them."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session, undefer

from coordinator.errors import NameTaken, NotAuthenticated, NotFound
from coordinator.federations import find
from coordinator.methods import load_method
from coordinator.records import iso
from coordinator.rounds import reaches, smallest_budget, touch
from coordinator.storage.store import Store
from coordinator.storage.tables import Assignment, Device, Federation
from edge_sdk.protocol.messages import ChangeDevice, DeviceInfo, DeviceProfile, Enrol, Enrolled, PauseReason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """A device that has shown its token."""

    device_id: str
    federation: str


class Devices:
    """Every enrolled device. Tokens and enrolment keys are kept hashed only."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._callers: dict[bytes, Caller] = {}  # by the token's digest; changed wherever a token is

    def enrol(self, federation_name: str, request: Enrol) -> Enrolled:
        """Enrol a device, or give one that lost the answer a new token. Raises NameTaken, NotFound."""
        token = secrets.token_urlsafe(32)
        key = _sha256(request.enrolment_key)
        now = self._clock()
        with self._store.writing() as db:
            federation = find(db, federation_name)
            device = db.scalar(
                select(Device).where(
                    Device.federation_id == federation.id, Device.name == request.name, Device.status != "revoked"
                )
            )
            if device is not None and not hmac.compare_digest(device.enrolment_key_sha256, key):
                raise NameTaken(
                    f"a device called {request.name!r} is enrolled in {federation_name}; choose another --name, or, if "
                    f"it is this device and its state was lost, have an admin revoke it first (its id is in "
                    f"GET /v1/federations/{federation_name}/devices)"
                )
            if device is None:
                device = Device(
                    id=uuid.uuid4().hex,
                    federation_id=federation.id,
                    name=request.name,
                    enrolment_key_sha256=key,
                    status="active",
                    present=True,
                    holds_model=False,
                    enrolled_at=now,
                )
                db.add(device)
            else:
                self._callers.pop(device.token_sha256, None)
            device.token_sha256 = _sha256(token)
            device.profile = request.profile.model_dump(mode="json")
            device.budget, device.num_examples = request.budget, request.num_examples
            device.limited_by = request.limited_by.value if request.limited_by else None
            device.seen_at = now
            return Enrolled(device_id=device.id, token=token, notice=_notice(federation, device))

    def known_caller(self, token: str) -> Caller | None:
        """Who holds this token, where that was looked up before; reads no records."""
        return self._callers.get(_sha256(token))

    def authenticate(self, token: str) -> Caller:
        """Who holds this token. Raises NotAuthenticated."""
        digest = _sha256(token)
        caller = self._callers.get(digest)
        if caller is None:
            with self._store.reading() as db:
                _holder(db, digest)  # a stranger's token must not keep others from writing
            with self._store.writing() as db:  # in turn with whoever changes tokens
                device = _holder(db, digest)
                federation = db.get_one(Federation, device.federation_id)
                caller = self._callers[digest] = Caller(device.id, federation.name)
        return caller

    def list(self, federation_name: str) -> list[DeviceInfo]:
        """Every device of a federation, by name. Raises NotFound."""
        with self._store.reading() as db:
            federation = find(db, federation_name)
            devices = db.scalars(
                select(Device)
                .where(Device.federation_id == federation.id)
                .order_by(Device.name)
                .options(undefer(Device.profile))
            )
            return [
                DeviceInfo(
                    device_id=device.id,
                    name=device.name,
                    status=device.status,
                    stopped_round=device.stopped_round,
                    present=device.present,
                    paused=device.paused,
                    budget=device.budget,
                    limited_by=device.limited_by,
                    profile=DeviceProfile.model_validate(device.profile),
                    enrolled_at=iso(device.enrolled_at),
                    seen_at=iso(device.seen_at),
                )
                for device in devices
            ]

    def change(self, device_id: str, request: ChangeDevice) -> None:
        """A new budget (from the next round on), a coming or going, a revocation. Raises NotFound."""
        with self._store.writing() as db:
            device = db.get(Device, device_id)
            if device is None:
                raise NotFound("there is no such device")
            if request.budget is not None:
                device.budget = request.budget
                device.limited_by = request.limited_by.value if request.limited_by else None
            if request.holds_model is not None:
                federation = db.get_one(Federation, device.federation_id)
                # Where devices keep no personal models, only an adapted one counts, and of that the records know.
                device.holds_model = request.holds_model and (
                    device.holds_model or load_method(federation.method).personal_models
                )
                if not request.holds_model:
                    _change_open(db, device_id, full=True)
                    _forgive_adapting(db, device_id)
            if request.conditions is not None:
                device.present, device.rest_until = request.conditions.available, 0.0
                device.paused = None
                if not device.present:
                    reason = request.conditions.reason
                    device.paused = reason.value if isinstance(reason, PauseReason) else None
                    said = device.paused or reason or "no reason given"
                    log.info("%s leaves: %s", device.name, said)
                    _take_back(db, device_id, said)
            if request.revoked:
                device.status, device.present = "revoked", False
                self._callers.pop(device.token_sha256, None)
                _change_open(db, device_id, status="expired")


def _holder(db: Session, digest: bytes) -> Device:
    device = db.scalar(select(Device).where(Device.token_sha256 == digest))
    if device is None or device.status == "revoked":
        raise NotAuthenticated("the device token is unknown or revoked; enrol again")
    return device


def _notice(federation: Federation, device: Device) -> str | None:
    """What the user of a newly enrolled device should know, or None."""
    smallest = smallest_budget(federation)
    if reaches(device.budget, smallest):
        return None
    return (
        f"your budget of {device.budget:g} is below the {smallest:g} that {federation.method} needs: this device takes "
        f"part in no round, and adapts the model when the federation has ended; with a larger --budget it trains"
    )


def _change_open(db: Session, device_id: str, **values: Any) -> None:
    """Change the device's open assignments."""
    db.execute(
        update(Assignment).where(Assignment.device_id == device_id, Assignment.status == "open").values(**values)
    )


def _take_back(db: Session, device_id: str, reason: str) -> None:
    """What a device leaves open keeps no round waiting. Work for everyone is given again when it is back, and adapting
    the finished model, for which nobody waits, stays."""
    left = select(Assignment).where(Assignment.device_id == device_id, Assignment.status == "open")
    for assignment in db.scalars(left.where(Assignment.kind != "adapt")):
        assignment.status = "expired" if assignment.kind == "personalise" else "returned"
        assignment.return_reason = reason
        touch(db, assignment.federation_id, assignment.round)


def _forgive_adapting(db: Session, device_id: str) -> None:
    """A device that handed its adapting back and was started again may try once more."""
    db.execute(
        update(Assignment)
        .where(Assignment.device_id == device_id, Assignment.kind == "adapt", Assignment.status == "returned")
        .values(status="expired")
    )


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
