"""The record of each round, summed from the reports of its assignments.

A record is made when somebody looks, and remembered until another fact comes (an evaluation, the cost of an upload).
What cannot be read of the facts is left out and named (``RoundRecord.unreadable``); it hides nothing else.
Bytes, seconds and joules are sums over devices; joules that were measured and joules that were estimated stay apart.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from statistics import fmean, median

from sqlalchemy import ColumnElement, and_, or_, select, update
from sqlalchemy.orm import Session

from sparrow.coordinator.errors import NotFound, Unavailable, read_stored
from sparrow.coordinator.fleet.federations import find
from sparrow.coordinator.fleet.last_seen import LastSeen
from sparrow.coordinator.methods import load_method
from sparrow.coordinator.rounds.assignments import COHORT_KINDS, DAMAGED, JUDGING_KINDS, UNCOUNTED, weight_of
from sparrow.coordinator.rounds.secure import PHASES
from sparrow.coordinator.storage.failing import RECORDS
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Assignment, Device, Round
from sparrow.protocol.manifest import MOST_METRICS
from sparrow.protocol.messages import (
    DeviceReport,
    Evaluation,
    FederationStatus,
    Kind,
    OpenAssignment,
    OpenWork,
    PerUpdate,
    Phase,
    PhaseSum,
    PrivacySpent,
    Receipt,
    RoundRecord,
    UpdateReport,
)

MOST_NAMES = 50
"""Different names of counts in a record, as devices choose these names."""

RECORDS_AT_A_TIME = 10
"""Records that are made, and then written, together: of a long training that nobody looked at there are many."""


class Records:
    """The records of every round. bring: writes down what waits in memory, before anybody looks. heard: when devices
    were."""

    def __init__(
        self, store: Store, bring: Callable[[], None], clock: Callable[[], float], last_seen: LastSeen
    ) -> None:
        self._store = store
        self._bring = bring
        self._clock = clock
        self._last_seen = last_seen

    def rounds(self, federation_name: str) -> list[RoundRecord]:
        """Return a record per round, the open one last. Raises NotFound."""
        federation_id = self.refresh(federation_name)
        with self._store.reading() as db:
            rounds = db.scalars(select(Round).where(Round.federation_id == federation_id).order_by(Round.number))
            found = [_known(item) or _look(db, item) for item in rounds]
        return with_joules_per_point(found)

    def refresh(self, federation_name: str) -> int:
        """Make the records of closed rounds that a fact has come to since; answers the federation's id. Raises
        NotFound."""
        with self._store.reading() as db:
            federation_id = find(db, federation_name).id
        if self._store.troubles.size(RECORDS) is None:  # else who only looks would wait for what cannot be written
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
                for round_id, facts, summary in found:  # but where a fact has come meanwhile
                    made = update(Round).where(Round.id == round_id, Round.facts == facts)
                    db.execute(made.values(summary=summary, stale=False))

    def reports(self, federation_name: str, number: int) -> list[DeviceReport]:
        """Return the report of each device in round ``number``, training first, by name. Raises NotFound.

        A report that cannot be read is left out; the round's record names its device.
        """
        if self._store.troubles.size(RECORDS) is None:
            with suppress(Unavailable):
                self._bring()
        with self._store.reading() as db:
            federation = find(db, federation_name)
            prepared = load_method(federation.method).prepares
            if not 1 - prepared <= number <= federation.round + 1:
                raise NotFound(f"{federation_name} has had {federation.round} rounds; there is no round {number}")
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
            DeviceReport(device=name, kind=Kind(assignment.kind), report=report, upload=_upload(assignment))
            for assignment, name, report in found
            if report is not None
        ]

    def open_work(self, federation_name: str) -> OpenWork:
        """Return the open assignments, oldest first. Raises NotFound."""
        with self._store.reading() as db:
            federation = find(db, federation_name)
            assignments = self.awaited(db, Assignment.federation_id == federation.id)
        return OpenWork(
            at=iso(self._clock()),
            status=FederationStatus(federation.status),
            round=federation.round,
            assignments=assignments,
        )

    def awaited(self, db: Session, *those: ColumnElement[bool], most: int | None = None) -> tuple[OpenAssignment, ...]:
        """Return the first of those assignments that are open, oldest first."""
        rows = db.execute(
            select(
                *(Assignment.id, Device.name, Assignment.kind, Assignment.round, Assignment.created_at),
                *(Device.id, Device.seen_at),
            )
            .join(Device, Device.id == Assignment.device_id)
            .where(Assignment.status == "open", *those)
            .order_by(Assignment.round, Assignment.kind, Assignment.position)
            .limit(most)
        )
        return tuple(
            OpenAssignment(
                assignment_id=assignment_id,
                device=name,
                kind=Kind(kind),
                round=number,
                since=iso(since),
                heard_at=iso(self._last_seen.at(device_id, seen_at)),
            )
            for assignment_id, name, kind, number, since, device_id, seen_at in rows
        )


def report_of(assignment: Assignment) -> UpdateReport | Receipt | None:
    """Return the report of an assignment that is done; None if it cannot be read."""
    if assignment.kind in COHORT_KINDS:
        return read_stored(UpdateReport, assignment.report)
    return read_stored(Receipt, assignment.report)


def _known(item: Round) -> RoundRecord | None:
    """Return the record of a round that was made before; None if a fact has come since, or it cannot be read."""
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
    """Return SQL, for buffered rounds, of the updates in a round's model, or, while it is open, of those that wait."""
    return Assignment.counted_round == item.number if item.status == "closed" else UNCOUNTED


