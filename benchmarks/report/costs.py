"""Labels at equal cost, and early stopping compared with fixed numbers of rounds.

Accuracy at a cost is interpolated between two evaluated rounds of a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np

from benchmarks.report.savings import stopping_pairs
from sparrow.bench.experiment import Experiment
from sparrow.bench.metrics import Accuracy, Point
from sparrow.bench.report.cells import ABSENT, bold_interval, for_each_group, markdown_lines, percent
from sparrow.bench.report.comparisons import students
from sparrow.bench.report.figures import Group, counting, end_of, finetune_flops
from sparrow.bench.rows import Recorded

Cost = Callable[[Point], float]
Figure = Callable[[Accuracy], float]
Pairs = Sequence[tuple[Recorded, Recorded]]

COSTS: Mapping[str, Cost] = {
    "upload": lambda point: point.bytes_up,
    "FLOPs": lambda point: point.flops,
    "estimated joules": lambda point: point.joules_estimated,
}
STOPPING_COSTS: Mapping[str, Cost] = {
    "FLOPs": COSTS["FLOPs"],
    "bytes": lambda point: point.bytes_up + point.bytes_down,
    "estimated joules": COSTS["estimated joules"],
}


def accuracy_at(
    points: Sequence[Point], cost: Callable[[Point], float], spent: float, figure: Callable[[Accuracy], float]
) -> float | None:
    """Return the accuracy at that cost, interpolated between evaluated rounds; None before the first or after the last
    one.
    """
    known = [(cost(point), figure(point.accuracy)) for point in points if point.accuracy]
    if not known or not known[0][0] <= spent <= known[-1][0]:
        return None
    costs, accuracies = zip(*known, strict=True)
    return float(np.interp(spent, costs, accuracies))


def at_equal_cost(pairs: Pairs, cost: Cost, figure: Figure) -> list[float]:
    """Return, for each pair of the same seed, the first trial's accuracy minus the other's in points, at the final cost
    of the cheaper one; empty unless every pair has both.
    """
    found = []
    for first, other in pairs:
        spent = min(cost(end_of(first)), cost(end_of(other)))
        both = [accuracy_at(trial.points, cost, spent, figure) for trial in (first, other)]
        if not spent or both[0] is None or both[1] is None:
            return []
        found.append(100 * (both[0] - both[1]))
    return found


def cost_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return the tables of the first label against the others at equal cost."""
    first, *others = (run.label for run in experiment.methods)
    if not others:
        return []

    everything = [trial for group in found for done in group.trials.values() for trial in done]
    costs = _known(COSTS, everything)

    def table(group: Group) -> list[str]:
        rows = []
        for label in others:
            seeds = {trial.trial.seed: trial for trial in group.trials[label]}
            pairs = [(each, seeds[each.trial.seed]) for each in group.trials[first] if each.trial.seed in seeds]
            cells = (_difference(at_equal_cost(pairs, cost, counting(experiment))) for cost in costs.values())
            rows.append([label, *cells])
        return markdown_lines([f"{first} minus", *(f"at equal {name}, points" for name in costs)], rows)

    old = any(finetune_flops(trial) is None for trial in everything)
    note = _NOTE + (" " + _OLD if old else "")
    return ["## At equal cost", "", note, "", *for_each_group(found, table)]


_NOTE = (
    "Accuracy of the first label minus the other's, both at the final cost of the cheaper one, interpolated linearly "
    "between evaluated rounds. The parentheses contain Student's 95 % interval over seeds, if there are two or more. "
    "FLOPs include training and the evaluated fine-tuned copies; joules include training and its transfers. "
    f"{ABSENT}: no evaluated round has such a low cost, or the cost is unknown."
)
_OLD = "These rows are from before fine-tuned copies were counted, so their FLOPs do not include them."


def _known(costs: Mapping[str, Cost], done: Iterable[Recorded]) -> dict[str, Cost]:
    """Return the costs that any of the trials has."""
    ends = [end_of(trial) for trial in done]
    return {name: cost for name, cost in costs.items() if any(map(cost, ends))}


def _difference(values: Sequence[float]) -> str:
    if not values:
        return ABSENT
    interval = students(values)
    return bold_interval(fmean(values), interval) if interval else f"**{values[0]:+.1f}**"


def stopping_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return the tables that compare early stopping with a fixed number of rounds of the same method."""
    shown = [group for group in found if any(True for _ in stopping_pairs(group))]
    if not shown:
        return []
    figure = counting(experiment)
    return [
        "## Early stopping beside a fixed horizon",
        "",
        _HORIZON_NOTE,
        "",
        *for_each_group(shown, lambda group: _equal(group, figure)),
        "The same, by fixed horizons: a run that ends for all devices after so many rounds, and the run to the end, of "
        "which the savings are shares.",
        "",
        *for_each_group(shown, lambda group: _horizons(group, figure)),
    ]


_HORIZON_NOTE = (
    "Accuracy with early stopping minus accuracy of the same method without it at the same cost, which is that of a "
    "run that ends earlier for all devices; between judged rounds by a straight line, in brackets Student's 95 % "
    "interval over seeds, where there are two or more. A rule that is worth having is above zero."
)


def _equal(group: Group, figure: Figure) -> list[str]:
    costs = _stopping_costs(group)
    rows = [
        [label, without, *(_difference(at_equal_cost(pairs, cost, figure)) for cost in costs.values())]
        for label, without, pairs in stopping_pairs(group)
    ]
    return markdown_lines(["", "less than", *(f"at equal {name}, points" for name in costs)], rows)


def _stopping_costs(group: Group) -> dict[str, Cost]:
    return _known(STOPPING_COSTS, (trial for _, _, pairs in stopping_pairs(group) for pair in pairs for trial in pair))


def _horizons(group: Group, figure: Figure) -> list[str]:
    rows = []
    costs = _stopping_costs(group)
    for without in {without: None for _, without, _ in stopping_pairs(group)}:
        whole = group.trials[without]
        for number in sorted({point.round for trial in whole for point in trial.points}):
            ended = [next((point for point in trial.points if point.round == number), None) for trial in whole]
            known = [(point, end_of(trial)) for point, trial in zip(ended, whole, strict=True) if point]
            if len(known) == len(whole) and number < end_of(whole[0]).round:
                rows.append([f"{without}, first {number} rounds", *_saved(known, figure, costs)])
    for label, _, pairs in stopping_pairs(group):
        rows.append([label, *_saved([(end_of(first), end_of(other)) for first, other in pairs], figure, costs)])
    return markdown_lines(["", "accuracy, points", *(f"{name} saved, %" for name in costs)], rows)


def _saved(pairs: Sequence[tuple[Point, Point]], figure: Figure, costs: Mapping[str, Cost]) -> list[str]:
    """Return the first point's accuracy minus the other's, and the saved share of each cost, over pairs."""
    lost = [100 * (figure(a.accuracy) - figure(b.accuracy)) for a, b in pairs if a.accuracy and b.accuracy]
    cells = [f"{fmean(lost):+.1f}" if lost else ABSENT]
    for cost in costs.values():
        base = sum(cost(b) for _, b in pairs)
        cells.append(percent(1 - sum(cost(a) for a, _ in pairs) / base if base else None))
    return cells
