"""Tables of accuracy on shifted test sets, on other recording devices, and on corrupted images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from sparrow.bench.experiment import Experiment, Options
from sparrow.bench.metrics import Accuracy, Shifted
from sparrow.bench.plots import Curve
from sparrow.bench.report.cells import ABSENT, bold_interval, for_each_group, markdown_lines, percent
from sparrow.bench.report.comparisons import paired
from sparrow.bench.report.figures import Group, over_seeds, participants, shift_of
from sparrow.bench.rows import Recorded


def shift_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return tables of the last models on other test sets than their devices' own."""
    shown = [group for group in found if any(trial.shifts for done in group.trials.values() for trial in done)]
    if not shown:
        return []
    lines = []
    by_degree = {f"{100 * share:g} %": Options(shift=share) for share in experiment.shifts}
    by_source = {source: Options(test_on=source) for source in experiment.test_on}
    if by_degree:
        lines += ["## Accuracy by degree of shift", "", _SHIFT_NOTE, ""]
        lines += for_each_group(shown, lambda group: _by_test_set(group, by_degree))
    if by_source:
        lines += ["## Accuracy by recording device of the test samples", "", _SOURCE_NOTE, ""]
        lines += for_each_group(shown, lambda group: _by_test_set(group, by_source))
    first, *others = (run.label for run in experiment.methods)
    if others and (by_degree or by_source):
        lines += [
            f"{first} less the other, in points, on the same test samples of the same devices, each with the 95 % "
            "interval as in the comparison above:",
            "",
            *for_each_group(shown, lambda group: _compared_on(group, first, {**by_degree, **by_source})),
        ]
    if experiment.corruptions:
        lines += ["## Accuracy on corrupted images", "", _CORRUPTION_NOTE, ""]
        lines += for_each_group(shown, lambda group: _by_corruption(group, experiment))
    return lines


_AS_JUDGED = (
    "The models of the last round, in per cent, mean over devices ± standard deviation over devices (of the "
    "population), both means over seeds; if a method has personal models, its global model has its own row. "
    "*Average*: of the means."
)


_SHIFT_NOTE = (
    "This share of each device's test samples is replaced by samples drawn from all devices; models are not trained "
    "further. " + _AS_JUDGED
)


_SOURCE_NOTE = "The same models on test samples of only one kind. " + _AS_JUDGED


_CORRUPTION_NOTE = (
    "Each device's own test images, corrupted as in CIFAR-10-C at severities 1 to 5. The models of the last round, in "
    "per cent, mean over devices, then over seeds; *mean*: over the severities."
)


def _by_test_set(group: Group, columns: Mapping[str, Options]) -> list[str]:
    rows = []
    for label, done in group.trials.items():
        rows.append([label, *_cells(done, columns, lambda each: each.accuracy)])
        both = [each for trial in done for each in trial.shifts if each.accuracy_personal and each.accuracy_global]
        if both:
            rows.append([f"{label}, global model", *_cells(done, columns, lambda each: each.accuracy_global)])
    return markdown_lines(["mean, %", *columns, "Average"], rows)


def _cells(
    done: Sequence[Recorded], columns: Mapping[str, Options], figure: Callable[[Shifted], Accuracy | None]
) -> list[str]:
    """Return mean ± standard deviation over devices on each test set, and the average of the means."""
    found = [over_seeds(done, test_set, figure) for test_set in columns.values()]
    means = [fmean(each.mean for each in accuracies) for accuracies in found if accuracies]
    cells = [
        f"**{percent(fmean(each.mean for each in accuracies))}** ± {percent(fmean(each.std for each in accuracies))}"
        if accuracies
        else ABSENT
        for accuracies in found
    ]
    return [*cells, percent(fmean(means)) if len(means) == len(columns) else ABSENT]


def _compared_on(group: Group, first: str, columns: Mapping[str, Options]) -> list[str]:
    rows = []
    for label, done in group.trials.items():
        if label != first:
            pairs = [paired(judged_on(each, group.trials[first]), judged_on(each, done)) for each in columns.values()]
            rows.append([label, *(bold_interval(pair.mean, pair.interval) if pair else ABSENT for pair in pairs)])
    return markdown_lines([f"{first} minus", *columns], rows)


def _by_corruption(group: Group, experiment: Experiment) -> list[str]:
    """Return a row per kind and label, and one per label over all kinds."""
    severities = sorted({int(each["severity"]) for each in experiment.test_sets if "severity" in each})
    kinds = [[name] for name in experiment.corruptions]
    rows = []
    for names in [*kinds, list(experiment.corruptions)] if len(kinds) > 1 else kinds:
        for label, done in group.trials.items():
            means = [
                [
                    fmean(each.mean for each in found)
                    for name in names
                    if (found := over_seeds(done, Options(corruption=name, severity=severity), lambda e: e.accuracy))
                ]
                for severity in severities
            ]
            whole = all(len(each) == len(names) for each in means)
            cells = [percent(fmean(each)) if len(each) == len(names) else ABSENT for each in means]
            mean = f"**{percent(fmean(map(fmean, means)))}**" if whole else ABSENT
            rows.append([names[0].replace("_", " ") if len(names) == 1 else "all kinds", label, *cells, mean])
    return markdown_lines(["", "accuracy, %", *(f"severity {each}" for each in severities), "mean"], rows)


def judged_on(test_set: Options, done: Sequence[Recorded]) -> list[Recorded]:
    """Return the trials that were evaluated on that test set, with its accuracies as the devices' own."""
    found = []
    for trial in done:
        shifted = shift_of(test_set, trial)
        if shifted is not None:
            both = zip(participants(trial), shifted.devices, strict=True)
            devices = tuple(replace(device, accuracy=accuracy) for device, accuracy in both)
            found.append(replace(trial, result=replace(trial.result, devices=devices)))
    return found


def shift_curve(done: Sequence[Recorded], shares: Sequence[float]) -> Curve | None:
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
    return Curve(
        list(known),
        [fmean(band) for band in known.values()],
        list(map(min, known.values())),
        list(map(max, known.values())),
    )
