"""Tables and pictures of an experiment from its recorded trials.

Every figure is the mean over seeds of what one trial came to; nothing is chosen among rounds, but for the best accuracy
so far at given uploads. Two labels are compared device by device: on the same point of the axes and with the same seed,
devices of the same name have the same data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import stats

from edge_sdk.protocol.messages import FederationSettings
from sparrow.benchmarks import plots
from sparrow.benchmarks.experiment import DEFAULT, Experiment, MethodRun, Options, Trial, Value, flat, trials
from sparrow.benchmarks.metrics import Accuracy, Point, Shifted, accuracy_over, best_within, rounds_to
from sparrow.benchmarks.rows import DeviceResult, Recorded
from sparrow.command_line.table import table

RESAMPLES = 10_000
STOP_RULE = {"early_stopping", "patience", "min_participations", "min_improvement", "stop_weight"}
ABSENT = "–"
ENDED = "†"
MIB = 2**20
MEAN_ACCURACY = "accuracy, %, mean over devices"


@dataclass(frozen=True)
class Group:
    """The trials on one point of the axes: label -> its trials in the order of the experiment's seeds."""

    title: str
    trials: dict[str, tuple[Recorded, ...]]


def groups(experiment: Experiment, recorded: Sequence[Recorded]) -> list[Group]:
    """The recorded trials that belong to the experiment, by point of the axes, each label in its order."""
    known = {each.trial.name: each for each in recorded}
    found: dict[str, dict[str, list[Recorded]]] = {}
    for expected in trials(experiment, "", {}):
        done = found.setdefault(_title(expected.axes), {}).setdefault(expected.label, [])
        if expected.name in known:
            done.append(known[expected.name])
    return [Group(title, {label: tuple(done) for label, done in by_label.items()}) for title, by_label in found.items()]


# --- comparisons -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """Accuracy of one label less that of another, device by device, in points.

    ``mean``: over devices, then over seeds. ``interval``: 95 %; Student's over the means of the seeds, or, where there
    is one seed, ``bootstrap``, the percentiles over resampled devices. Shares of pairs: of the first label's view.
    """

    seeds: int
    pairs: int
    mean: float
    interval: tuple[float, float]
    bootstrap: tuple[float, float]
    better: float
    equal: float
    worse: float


def differences(first: Sequence[Recorded], other: Sequence[Recorded]) -> dict[int, dict[str, float]]:
    """Seed -> device -> accuracy of ``first`` less that of ``other`` in points, where both were judged.

    Raises SystemExit where devices of the same name hold different data: then the rows are of different experiments.
    """
    others = {each.trial.seed: {device.device: device for device in _participants(each)} for each in other}
    found: dict[int, dict[str, float]] = {}
    for trial in first:
        for device in _participants(trial):
            match = others.get(trial.trial.seed, {}).get(device.device)
            if match is None or match.accuracy is None or device.accuracy is None:
                continue
            if match.test_examples != device.test_examples:
                raise SystemExit(
                    f"{trial.trial.name}: {device.device} has {device.test_examples} test samples here and "
                    f"{match.test_examples} under the label it is compared with; run both again"
                )
            found.setdefault(trial.trial.seed, {})[device.device] = 100 * (device.accuracy - match.accuracy)
    return found


def paired(first: Sequence[Recorded], other: Sequence[Recorded]) -> Paired | None:
    """``first`` compared with ``other``; None where they have no seed in common."""
    by_seed = differences(first, other)
    if not by_seed:
        return None
    values = [value for by_device in by_seed.values() for value in by_device.values()]
    means = [fmean(by_device.values()) for by_device in by_seed.values()]
    mean, bootstrap = fmean(means), _bootstrap(by_seed)
    return Paired(
        seeds=len(means),
        pairs=len(values),
        mean=mean,
        interval=students(means) or bootstrap,
        bootstrap=bootstrap,
        better=sum(value > 0 for value in values) / len(values),
        equal=sum(value == 0 for value in values) / len(values),
        worse=sum(value < 0 for value in values) / len(values),
    )


def students(means: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean over seeds; None for one seed, of which it knows nothing."""
    if len(means) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(means) - 1) * stats.sem(means))
    return fmean(means) - half, fmean(means) + half


def _bootstrap(by_seed: dict[int, dict[str, float]]) -> tuple[float, float]:
    """95 % percentiles of the mean over resampled devices; a device comes with all its seeds (a cluster)."""
    names = sorted({name for by_device in by_seed.values() for name in by_device})
    table = np.array([[by_device.get(name, np.nan) for name in names] for by_device in by_seed.values()])
    known = np.isfinite(table)
    draws = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), size=RESAMPLES)
    counts = draws @ known.T
    sums = draws @ np.where(known, table, 0.0).T
    # A resample without any device of a seed has the mean of the others.
    means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    resampled = means.sum(axis=1) / np.maximum((counts > 0).sum(axis=1), 1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)


