"""The record of one round, from its assignments and their devices' reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from sparrow.protocol.manifest import MOST_METRICS
from sparrow.protocol.messages import (
    Evaluation,
    Kind,
    PerUpdate,
    Phase,
    PhaseSum,
    PrivacySpent,
    Receipt,
    RoundRecord,
    UpdateReport,
)

from ..clock import iso
from ..errors import read_stored
from ..rounds.assignments import COHORT_KINDS, DAMAGED, JUDGING_KINDS, weight_of
from ..rounds.secure_state import PHASES
from ..storage.tables import Assignment, Round

MOST_NAMES = 50
"""Largest number of different counts in a record, because devices choose the names."""

SUMMED_UNDER_MASKS = ("accuracy_personal", "accuracy_global", "loss_personal", "loss_global")
"""Means of an evaluation that come from secure aggregation in secure rounds."""

Row = tuple[Assignment, str]
"""An assignment with its device's name."""


@dataclass(frozen=True)
class _Update:
    """An update with a readable report."""

    device: str
    report: UpdateReport
    upload: Phase
    # Number of samples.
    weight: int

    @property
    def phases(self) -> tuple[Phase, Phase, Phase]:
        """Download, training and upload."""
        return self.report.telemetry.download, self.report.telemetry.train, self.upload


@dataclass(frozen=True)
class _Notes:
    """A round's notes, separated into their parts."""

    left_out: Mapping[str, str]
    clipped: Mapping[str, float]
    privacy: Any
    # Means from secure aggregation.
    masked: Mapping[str, float]
    others: Mapping[str, Any]

    @classmethod
    def of(cls, item: Round) -> _Notes:
        notes = dict(item.notes) if isinstance(item.notes, dict) else {}
        left_out = notes.pop("left_out", {})
        clipped = notes.pop("clipped", {})
        privacy = notes.pop("privacy", None)
        masked = notes.pop("metrics", {})
        return cls(left_out, clipped, privacy, masked, notes)


def summarise(item: Round, rows: Sequence[Row]) -> RoundRecord:
    """Return the record of one round from its assignments and their devices' names."""
    notes = _Notes.of(item)
    done = [
        (each, name)
        for each, name in rows
        if each.kind in COHORT_KINDS and each.status == "done" and _counts(each, item)
    ]
    trained = [(each, name, read_stored(UpdateReport, each.report)) for each, name in done]
    updates = [
        _Update(name, report, upload_of(each), weight_of(report.num_examples, each.most_examples))
        for each, name, report in trained
        if report
    ]
    # Comparisons of models before the last evaluation are part of its cost.
    judged = [
        (each, name, read_stored(Receipt, each.report))
        for each, name in rows
        if each.kind in JUDGING_KINDS and each.status == "done"
    ]
    unread = [name for _, name, report in trained if report is None]
    unread += [name for each, name, receipt in judged if receipt is None and each.kind == Kind.evaluate]
    return RoundRecord(
        round=item.number,
        status="closed" if item.status == "closed" else "open",
        updates=len(done),
        unreadable=tuple(unread),
        privacy=read_stored(PrivacySpent, notes.privacy) if notes.privacy else None,
        parts_up=_whole_numbers(item.parts),
        notes=_whole_numbers(notes.others),
        model_sha256=item.model_sha256,
        base_version=item.base_version,
        model_version=item.model_version,
        undone=item.undone,
        **_of_time(item),
        **_of_the_cohort(item, rows),
        **_of_what_counts(item, rows, done, updates, notes),
        **_of_training(updates, notes.masked),
        **_of_durations(updates),
        **_of_evaluation([(each, receipt) for each, _, receipt in judged], notes.masked),
    )


def _counts(assignment: Assignment, item: Round) -> bool:
    """Return whether an acknowledged update counts in this round."""
    if assignment.arrival is None:
        return assignment.round == item.number
    return assignment.counted_round == (item.number if item.status == "closed" else None)


def _of_time(item: Round) -> dict[str, Any]:
    closed = item.closed_at
    return {
        "opened_at": iso(item.opened_at),
        "closed_at": None if closed is None else iso(closed),
        "seconds": None if closed is None else closed - item.opened_at,
    }


def _of_the_cohort(item: Round, rows: Sequence[Row]) -> dict[str, Any]:
    phases = [(each, name) for each, name in rows if each.kind in PHASES and each.round == item.number]
    # In a secure round a device has an assignment per phase; the cohort are the devices asked for keys.
    asked = phases if any(each.kind == Kind.keys for each, _ in phases) else _asked_to_train(item, rows)
    return {
        "cohort": tuple(dict.fromkeys(name for _, name in asked)),
        "handed_back": sum(assignment.status == "returned" for assignment, _ in asked),
        "expired": sum(assignment.status == "expired" for assignment, _ in asked),
    }