def _counts(assignment: Assignment, item: Round) -> bool:
    """Return whether an update that was acknowledged is one of this round's."""
    if assignment.arrival is None:
        return assignment.round == item.number
    return assignment.counted_round == (item.number if item.status == "closed" else None)


def summarise(item: Round, rows: Sequence[tuple[Assignment, str]]) -> RoundRecord:
    """Return the record of one round from its assignments (with their devices' names)."""
    training = [(assignment, name) for assignment, name in rows if assignment.kind in COHORT_KINDS]
    done = [(each, name) for each, name in training if each.status == "done" and _counts(each, item)]
    training = [(assignment, name) for assignment, name in training if assignment.round == item.number]
    phases = [(each, name) for each, name in rows if each.kind in PHASES and each.round == item.number]
    # In a secure round a device has an assignment in each phase; all were drawn that were asked for keys.
    asked = phases if any(each.kind == Kind.keys for each, _ in phases) else training
    trained = [(each, name, read_stored(UpdateReport, each.report)) for each, name in done]
    reports = [report for _, _, report in trained if report]
    uploads = [_upload(assignment) for assignment, _, report in trained if report]
    # Before the last evaluation devices may have compared models, which is part of what it cost.
    looked = [
        (each, name, read_stored(Receipt, each.report))
        for each, name in rows
        if each.kind in JUDGING_KINDS and each.status == "done"
    ]
    judged = [(each, name, receipt) for each, name, receipt in looked if each.kind == Kind.evaluate]
    receipts = [receipt for _, _, receipt in judged if receipt]
    costly = [receipt for _, _, receipt in looked if receipt]
    personal = [receipt.personal for receipt in receipts if receipt.personal]
    shared = [receipt.global_model for receipt in receipts if receipt.global_model]
    counted = [
        (name, report, weight_of(report.num_examples, of.most_examples)) for of, name, report in trained if report
    ]
    weights = [weight for _, _, weight in counted]
    examples = sum(weights)
    lost = {name: DAMAGED for each, name in training if (each.status, each.return_reason) == ("expired", DAMAGED)}
    notes = dict(item.notes) if isinstance(item.notes, dict) else {}
    left_out, privacy = notes.pop("left_out", {}), notes.pop("privacy", None)
    clipped = notes.pop("clipped", {})
    masked = notes.pop("metrics", {})  # of secure rounds: means that no device has told
    evaluation_phases = [phase for receipt in costly for phase in (receipt.telemetry.download, receipt.telemetry.train)]
    spent = sorted(
        (sum(phase.seconds for phase in (report.telemetry.download, report.telemetry.train, upload)), name)
        for (_, name, report), upload in zip(
            ((each, name, report) for each, name, report in trained if report), uploads, strict=True
        )
    )
    evaluation_uploads = [_upload(assignment) for assignment, _, receipt in looked if receipt]
    return RoundRecord(
        round=item.number,
        status="closed" if item.status == "closed" else "open",
        cohort=tuple(dict.fromkeys(name for _, name in asked)),
        updates=len(done),
        stopped=tuple(name for _, name, report in trained if report and report.status == "stopped"),
        handed_back=sum(assignment.status == "returned" for assignment, _ in asked),
        expired=sum(assignment.status == "expired" for assignment, _ in asked),
        num_examples=examples,
        training_flops=sum(report.training_flops for report in reports),
        finetune_flops=sum(receipt.finetune_flops for receipt in costly),
        train_loss=masked.get("train_loss", _weighted_mean([report.train_loss for report in reports], weights)),
        accuracy_personal=masked.get("accuracy_personal", _mean(each.accuracy for each in personal)),
        accuracy_personal_decile=bottom_decile([each.accuracy for each in personal]),
        accuracy_global=masked.get("accuracy_global", _mean(each.accuracy for each in shared)),
        loss_personal=masked.get("loss_personal", _mean(each.loss for each in personal)),
        loss_global=masked.get("loss_global", _mean(each.loss for each in shared)),
        metrics_personal=_mean_metrics(personal),
        metrics_global=_mean_metrics(shared),
        evaluated_devices=len(judged),
        bytes_down=sum(report.telemetry.download.bytes_down for report in reports),
        bytes_up=sum(upload.bytes_up for upload in uploads),
        parts_down=_add_counts(report.received for report in reports),
        parts_up=_whole_numbers(item.parts),
        counts=_add_counts(report.counts for report in reports),
        notes=_whole_numbers(notes),
        unreadable=tuple(name for _, name, report in (*trained, *judged) if report is None),
        privacy=read_stored(PrivacySpent, privacy) if privacy else None,
        left_out=lost | {name: left_out[assignment.id] for assignment, name in done if assignment.id in left_out},
        capped={name: weight for name, report, weight in counted if weight < report.num_examples},
        clipped={name: clipped[assignment.id] for assignment, name in done if assignment.id in clipped},
        evaluation_bytes_down=sum(phase.bytes_down for phase in evaluation_phases),
        evaluation_bytes_up=sum(upload.bytes_up for upload in evaluation_uploads),
        download=_add(report.telemetry.download for report in reports),
        train=_add(report.telemetry.train for report in reports),
        upload=_add(uploads),
        evaluation=_add([*evaluation_phases, *evaluation_uploads]),
        per_update=_per_update(
            (report.telemetry.download, report.telemetry.train, upload)
            for report, upload in zip(reports, uploads, strict=True)
        ),
        opened_at=iso(item.opened_at),
        closed_at=None if item.closed_at is None else iso(item.closed_at),
        seconds=None if item.closed_at is None else item.closed_at - item.opened_at,
        device_seconds_median=median(seconds for seconds, _ in spent) if spent else None,
        device_seconds_slowest=spent[-1][0] if spent else None,
        slowest=spent[-1][1] if spent else None,
        model_sha256=item.model_sha256,
        base_version=item.base_version,
        model_version=item.model_version,
        undone=item.undone,
    )


