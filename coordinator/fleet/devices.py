"""Devices: enrolment, tokens, and changes."""

from __future__ import annotations

import hmac
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import bindparam, or_, select, update
from sqlalchemy.orm import Session

from sparrow.protocol.events import EventKind
from sparrow.protocol.failures import Failure, in_words
from sparrow.protocol.messages import ChangeDevice, Enrol, Enrolled, NewToken, PauseReason, Start
from sparrow.protocol.tags import BadSelection, Selection, check_tags

from ..errors import (
    BadContent,
    FederationDeleted,
    NameTaken,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    OtherStart,
    RequestError,
    StateCopied,
    TokenExpired,
)
from ..methods import load_method
from ..models.global_models import settings_of
from ..rounds.assignments import touch
from ..rounds.candidates import reaches, smallest_budget
from ..rounds.failing import note_failure, rests
from ..storage import events
from ..storage.store import Store
from ..storage.tables import Assignment, DeletedDevice, Device, Federation, Token
from ..storage.tagging import retag
from .access import (
    Remembered,
    digest_of,
    new_secret,
    secret_after,
    spend,
)
from .federations import find

log = logging.getLogger(__name__)

COPIED = "copied"
"""In place of a start: the state folder was copied, and each copy is refused until one takes over."""


@dataclass(frozen=True)
class Caller:
    """A device with a valid token, issued at ``issued_at``."""

    device_id: str
    federation: str
    issued_at: float
    # Of the last process that it started; None if it never sent one.
    start: str | None = None


