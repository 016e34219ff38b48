"""Pictures of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from sparrow.benchmarks import plots
from sparrow.benchmarks.experiment import Experiment, Options
from sparrow.benchmarks.metrics import Accuracy, Point
from sparrow.benchmarks.report.comparisons import accuracy_interval, differences
from sparrow.benchmarks.report.figures import MIB, Group, counting, end_of, over_seeds, participants, trial_means
from sparrow.benchmarks.rows import Recorded

MEAN_ACCURACY = "accuracy, %, mean over devices"


def draw(experiment: Experiment, found: Sequence[Group], folder: Path, name: str) -> list[tuple[str, Path]]:
    """Draw every picture with content; return (caption, file) of each."""
    labels = list(found[0].trials)
    colour = plots.colours(labels)
    pictures = []

    path = folder / f"{name}-accuracy.png"
    seen = _panels(found, lambda group, label: trial_means(group.trials[label]))
    if any(seen.values()):
        intervals = {
            title: {label: accuracy_interval(each) for label, each in panel.items()} for title, panel in seen.items()
        }
        plots.dots(seen, intervals, colour, path, x="accuracy, %")
        between = ", the line their mean and its 95 % interval over seeds" if len(experiment.seeds) > 1 else ""
        pictures.append((f"Mean accuracy over devices: a dot for each seed{between}", path))
    figure, caps = counting(experiment), experiment.upload_caps
    by_round = _panels(found, lambda group, label: curve(group.trials[label], lambda point: point.round, figure))
    by_upload = _panels(
        found,
        lambda group, label: curve(
            group.trials[label], lambda point: point.bytes_up / (MIB if caps else 1e6), figure, best=bool(caps)
        ),
    )
    accuracies = _panels(found, lambda group, label: _device_accuracies(group.trials[label]))
    first = labels[0]
    against = _panels(
        found,
        lambda group, label: None if label == first else _flat(differences(group.trials[first], group.trials[label])),
    )
    if any(by_round.values()):
        judged = "accuracy on the test set, %" if experiment.tests_on_published else MEAN_ACCURACY
        band = "mean over seeds, the band from the worst to the best seed"
        path = folder / f"{name}-rounds.png"
        plots.curves(by_round, colour, path, x="round", y=judged)
        pictures.append((f"Accuracy by round: {band}", path))
        path = folder / f"{name}-upload.png"
        if caps:
            plots.curves(by_upload, colour, path, x="uploaded by all devices, MiB", y=f"best {judged}", marks=caps)
            pictures.append((f"Best accuracy so far by upload, up to the largest cap: {band}; dotted: the caps", path))
        else:
            plots.curves(by_upload, colour, path, x="uploaded by all devices, MB", y=judged)
            pictures.append((f"Accuracy by upload: {band}", path))
    by_shift = _panels(found, lambda group, label: shift_curve(group.trials[label], experiment.shifts))
    if any(by_shift.values()):
        path = folder / f"{name}-shift.png"
        plots.curves(by_shift, colour, path, x="test samples from all devices, %", y=MEAN_ACCURACY)
        pictures.append(
            ("Accuracy by degree of shift: mean over seeds, the band from the worst to the best seed", path)
        )
    if any(accuracies.values()):
        path = folder / f"{name}-devices.png"
        plots.histograms(accuracies, colour, path, x="accuracy of a device, %")
        pictures.append(("Accuracy of each device after the last round, all seeds; the dashed line is the mean", path))
    if any(against.values()):
        path = folder / f"{name}-differences.png"
        plots.sorted_differences(against, colour, path, y=f"{first} minus the other, points")
        pictures.append((f"{first} against the others, device by device, all seeds; above zero it is better", path))
    path = folder / f"{name}-costs.png"
    costs: dict[str, Callable[[Point], list[float]]] = {
        "training traffic, MB": lambda end: [end.bytes_up / 1e6, end.bytes_down / 1e6],
        "training, GFLOP": lambda end: [end.training_flops / 1e9],
        "device seconds": lambda end: [end.seconds],
    }
    plots.bars({what: _panels(found, _cost_of(cost)) for what, cost in costs.items()}, colour, path)
    pictures.append(("Costs of a trial, mean over seeds; of traffic, up is strong and down pale", path))
    return pictures


def _panels(
    found: Sequence[Group], shape: Callable[[Group, str], plots.Shape | None]
) -> dict[str, dict[str, plots.Shape]]:
    panels = {}
    for group in found:
        shapes = {label: shape(group, label) for label in group.trials}
        panels[group.title] = {label: each for label, each in shapes.items() if each}
    return panels


def _cost_of(cost: Callable[[Point], list[float]]) -> Callable[[Group, str], list[float]]:
    return lambda group, label: [
        fmean(parts) for parts in zip(*(cost(end_of(trial)) for trial in group.trials[label]), strict=True)
    ]


def _device_accuracies(done: Sequence[Recorded]) -> list[float]:
    return [100 * each.accuracy for trial in done for each in participants(trial) if each.accuracy is not None]


def _flat(by_seed: dict[int, dict[str, float]]) -> list[float]:
    return [value for by_device in by_seed.values() for value in by_device.values()]


def curve(
    done: Sequence[Recorded],
    x: Callable[[Point], float],
    figure: Callable[[Accuracy], float],
    *,
    best: bool = False,
) -> plots.Curve | None:
    """Return the mean over trials of ``x`` and of accuracy in per cent, after each round that any of them evaluated.

    ``best``: each trial's best accuracy so far instead. A trial that has ended stays where it ended: neither its models
    nor its costs change any more. Rounds before the first evaluation of every trial are left out. None where nothing
    was judged.
    """
    known = [[(point, 100 * figure(point.accuracy)) for point in trial.points if point.accuracy] for trial in done]
    if not known or not all(known):
        return None
    xs, bands = [], []
    for number in sorted({point.round for judged in known for point, _ in judged}):
        reached = [[each for each in judged if each[0].round <= number] for judged in known]
        if all(reached):
            xs.append(fmean(x(judged[-1][0]) for judged in reached))
            bands.append([max(each for _, each in judged) if best else judged[-1][1] for judged in reached])
    return plots.Curve(
        xs, [fmean(band) for band in bands], [min(band) for band in bands], [max(band) for band in bands]
    )


def shift_curve(done: Sequence[Recorded], shares: Sequence[float]) -> plots.Curve | None:
    """Return the mean accuracy in per cent over the share of test samples from all devices; None unless all trials
    have two.
    """
    bands = {
        100 * share: [100 * each.mean for each in over_seeds(done, Options(shift=share), lambda each: each.accuracy)]
        for share in sorted(shares)
    }
    known = {share: band for share, band in bands.items() if band}
    if len(known) < 2:
        return None
    return plots.Curve(
        list(known),
        [fmean(band) for band in known.values()],
        list(map(min, known.values())),
        list(map(max, known.values())),
    )
