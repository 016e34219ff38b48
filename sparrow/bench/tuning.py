"""``tune``: choice of settings on validation data.

A tuning run has at least half of the run's rounds. Trials in which the method's mechanism had no effect (a count of
``DeviceMethod.acts`` is zero) are ignored. If the best rate is at an edge of the grid, the grid is extended there by
its own ratio, with the best point's other settings, until both neighbours of the best rate were tried, or
``Tuning.extensions`` times. Epochs are not extended: the largest always fits best.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tqdm import tqdm

from edge_sdk.errors import SdkError

from ..command_line.exits import Exit
from . import rows
from .experiment import BadExperiment, Experiment, MethodRun, Trial, Value, grid_points, tuning_trial
from .rows import Recorded
from .runner import Where, run_trial, without_fine_tuning

EXTENDED = ("rate",)
"""Suffixes of the settings whose grids are extended."""

Point = dict[str, Value]


class NothingActed(SdkError):
    """A method's mechanism had no effect in any tuning trial."""

    exit_code = Exit.USAGE


@dataclass
class Choice:
    """The search for one label's settings."""

    rounds: int
    # Validation accuracy by point, None if the mechanism was idle.
    scores: dict[str, float | None] = field(default_factory=dict)
    # Points outside the grid.
    beyond: list[Point] = field(default_factory=list)

    @property
    def best(self) -> Point:
        """The first point of the best validation accuracy."""
        known = {point: score for point, score in self.scores.items() if score is not None}
        best: Point = json.loads(max(known, key=known.__getitem__))
        return best

    @property
    def open_edges(self) -> dict[str, list[Value]]:
        """Setting -> untried neighbours of its best value."""
        return open_edges(map(json.loads, self.scores), self.best)


def tune(
    experiment: Experiment, name: str, where: Where, *, scale: float, resume: bool, only: Sequence[str] = ()
) -> dict[str, Point]:
    """Try every point of the grid for every method and return the best settings by label.

    only: labels to tune (empty: all); with ``resume`` the choices for others stay. The criterion is the final accuracy
    on validation data, a mean over devices and seeds. Writes ``tuning.jsonl`` and ``tuned.json``. Raises BadExperiment,
    NothingActed.
    """
    if experiment.tune is None:
        raise SystemExit(f"{name} has no [tune]; add it with a grid")
    for run in experiment.tuned:
        if experiment.tuning_rounds(run) < experiment.half(run):
            raise BadExperiment(
                f"{name}: [tune] rounds is {experiment.tune.rounds}; {run.label} is tuned for at least half of its "
                f"run, {experiment.half(run)} rounds; leave rounds out, or ask for more"
            )
    file = where.folder / "tuning.jsonl"
    if not resume:
        shutil.rmtree(where.folder / "trials", ignore_errors=True)
        file.unlink(missing_ok=True)
    done = {_key(each.trial): each for each in rows.read(file)}
    choices = {}
    with tqdm(desc=f"tuning {name}", unit="trial", disable=None) as bar:

        def result(trial: Trial, others: Sequence[Trial]) -> Recorded | None:
            if _key(trial) not in done and (not only or trial.label in only):
                bar.set_postfix_str(trial.name)
                if bar.disable:  # no terminal: a line for each trial
                    print(f"tuning {name}: {trial.name}", file=sys.stderr, flush=True)
                retuned = [each for each in others if _key(each) not in done and _train_alike(each, trial)]
                for each in run_trial([trial], where, retuned):
                    done[_key(each.trial)] = each
                    rows.append(file, each)
                    bar.update()
            return done.get(_key(trial))

        for run in experiment.tuned:
            choice = search(experiment, name, run, result, scale)
            if choice is not None:
                choices[run.label] = choice
    record = {
        "tuned": {label: choice.best for label, choice in choices.items()},
        "validation_accuracy": {label: choice.scores for label, choice in choices.items()},
        "rounds": {label: choice.rounds for label, choice in choices.items()},
        "beyond_the_grid": {label: choice.beyond for label, choice in choices.items() if choice.beyond},
        "at_an_edge": {label: sorted(choice.open_edges) for label, choice in choices.items() if choice.open_edges},
    }
    (where.folder / "tuned.json").write_text(json.dumps(record, indent=1) + "\n")
    return {label: choice.best for label, choice in choices.items()}