class Devices:
    """All enrolled devices. Tokens and enrolment keys are stored as hashes.

    rotation_seconds, lifetime_seconds: ages at which a device renews its token and at which it expires; None for never.
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
        # Counts token changes in this process: a look-up begun before one is not cached.
        self._changes = 0
        self._remembering = threading.Lock()

    def enrol(self, federation_name: str, request: Enrol, token_id: str | None = None) -> Enrolled:
        """Enrol a device, or give an enrolled one a new token, after a lost answer or an expired token.

        The old token stays valid until the new one is first used, and repeated calls return the same new token, so that
        a duplicate call does no harm. A device with a ``failure`` is only listed; its name stays free.

        token_id: the enrolment token whose use is counted in the same transaction. Raises NameTaken, NotFound,
        NotAuthenticated.
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
            joined = device is not None and device.status != NOT_JOINED
            if device is not None and joined:
                _check_keys(federation_name, device, request, key)
            if device is not None and not joined and not hmac.compare_digest(device.enrolment_key_sha256, key):
                # A device that could not join has no claim to its name.
                db.delete(device)
                db.flush()
                device = None
            if device is None:
                if token_id is not None:
                    spend(db, token_id, now)
                token = new_secret("device")
                device = Device(
                    id=uuid.uuid4().hex,
                    federation_id=federation.id,
                    name=request.name,
                    enrolment_key_sha256=key,
                    token_sha256=digest_of(token),
                    token_issued_at=now,
                    status=NOT_JOINED,
                    holds_model=False,
                    enrolled_at=now,
                    own_tags={},
                    set_tags={},
                    tags={},
                )
                db.add(device)
            else:
                token = secret_after("device", device.token_sha256, request.enrolment_key)
                device.next_token_sha256 = digest_of(token)
            if request.start is not None:
                # Without its token a device cannot register again: its next call is refused.
                _note_start(db, device, request.start, now)
            if not joined:
                device.identity_key = request.identity_key
            device.profile = request.profile.model_dump(mode="json")
            device.budget = request.budget
            device.num_examples = request.num_examples or device.num_examples
            if request.tags is not None:
                _check_tags(federation, request.tags)
                retag(device, own=request.tags)
            device.limited_by = request.limited_by.value if request.limited_by else None
            device.hosted = request.hosted
            device.seen_at = now
            if not joined and token_id is not None:
                _tag_by_token(db, federation, device, token_id)
            if request.failure is not None:
                device.present = False
                note_failure(db, device, None, request.failure, now)
                log.info("%s cannot join: %s", device.name, in_words(request.failure))
            elif not joined:
                device.status = "active"
                device.present = True
                device.failure = None
                device.enrolled_at = now
                events.record(db, federation.id, EventKind.joined, now, device=request.name)
            enrolled = Enrolled(device_id=device.id, token=token, notice=_notice(federation, device))
            known = device.token_sha256 if joined else None
        self._forget(known)
        return enrolled

    def known_caller(self, token: str) -> Caller | None:
        """Return the cached device of this token, without a query."""
        return self._remembered.get(digest_of(token))

    def was_known(self, token: str) -> bool:
        """Return whether this token was valid at its last look-up."""
        return digest_of(token) in self._remembered

    def authenticate(self, token: str) -> Caller:
        """Return the device with this token. Raises NotAuthenticated, TokenExpired."""
        caller = self.known_caller(token) or self._look_up(digest_of(token))
        if self._is_over(caller, self._clock()):
            raise TokenExpired(
                "this device's token has expired; restart the device, with an enrolment token if needed, to get a new "
                "one"
            )
        return caller

    def wants_rotation(self, caller: Caller) -> bool:
        """Return whether the device should renew its token."""
        return self._rotation_seconds is not None and self._clock() - caller.issued_at >= self._rotation_seconds

    def rotate(self, device_id: str, enrolment_key: str) -> NewToken:
        """Return a new token for the device that enrolled with this key.

        The old token stays valid until the new one is first used, and repeated calls return the same one. A thief
        without the key loses access. Raises NotAuthenticated, NotAllowed.
        """
        with self._store.writing() as db:
            device = db.get(Device, device_id)
            if device is None or device.status in ("revoked", NOT_JOINED):
                raise NotAuthenticated(UNKNOWN)
            if not hmac.compare_digest(device.enrolment_key_sha256, digest_of(enrolment_key)):
                raise NotAllowed("the enrolment key is not that of the device; send the key that it enrolled with")
            token = secret_after("device", device.token_sha256, enrolment_key)
            device.next_token_sha256 = digest_of(token)
        return NewToken(token=token)

    def forget(self) -> None:
        """Clear the cache after devices were deleted."""
        self._forget(None)
        self._remembered.clear()

    def _is_over(self, caller: Caller, now: float) -> bool:
        return self._lifetime_seconds is not None and now - caller.issued_at >= self._lifetime_seconds

    def _look_up(self, digest: bytes) -> Caller:
        now = self._clock()
        changes = self._changes
        replaced = None
        try:
            # A read: an unknown token must not block writers.
            with self._store.reading() as db:
                device, federation = _holder(db, digest)
            # The first use of the new token ends the old one.
            if device.token_sha256 != digest:
                with self._store.writing() as db:
                    device, federation = _holder(db, digest)
                    if device.token_sha256 != digest:
                        replaced = device.token_sha256
                        device.token_sha256 = digest
                        device.token_issued_at = now
                        device.next_token_sha256 = None
                self._forget(replaced)
                changes = self._changes
        except NotAuthenticated:
            self._remembered.forget(digest)
            raise
        caller = Caller(device.id, federation.name, device.token_issued_at, device.start)
        with self._remembering:
            if changes == self._changes:
                self._remembered.put(digest, caller, now)
        return caller

    def _forget(self, digest: bytes | None) -> None:
        """Drop a revoked token from the cache, and do not cache look-ups in progress."""
        with self._remembering:
            self._changes += 1
            if digest is not None:
                self._remembered.forget(digest)

    def is_last_start(self, device_id: str, start: str) -> bool:
        """Return whether no other process of this device has started since ``start``."""
        with self._store.reading() as db:
            device = db.get(Device, device_id)
            return device is None or device.start in (None, start)

    def change(self, device_id: str, request: ChangeDevice) -> None:
        """Change a device's budget (from the next round on) or conditions, or revoke it.

        Raises NotFound; OtherStart if another process of it has started; StateCopied if it runs twice.
        """
        # Raised after the transaction, which keeps the failure.
        refusal = None
        with self._store.writing() as db:
            device = _existing(db, device_id)
            if request.start is not None:
                refusal = _note_start(db, device, request.start, self._clock())
            if refusal is None:
                self._apply(db, device, request)
            changed = device.token_sha256 if request.revoked or request.start is not None else None
        self._forget(changed)
        if refusal is not None:
            raise refusal

    def _apply(self, db: Session, device: Device, request: ChangeDevice) -> None:
        now = self._clock()
        record = partial(events.record, db, device.federation_id, now=now, device=device.name)
        if request.budget is not None:
            device.budget = request.budget
            device.limited_by = request.limited_by.value if request.limited_by else None
        if request.num_examples is not None:
            device.num_examples = request.num_examples
        if request.tags is not None or request.set_tags is not None:
            self._retag(db, device, request, now)
        if request.data_warnings is not None:
            device.profile = {**device.profile, "data_warnings": list(request.data_warnings)}
        if request.exported:
            device.exported = True
        if request.continues and device.status == "stopped":
            device.status = "active"
            device.stopped_round = None
            record(EventKind.resumed)
        if request.holds_model is not None:
            federation = db.get_one(Federation, device.federation_id)
            # Without personal models only an adapted model counts, which the records know.
            device.holds_model = request.holds_model and (
                device.holds_model or load_method(federation.method).personal_models
            )
            if not request.holds_model:
                _change_open(db, device.id, full=True)
                _forgive_adapting(db, device.id)
        if request.conditions is not None:
            paused_before = device.paused
            device.present = request.conditions.available
            # A device cannot end its own rest.
            if not rests(device, now):
                device.rest_until = 0.0
            device.paused = None
            if not device.present:
                reason = request.conditions.reason
                device.paused = reason.value if isinstance(reason, PauseReason) else None
                given = device.paused or reason or "no reason given"
                log.info("%s leaves: %s", device.name, in_words(given))
                if device.paused not in (None, paused_before):
                    record(EventKind.paused, detail=device.paused)
                left = _take_back(db, device.id, given)
                if reason is not None and device.paused is None:
                    note_failure(db, device, left, given, now)
            elif paused_before is not None:
                record(EventKind.resumed)
        if request.revoked:
            if device.status != "revoked":
                record(EventKind.removed)
            revoke(db, device)

    def _retag(self, db: Session, device: Device, request: ChangeDevice, now: float) -> None:
        """Change a device's tags. Raises BadContent."""
        federation = db.get_one(Federation, device.federation_id)
        changes = request.set_tags
        _check_tags(federation, request.tags or {})
        _check_tags(federation, {key: value for key, value in (changes or {}).items() if value is not None})
        if retag(device, own=request.tags, changes=changes) and changes is not None:
            detail = ", ".join(f"{key}={value}" for key, value in sorted(device.tags.items())) or "none"
            events.record(db, federation.id, EventKind.tagged, now, device=device.name, detail=detail)

    def remove(self, device_id: str) -> None:
        """Revoke a device, delete its profile and tokens, and remove it from lists and counts.

        Raises NotFound.
        """
        with self._store.writing() as db:
            device = _existing(db, device_id)
            if device.status != "revoked":
                events.record(db, device.federation_id, EventKind.removed, now=self._clock(), device=device.name)
            revoke(db, device)
            device.removed = True
            device.profile = {}
            device.own_tags = {}
            device.set_tags = {}
            device.tags = {}
            device.identity_key = None
            device.failure = None
            revoked = device.token_sha256
            # Digests of new secrets, which nobody has.
            device.token_sha256 = digest_of(new_secret("device"))
            device.enrolment_key_sha256 = digest_of(new_secret("device"))
        self._forget(revoked)


