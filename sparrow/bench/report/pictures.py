"""Pictures of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from .. import plots
from ..experiment import Experiment
from ..metrics import Accuracy, Point
from ..rows import Recorded
from .comparisons import accuracy_interval
from .figures import MIB, Group, counting, end_of, trial_means

MEAN_ACCURACY = "accuracy, %, mean over devices"
BAND = "mean over seeds, the band from the worst to the best seed"


KINDS = ("accuracy", "curves")
"""Kinds of pictures; each is a suffix of the file name."""


def draw(
    experiment: Experiment, found: Sequence[Group], folder: Path, name: str, kinds: Collection[str] = KINDS
) -> list[tuple[str, Path]]:
    """Draw the pictures of these kinds that have data; return (caption, file) of each."""
    labels = list(found[0].trials)
    colour = plots.colours(labels)
    pictures = []

    def wanted(kind: str, panels: Mapping[str, Mapping[str, object]]) -> Path | None:
        return folder / f"{name}-{kind}.png" if kind in kinds and any(panels.values()) else None

    seen = panels_of(found, lambda group, label: trial_means(group.trials[label]))
    if path := wanted("accuracy", seen):
        intervals = {
            title: {label: accuracy_interval(each) for label, each in panel.items()} for title, panel in seen.items()
        }
        plots.dots(seen, intervals, colour, path, x="accuracy, %")
        between = ", the line their mean and its 95 % interval over seeds" if len(experiment.seeds) > 1 else ""
        pictures.append((f"Mean accuracy over devices: a dot for each seed{between}", path))
    figure = counting(experiment)
    caps = experiment.upload_caps
    judged = "accuracy on the test set, %" if experiment.tests_on_published else MEAN_ACCURACY
    by_round = panels_of(found, lambda group, label: curve(group.trials[label], lambda point: point.round, figure))
    if path := wanted("curves", by_round):
        by_cost = _by_cost(found, figure, judged, caps)
        plots.rows_of_curves([(by_round, "round", judged, ()), *by_cost], colour, path)
        best = "; of upload the best so far, up to the largest cap (dotted: the caps)" if caps else ""
        pictures.append((f"Accuracy by round, upload, FLOPs and, if known, estimated joules: {BAND}{best}", path))
    return pictures


def _by_cost(
    found: Sequence[Group], figure: Callable[[Accuracy], float], judged: str, caps: Sequence[float]
) -> list[tuple[dict[str, dict[str, plots.Curve]], str, str, Sequence[float]]]:
    """Return rows of panels for ``plots.rows_of_curves``: accuracy over each known cost."""
    costs: list[tuple[str, Callable[[Point], float], Sequence[float]]] = [
        (
            f"uploaded by all devices, {'MiB' if caps else 'MB'}",
            lambda point: point.bytes_up / (MIB if caps else 1e6),
            caps,
        ),
        ("FLOPs of all devices, TFLOP", lambda point: point.flops / 1e12, ()),
        ("estimated joules of all devices, kJ", lambda point: point.joules_estimated / 1e3, ()),
    ]
    rows = []
    for x, cost, marks in costs:
        panels = panels_of(found, _curve_of(cost, figure, best=bool(marks)))
        if any(panels.values()):
            rows.append((panels, x, f"best {judged}" if marks else judged, marks))
    return rows


def _curve_of(
    cost: Callable[[Point], float], figure: Callable[[Accuracy], float], *, best: bool
) -> Callable[[Group, str], plots.Curve | None]:
    def draw_curve(group: Group, label: str) -> plots.Curve | None:
        done = group.trials[label]
        known = all(trial.points and cost(end_of(trial)) for trial in done)
        return curve(done, cost, figure, best=best) if known else None

    return draw_curve


def panels_of(
    found: Sequence[Group], shape: Callable[[Group, str], plots.Shape | None]
) -> dict[str, dict[str, plots.Shape]]:
    """Return group title -> label -> shape, without empty shapes."""
    panels = {}
    for group in found:
        shapes = {label: shape(group, label) for label in group.trials}
        panels[group.title] = {label: each for label, each in shapes.items() if each}
    return panels


def curve(
    done: Sequence[Recorded],
    x: Callable[[Point], float],
    figure: Callable[[Accuracy], float],
    *,
    best: bool = False,
) -> plots.Curve | None:
    """Return the means over trials of ``x`` and accuracy, in per cent, after each evaluated round.

    best: use each trial's best accuracy so far. A trial that has ended keeps its last values. The curve begins when all
    trials have been evaluated.
    """
    known = [[(point, 100 * figure(point.accuracy)) for point in trial.points if point.accuracy] for trial in done]
    if not known or not all(known):
        return None
    xs = []
    bands = []
    for number in sorted({point.round for judged in known for point, _ in judged}):
        reached = [[each for each in judged if each[0].round <= number] for judged in known]
        if all(reached):
            xs.append(fmean(x(judged[-1][0]) for judged in reached))
            bands.append([max(each for _, each in judged) if best else judged[-1][1] for judged in reached])
    return plots.Curve(
        xs, [fmean(band) for band in bands], [min(band) for band in bands], [max(band) for band in bands]
    )
