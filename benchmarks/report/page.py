"""The page of an experiment in Markdown: all tables, and its pictures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparrow.benchmarks.experiment import Experiment
from sparrow.benchmarks.report.analyses import analysis_sections
from sparrow.benchmarks.report.cells import (
    ABSENT,
    COST_COLUMNS,
    ENDED,
    SHARE_COLUMNS,
    STOP_COLUMNS,
    TIME_COLUMNS,
    accuracy_columns,
    bold_interval,
    for_each_group,
    headline,
    label_table,
    markdown_lines,
    percent,
    target_columns,
    upload_columns,
)
from sparrow.benchmarks.report.comparisons import RESAMPLES, paired, savings
from sparrow.benchmarks.report.costs import cost_sections, stopping_sections
from sparrow.benchmarks.report.facts import head_lines, tuning_lines, warning_lines
from sparrow.benchmarks.report.figures import Group, groups, participants, share_counted, stops_early
from sparrow.benchmarks.report.mechanism import idle_lines, mechanism_sections
from sparrow.benchmarks.report.pictures import KINDS, draw
from sparrow.benchmarks.report.shifts import shift_sections
from sparrow.benchmarks.rows import Recorded


def _by_block(group: Group) -> Group:
    """Return the labels whose method uses some blocks of the model in a batch."""
    return Group(
        group.title,
        {
            label: done
            for label, done in group.trials.items()
            if any(share_counted(each, "values_kept") for each in done)
        },
    )


def _sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Return every table, by kind and then by point of the axes."""
    labels = [run.label for run in experiment.methods]
    seeds = len(experiment.seeds)
    lines = [
        "## Accuracy after the last round",
        "",
        f"On {_test_data(experiment)}, of its personal model or, if the method has none, of the "
        "global one. Means over devices are unweighted, weighted means are by test samples; all are means over seeds"
        f"{', ± is the standard deviation over seeds' if seeds > 1 else ''}. The bottom decile is the floor(N/10)-th "
        "worst of N devices. Nothing is chosen among rounds.",
        "",
    ]
    if len(found) > 1:
        rows = [[label, *(headline(group.trials[label]) for group in found)] for label in labels]
        lines += markdown_lines(["mean, %", *(group.title for group in found)], rows)
    lines += for_each_group(found, lambda group: label_table(group.trials, accuracy_columns(experiment)))
    if experiment.upload_caps:
        lines += ["## Accuracy at fixed upload", "", _upload_note(experiment), ""]
        lines += for_each_group(found, lambda group: label_table(group.trials, upload_columns(experiment)))
    if experiment.accuracy_targets:
        lines += ["## Upload until an accuracy", "", _target_note(experiment), ""]
        lines += for_each_group(
            found, lambda group: label_table(group.trials, target_columns(experiment, group.trials[labels[0]]))
        )
    if len(labels) > 1:
        lines += [
            f"## {labels[0]} against the others",
            "",
            f"Accuracy of {labels[0]} minus the other's, in points, on the same devices with the same data and seed; "
            "better, equal and worse are shares of the pairs.",
            "",
        ]
        lines += for_each_group(found, lambda group: _compared(group, labels[0]))
        lines += [_interval_note(seeds), ""]
        if len(set(experiment.methods[0].budgets)) > 1:
            lines += [
                "## By budget",
                "",
                f"The same by the budget that a device has under {labels[0]}; under the other it may have another.",
                "",
                *for_each_group(found, lambda group: _compared_by_budget(group, labels[0])),
            ]
    lines += cost_sections(experiment, found)
    lines += shift_sections(experiment, found)
    saved = for_each_group([group for group in found if savings(group)], _saved)
    if saved:
        lines += [
            "## Savings of early stopping",
            "",
            "As a share of the cost of the same method without it, of sums over the seeds that both have; accuracy "
            "with early stopping minus accuracy without.",
            "",
            *saved,
            *stopping_sections(experiment, found),
        ]
    stopping = [group for group in map(_stopping, found) if group.trials]
    if stopping:
        lines += ["## Early stops", ""]
        lines += for_each_group(stopping, lambda group: label_table(group.trials, STOP_COLUMNS))
    by_block = [group for group in map(_by_block, found) if group.trials]
    if by_block:
        lines += [
            "## Used share of the model",
            "",
            "Values of the blocks that were on, mean over batches, and of those that any batch of a device's round "
            "touched and that went up: shares of the model's, means over device-rounds and seeds.",
            "",
            *for_each_group(by_block, lambda group: label_table(group.trials, SHARE_COLUMNS)),
        ]
    lines += [
        "## Rounds, traffic and work",
        "",
        "Sums over rounds and devices until the last round, means over seeds; the device's state is a mean over "
        "devices. Bytes are bodies of payloads and updates as counted on the wire, MB = 10^6, evaluation apart. FLOPs "
        "are counted from shapes and masks; *with fine-tuning* adds the copies that were judged at the end. *Judged "
        "models*: what one sample costs on a device, weights of zero left out, as in a narrow network: mean over "
        "devices and seeds, in brackets the least and the most. *Rounds to 80 %*: the first evaluated round at that "
        "share of the trial's own best mean accuracy, so no finer than the rounds between evaluations.",
        "",
        *for_each_group(found, lambda group: label_table(group.trials, COST_COLUMNS)),
        "## Time and energy",
        "",
        "Sums over rounds and devices, training with its transfers, means over seeds; wall seconds from the first call "
        "to the last. These are of the machine named above, on which devices slow each other down. Joules that were "
        "measured (or derived from a measurement) and joules that were estimated are never added; seconds with "
        "unknown energy are separate.",
        "",
        *for_each_group(found, lambda group: label_table(group.trials, TIME_COLUMNS)),
        *mechanism_sections(found),
        *analysis_sections(found),
    ]
    return lines