_HOLDER = (
    select(Device, Federation)
    .join(Federation, Federation.id == Device.federation_id)
    .where(or_(Device.token_sha256 == bindparam("digest"), Device.next_token_sha256 == bindparam("digest")))
)
STATE_COPIED = Failure("state-copied")
NOT_JOINED = "not_joined"
"""The status of a device that has only told why it cannot join."""
UNKNOWN = (
    "this device's token is no longer valid: the device was revoked, or the coordinator was reset or restored; "
    "enrol again with a new --state-dir or --device-name"
)


def _check_tags(federation: Federation, tags: Mapping[str, str]) -> None:
    try:
        check_tags(tags, settings_of(federation).tags)
    except BadSelection as error:
        raise BadContent(f"tags: {error}") from None


def _tag_by_token(db: Session, federation: Federation, device: Device, token_id: str) -> None:
    """Set the tags that an enrolment token gives. Raises NotAllowed for a device that the token is not for."""
    text = db.get_one(Token, token_id).where
    selection = Selection.parse(text)
    given = selection.given
    if all(device.tags.get(key, value) == value for key, value in given.items()):
        _check_tags(federation, given)
        retag(device, changes={**given})
    if not selection.matches(device.tags):
        raise NotAllowed(
            f"the enrolment token is only for devices with the tags {text}: change --tag, or ask the operator for "
            f"another token"
        )


