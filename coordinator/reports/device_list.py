"""Pages of a federation's devices, with the activity of each or the reason why it does not train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeVar

from sqlalchemy import ColumnElement, and_, case, func, not_, or_, select
from sqlalchemy.orm import Session, aliased, undefer

from sparrow.protocol.failures import in_words
from sparrow.protocol.messages import (
    BudgetLimit,
    DeviceFailure,
    DeviceHistory,
    DeviceInfo,
    DeviceProfile,
    DeviceRound,
    DeviceStates,
    Doing,
    FederationStatus,
    Kind,
    Moved,
    PauseReason,
    Phase,
    Receipt,
    UpdateReport,
)

from ..clock import iso
from ..errors import NotFound, read_stored
from ..fleet.checks import selection_of
from ..fleet.federations import find
from ..models.global_models import settings_of
from ..rounds.assignments import COHORT_KINDS, JUDGING_KINDS
from ..rounds.candidates import ENROLLED, SLACK, is_selected, smallest_budget
from ..rounds.secure_state import PHASES
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation
from ..storage.tagging import selected

# fmt: off
Order = Literal[
    "name", "budget", "seen", "stopped", "board", "doing", "accuracy", "gain", "seconds",
    "-name", "-budget", "-seen", "-stopped", "-board", "-doing", "-accuracy", "-gain", "-seconds",
]
# fmt: on
"""Orders of a device list; a minus means descending. Devices without a value come last."""

ENDED = (FederationStatus.finished.value, FederationStatus.stopped.value)
Only = Literal["failing", "not_exported"]
"""Selections of devices: failing, or unable to join; without an exported model."""

# SQL for some of the devices that take part, or could not join.
FAILING = and_(Device.failure.is_not(None), Device.status != "revoked")
NOT_EXPORTED = and_(Device.exported.is_(False), Device.status.in_(ENROLLED))
ONLY: dict[Only, ColumnElement[bool]] = {"failing": FAILING, "not_exported": NOT_EXPORTED}

_COLUMNS: dict[str, Any] = {
    "name": Device.sort_name,
    "budget": Device.budget,
    "seen": Device.seen_at,
    "stopped": Device.stopped_round,
    "board": Device.profile["board"].as_string(),
    "accuracy": Device.accuracy,
    "seconds": Device.seconds,
}
_BY_NAME = (Device.sort_name, Device.name, Device.id)


@dataclass(frozen=True)
class DeviceQuery:
    """A selection of devices."""

    # Part of the name or board, ignoring case.
    search: str = ""
    # An exact name.
    device: str | None = None
    doing: Doing | None = None
    only: Only | None = None
    # By tags.
    where: str = ""
    order: Order = "name"
    offset: int = 0
    limit: int | None = None


class DeviceLists:
    """Device lists of all federations. quiet: longest silence, s, of a device that waits for work."""

    def __init__(self, store: Store, clock: Callable[[], float], quiet: Callable[[], float] = lambda: 0.0) -> None:
        self._store = store
        self._clock = clock
        self._quiet = quiet

    def list(self, federation_name: str, query: DeviceQuery | None = None) -> tuple[list[DeviceInfo], int]:
        """Return one page of the selected devices, and their total number. Raises NotFound."""
        query = query or DeviceQuery()
        with self._store.reading() as db:
            federation = find(db, federation_name)
            doing = self._doing(federation)
            those = [Device.federation_id == federation.id, Device.removed.is_(False)]
            if query.search:
                texts = (Device.name, Device.profile["board"].as_string())
                those.append(or_(*(text.icontains(query.search, autoescape=True) for text in texts)))
            if query.device is not None:
                those.append(Device.name == query.device)
            if query.doing is not None:
                those.append(doing == query.doing.value)
            if query.only is not None:
                those.append(ONLY[query.only])
            if query.where:
                those.append(selected(selection_of(query.where, settings_of(federation))))
            total = db.scalar(select(func.count()).select_from(Device).where(*those)) or 0
            alone = alone_accuracy(federation)
            column = {**_COLUMNS, "doing": doing, "gain": Device.accuracy - alone}[query.order.removeprefix("-")]
            ordered = column.desc() if query.order.startswith("-") else column.asc()
            page = (
                select(Device, doing, alone)
                .where(*those)
                .order_by(ordered.nulls_last(), *_BY_NAME)
                .offset(query.offset)
                .limit(query.limit)
                .options(undefer(Device.profile))
            )
            return [_info(device, Doing(activity), alone) for device, activity, alone in db.execute(page)], total

    def states(self, federation_name: str, most: int) -> DeviceStates:
        """Return the activities of the first ``most`` devices by name. Raises NotFound."""
        with self._store.reading() as db:
            federation = find(db, federation_name)
            there = (Device.federation_id == federation.id, Device.status != "revoked")
            each = select(Device.name, self._doing(federation)).where(*there).order_by(*_BY_NAME).limit(most)
            found = [(name, Doing(activity)) for name, activity in db.execute(each)]
            total = len(found) if len(found) < most else db.scalar(select(func.count()).where(*there)) or 0
        return DeviceStates(names=tuple(row[0] for row in found), doing=tuple(row[1] for row in found), total=total)

    def history(self, device_id: str, most: int) -> DeviceHistory:
        """Return a device and its last ``most`` pieces of work, newest first. Raises NotFound."""
        with self._store.reading() as db:
            device = db.get(Device, device_id, options=[undefer(Device.profile)])
            if device is None:
                raise NotFound("this device does not exist; GET /v1/federations/NAME/devices lists all")
            federation = db.get_one(Federation, device.federation_id)
            look = select(self._doing(federation), alone_accuracy(federation))
            doing, alone = db.execute(look.where(Device.id == device_id)).one()
            last = (
                select(Assignment)
                .where(Assignment.device_id == device_id)
                .order_by(Assignment.created_at.desc(), Assignment.round.desc(), Assignment.id)
                .limit(most)
            )
            work = tuple(_work(each) for each in db.scalars(last))
            return DeviceHistory(device=_info(device, Doing(doing), alone), federation=federation.name, work=work)

    def count_doing(self, db: Session, federation: Federation) -> dict[Doing, tuple[int, float]]:
        """Return, per activity, the number of devices and the earliest last sight of one."""
        doing = self._doing(federation).label("doing")
        those = (Device.federation_id == federation.id, Device.removed.is_(False))
        each = select(doing, Device.seen_at).where(*those).subquery()
        rows = db.execute(select(each.c.doing, func.count(), func.min(each.c.seen_at)).group_by(each.c.doing))
        return {Doing(row[0]): (row[1], row[2]) for row in rows}

    def _doing(self, federation: Federation) -> ColumnElement[str]:
        now = self._clock()
        heard_before = now - settings_of(federation).silence_seconds - self._quiet()
        # A device that was heard of after the end of its federation has nothing left to do.
        if federation.status in ENDED:
            heard_before = min(heard_before, federation.finished_at or 0.0)
        return doing_of(federation, now, heard_before)


def doing_of(federation: Federation, now: float, heard_before: float) -> ColumnElement[str]:
    """Return SQL for each device's ``Doing`` value. heard_before: a device not heard of since is offline."""
    ended = federation.status in ENDED
    given = select(Assignment.device_id).where(Assignment.federation_id == federation.id)
    asked = given.where(Assignment.status == "open")
    trained = given.where(Assignment.kind.in_(COHORT_KINDS), Assignment.status == "done")
    failed = given.where(
        Assignment.kind.in_(COHORT_KINDS),
        Assignment.status == "returned",
        Assignment.return_reason.not_in([reason.value for reason in PauseReason]),
    )
    untrained = and_(Device.id.not_in(asked), Device.id.in_(failed), Device.id.not_in(trained))
    return case(
        (Device.status == "revoked", Doing.revoked.value),
        (Device.status == "not_joined", Doing.not_joined.value),
        (Device.status == "stopped", Doing.stopped.value),
        (Device.id.in_(asked.where(Assignment.kind.in_((*COHORT_KINDS, *PHASES)))), Doing.training.value),
        *([(untrained, Doing.untrained.value)] if ended else []),
        (Device.paused.is_not(None), Doing.paused.value),
        (Device.present.is_(False), Doing.away.value),
        (and_(Device.seen_at < heard_before, Device.hosted.is_(False)), Doing.offline.value),
        *([(Device.id.not_in(asked), Doing.done.value)] if ended else []),
        (Device.budget < smallest_budget(federation) - SLACK, Doing.small_budget.value),
        (not_(is_selected(federation)), Doing.not_selected.value),
        (Device.id.in_(asked.where(Assignment.kind.in_(JUDGING_KINDS))), Doing.evaluating.value),
        (Device.rest_until > now, Doing.resting.value),
        else_=Doing.ready.value,
    )


