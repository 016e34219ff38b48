"""Metrics of a trial from its coordinator's records, the same for every method.

A device's accuracy is that of its personal model, or of the global model if the method has no personal ones, on the
device's own test data. Bytes are bodies of payloads and updates on the wire, with evaluation separate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edge_sdk.methods import Evaluated

from ..coordinator.reports.summary import bottom_decile
from ..protocol.messages import DeviceReport, Evaluation, Kind, Receipt, RoundRecord


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over devices."""

    devices: int
    mean: float
    # Weighted by test samples.
    weighted: float
    # Population standard deviation.
    std: float
    # The floor(N/10)-th worst, from 1.
    bottom_decile: float


def accuracy_of(evaluations: Sequence[Evaluation]) -> Accuracy | None:
    """Return the accuracy over the evaluated devices; None if there is none."""
    return accuracy_over([(each.accuracy, each.num_examples) for each in evaluations])


def accuracy_over(devices: Sequence[tuple[float | None, int]]) -> Accuracy | None:
    """Return the accuracy over devices, each given as (accuracy, test samples); None if none was evaluated."""
    shares = np.array([accuracy for accuracy, _ in devices if accuracy is not None])
    weights = np.array([samples for accuracy, samples in devices if accuracy is not None])
    if len(shares) == 0:
        return None
    return Accuracy(
        devices=len(shares),
        mean=float(shares.mean()),
        weighted=float(np.average(shares, weights=weights)),
        std=float(shares.std()),
        bottom_decile=bottom_decile(shares.tolist()) or 0.0,
    )


@dataclass(frozen=True)
class Point:
    """The state of a trial after an evaluated round.

    Costs are sums over devices and rounds so far.
    """

    round: int
    accuracy: Accuracy | None
    accuracy_global: Accuracy | None
    accuracy_validation: Accuracy | None
    train_loss: float | None
    stopped: int
    bytes_up: int
    bytes_down: int
    evaluation_bytes_up: int
    evaluation_bytes_down: int
    training_flops: int
    # Sums of training and transfer.
    seconds: float
    joules_measured: float
    joules_estimated: float
    # Number of phases with unknown energy.
    seconds_without_joules: float
    wall_seconds: float
    # Notes of the coordinator.
    notes: dict[str, int] = field(default_factory=dict)
    # Counts of the method's device halves.
    counts: dict[str, int] | None = None
    # Finetune flops, only of the copies evaluated in this round. counts and finetune_flops are None in older rows.
    finetune_flops: int | None = None

    @property
    def counted(self) -> dict[str, int]:
        """All counts by name."""
        return total([self.notes, self.counts or {}])

    @property
    def flops(self) -> int:
        """FLOPs of training and of the evaluated fine-tuned copies."""
        return self.training_flops + (self.finetune_flops or 0)


@dataclass(frozen=True)
class Shifted:
    """Accuracy of a trial's last models on an additional test set of each device that trained."""

    # Its options of ``--data``.
    test_set: dict[str, bool | int | float | str]
    # Accuracy of the device's model, the personal one or else the global one.
    accuracy: Accuracy | None
    # Accuracy of each kind of model, if it exists.
    accuracy_personal: Accuracy | None
    accuracy_global: Accuracy | None
    # Accuracies per device, in the order of the trial's result.
    devices: tuple[float | None, ...]
    devices_global: tuple[float | None, ...]


def shifted(
    test_set: dict[str, bool | int | float | str], found: Sequence[Evaluated], judged_as: str | None = None
) -> Shifted:
    """Return the results on a test set. judged_as: another way to predict, as for ``own``."""
    counting = [own(each, judged_as) for each in found]
    return Shifted(
        test_set=test_set,
        accuracy=accuracy_of([each for each in counting if each]),
        accuracy_personal=accuracy_of([each.personal for each in found if each.personal]),
        accuracy_global=accuracy_of([each.global_model for each in found if each.global_model]),
        devices=tuple(each.accuracy if each else None for each in counting),
        devices_global=tuple(each.global_model.accuracy if each.global_model else None for each in found),
    )