def _judged_on(test_set: Options, done: Sequence[Recorded]) -> list[Recorded]:
    """The trials that were judged on that test set, as if that were what their devices are judged on."""
    found = []
    for trial in done:
        shifted = _shifted(test_set, trial)
        if shifted is not None:
            both = zip(_participants(trial), shifted.devices, strict=True)
            devices = tuple(replace(device, accuracy=accuracy) for device, accuracy in both)
            found.append(replace(trial, result=replace(trial.result, devices=devices)))
    return found


@dataclass(frozen=True)
class Saving:
    """What early stopping saved: shares of the same method's cost without it, of sums over the seeds that both have.
    None where the cost without it is zero."""

    label: str
    without: str
    device_rounds: float | None
    traffic: float | None
    training_flops: float | None
    joules_measured: float | None
    joules_estimated: float | None
    difference: Paired | None


def savings(group: Group) -> list[Saving]:
    """A saving for each pair of labels that differ in nothing but early stopping."""
    found = []
    for (label, stopping), (without, whole) in itertools.permutations(group.trials.items(), 2):
        pairs = [(a, b) for a in stopping for b in whole if a.trial.seed == b.trial.seed]
        if not pairs or not all(_differ_in_stopping(a.trial, b.trial) for a, b in pairs):
            continue

        def saved(cost: Callable[[Recorded], float], pairs: list[tuple[Recorded, Recorded]] = pairs) -> float | None:
            base = sum(cost(b) for _, b in pairs)
            return 1 - sum(cost(a) for a, _ in pairs) / base if base else None

        found.append(
            Saving(
                label=label,
                without=without,
                device_rounds=saved(_device_rounds),
                traffic=saved(lambda trial: _end(trial).bytes_up + _end(trial).bytes_down),
                training_flops=saved(lambda trial: _end(trial).training_flops),
                joules_measured=saved(lambda trial: _end(trial).joules_measured),
                joules_estimated=saved(lambda trial: _end(trial).joules_estimated),
                difference=paired(stopping, whole),
            )
        )
    return found


def _differ_in_stopping(stopping: Trial, whole: Trial) -> bool:
    rest = [{key: value for key, value in each.settings.items() if key not in STOP_RULE} for each in (stopping, whole)]
    same = (stopping.method, stopping.budgets, rest[0]) == (whole.method, whole.budgets, rest[1])
    return same and _stops(stopping) and not _stops(whole)


def _stops(trial: Trial) -> bool:
    """Whether the trial's devices stop early; what is not said is as published."""
    return bool(trial.settings.get("early_stopping", FederationSettings().early_stopping) != "off")


# --- figures of a trial ------------------------------------------------------------------------------------------


def _participants(trial: Recorded) -> list[DeviceResult]:
    return [device for device in trial.result.devices if not device.new]


def _shifted(test_set: Options, trial: Recorded) -> Shifted | None:
    """How a trial did on a test set; None where it was not judged on it."""
    return next((each for each in trial.shifts if each.test_set == test_set), None)


def _accuracy(devices: Iterable[DeviceResult]) -> Accuracy | None:
    return accuracy_over([(device.accuracy, device.test_examples) for device in devices])


def _accuracy_global(trial: Recorded) -> Accuracy | None:
    return accuracy_over([(device.accuracy_global, device.test_examples) for device in _participants(trial)])


def _end(trial: Recorded) -> Point:
    return trial.points[-1]


def _device_rounds(trial: Recorded) -> int:
    return sum(device.rounds for device in _participants(trial))


def _counting(experiment: Experiment) -> Callable[[Accuracy], float]:
    """Which mean over devices stands for a round: by test samples where those are the published set, else unweighted.

    With slices of the published test set the weighted mean of a global model is its accuracy on the whole set.
    """
    return (lambda each: each.weighted) if experiment.tests_on_published else (lambda each: each.mean)


def _stopped(trial: Recorded) -> int:
    return sum(device.stopped_round is not None for device in _participants(trial))


def _state_bytes(trial: Recorded) -> float:
    return fmean(device.state_bytes for device in _participants(trial))