def _existing(db: Session, device_id: str) -> Device:
    device = db.get(Device, device_id)
    if device is None:
        raise NotFound("this device does not exist; GET /v1/federations/NAME/devices lists all")
    return device


def _note_start(db: Session, device: Device, start: Start, now: float) -> RequestError | None:
    """Record the last start of a device's process.

    Returns OtherStart for a start that does not follow the known one. If the process then registers again, its state
    folder was copied: StateCopied, and no copy gets work until one takes over.
    """
    if device.start is None or device.start in (start.id, *start.after):
        device.start = start.id
        return None
    if start.take_over:
        device.start = start.id
        if device.failure is not None and device.failure["reason"] == STATE_COPIED:
            device.failure = None
            events.record(db, device.federation_id, EventKind.recovered, now, device=device.name)
        return None
    if not start.again:
        # The request of an earlier process may arrive late, or twice: it must not stop the process that runs now.
        return OtherStart("another process of this device has started since; register this start again")
    device.start = COPIED
    device.present = False
    note_failure(db, device, _take_back(db, device.id, STATE_COPIED), STATE_COPIED, now)
    log.warning("%s: its state folder was copied, and more than one copy has started", device.name)
    return StateCopied(
        f"another copy of the state folder of {device.name} has started since: the folder was copied, or restored "
        f"from a backup. Start the copy to keep with --take-over, and give each other copy its own --device-name and "
        f"--state-dir"
    )


def _check_keys(federation: str, device: Device, request: Enrol, key: bytes) -> None:
    """Raise NameTaken unless the enrolled device itself is calling."""
    if not hmac.compare_digest(device.enrolment_key_sha256, key):
        raise NameTaken(
            f"a device called {request.name!r} is enrolled in {federation}; choose another --device-name, or, if this "
            f"device has lost its state, let an admin revoke it first (sparrow device revoke {federation} "
            f"{request.name})"
        )
    if request.identity_key not in (None, device.identity_key):
        raise NameTaken(
            f"{request.name} is enrolled with another identity key: its state was lost or is a copy; let an admin "
            f"revoke it, or choose another --device-name"
        )


def revoke(db: Session, device: Device) -> None:
    """Revoke a device's token permanently; its open assignments expire."""
    device.status = "revoked"
    device.present = False
    device.next_token_sha256 = None
    _change_open(db, device.id, status="expired")


def _holder(db: Session, digest: bytes) -> tuple[Device, Federation]:
    row = db.execute(_HOLDER, {"digest": digest}).first()
    if row is None and db.get(DeletedDevice, digest) is not None:
        raise FederationDeleted
    if row is None or row[0].status in ("revoked", NOT_JOINED):
        raise NotAuthenticated(UNKNOWN)
    return row[0], row[1]


def _notice(federation: Federation, device: Device) -> str | None:
    smallest = smallest_budget(federation)
    if reaches(device.budget, smallest):
        return None
    return (
        f"your budget of {device.budget:g} is below the {smallest:g} that {federation.method} needs: this device only "
        f"adapts the final model; give a larger --budget to train"
    )


def _change_open(db: Session, device_id: str, **values: Any) -> None:
    db.execute(
        update(Assignment).where(Assignment.device_id == device_id, Assignment.status == "open").values(**values)
    )


def _take_back(db: Session, device_id: str, reason: str) -> Assignment | None:
    """Close the open assignments of a leaving device, so that no round waits for them; return one of them.

    Adapting the final model stays open.
    """
    assignment = None
    left = select(Assignment).where(Assignment.device_id == device_id, Assignment.status == "open")
    for assignment in db.scalars(left.where(Assignment.kind != "adapt")):
        assignment.status = "expired" if assignment.kind == "personalise" else "returned"
        assignment.return_reason = reason
        touch(db, assignment.federation_id, assignment.round)
    return assignment


def _forgive_adapting(db: Session, device_id: str) -> None:
    """Let a restarted device that returned its adapting assignment try once more."""
    db.execute(
        update(Assignment)
        .where(Assignment.device_id == device_id, Assignment.kind == "adapt", Assignment.status == "returned")
        .values(status="expired")
    )