def alone_accuracy(federation: Federation) -> ColumnElement[float | None]:
    """Return SQL for each device's accuracy by training alone, NULL if unknown.

    That of its local-only model, or else of the device of this name in the newest federation of the method ``local``
    with this task.
    """
    newest = (
        select(Federation.id)
        .where(Federation.method == "local", Federation.task == federation.task, Federation.id != federation.id)
        .order_by(Federation.id.desc())
        .limit(1)
    )
    if federation.method == "local":
        return Device.accuracy_alone.expression
    twin = aliased(Device)
    theirs = select(twin.accuracy).where(
        twin.federation_id == newest.scalar_subquery(), twin.name == Device.name, twin.status != "revoked"
    )
    return func.coalesce(Device.accuracy_alone, theirs.scalar_subquery())


def _info(device: Device, doing: Doing, alone: float | None) -> DeviceInfo:
    return DeviceInfo(
        device_id=device.id,
        name=device.name,
        status=device.status,
        stopped_round=device.stopped_round,
        doing=doing,
        present=device.present,
        paused=_word(PauseReason, device.paused),
        budget=device.budget,
        limited_by=_word(BudgetLimit, device.limited_by),
        failure=_failure(device.failure),
        refusals=device.refusals,
        exported=device.exported,
        accuracy=device.accuracy,
        accuracy_alone=alone,
        gain=None if device.accuracy is None or alone is None else device.accuracy - alone,
        seconds=device.seconds,
        tags=device.tags,
        set_tags=tuple(device.set_tags),
        profile=read_stored(DeviceProfile, device.profile) or DeviceProfile(board="unreadable"),
        everything=read_stored(Moved, {"bytes_down": device.bytes_down, "bytes_up": device.bytes_up}) or Moved(),
        enrolled_at=iso(device.enrolled_at),
        seen_at=iso(device.seen_at),
    )


