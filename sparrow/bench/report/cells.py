"""Columns and cells of the tables: a column is a title and a function from the trials of a label to text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median, stdev

from ..experiment import Experiment
from ..metrics import Accuracy, rounds_to
from ..rows import Recorded
from .figures import (
    Group,
    accuracy_among,
    device_rounds,
    end_of,
    finetune_flops,
    global_accuracy,
    judged_flops,
    known_mean,
    mean_state_bytes,
    participants,
    stopped_devices,
)

ABSENT = "–"


Column = tuple[str, Callable[[Sequence[Recorded]], str]]


def three_digits(value: float | None, unit: float = 1.0) -> str:
    """Format with three significant digits, or as an integer from 1,000."""
    if value is None:
        return ABSENT
    scaled = value / unit
    return f"{scaled:,.0f}" if abs(scaled) >= 1000 or scaled == 0 else f"{float(f'{scaled:.3g}'):g}"


def percent(share: float | None) -> str:
    """Format a fraction as per cent with one decimal."""
    return ABSENT if share is None else f"{100 * share:.1f}"


def mean_cell(figure: Callable[[Recorded], float | None], unit: float = 1.0) -> Callable[[Sequence[Recorded]], str]:
    """Return a cell with a figure's mean over trials, divided by ``unit``."""
    return lambda done: three_digits(known_mean(map(figure, done)), unit)


def percent_cell(figure: Callable[[Recorded], float | None]) -> Callable[[Sequence[Recorded]], str]:
    """Return a cell with a fraction's mean over trials, in per cent."""
    return lambda done: percent(known_mean(map(figure, done)))


def known_figure(figure: Callable[[Accuracy], float], accuracy: Accuracy | None) -> float | None:
    """Return the figure of an accuracy; None if the accuracy is None."""
    return None if accuracy is None else figure(accuracy)


def accuracy_cell(figure: Callable[[Accuracy], float]) -> Callable[[Sequence[Recorded]], str]:
    """Return a cell with the mean over trials of a figure of the participants' accuracy, in per cent."""
    return percent_cell(lambda trial: known_figure(figure, accuracy_among(participants(trial))))


def headline(done: Sequence[Recorded], budget: float | None = None) -> str:
    """Format the mean over seeds, with ± standard deviation from two seeds. budget: only devices with this budget."""
    counted = ([each for each in participants(trial) if budget in (None, each.budget)] for trial in done)
    means = [each.mean for each in map(accuracy_among, counted) if each]
    spread = f" ± {100 * stdev(means):.1f}" if len(means) > 1 else ""
    return f"**{percent(known_mean(means))}**{spread}" if means else ABSENT


def nonzero_cell(figure: Callable[[Recorded], float]) -> Callable[[Sequence[Recorded]], str]:
    """Return a cell of a figure whose zero means unknown, such as joules."""
    return mean_cell(lambda trial: figure(trial) or None)


def accuracy_columns(experiment: Experiment) -> list[Column]:
    """Return the columns of the accuracy table."""
    columns: list[Column] = [
        ("mean, %", headline),
        ("weighted mean, %", accuracy_cell(lambda each: each.weighted)),
        ("std over devices, points", accuracy_cell(lambda each: each.std)),
        ("bottom decile, %", accuracy_cell(lambda each: each.bottom_decile)),
        ("global model, %", percent_cell(lambda trial: known_figure(lambda each: each.mean, global_accuracy(trial)))),
    ]
    if experiment.new:
        fresh = percent_cell(
            lambda trial: known_figure(
                lambda each: each.mean, accuracy_among([d for d in trial.result.devices if d.new])
            )
        )
        columns.append(("new devices, %", fresh))
    seeds: Column = ("seeds", lambda done: f"{len(done)} of {len(experiment.seeds)}")
    return [*columns, seeds]


def _with_fine_tuning(done: Sequence[Recorded]) -> str:
    tuned = [finetune_flops(trial) for trial in done]
    if any(each is None for each in tuned):
        return "not counted"
    return three_digits(
        fmean(end_of(trial).training_flops + (each or 0) for trial, each in zip(done, tuned, strict=True)), 1e9
    )


