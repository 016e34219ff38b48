"""Failures of devices and their reasons, shown to operators until they are resolved.

A failure of training lasts until an update is accepted, in a secure round until the phase in which it failed succeeds;
evaluations do not end it. A failure of an evaluation lasts until an evaluation is accepted. A device that was
interrupted has recovered with any accepted work.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from sparrow.protocol.events import EventKind
from sparrow.protocol.messages import Kind

from ..storage import events
from ..storage.tables import Assignment, Device
from .assignments import JUDGING_KINDS
from .secure_state import PHASES

MOST_REFUSALS = 3
"""Number of refused updates in a row after which a device rests."""

LONGEST_REASON = 500

_INTERRUPTED = "interrupted"


def rests(device: Device, now: float) -> bool:
    """Return True if a device rests after refused updates."""
    return device.refusals >= MOST_REFUSALS and device.rest_until > now


def note_failure(db: Session, device: Device, assignment: Assignment | None, reason: str, now: float) -> None:
    """Record a device's failure, unless one that lasts longer is recorded. If a device fails again, the time of its
    first failure is kept.
    """
    # PostgreSQL has no NUL in text, and a refusal may quote the update.
    reason = reason[:LONGEST_REASON].replace("\0", "\ufffd")
    failure = {
        "reason": reason,
        "round": assignment.round if assignment is not None else None,
        "kind": assignment.kind if assignment is not None else None,
        "at": now,
    }
    before = device.failure
    if before is not None and _rank(failure) < _rank(before):
        return
    if before is not None and _rank(failure) == _rank(before):
        failure["at"] = before.get("at", now)
    if before is None or before.get("reason") != reason:
        events.record(db, device.federation_id, EventKind.failed, now, device=device.name, detail=reason)
    device.failure = failure


def recovers(device: Device, kind: str) -> bool:
    """Return True if accepted work of this kind ends the device's failure."""
    failure = device.failure
    if failure is None:
        return False
    if _rank(failure) == 0:
        return True
    # Adapting is the last work of a device. One that never trained successfully adapts a model that is not its own.
    if kind == Kind.adapt:
        return device.holds_model or failure.get("kind") != Kind.train.value
    # A device that has stopped trains no more.
    if device.status == "stopped":
        return True
    if failure.get("kind") in JUDGING_KINDS:
        return kind in JUDGING_KINDS
    return kind not in JUDGING_KINDS and _phase(kind) >= _phase(failure.get("kind"))


def _rank(failure: dict[str, Any]) -> int:
    """Return 0 for an interruption, 1 for a failure of an evaluation, 2 for one of training or without work."""
    if str(failure.get("reason")).startswith(_INTERRUPTED):
        return 0
    return 1 if failure.get("kind") in JUDGING_KINDS else 2


def _phase(kind: str | None) -> int:
    return PHASES.index(kind if kind in PHASES else Kind.train.value)