def _failure(stored: dict[str, Any] | None) -> DeviceFailure | None:
    if not isinstance(stored, dict) or not isinstance(at := stored.get("at"), int | float):
        return None
    failure = read_stored(DeviceFailure, stored | {"at": iso(at)})
    return failure and failure.model_copy(update={"reason": in_words(failure.reason)})


def _work(assignment: Assignment) -> DeviceRound:
    kind = Kind(assignment.kind)
    found: dict[str, Any] = {}
    upload = read_stored(Phase, assignment.upload_cost) if assignment.upload_cost else None
    report = read_stored(UpdateReport, assignment.report) if kind in (Kind.train, Kind.personalise) else None
    receipt = read_stored(Receipt, assignment.report) if kind in (Kind.evaluate, Kind.compare, Kind.adapt) else None
    if report is not None:
        found = {"loss": report.train_loss}
    if receipt is not None:
        judged = receipt.personal or receipt.global_model
        found = {
            "loss": judged and judged.loss,
            "accuracy": receipt.personal and receipt.personal.accuracy,
            "accuracy_global": receipt.global_model and receipt.global_model.accuracy,
        }
    if (reported := report or receipt) is not None:
        phases = [reported.telemetry.download, reported.telemetry.train]
        if upload:
            phases.append(upload)
        joules = [phase.joules for phase in phases if phase.joules is not None]
        found |= {
            "seconds": sum(phase.seconds for phase in phases),
            "bytes_up": sum(phase.bytes_up for phase in phases),
            "bytes_down": sum(phase.bytes_down for phase in phases),
            "joules": sum(joules) if joules else None,
        }
    return DeviceRound(
        round=assignment.round,
        kind=kind,
        status=assignment.status,
        reason=None if assignment.return_reason is None else in_words(assignment.return_reason),
        began_at=iso(assignment.created_at),
        **found,
    )


Word = TypeVar("Word", bound=Enum)


def _word(kind: type[Word], stored: str | None) -> Word | None:
    """Return a stored enum value; None if there is none, or if this version does not have it."""
    return next((word for word in kind if word.value == stored), None)