def missing(experiment: Experiment, name: str, file: Path, only: Sequence[str] = ()) -> list[Trial]:
    """Return the next tuning trials without rows; those outside of the grid come last."""
    done = {_key(each.trial): each for each in rows.read(file)}
    found: list[Trial] = []

    def result(trial: Trial, others: Sequence[Trial]) -> Recorded | None:
        if _key(trial) not in done:
            found.append(trial)
        return done.get(_key(trial))

    for run in experiment.tuned if experiment.tune else ():
        if not only or run.label in only:
            search(experiment, name, run, result)
    return found


def search(
    experiment: Experiment,
    name: str,
    run: MethodRun,
    result: Callable[[Trial, Sequence[Trial]], Recorded | None],
    scale: float = 1.0,
) -> Choice | None:
    """Return the choice for a method. Raises NothingActed if the mechanism was idle in all trials.

    result: returns a trial's rows, or None without running it; an incomplete grid gives no choice.
    """
    assert experiment.tune is not None, "only experiments with a [tune] section are tuned"
    choice = Choice(experiment.tuning_rounds(run, scale))
    points, idle = grid_points(experiment.grid_of(run)), set[str]()
    for extension in range(experiment.tune.extensions + 1):
        asked = _asked(experiment, name, run, points, scale)
        every = [trial for trials in asked.values() for trial in trials]
        for text, trials in asked.items():
            found = [result(trial, [each for each in every if each != trial]) for trial in trials]
            known = [each for each in found if each is not None]
            if len(known) < len(found):
                return choice if extension else None
            idle |= {act for each in known for act in each.result.idle or ()}
            choice.scores[text] = _score(known)
            choice.beyond += [json.loads(text)] if extension else []
        if set(choice.scores.values()) <= {None}:
            raise NothingActed(_too_short(experiment, run, sorted(idle)))
        best = choice.best
        points = [{**best, key: value} for key, values in choice.open_edges.items() for value in values]
    return choice


def _asked(
    experiment: Experiment, name: str, run: MethodRun, points: Sequence[Point], scale: float
) -> dict[str, list[Trial]]:
    """Return the trials of each valid point."""
    assert experiment.tune is not None, "only experiments with a [tune] section are tuned"
    asked: dict[str, list[Trial]] = {}
    for point in points:
        with suppress(ValidationError):  # beyond the grid is beyond what the setting may be
            asked[json.dumps(point)] = [
                tuning_trial(experiment, name, run, point, seed, scale) for seed in experiment.tune.seeds
            ]
    return asked


def _score(found: Sequence[Recorded]) -> float | None:
    """Return the mean final accuracy on validation data, None if the mechanism was idle in a trial."""
    if any(each.result.idle for each in found):
        return None
    last = [each.points[-1].accuracy_validation if each.points else None for each in found]
    return sum(each.mean if each else 0.0 for each in last) / len(last)  # nobody could be judged: as bad as can be


def _too_short(experiment: Experiment, run: MethodRun, idle: Sequence[str]) -> str:
    rounds, most = experiment.tuning_rounds(run), experiment.rounds_of(run)
    advice = (
        f"ask for [tune] rounds = {min(2 * rounds, most)}"
        if rounds < most
        else "that is its whole run, so change its settings"
    )
    return (
        f"{run.label}: mechanism idle in every tuning trial ({', '.join(idle)} stayed 0 over {rounds} rounds), so "
        f"nothing can be chosen; {advice}"
    )


def open_edges(tried: Iterable[Point], best: Point) -> dict[str, list[Value]]:
    """Return the untried neighbours of the best values: setting -> values.

    Beyond an edge, the last ratio gives the next value.
    """
    points = list(tried)
    found: dict[str, list[Value]] = {}
    for key, value in best.items():
        values = _numbers(each[key] for each in points)
        if not key.endswith(EXTENDED) or len(values) < 2 or values[0] <= 0:
            continue
        beside = [each[key] for each in points if {**each, key: None} == {**best, key: None}]
        around = [_next(values[0], values[1]), *values, _next(values[-1], values[-2])]
        place = 1 + values.index(value)
        missing = [each for each in (around[place - 1], around[place + 1]) if each not in beside]
        if missing:
            found[key] = missing
    return found


def _numbers(values: Iterable[Value]) -> list[Any]:
    return sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})


def _next(edge: float, inner: float) -> float:
    following = edge * edge / inner
    if isinstance(edge, int) and isinstance(inner, int):
        return max(1, round(following))
    return float(f"{following:.2g}")


def _train_alike(trial: Trial, other: Trial) -> bool:
    both = all(each.settings.get("finetune_epochs", 0) for each in (trial, other))
    return both and not trial.new and without_fine_tuning(trial) == without_fine_tuning(other)


def _key(trial: Trial) -> str:
    return json.dumps([trial.name, trial.settings])
