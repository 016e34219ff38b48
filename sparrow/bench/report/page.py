"""The Markdown page of an experiment: tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..experiment import Experiment
from ..rows import Recorded
from .cells import (
    ABSENT,
    COST_COLUMNS,
    STOP_COLUMNS,
    TIME_COLUMNS,
    accuracy_columns,
    bold_interval,
    for_each_group,
    headline,
    label_table,
    markdown_lines,
)
from .comparisons import RESAMPLES, paired
from .facts import head_lines, tuning_lines, warning_lines
from .figures import Group, groups, participants, stops_early
from .idle import idle_lines
from .pictures import draw

More = Callable[[Experiment, Sequence[Group]], list[str]]
"""A function that returns the lines of further tables."""
Draw = Callable[[Experiment, Sequence[Group], Path, str], list[tuple[str, Path]]]
"""A function that draws pictures into a folder, with a prefix for file names, and returns (caption, file) of each."""


def no_more(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return no further tables."""
    return []


def _sections(experiment: Experiment, found: Sequence[Group], more: More) -> list[str]:
    return [
        *accuracy_sections(experiment, found),
        *comparison_sections(experiment, found),
        *budget_sections(experiment, found),
        *more(experiment, found),
        *_cost_sections(found),
    ]


def accuracy_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return the tables of accuracy after the last round."""
    labels = [run.label for run in experiment.methods]
    seeds = len(experiment.seeds)
    lines = [
        "## Accuracy after the last round",
        "",
        f"On {_test_data(experiment)}, of its personal model or, if the method has none, of the "
        "global one. Means over devices are unweighted, weighted means are by test samples; all are means over seeds"
        f"{', ± is the standard deviation over seeds' if seeds > 1 else ''}. The bottom decile is the floor(N/10)-th "
        "worst of N devices. No round is selected.",
        "",
    ]
    if len(found) > 1:
        rows = [[label, *(headline(group.trials[label]) for group in found)] for label in labels]
        lines += markdown_lines(["mean, %", *(group.title for group in found)], rows)
    lines += for_each_group(found, lambda group: label_table(group.trials, accuracy_columns(experiment)))
    return lines


def comparison_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return the tables of the first label against the others."""
    labels = [run.label for run in experiment.methods]
    if len(labels) < 2:
        return []
    lines = [
        f"## {labels[0]} against the others",
        "",
        f"Accuracy of {labels[0]} minus the other's, in points, on the same devices with the same data and seed; "
        "better, equal and worse are shares of the pairs.",
        "",
    ]
    lines += for_each_group(found, lambda group: _compared(group, labels[0]))
    lines += [_interval_note(len(experiment.seeds)), ""]
    return lines


