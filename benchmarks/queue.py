"""``python -m benchmarks queue --data DIR``: the trials of ``queue.toml``, one after the other, at low priority.

The list is committed, and so are the rows that it makes: each trial's are appended to ``docs/results/NAME.jsonl`` at
its end. A trial that is there already, with the same settings, is not run again; one that was interrupted goes on from
its coordinator's records in ``runs/queue``. Each fits one sitting of an hour and a half.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sparrow.benchmarks import rows, runner
from sparrow.benchmarks.experiment import BadExperiment, Trial, load_experiment, trials
from sparrow.benchmarks.runner import Where

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIST = Path(__file__).with_name("queue.toml")
RESULTS = Path("docs/results")
WORK = Path("runs/queue")


class Entry(BaseModel):
    """An experiment of the list.

    only, seeds: those that are run, all if there are none. claims: "PAPER ITEM" of ``docs/results/claims.toml``, which
    say that they are running meanwhile.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    claims: tuple[str, ...] = ()


class _List(BaseModel):
    model_config = ConfigDict(extra="forbid")

    entry: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """A trial that has no rows yet."""

    entry: Entry
    trial: Trial


def entries(path: Path = LIST) -> tuple[Entry, ...]:
    """Return the list in its order. Raises BadExperiment."""
    try:
        return _List.model_validate(tomllib.loads(path.read_text())).entry
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise BadExperiment(f"{path}: {error}") from None


def waiting(path: Path = LIST, results: Path = RESULTS) -> Iterator[Waiting]:
    """Yield the trials of the list that have no rows in ``results``, in the order in which they are run.

    Raises BadExperiment, and UnknownExperiment for an experiment that there is not.
    """
    for entry in entries(path):
        experiment = load_experiment(entry.experiment)
        labels = [method.label for method in experiment.methods]
        unknown = sorted({*entry.only} - {*labels}) + sorted({*entry.seeds} - {*experiment.seeds})
        if unknown:
            raise BadExperiment(f"{path}: {entry.experiment} has no {unknown[0]!r}")
        name = Path(entry.experiment).stem
        done = rows.latest(rows.read(results / f"{name}.jsonl"))
        for trial in trials(experiment, name, runner.read_tuned(WORK / name, name, experiment)):
            wanted = (not entry.only or trial.label in entry.only) and (not entry.seeds or trial.seed in entry.seeds)
            if wanted and not (trial.name in done and done[trial.name].trial == trial):
                yield Waiting(entry, trial)


def work(data: str, path: Path = LIST, results: Path = RESULTS, folder: Path = WORK) -> None:
    """Run what waits, one trial after the other, until none does. data: the folder with the data of all experiments."""
    while (following := next(waiting(path, results), None)) is not None:
        trial, name = following.trial, following.trial.experiment
        left = sum(1 for _ in waiting(path, results))
        print(f"{name}: {trial.name}; {left} left", file=sys.stderr, flush=True)
        recorded = runner.run(
            load_experiment(following.entry.experiment),
            name,
            Where(data=data, folder=folder / name, processes=1),
            scale=1.0,
            resume=True,
            only=(trial.label,),
            seeds=(trial.seed,),
        )
        # A training has rows for all labels that judge it, whether they were asked for or not.
        known = rows.latest(rows.read(results / f"{name}.jsonl"))
        of_training = rows.latest(rows.read(folder / name / "results.jsonl")).values()
        for each in of_training:
            if each.trial.name not in known or known[each.trial.name].trial != each.trial:
                rows.append(results / f"{name}.jsonl", each)
        assert recorded, "the trial was wanted"
