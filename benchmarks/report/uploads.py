"""Tables of accuracy at fixed uploads, and of uploads until an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from sparrow.bench.experiment import Experiment
from sparrow.bench.metrics import Accuracy, Point
from sparrow.bench.report.cells import ABSENT, Column, for_each_group, label_table
from sparrow.bench.report.comparisons import students
from sparrow.bench.report.figures import MIB, Group, counting, end_of
from sparrow.bench.rows import Recorded

ENDED = "†"


def upload_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return the tables that the experiment's file asks for."""
    lines = []
    if experiment.upload_caps:
        lines += ["## Accuracy at fixed upload", "", _upload_note(experiment), ""]
        lines += for_each_group(found, lambda group: label_table(group.trials, upload_columns(experiment)))
    if experiment.accuracy_targets:
        first = experiment.methods[0].label
        lines += ["## Upload until an accuracy", "", _target_note(experiment), ""]
        lines += for_each_group(
            found, lambda group: label_table(group.trials, target_columns(experiment, group.trials[first]))
        )
    return lines


def best_within(points: Sequence[Point], bytes_up: float, figure: Callable[[Accuracy], float]) -> float | None:
    """Return the best accuracy of the evaluated rounds with at most ``bytes_up`` uploaded; None if there is none."""
    known = [figure(point.accuracy) for point in points if point.accuracy and point.bytes_up <= bytes_up]
    return max(known, default=None)


def upload_until(points: Sequence[Point], accuracy: float, figure: Callable[[Accuracy], float]) -> int | None:
    """Return the bytes uploaded until the first evaluated round with this accuracy; None if it is never reached."""
    return next((each.bytes_up for each in points if each.accuracy and figure(each.accuracy) >= accuracy), None)


def upload_columns(experiment: Experiment) -> list[Column]:
    """Return a column per upload cap."""
    return [(f"{cap:g} MiB, %", _best_within(cap * MIB, counting(experiment))) for cap in experiment.upload_caps]


def _best_within(bytes_up: float, figure: Callable[[Accuracy], float]) -> Callable[[Sequence[Recorded]], str]:
    """Return a cell with the mean over seeds of the best accuracy so far at that upload; absent unless every trial
    has one.
    """

    def cell(done: Sequence[Recorded]) -> str:
        best = [best_within(trial.points, bytes_up, figure) for trial in done]
        known = [100 * each for each in best if each is not None]
        if len(known) < len(best):
            return ABSENT
        interval = students(known)
        text = f"**{fmean(known):.1f}**" + (f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else "")
        return f"{text} {ENDED}" if any(end_of(trial).bytes_up < bytes_up for trial in done) else text

    return cell


def target_columns(experiment: Experiment, first: Sequence[Recorded]) -> list[Column]:
    """Return two columns per accuracy target: the upload until it, and that as a share of ``first``'s, seed by seed."""
    figure = counting(experiment)
    name = experiment.methods[0].label
    return [
        column
        for target in experiment.accuracy_targets
        for column in (
            (f"until {100 * target:g} %, MiB", _until(target, figure)),
            (f"of {name}'s", _share_until(target, figure, first)),
        )
    ]


def _until(target: float, figure: Callable[[Accuracy], float]) -> Callable[[Sequence[Recorded]], str]:
    """Return a cell with the mean over seeds of the upload until an accuracy, if every trial reached it, and each."""

    def cell(done: Sequence[Recorded]) -> str:
        found = [upload_until(trial.points, target, figure) for trial in done]
        known = [each / MIB for each in found if each is not None]
        each = ", ".join(ABSENT if one is None else f"{one / MIB:.1f}" for one in found)
        return f"**{fmean(known):.1f}** ({each})" if len(known) == len(found) else f"{ABSENT} ({each})"

    return cell


def _share_until(
    target: float, figure: Callable[[Accuracy], float], first: Sequence[Recorded]
) -> Callable[[Sequence[Recorded]], str]:
    """Return a cell with the upload until an accuracy over that of ``first``'s trial of the same seed: the mean over
    seeds in which both reached it, and each."""
    basis = {trial.trial.seed: upload_until(trial.points, target, figure) for trial in first}

    def cell(done: Sequence[Recorded]) -> str:
        pairs = [(upload_until(trial.points, target, figure), basis.get(trial.trial.seed)) for trial in done]
        shares = [one / other for one, other in pairs if one is not None and other]
        return f"**{fmean(shares):.2f}** ({', '.join(f'{each:.2f}' for each in shares)})" if shares else ABSENT

    return cell


def _upload_note(experiment: Experiment) -> str:
    mean = "weighted by test samples" if experiment.tests_on_published else "unweighted"
    seeds = " The parentheses contain Student's 95 % interval over seeds." if len(experiment.seeds) > 1 else ""
    return (
        f"The best accuracy so far, {mean} over devices, at the last evaluated round with at most this total upload of "
        "all devices. Upload is the bodies of updates as counted on the wire, without evaluation; MiB = 2^20 bytes. "
        "The best is chosen on the test data, as in papers, so it is higher than a deployment could select. Only "
        f"evaluated rounds are considered. Means over seeds.{seeds} {ENDED}: a trial ended before the limit, so the "
        f"best has fewer bytes. {ABSENT}: no evaluated round fits."
    )


def _target_note(experiment: Experiment) -> str:
    mean = "weighted by test samples" if experiment.tests_on_published else "unweighted"
    return (
        f"The total upload of all devices until the first evaluated round with at least this accuracy, {mean} over "
        "devices. Upload is the bodies of updates as counted on the wire, without evaluation; MiB = 2^20 bytes. The "
        f"mean over seeds, and each seed; {ABSENT}: not reached. The last columns divide it by "
        f"{experiment.methods[0].label}'s upload with the same seed, if both reached it. Methods that are evaluated "
        "more often appear to reach it earlier."
    )