def _mean(values: Iterable[float | None]) -> float | None:
    """Over what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# --- at a glance -------------------------------------------------------------------------------------------------


def summary(experiment: Experiment, recorded: Sequence[Recorded]) -> str:
    """The figures that matter most as a table of text, a line per label and point of the axes."""
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
                    _with_interval(_means(done)),
                    _of_accuracy(lambda each: each.bottom_decile)(done),
                    _plain_interval(difference.mean, difference.interval) if difference else ABSENT,
                    _mean_of(lambda trial: _end(trial).bytes_up, 1e6)(done),
                    _mean_of(lambda trial: _end(trial).bytes_down, 1e6)(done),
                    _mean_of(lambda trial: _end(trial).seconds)(done),
                ]
            )
    seeds = len(experiment.seeds)
    between = "Student's over the seeds" if seeds > 1 else "a bootstrap over devices, for there is one seed"
    return (
        f"{table(head, rows)}\n\nMeans over {experiment.devices} devices and {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}, of the model that each device ends with on its own test data; in "
        f"brackets 95 % intervals, {between}. MB are those of training."
    )


def _means(done: Sequence[Recorded]) -> list[float]:
    """Mean accuracy over devices of each trial that was judged, in per cent."""
    return [100 * each.mean for each in (_accuracy(_participants(trial)) for trial in done) if each]


def _interval_of(means: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of a mean accuracy, cut at 0 and 100 %; the mean itself for one seed."""
    low, high = students(means) or (means[0], means[0])
    return max(low, 0.0), min(high, 100.0)


def _with_interval(means: Sequence[float]) -> str:
    if not means:
        return ABSENT
    interval = _interval_of(means) if len(means) > 1 else None
    return f"{fmean(means):.1f}" + (f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else "")


# --- the page ----------------------------------------------------------------------------------------------------

Column = tuple[str, Callable[[Sequence[Recorded]], str]]


def _title(axes: dict[str, Value]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in axes.items())


def _number(value: float | None, unit: float = 1.0) -> str:
    """Three significant digits, from a thousand on whole numbers: 12,345, 123, 1.23, 0.00123."""
    if value is None:
        return ABSENT
    scaled = value / unit
    return f"{scaled:,.0f}" if abs(scaled) >= 1000 or scaled == 0 else f"{float(f'{scaled:.3g}'):g}"


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.1f}"


def _mean_of(figure: Callable[[Recorded], float | None], unit: float = 1.0) -> Callable[[Sequence[Recorded]], str]:
    return lambda done: _number(_mean(map(figure, done)), unit)


def _percent_of(figure: Callable[[Recorded], float | None]) -> Callable[[Sequence[Recorded]], str]:
    return lambda done: _percent(_mean(map(figure, done)))


def _known(figure: Callable[[Accuracy], float], accuracy: Accuracy | None) -> float | None:
    return None if accuracy is None else figure(accuracy)


def _of_accuracy(figure: Callable[[Accuracy], float]) -> Callable[[Sequence[Recorded]], str]:
    return _percent_of(lambda trial: _known(figure, _accuracy(_participants(trial))))


def _headline(done: Sequence[Recorded]) -> str:
    """Mean over seeds ± standard deviation over seeds, where there are two."""
    means = [each.mean for each in (_accuracy(_participants(trial)) for trial in done) if each]
    spread = f" ± {100 * stdev(means):.1f}" if len(means) > 1 else ""
    return f"**{_percent(_mean(means))}**{spread}" if means else ABSENT


def _nonzero(figure: Callable[[Recorded], float]) -> Callable[[Sequence[Recorded]], str]:
    """For joules and the like, whose zero says that there is no such figure."""
    return _mean_of(lambda trial: figure(trial) or None)


def _accuracy_columns(experiment: Experiment) -> list[Column]:
    columns: list[Column] = [
        ("mean, %", _headline),
        ("weighted mean, %", _of_accuracy(lambda each: each.weighted)),
        ("std over devices, points", _of_accuracy(lambda each: each.std)),
        ("bottom decile, %", _of_accuracy(lambda each: each.bottom_decile)),
        ("global model, %", _percent_of(lambda trial: _known(lambda each: each.mean, _accuracy_global(trial)))),
    ]
    if experiment.new:
        fresh = _percent_of(
            lambda trial: _known(lambda each: each.mean, _accuracy([d for d in trial.result.devices if d.new]))
        )
        columns.append(("new devices, %", fresh))
    seeds: Column = ("seeds", lambda done: f"{len(done)} of {len(experiment.seeds)}")
    return [*columns, seeds]