def _test_data(experiment: Experiment) -> str:
    """Return the test data of a device in words."""
    if not experiment.tests_on_published:
        return "each device's own test data"
    rest = ", whose weighted mean for a global model is its accuracy on the whole set" if not experiment.new else ""
    return f"each device's slice of the published test set{rest}"


def _upload_note(experiment: Experiment) -> str:
    mean = "by test samples" if experiment.tests_on_published else "each alike"
    seeds = " In brackets Student's 95 % interval over seeds." if len(experiment.seeds) > 1 else ""
    return (
        f"The best accuracy so far, devices counted {mean}, at the last judged round up to which all devices together "
        "have uploaded at most so much: bodies of updates as counted on the wire, MiB = 2^20 bytes, evaluation apart. "
        "The best is chosen on the test data, as papers do, so it lies above what a deployment could choose, and no "
        f"finer than the rounds between evaluations; mean over seeds.{seeds} {ENDED}: a trial ended before the cap, so "
        f"it is the best of fewer bytes. {ABSENT}: no judged round fits."
    )


def _target_note(experiment: Experiment) -> str:
    mean = "by test samples" if experiment.tests_on_published else "each alike"
    return (
        f"All devices' uploads until the first judged round with at least that accuracy, devices counted {mean}: "
        "bodies of updates as counted on the wire, MiB = 2^20 bytes, evaluation apart. Mean over seeds, and each; "
        f"{ABSENT}: not reached. Then the same over {experiment.methods[0].label}'s with the same seed, where both "
        "reached it. Whoever is judged more often is found earlier."
    )


def _stopping(group: Group) -> Group:
    """Return the labels of a group with early stopping."""
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
            f"The interval is over the devices of one seed only (bootstrap, {RESAMPLES:,} resamples): with one seed "
            "nothing else can be known, and it does not show how far another seed would move the mean."
        )
    return (
        "The interval in brackets is Student's over the means of the seeds: devices of one seed share a global model, "
        "and those of another have other data, so seeds are the independent units, and so few of them are not "
        "resampled. Where only one seed is done, it is over the devices of that seed only (bootstrap, "
        f"{RESAMPLES:,} resamples)."
    )


def _saved(group: Group) -> list[str]:
    rows = []
    for each in savings(group):
        figures = (each.device_rounds, each.traffic, each.training_flops, each.joules_measured, each.joules_estimated)
        difference = bold_interval(each.difference.mean, each.difference.interval) if each.difference else ABSENT
        rows.append([each.label, each.without, *map(percent, figures), difference])
    costs = ["device-rounds, %", "bytes, %", "training FLOPs, %", "J measured, %", "J estimated, %"]
    return markdown_lines(["", "less than", *costs, "accuracy, points (95 %)"], rows)


def report_text(
    experiment: Experiment,
    recorded: Sequence[Recorded],
    *,
    command: str,
    pictures: Sequence[tuple[str, Path]] = (),
    tuning: Mapping[str, Any] | None = None,
) -> str:
    """Return the page in Markdown. pictures: (caption, file). tuning: the record that ``tune`` has written.

    Raises SystemExit if nothing is recorded.
    """
    found = groups(experiment, recorded)
    mine = [trial for group in found for done in group.trials.values() for trial in done]
    if not mine:
        raise SystemExit(f"no trial of {experiment.title!r} is recorded yet; run it first")
    lines = [
        *head_lines(experiment, mine, command),
        *warning_lines(experiment, recorded),
        *idle_lines(mine),
        *tuning_lines(experiment, tuning or {}),
        *_sections(experiment, found),
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
    kinds: Collection[str] = KINDS,
) -> list[Path]:
    """Write the page and its pictures into ``folder``, named after the recorded experiment; return the files.

    tuning: as in ``report_text``. kinds: of the pictures. Raises SystemExit where nothing is recorded.
    """
    report_text(experiment, recorded, command=command)  # complain before anything is written
    name = recorded[0].trial.experiment
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(experiment, groups(experiment, recorded), folder, name, kinds)
    page = folder / f"{name}.md"
    page.write_text(report_text(experiment, recorded, command=command, pictures=pictures, tuning=tuning))
    return [page, *(path for _, path in pictures)]