def _asked_to_train(item: Round, rows: Sequence[Row]) -> list[Row]:
    return [(each, name) for each, name in rows if each.kind in COHORT_KINDS and each.round == item.number]


def _of_what_counts(
    item: Round, rows: Sequence[Row], done: Sequence[Row], updates: Sequence[_Update], notes: _Notes
) -> dict[str, Any]:
    """Return the updates left out, clipped, or counted with fewer samples, grouped by device."""
    asked = _asked_to_train(item, rows)
    lost = {name: DAMAGED for each, name in asked if (each.status, each.return_reason) == ("expired", DAMAGED)}
    return {
        "left_out": lost | {name: notes.left_out[each.id] for each, name in done if each.id in notes.left_out},
        "capped": {each.device: each.weight for each in updates if each.weight < each.report.num_examples},
        "clipped": {name: notes.clipped[each.id] for each, name in done if each.id in notes.clipped},
    }


def _of_training(updates: Sequence[_Update], masked: Mapping[str, float]) -> dict[str, Any]:
    reports = [each.report for each in updates]
    weights = [each.weight for each in updates]
    return {
        "stopped": tuple(each.device for each in updates if each.report.status == "stopped"),
        "num_examples": sum(weights),
        "training_flops": sum(report.training_flops for report in reports),
        "train_loss": masked.get("train_loss", _weighted_mean([report.train_loss for report in reports], weights)),
        "bytes_down": sum(report.telemetry.download.bytes_down for report in reports),
        "bytes_up": sum(each.upload.bytes_up for each in updates),
        "parts_down": _add_counts(report.received for report in reports),
        "counts": _add_counts(report.counts for report in reports),
    }


def _of_durations(updates: Sequence[_Update]) -> dict[str, Any]:
    spent = sorted((sum(phase.seconds for phase in each.phases), each.device) for each in updates)
    return {
        "download": _add(each.report.telemetry.download for each in updates),
        "train": _add(each.report.telemetry.train for each in updates),
        "upload": _add(each.upload for each in updates),
        "per_update": _per_update(each.phases for each in updates),
        "device_seconds_median": median(seconds for seconds, _ in spent) if spent else None,
        "device_seconds_slowest": spent[-1][0] if spent else None,
        "slowest": spent[-1][1] if spent else None,
    }


def _of_evaluation(judged: Sequence[tuple[Assignment, Receipt | None]], masked: Mapping[str, float]) -> dict[str, Any]:
    evaluated = [receipt for each, receipt in judged if each.kind == Kind.evaluate]
    personal = [receipt.personal for receipt in evaluated if receipt and receipt.personal]
    shared = [receipt.global_model for receipt in evaluated if receipt and receipt.global_model]
    return {
        **{f"{name}_personal": value for name, value in _means(personal).items()},
        **{f"{name}_global": value for name, value in _means(shared).items()},
        **{name: masked[name] for name in SUMMED_UNDER_MASKS if name in masked},
        "accuracy_personal_decile": bottom_decile([each.accuracy for each in personal]),
        "evaluated_devices": len(evaluated),
        **_of_judging([(each, receipt) for each, receipt in judged if receipt]),
    }


def _means(judged: Sequence[Evaluation]) -> dict[str, Any]:
    return {
        "accuracy": _mean(each.accuracy for each in judged),
        "loss": _mean(each.loss for each in judged),
        "metrics": _mean_metrics(judged),
    }


def _of_judging(judged: Sequence[tuple[Assignment, Receipt]]) -> dict[str, Any]:
    """Return the cost of evaluations and comparisons of models."""
    phases = [phase for _, each in judged for phase in (each.telemetry.download, each.telemetry.train)]
    uploads = [upload_of(assignment) for assignment, _ in judged]
    return {
        "finetune_flops": sum(receipt.finetune_flops for _, receipt in judged),
        "evaluation_bytes_down": sum(phase.bytes_down for phase in phases),
        "evaluation_bytes_up": sum(upload.bytes_up for upload in uploads),
        "evaluation": _add([*phases, *uploads]),
    }


def upload_of(assignment: Assignment) -> Phase:
    """Return the cost of an upload; until the device reports it, only the received bytes."""
    known = None if assignment.upload_cost is None else read_stored(Phase, assignment.upload_cost)
    return known or Phase(bytes_up=assignment.update_bytes or 0)


def _add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return sums by name, for the ``MOST_NAMES`` names from the most devices."""
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
    """Return the floor(N/10)-th lowest of the N known values, counted from 1, or None if N is 0."""
    known = sorted(value for value in values if value is not None)
    return known[max(1, len(known) // 10) - 1] if known else None


def _per_update(rounds: Iterable[tuple[Phase, ...]]) -> PerUpdate:
    measured = []
    estimated = []
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