COST_COLUMNS: tuple[Column, ...] = (
    ("rounds", _mean_of(lambda trial: trial.result.rounds)),
    ("rounds to 80 % of best", _mean_of(lambda trial: rounds_to(trial.points, 0.8))),
    ("to 90 %", _mean_of(lambda trial: rounds_to(trial.points, 0.9))),
    ("up, MB", _mean_of(lambda trial: _end(trial).bytes_up, 1e6)),
    ("down, MB", _mean_of(lambda trial: _end(trial).bytes_down, 1e6)),
    ("evaluation up, MB", _mean_of(lambda trial: _end(trial).evaluation_bytes_up, 1e6)),
    ("evaluation down, MB", _mean_of(lambda trial: _end(trial).evaluation_bytes_down, 1e6)),
    ("training, GFLOP", _mean_of(lambda trial: _end(trial).training_flops, 1e9)),
    ("inference, MFLOP per sample", _mean_of(lambda trial: trial.result.inference_flops, 1e6)),
    ("state on a device, kB", _mean_of(_state_bytes, 1e3)),
)

TIME_COLUMNS: tuple[Column, ...] = (
    ("device seconds", _mean_of(lambda trial: _end(trial).seconds)),
    ("J measured", _nonzero(lambda trial: _end(trial).joules_measured)),
    ("J estimated", _nonzero(lambda trial: _end(trial).joules_estimated)),
    ("device seconds, energy unavailable", _mean_of(lambda trial: _end(trial).seconds_without_joules)),
    ("wall seconds", _mean_of(lambda trial: trial.result.wall_seconds)),
)

SHARE_COLUMNS: tuple[Column, ...] = (
    ("on in a batch, %", _percent_of(lambda trial: _share(trial, "values_kept"))),
    ("touched in a round, %", _percent_of(lambda trial: _share(trial, "values_touched"))),
)

STOP_COLUMNS: tuple[Column, ...] = (
    ("devices stopped", lambda done: f"{_number(fmean(map(_stopped, done)))} of {len(_participants(done[0]))}"),
    ("last round, mean", _mean_of(lambda trial: trial.result.rounds)),
    ("ended by", lambda done: ", ".join(sorted({trial.result.reason or ABSENT for trial in done}))),
    ("device-rounds trained", _mean_of(_device_rounds)),
)


def _share(trial: Recorded, count: str) -> float | None:
    """Of the model's values, those that a method counted in its device-rounds; None where it counts no such thing."""
    notes = _end(trial).notes
    return notes[count] / notes["values"] if notes.get("values") and count in notes else None


def _by_block(group: Group) -> Group:
    """The labels whose method uses some blocks of the model in a batch."""
    return Group(
        group.title,
        {label: done for label, done in group.trials.items() if any(_share(each, "values_kept") for each in done)},
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _by_label(by_label: dict[str, tuple[Recorded, ...]], columns: Sequence[Column]) -> list[str]:
    rows = [[label, *(figure(done) if done else ABSENT for _, figure in columns)] for label, done in by_label.items()]
    return _table(["", *(name for name, _ in columns)], rows)


def _plain_interval(mean: float, interval: tuple[float, float]) -> str:
    return f"{mean:+.1f} ({interval[0]:+.1f} to {interval[1]:+.1f})"


def _interval(mean: float, interval: tuple[float, float]) -> str:
    number, _, rest = _plain_interval(mean, interval).partition(" ")
    return f"**{number}** {rest}"


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in flat(settings).items())


def _tuned(experiment: Experiment, run: MethodRun, done: Sequence[Recorded]) -> str:
    """The settings that trials chose for a label, from its rows."""
    as_tuned = next((each for each in experiment.methods if each.label == run.tuned_as), run)
    keys = [key for key in experiment.grid_of(as_tuned) if key not in flat(run.settings)]
    values = {key: sorted({str(flat(trial.trial.settings).get(key, ABSENT)) for trial in done}) for key in keys}
    text = _settings({key: " or ".join(value) for key, value in values.items()}) if done else ""
    return f"{text}, as {run.tuned_as}" if text and run.tuned_as else text or ABSENT


def _head(experiment: Experiment, recorded: Sequence[Recorded], command: str) -> list[str]:
    """What was run, on what, with which settings and how."""
    axes = "; ".join(f"{key} in {', '.join(map(str, values))}" for key, values in experiment.axes.items())
    judged = f"every {experiment.evaluate_every} rounds and at the end" if experiment.evaluate_every else "at the end"
    parameters = sorted({trial.result.parameters for trial in recorded})
    facts = {
        "Task": f"{experiment.task}, {', '.join(f'{count:,}' for count in parameters)} parameters",
        "Partition": f"{_partition(experiment)}{f'; {axes}' if axes else ''}",
        "Data": _settings(experiment.data),
        "Devices": f"{experiment.devices}{f', and {experiment.new} new ones' if experiment.new else ''}",
        "Boards": ", ".join(experiment.boards),
        "Rounds": f"at most {experiment.rounds}, judged {judged}",
        "Seeds": ", ".join(map(str, experiment.seeds)),
        "Settings of all": _settings(experiment.settings),
        "Other settings": "as `sparrow publish` has them, early stopping included" if experiment.as_published else "",
        "Tuned": "" if experiment.tune is None else _tuning(experiment),
        "Machine": "; ".join(sorted({trial.result.machine for trial in recorded})),
        "Command": f"`{command}`",
    }
    lines = [f"# {experiment.title}", "", *([experiment.about.strip(), ""] if experiment.about else [])]
    lines += [*(f"- {name}: {fact}" for name, fact in facts.items() if fact), ""]
    of_label = {run.label: [each for each in recorded if each.trial.label == run.label] for run in experiment.methods}
    rows = [
        [
            run.label,
            run.method,
            ", ".join(map(str, run.budgets)),
            _settings(run.settings) or ABSENT,
            _tuned(experiment, run, of_label[run.label]),
        ]
        for run in experiment.methods
    ]
    return [*lines, *_table(["", "method", "budgets", "own settings", "tuned settings"], rows)]


