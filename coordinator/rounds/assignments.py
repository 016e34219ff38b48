"""Assignments of devices, and their state in the records.

Statements of frequent calls are built once, because SQLAlchemy needs longer to build one than SQLite to execute it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import and_, bindparam, select, update
from sqlalchemy.orm import Session

from sparrow.protocol.messages import JUDGING, Kind

from ..errors import FederationDeleted, NotAllowed, NotFound
from ..methods import load_method
from ..models.global_models import settings_of
from ..storage.tables import Assignment, Device, Federation, Round

COHORT_KINDS = (Kind.train.value, Kind.personalise.value, Kind.prepare.value)
"""Kinds of work of a round's cohort, depending on the method."""

BUNDLE_KINDS = (Kind.train.value, Kind.prepare.value)
"""Kinds of work whose answers have values of the model."""

JUDGING_KINDS = tuple(kind.value for kind in JUDGING)
"""Kinds of work that evaluate models."""

DAMAGED = "its stored update was damaged, and it sent no other in time"
"""Reason for an assignment whose acknowledged update was damaged and did not arrive again."""

UNCOUNTED = and_(Assignment.arrival.is_not(None), Assignment.counted_round.is_(None))
"""SQL for assignments whose update waits to count in a buffered round."""

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
    select(
        Assignment.id,
        Assignment.device_id,
        Assignment.kind,
        Assignment.status,
        Assignment.update_sha256,
        Assignment.most_examples,
    )
    .where(
        Assignment.federation_id == bindparam("federation_id"),
        Assignment.round == bindparam("number"),
        Assignment.kind.in_(COHORT_KINDS),
    )
    .order_by(Assignment.position)
)


def owned(db: Session, assignment_id: str, device_id: str) -> tuple[Assignment, Device, Federation]:
    """Return an assignment of this device, the device and its federation. Raises NotFound, NotAllowed."""
    row = db.execute(_OWNED, {"assignment_id": assignment_id}).first()
    if row is None:
        raise NotFound("this assignment does not exist; ask for the next one")
    assignment, device, federation = row
    if device.id != device_id:
        raise NotAllowed("this assignment belongs to another device; ask for your own")
    return assignment, device, federation


def oldest_open(db: Session, device_id: str) -> tuple[Device, Federation, Assignment | None]:
    """Return a device, its federation and its oldest open assignment. Raises FederationDeleted."""
    row = db.execute(_OLDEST_OPEN, {"asking_id": device_id}).first()
    if row is None:
        raise FederationDeleted
    device, federation, assignment = row
    return device, federation, assignment


def open_round(db: Session, federation: Federation) -> Round | None:
    """Return the federation's open round, if any."""
    return db.scalar(_OPEN_ROUND, {"federation_id": federation.id})


class Drawable(NamedTuple):
    """The columns of a device that drawing and assigning need."""

    id: str
    name: str
    budget: float
    holds_model: bool
    num_examples: int | None


@dataclass(frozen=True)
class Member:
    """The columns of an assignment that its round needs to advance."""

    id: str
    device_id: str
    kind: str
    status: str
    update_sha256: str | None
    most_examples: int | None


def weight_of(num_examples: int, most: int | None) -> int:
    """Return the weight of an update with this reported number of samples."""
    return num_examples if most is None else min(num_examples, most)


def cohort_of(db: Session, federation: Federation, number: int) -> list[Member]:
    """Return the assignments of a round's cohort, in order."""
    rows = db.execute(_COHORT, {"federation_id": federation.id, "number": number})
    return [Member(*row) for row in rows]


def assign(
    federation: Federation,
    device: Device | Drawable,
    kind: Kind,
    number: int,
    position: int,
    now: float,
    *,
    whole: bool | None = None,
    ratio: float | None = None,
    most_examples: int | None = None,
) -> Assignment:
    """Return a new assignment, not recorded yet.

    whole: whether the payload is the whole global model (for an evaluation, whether it has a payload); None: decide by
    the device's state. ratio: active ratio; None: the device's budget. most_examples: largest weight of its update;
    None for no limit.
    """
    method = load_method(federation.method)
    narrow = method.active is not None and method.active.narrow
    return Assignment(
        id=uuid.uuid4().hex,
        federation_id=federation.id,
        device_id=device.id,
        kind=kind.value,
        round=number,
        position=position,
        status="open",
        model_version=federation.model_version,
        full=(kind not in COHORT_KINDS or not (device.holds_model or narrow)) if whole is None else whole,
        ratio=ratio or (None if kind in JUDGING or method.active is None else device.budget),
        most_examples=most_examples,
        created_at=now,
        deadline_at=now + settings_of(federation).deadline_seconds,
    )


def missed_work(db: Session, device_id: str, number: int) -> tuple[Assignment | None] | None:
    """Return a 1-tuple with the assignment of a device that missed round ``number``, or with None if it never had one.

    Returns None for a device that has done or returned the work, or was drawn since.
    """
    since = select(Assignment).where(Assignment.device_id == device_id, Assignment.round >= number)
    found = db.scalars(since.where(Assignment.kind.in_(COHORT_KINDS)).order_by(Assignment.round.desc())).first()
    settled = found is not None and (found.status in ("done", "returned") or found.kind != Kind.personalise.value)
    if found is not None and (found.round > number or settled):
        return None
    return (found,)


def drop_late_work(db: Session, device_ids: Sequence[str]) -> None:
    """Close the late work of devices that are drawn again."""
    late = update(Assignment).where(Assignment.device_id.in_(device_ids), Assignment.status == "open")
    db.execute(late.where(Assignment.kind == Kind.personalise.value).values(status="expired"))


def extend_deadlines(db: Session, federation: Federation, now: float) -> None:
    """Restart the deadlines of the open round and open assignments."""
    deadline = now + settings_of(federation).deadline_seconds
    db.execute(
        update(Round).where(Round.federation_id == federation.id, Round.status == "open").values(deadline_at=deadline)
    )
    db.execute(
        update(Assignment)
        .where(Assignment.federation_id == federation.id, Assignment.status == "open")
        .values(deadline_at=deadline)
    )


def forget_adapted(db: Session, federation: Federation) -> None:
    """Discard adapted models when a federation continues, since they are outdated."""
    if load_method(federation.method).personal_models:
        return
    db.execute(update(Device).where(Device.federation_id == federation.id).values(holds_model=False))
    adapting = update(Assignment).where(Assignment.federation_id == federation.id, Assignment.kind == "adapt")
    db.execute(adapting.where(Assignment.status.in_(("open", "returned"))).values(status="expired"))


def touch(db: Session, federation_id: int, number: int) -> None:
    """Invalidate the cached record of a round."""
    of_round = (Round.federation_id == federation_id, Round.number == number)
    db.execute(update(Round).where(*of_round).values(stale=True, facts=Round.facts + 1))


def update_folder(federation_id: int) -> str:
    """Return the folder of a federation's stored updates."""
    return f"{federation_id}/updates"


def assignment_of(key: str) -> str:
    """Return the assignment id in the key of a stored update."""
    return key.rpartition("/")[2].partition(".")[0]


def update_key(federation_id: int, assignment_id: str, digest: str) -> str:
    """Return the key of an update, with its digest, so that only the recorded body is folded."""
    return f"{update_folder(federation_id)}/{assignment_id}.{digest}"