def budget_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return a table of the first label against the others for each device budget."""
    first, *others = experiment.methods
    if not others or len(set(first.budgets)) < 2:
        return []
    return [
        "## By budget",
        "",
        f"The same, by the device's budget under {first.label}; its budget under the other label may differ.",
        "",
        *for_each_group(found, lambda group: _compared_by_budget(group, first.label)),
    ]


def _cost_sections(found: Sequence[Group]) -> list[str]:
    lines = []
    stopping = [group for group in map(_stopping, found) if group.trials]
    if stopping:
        lines += ["## Early stops", ""]
        lines += for_each_group(stopping, lambda group: label_table(group.trials, STOP_COLUMNS))
    lines += [
        "## Rounds, traffic and work",
        "",
        "Sums over rounds and devices until the last round, means over seeds. The device's state is a mean over "
        "devices. Bytes are the bodies of payloads and updates as counted on the wire, without evaluation; MB = 10^6. "
        "FLOPs are counted from shapes and masks; *with fine-tuning* adds the copies that were evaluated at the end. "
        "*Judged models*: the cost of one sample on a device without zero weights, as in a narrow network: mean over "
        "devices and seeds, with minimum and maximum in parentheses. *Rounds to 80 %*: the first evaluated round with "
        "this share of the trial's best mean accuracy.",
        "",
        *for_each_group(found, lambda group: label_table(group.trials, COST_COLUMNS)),
        "## Time and energy",
        "",
        "Sums over rounds and devices of training with its transfers, means over seeds. Wall seconds are from the "
        "first call to the last, on the machine named above, on which devices slow each other down. Measured joules "
        "(or derived from a measurement) and estimated joules are never added; seconds with unknown energy are "
        "separate.",
        "",
        *for_each_group(found, lambda group: label_table(group.trials, TIME_COLUMNS)),
    ]
    return lines


def _test_data(experiment: Experiment) -> str:
    if not experiment.tests_on_published:
        return "each device's own test data"
    rest = ", whose weighted mean for a global model is its accuracy on the whole set" if not experiment.new else ""
    return f"each device's slice of the published test set{rest}"


def _stopping(group: Group) -> Group:
    on = {label: done for label, done in group.trials.items() if any(stops_early(trial.trial) for trial in done)}
    return Group(group.title, on)


def _compared(group: Group, first: str) -> list[str]:
    rows = []
    for label, done in group.trials.items():
        if label == first:
            continue
        pair = paired(group.trials[first], done)
        if pair is None:
            rows.append([label, *[ABSENT] * 3])
            continue
        shares = " / ".join(f"{100 * share:.0f}" for share in (pair.better, pair.equal, pair.worse))
        pairs = f"{pair.pairs} in {pair.seeds} {'seed' if pair.seeds == 1 else 'seeds'}"
        rows.append([label, bold_interval(pair.mean, pair.interval), shares, pairs])
    head = [
        f"{first} minus",
        "difference, points (95 %)",
        "better / equal / worse, %",
        "pairs",
    ]
    return markdown_lines(head, rows)


def _compared_by_budget(group: Group, first: str) -> list[str]:
    mine = group.trials[first]
    budgets = sorted({device.budget for trial in mine for device in participants(trial)})
    rows = [[f"{first}, %", *(headline(mine, budget) for budget in budgets)]]
    for label, done in group.trials.items():
        pairs = [] if label == first else [paired(mine, done, budget) for budget in budgets]
        if pairs:
            cells = [bold_interval(pair.mean, pair.interval) if pair else ABSENT for pair in pairs]
            rows.append([f"minus {label}", *cells])
    return markdown_lines(["", *(f"p = {budget:g}" for budget in budgets)], rows)


def _interval_note(seeds: int) -> str:
    if seeds == 1:
        return (
            f"The interval is over the devices of one seed (bootstrap, {RESAMPLES:,} resamples). It does not include "
            "the variation between seeds."
        )
    return (
        "The interval in parentheses is Student's over the means of the seeds. Seeds are the independent units, "
        "because devices of one seed share a global model. With only one finished seed, the interval is over the "
        f"devices of this seed (bootstrap, {RESAMPLES:,} resamples)."
    )


def report_text(
    experiment: Experiment,
    recorded: Sequence[Recorded],
    *,
    command: str,
    pictures: Sequence[tuple[str, Path]] = (),
    tuning: Mapping[str, Any] | None = None,
    more: More = no_more,
) -> str:
    """Return the page in Markdown. pictures: (caption, file). Raises SystemExit if nothing is recorded."""
    found = groups(experiment, recorded)
    mine = [trial for group in found for done in group.trials.values() for trial in done]
    if not mine:
        raise SystemExit(f"no trial of {experiment.title!r} is recorded yet; run it first")
    lines = [
        *head_lines(experiment, mine, command),
        *warning_lines(experiment, recorded),
        *idle_lines(mine),
        *tuning_lines(experiment, tuning or {}),
        *_sections(experiment, found, more),
        *(["## Pictures", ""] if pictures else []),
        *(line for caption, path in pictures for line in (f"{caption}:", "", f"![{caption}]({path.name})", "")),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write_report(
    experiment: Experiment,
    recorded: Sequence[Recorded],
    folder: Path,
    *,
    command: str,
    tuning: Mapping[str, Any] | None = None,
    more: More = no_more,
    pictures: Draw = draw,
) -> list[Path]:
    """Write the page and its pictures, named after the recorded experiment; return the files.

    tuning, more: texts, as for ``report_text``. Raises SystemExit if no trial is recorded.
    """
    # Raise before any file is written.
    report_text(experiment, recorded, command=command)
    name = recorded[0].trial.experiment
    folder.mkdir(parents=True, exist_ok=True)
    drawn = pictures(experiment, groups(experiment, recorded), folder, name)
    page = folder / f"{name}.md"
    page.write_text(report_text(experiment, recorded, command=command, pictures=drawn, tuning=tuning, more=more))
    return [page, *(path for _, path in drawn)]