def _partition(experiment: Experiment) -> str:
    return "by default, as the task deals" if experiment.partition == DEFAULT else experiment.partition


def _tuning(experiment: Experiment) -> str:
    tune = experiment.tune
    if tune is None:
        return ""
    grids = [("", tune.grid), *((f"{run.label}: ", run.grid) for run in experiment.methods)]
    grid = "; ".join(
        f"{of}{key} in {', '.join(map(str, values))}" for of, points in grids for key, values in points.items()
    )
    where = f", {_title(tune.axes)}" if tune.axes else ""
    return f"{grid}; {tune.rounds} rounds, seeds {', '.join(map(str, tune.seeds))}{where}, on validation data"


def _warnings(experiment: Experiment, recorded: Sequence[Recorded]) -> list[str]:
    """What a reader must know before any figure: trials that are missing, or not what the experiment's file says."""
    expected = {trial.name: trial for trial in trials(experiment, "", {})}
    done = {trial.trial.name: trial.trial for trial in recorded if trial.trial.name in expected}
    lines = []
    if len(done) < len(expected):
        lines += [
            f"**Incomplete: {len(done)} of {len(expected)} trials.** Means over different seeds do not compare; "
            "paired differences use the seeds that both labels have.",
            "",
        ]
    strangers = {trial.trial.name for trial in recorded} - set(expected)
    if strangers:
        lines += [f"**Left out: {len(strangers)} recorded trials that are not of this experiment (any more).**", ""]
    others = [name for name, trial in done.items() if trial.test_sets != experiment.test_sets]
    if others:
        lines += [
            f"**{len(others)} of {len(done)} trials were judged on other shifted test sets than the file says.**",
            "",
        ]
    tuned = {key for run in experiment.methods for key in experiment.grid_of(run)}
    changed: dict[str, set[str]] = {}
    for name, trial in done.items():
        for key, (ran, says) in _departures(trial, expected[name], tuned).items():
            changed.setdefault(f"{key} = {ran}, the file says {says}", set()).add(name)
    lines += [
        line
        for what, names in changed.items()
        for line in (f"**{len(names)} of {len(done)} trials ran with {what}.**", "")
    ]
    return lines


def _departures(ran: Trial, expected: Trial, tuned: set[str]) -> dict[str, tuple[Any, Any]]:
    """Where a trial was not run as the experiment's file has it: name -> (as run, as in the file)."""
    elsewhere = {"experiment", "label", "axes", "seed", "settings", "test_sets"}
    parts = [each.model_dump(exclude=elsewhere) for each in (ran, expected)]
    now, then = ({**flat(part), **flat(each.settings)} for part, each in zip(parts, (ran, expected), strict=True))
    keys = sorted((now.keys() | then.keys()) - tuned)
    return {key: (now.get(key), then.get(key)) for key in keys if now.get(key) != then.get(key)}


