"""Device lists of a federation, in pages: what each device is doing, or why it does not train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeVar, get_args

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.orm import Session, undefer

from edge_sdk.protocol.messages import BudgetLimit, DeviceInfo, DeviceProfile, Doing, Moved, PauseReason
from sparrow.coordinator.errors import read_stored
from sparrow.coordinator.fleet.federations import find
from sparrow.coordinator.reports.records import iso
from sparrow.coordinator.rounds.assignments import COHORT_KINDS
from sparrow.coordinator.rounds.candidates import SLACK, smallest_budget
from sparrow.coordinator.rounds.secure import PHASES
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Assignment, Device, Federation

Order = Literal["name", "budget", "seen", "stopped", "-name", "-budget", "-seen", "-stopped"]
"""The orders of a list of devices; with a minus, the largest or latest first."""

_COLUMNS = {"name": Device.name, "budget": Device.budget, "seen": Device.seen_at, "stopped": Device.stopped_round}
assert set(_COLUMNS) == {order.removeprefix("-") for order in get_args(Order)}


@dataclass(frozen=True)
class DeviceQuery:
    """A selection of a federation's devices. search: part of the name or board, in any case."""

    search: str = ""
    doing: Doing | None = None
    order: Order = "name"
    offset: int = 0
    limit: int | None = None


class DeviceLists:
    """The devices of every federation."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    def list(self, federation_name: str, query: DeviceQuery | None = None) -> tuple[list[DeviceInfo], int]:
        """Return the selected devices, and the number of those on all pages. Raises NotFound."""
        query = query or DeviceQuery()
        with self._store.reading() as db:
            federation = find(db, federation_name)
            doing = doing_of(federation, self._clock())
            those = [Device.federation_id == federation.id]
            if query.search:
                where = (Device.name, Device.profile["board"].as_string())
                those.append(or_(*(text.icontains(query.search, autoescape=True) for text in where)))
            if query.doing is not None:
                those.append(doing == query.doing.value)
            total = db.scalar(select(func.count()).select_from(Device).where(*those)) or 0
            column = _COLUMNS[query.order.removeprefix("-")]
            ordered = column.desc() if query.order.startswith("-") else column.asc()
            page = (
                select(Device, doing)
                .where(*those)
                .order_by(ordered.nulls_last(), Device.name, Device.id)
                .offset(query.offset)
                .limit(query.limit)
                .options(undefer(Device.profile))
            )
            return [_info(device, Doing(what)) for device, what in db.execute(page)], total


def count_doing(db: Session, federation: Federation, now: float) -> dict[Doing, int]:
    """Return the number of a federation's devices for each ``Doing``."""
    doing = doing_of(federation, now).label("doing")
    each = select(doing).where(Device.federation_id == federation.id).subquery()
    rows = db.execute(select(each.c.doing, func.count()).group_by(each.c.doing))
    return {Doing(row[0]): row[1] for row in rows}


def doing_of(federation: Federation, now: float) -> ColumnElement[str]:
    """Return SQL for what each device is doing, or why it does not train: a value of ``Doing``."""
    asked = select(Assignment.device_id).where(Assignment.federation_id == federation.id, Assignment.status == "open")
    return case(
        (Device.status == "revoked", Doing.revoked.value),
        (Device.status == "stopped", Doing.stopped.value),
        (Device.id.in_(asked.where(Assignment.kind.in_((*COHORT_KINDS, *PHASES)))), Doing.training.value),
        (Device.paused.is_not(None), Doing.paused.value),
        (Device.present.is_(False), Doing.away.value),
        (Device.budget < smallest_budget(federation) - SLACK, Doing.small_budget.value),
        (Device.id.in_(asked.where(Assignment.kind == "evaluate")), Doing.evaluating.value),
        (Device.rest_until > now, Doing.resting.value),
        else_=Doing.ready.value,
    )


def _info(device: Device, doing: Doing) -> DeviceInfo:
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
        profile=read_stored(DeviceProfile, device.profile) or DeviceProfile(board="unreadable"),
        everything=read_stored(Moved, {"bytes_down": device.bytes_down, "bytes_up": device.bytes_up}) or Moved(),
        enrolled_at=iso(device.enrolled_at),
        seen_at=iso(device.seen_at),
    )


Word = TypeVar("Word", bound=Enum)


def _word(kind: type[Word], stored: str | None) -> Word | None:
    """Return a stored word; None where there is none, or this version does not know it."""
    return next((word for word in kind if word.value == stored), None)
