"""The main results as a text table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ...command_line.table import table
from ..experiment import Experiment
from ..rows import Recorded
from .cells import ABSENT, accuracy_cell, mean_cell, plain_interval
from .comparisons import accuracy_interval, paired
from .figures import end_of, groups, trial_means
from .idle import idle_lines


def summary(experiment: Experiment, recorded: Sequence[Recorded]) -> str:
    """Return the main results as a text table with a line per label and point of the axes."""
    found = groups(experiment, recorded)
    first = experiment.methods[0].label
    head = ["", "accuracy, %", "worst tenth, %", f"{first} minus it, points", "up, MB", "down, MB", "device seconds"]
    rows = []
    for group in found:
        for label, done in group.trials.items():
            if not done:
                continue
            difference = None if label == first else paired(group.trials[first], done)
            rows.append(
                [
                    f"{group.title}: {label}" if group.title else label,
                    _with_interval(trial_means(done)),
                    accuracy_cell(lambda each: each.bottom_decile)(done),
                    plain_interval(difference.mean, difference.interval) if difference else ABSENT,
                    mean_cell(lambda trial: end_of(trial).bytes_up, 1e6)(done),
                    mean_cell(lambda trial: end_of(trial).bytes_down, 1e6)(done),
                    mean_cell(lambda trial: end_of(trial).seconds)(done),
                ]
            )
    seeds = len({each.trial.seed for group in found for done in group.trials.values() for each in done})
    between = "Student's over the seeds" if seeds > 1 else "over the devices of the one seed only (bootstrap)"
    idle = [line.replace("*", "") for line in idle_lines(recorded) if line]
    return (
        f"{table(head, rows)}\n\nMeans over {experiment.devices} devices and {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}, of the model that each device ends with on its own test data; in "
        f"brackets 95 % intervals, {between}. MB are those of training." + "".join(f"\n{line}" for line in idle)
    )


def _with_interval(means: Sequence[float]) -> str:
    if not means:
        return ABSENT
    interval = accuracy_interval(means) if len(means) > 1 else None
    return f"{fmean(means):.1f}" + (f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else "")