def _sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Every table, by kind and then by point of the axes."""
    labels = [run.label for run in experiment.methods]
    seeds = len(experiment.seeds)
    lines = [
        "## Accuracy after the last round",
        "",
        f"On {_test_data(experiment)}, of its personal model or, where the method has none, of the "
        "global one. Means over devices count each alike, weighted ones by test samples; all are means over seeds"
        f"{', ± is the standard deviation over seeds' if seeds > 1 else ''}. The bottom decile is the floor(N/10)-th "
        "worst of N devices. Nothing is chosen among rounds.",
        "",
    ]
    if len(found) > 1:
        rows = [[label, *(_headline(group.trials[label]) for group in found)] for label in labels]
        lines += _table(["mean, %", *(group.title for group in found)], rows)
    lines += _for_each(found, lambda group: _by_label(group.trials, _accuracy_columns(experiment)))
    if experiment.upload_caps:
        lines += ["## Accuracy at fixed upload", "", _upload_note(experiment), ""]
        lines += _for_each(found, lambda group: _by_label(group.trials, _upload_columns(experiment)))
    if len(labels) > 1:
        lines += [
            f"## {labels[0]} against the others",
            "",
            f"Accuracy of {labels[0]} less the other's, in points, on the same devices with the same data and seed; "
            "better, equal and worse are shares of the pairs.",
            "",
        ]
        lines += _for_each(found, lambda group: _compared(group, labels[0]))
        lines += [_interval_note(seeds), ""]
    lines += _shift_sections(experiment, found)
    saved = _for_each([group for group in found if savings(group)], _saved)
    if saved:
        lines += [
            "## What early stopping saves",
            "",
            "As a share of the cost of the same method without it, of sums over the seeds that both have; accuracy "
            "with early stopping less without.",
            "",
            *saved,
        ]
    stopping = [group for group in map(_stopping, found) if group.trials]
    if stopping:
        lines += ["## Who stopped early", ""]
        lines += _for_each(stopping, lambda group: _by_label(group.trials, STOP_COLUMNS))
    by_block = [group for group in map(_by_block, found) if group.trials]
    if by_block:
        lines += [
            "## What is used of the model",
            "",
            "Values of the blocks that were on, mean over batches, and of those that any batch of a device's round "
            "touched and that went up: shares of the model's, means over device-rounds and seeds.",
            "",
            *_for_each(by_block, lambda group: _by_label(group.trials, SHARE_COLUMNS)),
        ]
    lines += [
        "## Rounds, traffic and work",
        "",
        "Sums over rounds and devices until the last round, means over seeds; the device's state is a mean over "
        "devices. Bytes are bodies of payloads and updates as counted on the wire, MB = 10^6, evaluation apart. FLOPs "
        "are counted from shapes and masks. *Rounds to 80 %*: the first judged round at that share of the trial's own "
        "best mean accuracy, so no finer than the rounds between evaluations.",
        "",
        *_for_each(found, lambda group: _by_label(group.trials, COST_COLUMNS)),
        "## Time and energy",
        "",
        "Sums over rounds and devices, training with its transfers, means over seeds; wall seconds from the first call "
        "to the last. Of the machine named above, and devices that share it slow each other down. Joules that were "
        "measured (or derived from a measurement) and joules that were estimated are never added; seconds whose energy "
        "nobody knows stand apart.",
        "",
        *_for_each(found, lambda group: _by_label(group.trials, TIME_COLUMNS)),
    ]
    return lines


# --- shifted test sets


def _shift_sections(experiment: Experiment, found: Sequence[Group]) -> list[str]:
    """Tables of what the last models made of other test sets than their devices' own."""
    shown = [group for group in found if any(trial.shifts for done in group.trials.values() for trial in done)]
    if not shown:
        return []
    lines = []
    by_degree = {f"{100 * share:g} %": Options(shift=share) for share in experiment.shifts}
    by_source = {source: Options(test_on=source) for source in experiment.test_on}
    if by_degree:
        lines += ["## Accuracy by degree of shift", "", _SHIFT_NOTE, ""]
        lines += _for_each(shown, lambda group: _by_test_set(group, by_degree))
    if by_source:
        lines += ["## Accuracy by what the test samples were recorded with", "", _SOURCE_NOTE, ""]
        lines += _for_each(shown, lambda group: _by_test_set(group, by_source))
    first, *others = (run.label for run in experiment.methods)
    if others and (by_degree or by_source):
        lines += [
            f"{first} less the other, in points, on the same test samples of the same devices, each with the 95 % "
            "interval of the comparison above:",
            "",
            *_for_each(shown, lambda group: _compared_on(group, first, {**by_degree, **by_source})),
        ]
    if experiment.corruptions:
        lines += ["## Accuracy on corrupted images", "", _CORRUPTION_NOTE, ""]
        lines += _for_each(shown, lambda group: _by_corruption(group, experiment))
    return lines


_AS_JUDGED = (
    "The models of the last round, in per cent, mean over devices ± standard deviation over devices (of the "
    "population), both means over seeds; where a method has personal models, its global model is in a row of its own. "
    "*Average*: of the means."
)
_SHIFT_NOTE = (
    "Of each device's test samples so many are replaced by draws from all devices' test samples; nothing is trained. "
    + _AS_JUDGED
)
_SOURCE_NOTE = "The same models on test samples of each kind alone. " + _AS_JUDGED
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
    return _table(["mean, %", *columns, "Average"], rows)


