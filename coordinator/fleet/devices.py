"""Devices: enrolment, tokens, and changes."""

from __future__ import annotations

import hmac
import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, or_, select, update
from sqlalchemy.orm import Session

from sparrow.protocol.failures import in_words
from sparrow.protocol.messages import ChangeDevice, Enrol, Enrolled, NewToken, PauseReason

from ..errors import (
    FederationDeleted,
    NameTaken,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    TokenExpired,
)
from ..methods import load_method
from ..rounds.assignments import note_failure, rests, touch
from ..rounds.candidates import reaches, smallest_budget
from ..storage.store import Store
from ..storage.tables import Assignment, DeletedDevice, Device, Federation
from .access import (
    Remembered,
    digest_of,
    new_secret,
    secret_after,
    spend,
)
from .federations import find

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """A device that has shown its token, which it has had since ``issued_at``."""

    device_id: str
    federation: str
    issued_at: float


class Devices:
    """Every enrolled device. Tokens and enrolment keys are kept hashed only.

    rotation_seconds: age at which a device is asked to take a new token, None for never. lifetime_seconds: age beyond
    which a token is good for nothing, None for none. The holder of a token is remembered for ``REMEMBER_SECONDS``.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        *,
        rotation_seconds: float | None = None,
        lifetime_seconds: float | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._rotation_seconds = rotation_seconds
        self._lifetime_seconds = lifetime_seconds
        self._remembered = Remembered(clock, self._is_over)
        self._changes = 0  # of tokens in this process: a look-up before one is not remembered after it
        self._remembering = threading.Lock()

    def enrol(self, federation_name: str, request: Enrol, token_id: str | None = None) -> Enrolled:
        """Enrol a device, or give one that lost the answer, or whose token has expired, a new token.

        The old one is good until the new one is used for the first time, and asking again gives the same new one: a
        call that comes twice, or late, takes no token from a device.

        token_id: the enrolment token of the records that lets it in; one use of it is counted, in the transaction that
        makes the device. Raises NameTaken, NotFound, NotAuthenticated.
        """
        key = digest_of(request.enrolment_key)
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
                    f"a device called {request.name!r} is enrolled in {federation_name}; choose another --device-name, "
                    f"or, if it is this device and its state was lost, have an admin revoke it first (sparrow device "
                    f"revoke {federation_name} {request.name})"
                )
            if device is not None and request.identity_key not in (None, device.identity_key):
                raise NameTaken(
                    f"{request.name} is enrolled with another identity key: its state was lost or is a copy; have an "
                    f"admin revoke it, or choose another --device-name"
                )
            if device is None:
                if token_id is not None:
                    spend(db, token_id, now)
                token = new_secret("device")
                device = Device(
                    id=uuid.uuid4().hex,
                    federation_id=federation.id,
                    name=request.name,
                    enrolment_key_sha256=key,
                    identity_key=request.identity_key,
                    token_sha256=digest_of(token),
                    token_issued_at=now,
                    status="active",
                    present=True,
                    holds_model=False,
                    enrolled_at=now,
                )
                db.add(device)
            else:
                token = secret_after("device", device.token_sha256, request.enrolment_key)
                device.next_token_sha256 = digest_of(token)
            device.profile = request.profile.model_dump(mode="json")
            device.budget, device.num_examples = request.budget, request.num_examples or device.num_examples
            device.limited_by = request.limited_by.value if request.limited_by else None
            device.hosted = request.hosted
            device.seen_at = now
            return Enrolled(device_id=device.id, token=token, notice=_notice(federation, device))

    def known_caller(self, token: str) -> Caller | None:
        """Return the device that holds this token if it was looked up a moment ago, without reading the records."""
        return self._remembered.get(digest_of(token))

    def was_known(self, token: str) -> bool:
        """Return whether this token was a device's when it was last looked up."""
        return digest_of(token) in self._remembered

    def authenticate(self, token: str) -> Caller:
        """Return the device that holds this token. Raises NotAuthenticated, TokenExpired."""
        caller = self.known_caller(token) or self._look_up(digest_of(token))
        if self._is_over(caller, self._clock()):
            raise TokenExpired(
                "this device's token has expired; start the device again, with an enrolment token where one is needed, "
                "and it gets a new one"
            )
        return caller

    def wants_rotation(self, caller: Caller) -> bool:
        """Return whether the device should take a new token."""
        return self._rotation_seconds is not None and self._clock() - caller.issued_at >= self._rotation_seconds

    def rotate(self, device_id: str, enrolment_key: str) -> NewToken:
        """Return a new token for the device that enrolled with this key. The old one is valid until the new one is used
        for the first time, and asking again gives the same new one.

        So a lost answer does no harm, and whoever has stolen the token, but not the key, loses it with this. Raises
        NotAuthenticated, NotAllowed.
        """
        with self._store.writing() as db:
            device = db.get(Device, device_id)
            if device is None or device.status == "revoked":
                raise NotAuthenticated(UNKNOWN)
            if not hmac.compare_digest(device.enrolment_key_sha256, digest_of(enrolment_key)):
                raise NotAllowed("this is not the key that the device enrolled with; nothing was changed")
            token = secret_after("device", device.token_sha256, enrolment_key)
            device.next_token_sha256 = digest_of(token)
        return NewToken(token=token)

    def forget(self) -> None:
        """Look every token up anew: devices have gone."""
        self._forget(None)
        self._remembered.clear()

    def _is_over(self, caller: Caller, now: float) -> bool:
        return self._lifetime_seconds is not None and now - caller.issued_at >= self._lifetime_seconds

    def _look_up(self, digest: bytes) -> Caller:
        now, changes, replaced = self._clock(), self._changes, None
        try:
            with self._store.reading() as db:  # an unknown token must not keep others from writing
                device, federation = _holder(db, digest)
            if device.token_sha256 != digest:  # it has used its new token: the old one is over
                with self._store.writing() as db:
                    device, federation = _holder(db, digest)
                    if device.token_sha256 != digest:
                        replaced = device.token_sha256
                        device.token_sha256, device.token_issued_at, device.next_token_sha256 = digest, now, None
                self._forget(replaced)
                changes = self._changes
        except NotAuthenticated:
            self._remembered.forget(digest)
            raise
        caller = Caller(device.id, federation.name, device.token_issued_at)
        with self._remembering:
            if changes == self._changes:
                self._remembered.put(digest, caller, now)
        return caller

    def _forget(self, digest: bytes | None) -> None:
        """Forget a token after the commit that revoked it; look-ups that read the records before do not keep it."""
        with self._remembering:
            self._changes += 1
            if digest is not None:
                self._remembered.forget(digest)

    def change(self, device_id: str, request: ChangeDevice) -> None:
        """Change a device's budget (from the next round on) or conditions, or revoke it. Raises NotFound."""
        revoked = None
        with self._store.writing() as db:
            device = db.get(Device, device_id)
            if device is None:
                raise NotFound("this device does not exist; GET /v1/federations/NAME/devices lists all")
            if request.budget is not None:
                device.budget = request.budget
                device.limited_by = request.limited_by.value if request.limited_by else None
            if request.num_examples is not None:
                device.num_examples = request.num_examples
            if request.data_warnings is not None:
                device.profile = {**device.profile, "data_warnings": list(request.data_warnings)}
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
                device.present = request.conditions.available
                if not rests(device, self._clock()):  # which it cannot end itself
                    device.rest_until = 0.0
                device.paused = None
                if not device.present:
                    reason = request.conditions.reason
                    device.paused = reason.value if isinstance(reason, PauseReason) else None
                    said = device.paused or reason or "no reason given"
                    log.info("%s leaves: %s", device.name, in_words(said))
                    left = _take_back(db, device_id, said)
                    if reason is not None and device.paused is None:
                        note_failure(device, left, said, self._clock())
            if request.revoked:
                revoked = device.token_sha256
                revoke(db, device)
        self._forget(revoked)


