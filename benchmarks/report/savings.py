"""Savings of early stopping: a method's costs with it, compared with the same method without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparrow.bench.experiment import Trial
from sparrow.bench.report.cells import ABSENT, bold_interval, for_each_group, markdown_lines, percent
from sparrow.bench.report.comparisons import Paired, paired
from sparrow.bench.report.figures import Group, device_rounds, end_of, stops_early
from sparrow.bench.rows import Recorded

STOP_RULE = {
    *("early_stopping", "patience", "min_participations", "min_improvement", "stop_weight"),
    "joules_per_device",
}


@dataclass(frozen=True)
class Saving:
    """Savings of early stopping, as shares of the same method's cost without it, over the seeds that both have.

    None if that cost is zero.
    """

    label: str
    without: str
    device_rounds: float | None
    traffic: float | None
    training_flops: float | None
    joules_measured: float | None
    joules_estimated: float | None
    difference: Paired | None


def savings(group: Group) -> list[Saving]:
    """Return a saving for each pair of labels that differ only in early stopping."""
    found = []
    for label, without, pairs in stopping_pairs(group):

        def saved(cost: Callable[[Recorded], float], pairs: list[tuple[Recorded, Recorded]] = pairs) -> float | None:
            base = sum(cost(b) for _, b in pairs)
            return 1 - sum(cost(a) for a, _ in pairs) / base if base else None

        found.append(
            Saving(
                label=label,
                without=without,
                device_rounds=saved(device_rounds),
                traffic=saved(lambda trial: end_of(trial).bytes_up + end_of(trial).bytes_down),
                training_flops=saved(lambda trial: end_of(trial).training_flops),
                joules_measured=saved(lambda trial: end_of(trial).joules_measured),
                joules_estimated=saved(lambda trial: end_of(trial).joules_estimated),
                difference=paired(group.trials[label], group.trials[without]),
            )
        )
    return found


def stopping_pairs(group: Group) -> Iterator[tuple[str, str, list[tuple[Recorded, Recorded]]]]:
    """Yield each pair of labels that differ only in early stopping, and their trials of the same seeds."""
    for (label, stopping), (without, whole) in itertools.permutations(group.trials.items(), 2):
        pairs = [(a, b) for a in stopping for b in whole if a.trial.seed == b.trial.seed]
        if pairs and all(_differ_in_stopping(a.trial, b.trial) for a, b in pairs):
            yield label, without, pairs


def _differ_in_stopping(stopping: Trial, whole: Trial) -> bool:
    """Return True if the trials differ only in early stopping."""
    rest = [{key: value for key, value in each.settings.items() if key not in STOP_RULE} for each in (stopping, whole)]
    same = (stopping.method, stopping.budgets, rest[0]) == (whole.method, whole.budgets, rest[1])
    return same and stops_early(stopping) and not stops_early(whole)


def saving_sections(found: Sequence[Group]) -> list[str]:
    """Return the tables of savings, of groups with such pairs."""
    saved = for_each_group([group for group in found if savings(group)], _saved)
    if not saved:
        return []
    note = (
        "Savings are shares of the same method's cost without early stopping, from sums over the seeds that both have. "
        "Accuracy is with early stopping minus without."
    )
    return ["## Savings of early stopping", "", note, "", *saved]


def _saved(group: Group) -> list[str]:
    rows = []
    for each in savings(group):
        figures = (each.device_rounds, each.traffic, each.training_flops, each.joules_measured, each.joules_estimated)
        difference = bold_interval(each.difference.mean, each.difference.interval) if each.difference else ABSENT
        rows.append([each.label, each.without, *map(percent, figures), difference])
    costs = ["device-rounds, %", "bytes, %", "training FLOPs, %", "J measured, %", "J estimated, %"]
    return markdown_lines(["", "less than", *costs, "accuracy, points (95 %)"], rows)