def _cells(
    done: Sequence[Recorded], columns: Mapping[str, Options], figure: Callable[[Shifted], Accuracy | None]
) -> list[str]:
    """Mean ± standard deviation over devices on each test set, and the average of the means."""
    found = [_over_seeds(done, test_set, figure) for test_set in columns.values()]
    means = [fmean(each.mean for each in accuracies) for accuracies in found if accuracies]
    cells = [
        f"**{_percent(fmean(each.mean for each in accuracies))}** ± {_percent(fmean(each.std for each in accuracies))}"
        if accuracies
        else ABSENT
        for accuracies in found
    ]
    return [*cells, _percent(fmean(means)) if len(means) == len(columns) else ABSENT]


def _over_seeds(
    done: Sequence[Recorded], test_set: Options, figure: Callable[[Shifted], Accuracy | None]
) -> list[Accuracy]:
    """The accuracies of the trials on a test set; none unless all have one, for means over fewer do not compare."""
    judged = [_shifted(test_set, trial) for trial in done]
    known = [accuracy for accuracy in (figure(each) for each in judged if each) if accuracy]
    return known if len(known) == len(done) else []


def _compared_on(group: Group, first: str, columns: Mapping[str, Options]) -> list[str]:
    rows = []
    for label, done in group.trials.items():
        if label != first:
            pairs = [paired(_judged_on(each, group.trials[first]), _judged_on(each, done)) for each in columns.values()]
            rows.append([label, *(_interval(pair.mean, pair.interval) if pair else ABSENT for pair in pairs)])
    return _table([f"{first} minus", *columns], rows)


def _by_corruption(group: Group, experiment: Experiment) -> list[str]:
    """A row per kind and label, and one for each label over all kinds."""
    severities = sorted({int(each["severity"]) for each in experiment.test_sets if "severity" in each})
    kinds = [[name] for name in experiment.corruptions]
    rows = []
    for names in [*kinds, list(experiment.corruptions)] if len(kinds) > 1 else kinds:
        for label, done in group.trials.items():
            means = [
                [
                    fmean(each.mean for each in found)
                    for name in names
                    if (found := _over_seeds(done, Options(corruption=name, severity=severity), lambda e: e.accuracy))
                ]
                for severity in severities
            ]
            whole = all(len(each) == len(names) for each in means)
            cells = [_percent(fmean(each)) if len(each) == len(names) else ABSENT for each in means]
            mean = f"**{_percent(fmean(map(fmean, means)))}**" if whole else ABSENT
            rows.append([names[0].replace("_", " ") if len(names) == 1 else "all kinds", label, *cells, mean])
    return _table(["", "accuracy, %", *(f"severity {each}" for each in severities), "mean"], rows)


def _test_data(experiment: Experiment) -> str:
    """What a device is judged on, in words."""
    if not experiment.tests_on_published:
        return "each device's own test data"
    rest = ", whose weighted mean for a global model is its accuracy on the whole set" if not experiment.new else ""
    return f"each device's slice of the published test set{rest}"


def _upload_columns(experiment: Experiment) -> list[Column]:
    return [(f"{cap:g} MiB, %", _best_within(cap * MIB, _counting(experiment))) for cap in experiment.upload_caps]


def _best_within(bytes_up: float, figure: Callable[[Accuracy], float]) -> Callable[[Sequence[Recorded]], str]:
    """Mean over seeds of the best accuracy so far at that upload; absent unless every trial has one."""

    def cell(done: Sequence[Recorded]) -> str:
        best = [best_within(trial.points, bytes_up, figure) for trial in done]
        known = [100 * each for each in best if each is not None]
        if len(known) < len(best):
            return ABSENT
        interval = students(known)
        text = f"**{fmean(known):.1f}**" + (f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else "")
        return f"{text} {ENDED}" if any(_end(trial).bytes_up < bytes_up for trial in done) else text

    return cell


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


def _for_each(found: Sequence[Group], table: Callable[[Group], list[str]]) -> list[str]:
    return [line for group in found for line in ([f"### {group.title}", ""] if group.title else []) + table(group)]


def _stopping(group: Group) -> Group:
    """The labels with early stopping, of a group."""
    on = {label: done for label, done in group.trials.items() if any(_stops(trial.trial) for trial in done)}
    return Group(group.title, on)


def _compared(group: Group, first: str) -> list[str]:
    rows = []
    for label, done in group.trials.items():
        if label == first:
            continue
        pair = paired(group.trials[first], done)
        if pair is None:
            rows.append([label, *[ABSENT] * 4])
            continue
        shares = " / ".join(f"{100 * share:.0f}" for share in (pair.better, pair.equal, pair.worse))
        low, high = pair.bootstrap
        pairs = f"{pair.pairs} in {pair.seeds} {'seed' if pair.seeds == 1 else 'seeds'}"
        rows.append([label, _interval(pair.mean, pair.interval), f"{low:+.1f} to {high:+.1f}", shares, pairs])
    head = [
        f"{first} minus",
        "difference, points (95 %)",
        "bootstrap over devices, points",
        "better / equal / worse, %",
        "pairs",
    ]
    return _table(head, rows)


