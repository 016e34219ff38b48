"""``tune``: settings chosen on validation data, from runs that are long enough and grids that are wide enough.

A tuning run is at least half as long as the run itself, and a trial in which the method's mechanism did nothing (a
count of ``DeviceMethod.acts`` is zero) is no basis of a choice. Where the best rate is at the edge of the
grid, this goes on there by its own ratio, with the other settings as in the best point, until the values on both sides
of the best one were tried, or ``Tuning.extensions`` times. Epochs are chosen among those given: they are what a
comparison allows a device, and the most always fit best.
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
"""Endings of the settings whose grids go on beyond their edges."""

Point = dict[str, Value]


class NothingActed(SdkError):
    """A method's mechanism did nothing in any tuning trial; the text says how many rounds to ask for."""

    exit_code = Exit.USAGE


@dataclass
class Choice:
    """The search for one label's settings. scores: validation accuracy by point, None where the mechanism was idle.

    beyond: the points that the grid does not have.
    """

    rounds: int
    scores: dict[str, float | None] = field(default_factory=dict)
    beyond: list[Point] = field(default_factory=list)

    @property
    def best(self) -> Point:
        """The point of the best validation accuracy; of equal ones the first."""
        known = {point: score for point, score in self.scores.items() if score is not None}
        best: Point = json.loads(max(known, key=known.__getitem__))
        return best

    @property
    def open_edges(self) -> dict[str, list[Value]]:
        """The settings whose best value has untried values next to it, with these."""
        return open_edges(map(json.loads, self.scores), self.best)


def tune(
    experiment: Experiment, name: str, where: Where, *, scale: float, resume: bool, only: Sequence[str] = ()
) -> dict[str, Point]:
    """Try every point of the grid for every method; keep, per label, the one with the best validation accuracy.

    only: labels of the methods to tune (empty: all); with ``resume`` what is chosen for the others stays. The mean over
    devices and seeds of the accuracy on validation data at the end of a trial decides; ties go to the point that was
    tried first. Writes ``tuning.jsonl`` (every trial) and ``tuned.json`` (what was chosen, and from what). Raises
    BadExperiment for runs that are too short, NothingActed.
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
    """Return the tuning trials that have no rows in a file and are asked for next; those beyond an edge of the grid are
    asked for when it is complete. only: labels (empty: all)."""
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
    """Return the choice for a method. result: returns a trial's rows, or None if it is not to be run: of a grid that is
    not complete nothing is chosen; the trials beside it will be asked for next. Raises NothingActed."""
    assert experiment.tune is not None, "only what has [tune] is tuned"
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
    """Return the trials of each point, without points that a setting cannot have."""
    assert experiment.tune is not None, "only what has [tune] is tuned"
    asked: dict[str, list[Trial]] = {}
    for point in points:
        with suppress(ValidationError):  # beyond the grid is beyond what the setting may be
            asked[json.dumps(point)] = [
                tuning_trial(experiment, name, run, point, seed, scale) for seed in experiment.tune.seeds
            ]
    return asked


def _score(found: Sequence[Recorded]) -> float | None:
    """Return the mean accuracy on validation data at the trials' ends; None if the mechanism was idle in one."""
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
    """Return the rates of which a value next to the best one was not tried with its other
    settings, and those values: at the edge of what was tried at all, the next one by the ratio of the last two."""
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
    """Return whether two trials differ only in fine-tuning copies that are thrown away, and so not in training."""
    both = all(each.settings.get("finetune_epochs", 0) for each in (trial, other))
    return both and not trial.new and without_fine_tuning(trial) == without_fine_tuning(other)


def _key(trial: Trial) -> str:
    return json.dumps([trial.name, trial.settings])
