"""Records of rounds, summed from the reports of their assignments.

A record is made on request and stored until a new fact arrives (an evaluation, the cost of an upload). Unreadable facts
are listed in ``RoundRecord.unreadable``. Measured and estimated joules are separate sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy import ColumnElement, and_, or_, select, update
from sqlalchemy.orm import Session

from sparrow.protocol.messages import (
    DeviceReport,
    Kind,
    Receipt,
    RoundRecord,
    UpdateReport,
)

from ..errors import NotFound, Unavailable, read_stored
from ..fleet.federations import find
from ..methods import load_method
from ..rounds.assignments import COHORT_KINDS, UNCOUNTED
from ..storage.failing import RECORDS
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Round
from .summary import summarise, upload_of

RECORDS_AT_A_TIME = 10
"""Number of records made and written in one transaction, because a training may be long."""


class Records:
    """Records of all rounds. bring: called before reading, to write pending facts."""

    def __init__(self, store: Store, bring: Callable[[], None]) -> None:
        self._store = store
        self._bring = bring

    def rounds(self, federation_name: str) -> list[RoundRecord]:
        """Return a record per round, the open one last. Raises NotFound."""
        federation_id = self.refresh(federation_name)
        with self._store.reading() as db:
            rounds = db.scalars(select(Round).where(Round.federation_id == federation_id).order_by(Round.number))
            found = [_known(item) or _look(db, item) for item in rounds]
        return with_joules_per_point(found)

    def refresh(self, federation_name: str) -> int:
        """Update the outdated records of closed rounds; return the federation's id. Raises NotFound."""
        with self._store.reading() as db:
            federation_id = find(db, federation_name).id
        # While the records cannot be written, readers must not wait for writes.
        if self._store.troubles.size(RECORDS) is None:
            with suppress(Unavailable):
                self._bring()
                self._remember(federation_id)
        return federation_id

    def _remember(self, federation_id: int) -> None:
        with self._store.reading() as db:
            outdated = select(Round).where(Round.federation_id == federation_id, Round.status == "closed", Round.stale)
            waiting = len(db.scalars(outdated.with_only_columns(Round.id)).all())
        for _ in range(0, waiting, RECORDS_AT_A_TIME):
            with self._store.reading() as db:
                found = [
                    (item.id, item.facts, json.loads(_look(db, item).model_dump_json()))
                    for item in db.scalars(outdated.order_by(Round.number.desc()).limit(RECORDS_AT_A_TIME))
                ]
            with self._store.writing() as db:
                for round_id, facts, summary in found:
                    # A round that got another fact meanwhile stays outdated.
                    made = update(Round).where(Round.id == round_id, Round.facts == facts)
                    db.execute(made.values(summary=summary, stale=False))

    def reports(self, federation_name: str, number: int) -> list[DeviceReport]:
        """Return the readable reports of round ``number``, training first, by device name. Raises NotFound."""
        if self._store.troubles.size(RECORDS) is None:
            with suppress(Unavailable):
                self._bring()
        with self._store.reading() as db:
            federation = find(db, federation_name)
            prepared = load_method(federation.method).prepares
            if not 1 - prepared <= number <= federation.round + 1:
                raise NotFound(f"there is no round {number}; {federation_name} has had {federation.round} rounds")
            rows = db.execute(
                select(Assignment, Device.name)
                .join(Device, Device.id == Assignment.device_id)
                .where(
                    Assignment.federation_id == federation.id,
                    Assignment.status == "done",
                    or_(
                        Assignment.counted_round == number,
                        and_(Assignment.round == number, Assignment.arrival.is_(None)),
                    ),
                )
                .order_by(Assignment.kind.desc(), Device.name)
            ).all()
        found = [(assignment, name, report_of(assignment)) for assignment, name in rows]
        return [
            DeviceReport(device=name, kind=Kind(assignment.kind), report=report, upload=upload_of(assignment))
            for assignment, name, report in found
            if report is not None
        ]


def report_of(assignment: Assignment) -> UpdateReport | Receipt | None:
    """Return the report of a completed assignment, or None if it is unreadable."""
    if assignment.kind in COHORT_KINDS:
        return read_stored(UpdateReport, assignment.report)
    return read_stored(Receipt, assignment.report)


def _known(item: Round) -> RoundRecord | None:
    """Return the stored record of a round, or None if it is outdated or unreadable."""
    return None if item.stale else read_stored(RoundRecord, item.summary)


def _look(db: Session, item: Round) -> RoundRecord:
    rows = db.execute(
        select(Assignment, Device.name)
        .join(Device, Device.id == Assignment.device_id)
        .where(
            Assignment.federation_id == item.federation_id, or_(Assignment.round == item.number, _in_its_model(item))
        )
        .order_by(Assignment.position)
    )
    return summarise(item, [(row[0], row[1]) for row in rows])


def _in_its_model(item: Round) -> ColumnElement[bool]:
    """Return SQL for the updates in a buffered round's model or, while it is open, for waiting updates."""
    return Assignment.counted_round == item.number if item.status == "closed" else UNCOUNTED


def with_joules_per_point(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    """Return the records, with the joules per point of accuracy gained."""
    found = []
    before = None
    measured = 0.0
    estimated = 0.0
    for record in records:
        phases = (record.download, record.train, record.upload)
        measured += sum(phase.joules_measured for phase in phases)
        estimated += sum(phase.joules_estimated for phase in phases)
        accuracy = record.accuracy_global if record.accuracy_personal is None else record.accuracy_personal
        if accuracy is not None:
            points = 0.0 if before is None else 100 * (accuracy - before)
            if points > 0:
                values = {"measured": measured / points or None, "estimated": estimated / points or None}
                record = record.model_copy(update={f"joules_per_point_{key}": value for key, value in values.items()})
            before = accuracy
            measured = 0.0
            estimated = 0.0
        found.append(record)
    return found