def judged(reports: Sequence[DeviceReport]) -> list[tuple[str, Receipt]]:
    """Return the devices' evaluations of a round."""
    return [
        (each.device, each.report)
        for each in reports
        if each.kind is Kind.evaluate and isinstance(each.report, Receipt)
    ]


def own(found: Receipt | Evaluated, judged_as: str | None = None) -> Evaluation | None:
    """Return the evaluation of a device's model, the personal one or else the global one.

    judged_as: another way of the method to predict, which takes precedence.
    """
    other = found.others.get(judged_as) if judged_as else None
    return other or found.personal or found.global_model


def point_after(records: Sequence[RoundRecord], reports: Sequence[DeviceReport], judged_as: str | None = None) -> Point:
    """Return the point after the last of ``records``, whose evaluation is in ``reports``.

    judged_as: another way to predict, as for ``own``.
    """
    receipts = [receipt for _, receipt in judged(reports)]
    phases = [phase for record in records for phase in (record.download, record.train, record.upload)]
    accuracy, of_global, validation = _accuracies(receipts, judged_as)
    return Point(
        round=records[-1].round,
        accuracy=accuracy,
        accuracy_global=of_global,
        accuracy_validation=validation,
        train_loss=records[-1].train_loss,
        stopped=sum(len(record.stopped) for record in records),
        bytes_up=sum(record.bytes_up for record in records),
        bytes_down=sum(record.bytes_down for record in records),
        evaluation_bytes_up=sum(record.evaluation_bytes_up for record in records),
        evaluation_bytes_down=sum(record.evaluation_bytes_down for record in records),
        training_flops=sum(record.training_flops for record in records),
        seconds=sum(phase.seconds for phase in phases),
        joules_measured=sum(phase.joules_measured for phase in phases),
        joules_estimated=sum(phase.joules_estimated for phase in phases),
        seconds_without_joules=sum(phase.seconds_without_joules for phase in phases),
        wall_seconds=sum(record.seconds or 0.0 for record in records),
        notes=total(record.notes for record in records),
        counts=total(record.counts for record in records),
        finetune_flops=sum(receipt.finetune_flops for receipt in receipts),
    )


def rejudged(point: Point, found: Sequence[Evaluated], judged_as: str | None = None) -> Point:
    """Return a point with a repeated evaluation under other settings."""
    accuracy, of_global, validation = _accuracies(found, judged_as)
    return replace(
        point,
        accuracy=accuracy,
        accuracy_global=of_global,
        accuracy_validation=validation,
        finetune_flops=sum(each.flops for each in found),
    )


def _accuracies(
    found: Sequence[Receipt | Evaluated], judged_as: str | None
) -> tuple[Accuracy | None, Accuracy | None, Accuracy | None]:
    return (
        accuracy_of([each for each in (own(one, judged_as) for one in found) if each]),
        accuracy_of([each.global_model for each in found if each.global_model]),
        accuracy_of([each.validation for each in found if each.validation]),
    )


def total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return sums by name, including zeros."""
    found: Counter[str] = Counter()
    for each in counts:
        found.update(each)
    return dict(found)


def idle(acts: Sequence[str], records: Sequence[RoundRecord]) -> tuple[str, ...]:
    """Return the method's ``acts`` that are zero over all rounds: its mechanism was idle."""
    counted = total(each for record in records for each in (record.counts, record.notes))
    return tuple(name for name in acts if not counted.get(name))


def rounds_to(points: Sequence[Point], share: float) -> int | None:
    """Return the first evaluated round whose mean accuracy reaches ``share`` of the trial's best; None without one."""
    known = [(point.round, point.accuracy.mean) for point in points if point.accuracy]
    best = max((mean for _, mean in known), default=None)
    return next((number for number, mean in known if best is not None and mean >= share * best), None)