_HOLDER = (
    select(Device, Federation)
    .join(Federation, Federation.id == Device.federation_id)
    .where(or_(Device.token_sha256 == bindparam("digest"), Device.next_token_sha256 == bindparam("digest")))
)
UNKNOWN = "the device token is unknown or revoked; enrol again"


def revoke(db: Session, device: Device) -> None:
    """Revoke a device's token for good; its open assignments expire."""
    device.status, device.present, device.next_token_sha256 = "revoked", False, None
    _change_open(db, device.id, status="expired")


def _holder(db: Session, digest: bytes) -> tuple[Device, Federation]:
    row = db.execute(_HOLDER, {"digest": digest}).first()
    if row is None and db.get(DeletedDevice, digest) is not None:
        raise FederationDeleted
    if row is None or row[0].status == "revoked":
        raise NotAuthenticated(UNKNOWN)
    return row[0], row[1]


def _notice(federation: Federation, device: Device) -> str | None:
    """Return a notice for the user of a newly enrolled device, or None."""
    smallest = smallest_budget(federation)
    if reaches(device.budget, smallest):
        return None
    return (
        f"your budget of {device.budget:g} is below the {smallest:g} that {federation.method} needs: this device takes "
        f"part in no round, and adapts the model when the federation has ended; with a larger --budget it trains"
    )


def _change_open(db: Session, device_id: str, **values: Any) -> None:
    db.execute(
        update(Assignment).where(Assignment.device_id == device_id, Assignment.status == "open").values(**values)
    )


def _take_back(db: Session, device_id: str, reason: str) -> Assignment | None:
    """Close the open assignments of a device that leaves, so that no round waits for them; return one of them.

    Work for everyone is given again when it is back; adapting the finished model, for which nobody waits, stays."""
    assignment = None
    left = select(Assignment).where(Assignment.device_id == device_id, Assignment.status == "open")
    for assignment in db.scalars(left.where(Assignment.kind != "adapt")):
        assignment.status = "expired" if assignment.kind == "personalise" else "returned"
        assignment.return_reason = reason
        touch(db, assignment.federation_id, assignment.round)
    return assignment


def _forgive_adapting(db: Session, device_id: str) -> None:
    """Let a device that returned its adapting, and was started again, try once more."""
    db.execute(
        update(Assignment)
        .where(Assignment.device_id == device_id, Assignment.kind == "adapt", Assignment.status == "returned")
        .values(status="expired")
    )