def _mean_and_range(flops: Sequence[int]) -> str:
    if not flops:
        return "not counted"
    low = min(flops)
    high = max(flops)
    spread = f" ({three_digits(low, 1e6)} to {three_digits(high, 1e6)})" if low < high else ""
    return three_digits(fmean(flops), 1e6) + spread


COST_COLUMNS: tuple[Column, ...] = (
    ("rounds", mean_cell(lambda trial: trial.result.rounds)),
    ("rounds to 80 % of best", mean_cell(lambda trial: rounds_to(trial.points, 0.8))),
    ("to 90 %", mean_cell(lambda trial: rounds_to(trial.points, 0.9))),
    ("up, MB", mean_cell(lambda trial: end_of(trial).bytes_up, 1e6)),
    ("down, MB", mean_cell(lambda trial: end_of(trial).bytes_down, 1e6)),
    ("evaluation up, MB", mean_cell(lambda trial: end_of(trial).evaluation_bytes_up, 1e6)),
    ("evaluation down, MB", mean_cell(lambda trial: end_of(trial).evaluation_bytes_down, 1e6)),
    ("training, GFLOP", mean_cell(lambda trial: end_of(trial).training_flops, 1e9)),
    ("with fine-tuning, GFLOP", lambda done: _with_fine_tuning(done)),
    ("inference, MFLOP per sample: whole model", mean_cell(lambda trial: trial.result.inference_flops, 1e6)),
    ("judged models", lambda done: _mean_and_range([flops for trial in done for flops in judged_flops(trial)])),
    ("state on a device, kB", mean_cell(mean_state_bytes, 1e3)),
)


TIME_COLUMNS: tuple[Column, ...] = (
    ("device seconds", mean_cell(lambda trial: end_of(trial).seconds)),
    ("J measured", nonzero_cell(lambda trial: end_of(trial).joules_measured)),
    ("J estimated", nonzero_cell(lambda trial: end_of(trial).joules_estimated)),
    ("device seconds, energy unavailable", mean_cell(lambda trial: end_of(trial).seconds_without_joules)),
    ("wall seconds", mean_cell(lambda trial: trial.result.wall_seconds)),
)


def _stops(done: Sequence[Recorded]) -> str:
    rounds = [each.stopped_round for trial in done for each in participants(trial) if each.stopped_round is not None]
    return f"{min(rounds)} / {median(rounds):g} / {max(rounds)}" if rounds else ABSENT


STOP_COLUMNS: tuple[Column, ...] = (
    (
        "devices stopped",
        lambda done: f"{three_digits(fmean(map(stopped_devices, done)))} of {len(participants(done[0]))}",
    ),
    ("stopped after round, least / median / most", lambda done: _stops(done)),
    ("last round, mean", mean_cell(lambda trial: trial.result.rounds)),
    ("ended by", lambda done: ", ".join(sorted({trial.result.reason or ABSENT for trial in done}))),
    ("device-rounds trained", mean_cell(device_rounds)),
)


def markdown_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table as lines."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def label_table(by_label: dict[str, tuple[Recorded, ...]], columns: Sequence[Column]) -> list[str]:
    """Return a Markdown table with a row per label."""
    rows = [[label, *(figure(done) if done else ABSENT for _, figure in columns)] for label, done in by_label.items()]
    return markdown_lines(["", *(name for name, _ in columns)], rows)


def plain_interval(mean: float, interval: tuple[float, float]) -> str:
    """Format a signed mean with its interval."""
    return f"{mean:+.1f} ({interval[0]:+.1f} to {interval[1]:+.1f})"


def bold_interval(mean: float, interval: tuple[float, float]) -> str:
    """Format a signed mean, in bold, with its interval."""
    number, _, rest = plain_interval(mean, interval).partition(" ")
    return f"**{number}** {rest}"


def for_each_group(found: Sequence[Group], table: Callable[[Group], list[str]]) -> list[str]:
    """Return the tables of all groups, each under its title."""
    return [line for group in found for line in ([f"### {group.title}", ""] if group.title else []) + table(group)]