def with_joules_per_point(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    """Return the records, each evaluated one with the joules that a point of accuracy took since the one before."""
    found, before = [], None
    measured = estimated = 0.0
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
            before, measured, estimated = accuracy, 0.0, 0.0
        found.append(record)
    return found


def iso(seconds: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _upload(assignment: Assignment) -> Phase:
    """Return the cost of an upload; until the device reports it, at least the bytes that arrived."""
    known = None if assignment.upload_cost is None else read_stored(Phase, assignment.upload_cost)
    return known or Phase(bytes_up=assignment.update_bytes or 0)


def _add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return sums by name; of more than ``MOST_NAMES`` names, of those that most devices gave."""
    total: Counter[str] = Counter()
    devices: Counter[str] = Counter()
    for each in counts:
        total.update(each)
        devices.update(each.keys())
    names = sorted(devices, key=lambda name: (-devices[name], name))[:MOST_NAMES]
    return {name: total[name] for name in names}


def _whole_numbers(stored: object) -> dict[str, int]:
    named = stored if isinstance(stored, dict) else {}
    return {name: value for name, value in named.items() if isinstance(value, int)}


def _mean_metrics(judged: Sequence[Evaluation]) -> dict[str, float]:
    """Return each metric's mean over the devices that measured it, by name."""
    names = sorted({name for each in judged for name in each.metrics})[:MOST_METRICS]
    return {name: fmean(each.metrics[name] for each in judged if name in each.metrics) for name in names}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _weighted_mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def bottom_decile(values: Iterable[float | None]) -> float | None:
    """Return the floor(N/10)-th worst of the N values that are known, counted from 1; None if none is."""
    known = sorted(value for value in values if value is not None)
    return known[max(1, len(known) // 10) - 1] if known else None


def _per_update(rounds: Iterable[tuple[Phase, ...]]) -> PerUpdate:
    measured, estimated = [], []
    for phases in rounds:
        total = _add(phases)
        if total.joules_measured:
            measured.append(total.joules_measured)
        if total.joules_estimated:
            estimated.append(total.joules_estimated)
    return PerUpdate(
        joules_measured=_mean(measured),
        joules_estimated=_mean(estimated),
        measured_updates=len(measured),
        estimated_updates=len(estimated),
    )


def _add(phases: Iterable[Phase]) -> PhaseSum:
    seconds = paused = measured = estimated = without = 0.0
    throttled: float | None = None
    peak: float | None = None
    for phase in phases:
        seconds += phase.seconds
        paused += phase.paused_seconds
        if phase.throttled_seconds is not None:
            throttled = (throttled or 0.0) + phase.throttled_seconds
        if phase.celsius_peak is not None:
            peak = phase.celsius_peak if peak is None else max(peak, phase.celsius_peak)
        if phase.joules is None:
            without += phase.seconds
        elif phase.quality == "estimated":
            estimated += phase.joules
        else:
            measured += phase.joules
    return PhaseSum(
        seconds=seconds,
        paused_seconds=paused,
        throttled_seconds=throttled,
        celsius_peak=peak,
        joules_measured=measured,
        joules_estimated=estimated,
        seconds_without_joules=without,
    )
