"""The beginning of a page: task, settings, machine and command, and warnings about missing or different trials."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.training.engine import TorchEngine

from ..experiment import DEFAULT, Experiment, MethodRun, Trial, flat, trials
from ..provenance import Provenance
from ..rows import Recorded
from ..tuning import open_edges
from .cells import ABSENT, markdown_lines
from .figures import axes_title

TITLES = {"onnx": OnnxEngine.title, "torch": TorchEngine.title}


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in flat(settings).items())


def _tuned(experiment: Experiment, run: MethodRun, done: Sequence[Recorded]) -> str:
    # Read from the rows, because the file has only the grid.
    as_tuned = next((each for each in experiment.methods if each.label == run.tuned_as), run)
    keys = [key for key in experiment.grid_of(as_tuned) if key not in flat(run.settings)]
    values = {key: sorted({str(flat(trial.trial.settings).get(key, ABSENT)) for trial in done}) for key in keys}
    text = _settings({key: " or ".join(value) for key, value in values.items()}) if done else ""
    return f"{text}, as {run.tuned_as}" if text and run.tuned_as else text or ABSENT


def _engines(recorded: Sequence[Recorded]) -> str:
    """Describe the engines, with their labels if there are several."""
    labels: dict[str, list[str]] = {}
    for each in recorded:
        named = labels.setdefault(TITLES[each.result.engine], [])
        named += [each.trial.label] * (each.trial.label not in named)
    if len(labels) < 2:
        return "".join(labels)
    return "; ".join(f"{title} trained {', '.join(named)}" for title, named in sorted(labels.items()))


def _computed_by(recorded: Sequence[Recorded]) -> str:
    counted = Counter(_described(each.result.provenance) for each in recorded)
    if len(counted) < 2:
        return "".join(counted)
    return "; ".join(f"{count} of {len(recorded)} trials: {text}" for text, count in sorted(counted.items()))


def _described(computed: Provenance | None) -> str:
    if computed is None:
        return "not recorded, the rows are older"
    commit = f"commit {computed.commit[:10]}" if computed.commit else "no commit"
    changed = f" with {computed.changes} changed files" if computed.changes else ""
    packages = ", ".join(f"{name} {number}" for name, number in computed.packages.items())
    flags = f" ({' '.join(computed.flags)})" if computed.flags else ""
    return f"{commit}{changed}, {packages}, {computed.processor}{flags}, threads: {computed.threads}"


def head_lines(experiment: Experiment, recorded: Sequence[Recorded], command: str) -> list[str]:
    """Return the page's head: task, data, settings, machine and command."""
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
        "Engine": _engines(recorded),
        "Machine": "; ".join(sorted({trial.result.machine for trial in recorded})),
        "Computed by": _computed_by(recorded),
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
    return [*lines, *markdown_lines(["", "method", "budgets", "own settings", "tuned settings"], rows)]


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
    where = f", {axes_title(tune.axes)}" if tune.axes else ""
    rounds = f"{tune.rounds} rounds" if tune.rounds else "half of a run's rounds"
    return f"{grid}; {rounds}, seeds {', '.join(map(str, tune.seeds))}{where}, on validation data"


def tuning_lines(experiment: Experiment, record: Mapping[str, Any]) -> list[str]:
    """Return the table of chosen settings. record: record written by ``tune``."""
    chosen = record.get("tuned", {})
    scores = record.get("validation_accuracy", {})
    rows = []
    for run in experiment.tuned:
        if run.label in chosen:
            points = scores[run.label]
            best = chosen[run.label]
            rounds = record.get("rounds", {}).get(run.label, experiment.tuning_rounds(run))
            half = experiment.half(run)
            idle = sum(score is None for score in points.values())
            edges = open_edges(map(json.loads, points), best)
            rows.append(
                [
                    run.label,
                    _settings(best),
                    f"{100 * points[json.dumps(best)]:.1f}",
                    f"{len(points)}{f', {idle} idle' if idle else ''}",
                    f"{rounds} of {experiment.rounds_of(run)}{', **too short**' if rounds < half else ''}",
                    f"**at the edge**: {', '.join(sorted(edges))}" if edges else "inside",
                ]
            )
    if not rows:
        return []
    head = ["", "chosen", "validation accuracy, %", "points tried", "rounds", "rates and epochs"]
    return ["## Tuning", "", _TUNING_NOTE, "", *markdown_lines(head, rows)]


_TUNING_NOTE = (
    "Chosen by accuracy on validation data at the end of a tuning run; test data are not used. *Too short*: less "
    "than half of the run. *At the edge*: the best learning rate or number of epochs is the largest or smallest tried."
)


def warning_lines(experiment: Experiment, recorded: Sequence[Recorded]) -> list[str]:
    """Return warnings about missing trials and trials that differ from the experiment's file."""
    expected = {trial.name: trial for trial in trials(experiment, "", {})}
    done = {trial.trial.name: trial.trial for trial in recorded if trial.trial.name in expected}
    lines = []
    if len(done) < len(expected):
        lines += [
            f"**Incomplete: {len(done)} of {len(expected)} trials.** Means over different seeds are not comparable; "
            "paired differences use the seeds that both labels have.",
            "",
        ]
    unexpected = {trial.trial.name for trial in recorded} - set(expected)
    if unexpected:
        lines += [f"**Left out: {len(unexpected)} recorded trials that are not of this experiment (any more).**", ""]
    others = [name for name, trial in done.items() if trial.test_sets != experiment.test_sets]
    if others:
        lines += [
            f"**{len(others)} of {len(done)} trials were evaluated on other shifted test sets than in the file.**",
            "",
        ]
    tuned = {key for run in experiment.methods for key in experiment.grid_of(run)}
    changed: dict[str, set[str]] = {}
    for name, trial in done.items():
        for key, (ran, says) in _departures(trial, expected[name], tuned).items():
            changed.setdefault(f"{key} = {ran}, in the file {says}", set()).add(name)
    lines += [
        line
        for what, names in changed.items()
        for line in (f"**{len(names)} of {len(done)} trials ran with {what}.**", "")
    ]
    return lines


def _departures(ran: Trial, expected: Trial, tuned: set[str]) -> dict[str, tuple[Any, Any]]:
    elsewhere = {"experiment", "label", "axes", "seed", "settings", "test_sets"}
    parts = [each.model_dump(exclude=elsewhere) for each in (ran, expected)]
    now, then = ({**flat(part), **flat(each.settings)} for part, each in zip(parts, (ran, expected), strict=True))
    keys = sorted((now.keys() | then.keys()) - tuned)
    return {key: (now.get(key), then.get(key)) for key in keys if now.get(key) != then.get(key)}