def _interval_note(seeds: int) -> str:
    if seeds == 1:
        return (
            f"The interval is a bootstrap over devices ({RESAMPLES:,} resamples): with one seed nothing else can be "
            "known, and it does not show how far another seed would move the mean."
        )
    return (
        "The interval in brackets is Student's over the means of the seeds (a bootstrap over devices where only one "
        "seed is done): devices of one seed share a global model and are not independent, seeds are. The bootstrap "
        f"({RESAMPLES:,} resamples of devices, each with all its seeds) shows the spread over devices alone."
    )


def _saved(group: Group) -> list[str]:
    rows = []
    for each in savings(group):
        figures = (each.device_rounds, each.traffic, each.training_flops, each.joules_measured, each.joules_estimated)
        difference = _interval(each.difference.mean, each.difference.interval) if each.difference else ABSENT
        rows.append([each.label, each.without, *map(_percent, figures), difference])
    costs = ["device-rounds, %", "bytes, %", "training FLOPs, %", "J measured, %", "J estimated, %"]
    return _table(["", "less than", *costs, "accuracy, points (95 %)"], rows)


def report_text(
    experiment: Experiment,
    recorded: Sequence[Recorded],
    *,
    command: str,
    pictures: Sequence[tuple[str, Path]] = (),
) -> str:
    """The page in Markdown. pictures: (caption, file beside the page). Raises SystemExit where nothing is recorded."""
    found = groups(experiment, recorded)
    mine = [trial for group in found for done in group.trials.values() for trial in done]
    if not mine:
        raise SystemExit(f"no trial of {experiment.title!r} is recorded yet; run it first")
    lines = [
        *_head(experiment, mine, command),
        *_warnings(experiment, recorded),
        *_sections(experiment, found),
        *(["## Pictures", ""] if pictures else []),
        *(line for caption, path in pictures for line in (f"{caption}:", "", f"![{caption}]({path.name})", "")),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write_report(experiment: Experiment, recorded: Sequence[Recorded], folder: Path, *, command: str) -> list[Path]:
    """Write the page and its pictures into ``folder``, named after the recorded experiment; returns the files.

    Raises SystemExit where nothing is recorded.
    """
    report_text(experiment, recorded, command=command)  # complain before anything is written
    name = recorded[0].trial.experiment
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(experiment, groups(experiment, recorded), folder, name)
    page = folder / f"{name}.md"
    page.write_text(report_text(experiment, recorded, command=command, pictures=pictures))
    return [page, *(path for _, path in pictures)]


# --- pictures ----------------------------------------------------------------------------------------------------


def draw(experiment: Experiment, found: Sequence[Group], folder: Path, name: str) -> list[tuple[str, Path]]:
    """Every picture that has something to show, as (caption, file)."""
    labels = list(found[0].trials)
    colour = plots.colours(labels)
    pictures = []

    path = folder / f"{name}-accuracy.png"
    seen = _panels(found, lambda group, label: _means(group.trials[label]))
    if any(seen.values()):
        intervals = {
            title: {label: _interval_of(each) for label, each in panel.items()} for title, panel in seen.items()
        }
        plots.dots(seen, intervals, colour, path, x="accuracy, %")
        between = ", the line their mean and its 95 % interval over seeds" if len(experiment.seeds) > 1 else ""
        pictures.append((f"Mean accuracy over devices: a dot for each seed{between}", path))
    figure, caps = _counting(experiment), experiment.upload_caps
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
        fmean(parts) for parts in zip(*(cost(_end(trial)) for trial in group.trials[label]), strict=True)
    ]


def _device_accuracies(done: Sequence[Recorded]) -> list[float]:
    return [100 * each.accuracy for trial in done for each in _participants(trial) if each.accuracy is not None]


def _flat(by_seed: dict[int, dict[str, float]]) -> list[float]:
    return [value for by_device in by_seed.values() for value in by_device.values()]


def curve(
    done: Sequence[Recorded],
    x: Callable[[Point], float],
    figure: Callable[[Accuracy], float],
    *,
    best: bool = False,
) -> plots.Curve | None:
    """Mean over trials of ``x`` and of accuracy in per cent, after each round that any of them judged.

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
    """Mean accuracy in per cent over the share of test samples from all devices; None unless all were judged on two."""
    bands = {
        100 * share: [100 * each.mean for each in _over_seeds(done, Options(shift=share), lambda each: each.accuracy)]
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
