"""``python -m benchmarks queue --data DIR``: the trials of ``queue.toml``, one after the other, at low priority.

The list and its rows are committed: each finished trial is appended to ``benchmarks/rows/NAME.jsonl``. A recorded trial
with the same settings is not run again; an interrupted one continues from its coordinator's records in ``runs/queue``.
A trial takes up to an hour and a half. With ``tune``, settings are chosen first; points of the grid that
``NAME.tuning.jsonl`` lacks are run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.places import ROWS, compress, keep
from benchmarks.small import write_sets
from sparrow.bench import rows, runner, tuning
from sparrow.bench.experiment import BadExperiment, Experiment, Trial, load_experiment, trials
from sparrow.bench.rows import Recorded
from sparrow.bench.runner import Where

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIST = Path(__file__).with_name("queue.toml")
RESULTS = ROWS
WORK = Path("runs/queue")


class Entry(BaseModel):
    """An experiment of the list.

    only, seeds: the labels and seeds to run; empty: all. tune: whether settings are chosen first. anew: whether rows
    without a provenance are repeated. claims: "PAPER ITEM" of ``claims.toml``, shown as running. small: its set of
    ``benchmarks.small``, written if it is missing; none: the data of all experiments.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    tune: bool = False
    anew: bool = False
    claims: tuple[str, ...] = ()
    small: str = ""


class _List(BaseModel):
    model_config = ConfigDict(extra="forbid")

    entry: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """A trial without rows. tunes: it is part of a tuning run."""

    entry: Entry
    experiment: Experiment
    trial: Trial
    tunes: bool = False


def entries(path: Path = LIST) -> tuple[Entry, ...]:
    """Return the list in its order. Raises BadExperiment."""
    try:
        return _List.model_validate(tomllib.loads(path.read_text())).entry
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise BadExperiment(f"{path}: {error}") from None


def waiting(path: Path = LIST, results: Path = RESULTS, folder: Path = WORK) -> Iterator[Waiting]:
    """Yield the trials of the list without rows in ``results``, in order.

    For trials whose settings are not chosen yet, yield the tuning trials instead. Raises BadExperiment,
    UnknownExperiment.
    """
    for entry in entries(path):
        experiment = load_experiment(entry.experiment)
        labels = [method.label for method in experiment.methods]
        unknown = sorted({*entry.only} - {*labels}) + sorted({*entry.seeds} - {*experiment.seeds})
        if unknown:
            raise BadExperiment(f"{path}: {entry.experiment} has no {unknown[0]!r}")
        name = Path(entry.experiment).stem
        if entry.tune:
            labels = _tuned(entry, experiment)
            choosing = tuning.missing(experiment, name, results / f"{name}.tuning.jsonl", labels)
            yield from (Waiting(entry, experiment, trial, tunes=True) for trial in choosing)
            if choosing:
                continue
        done = rows.latest(rows.read(results / f"{name}.jsonl"))
        for trial in trials(experiment, name, runner.read_tuned(folder / name, name, experiment)):
            wanted = (not entry.only or trial.label in entry.only) and (not entry.seeds or trial.seed in entry.seeds)
            if wanted and not _is_done(entry, trial, done):
                yield Waiting(entry, experiment, trial)


def _is_done(entry: Entry, trial: Trial, done: Mapping[str, Recorded]) -> bool:
    """Return whether a trial has the rows that an entry asks for."""
    recorded = done.get(trial.name)
    if recorded is None or recorded.trial.asked != trial:
        return False
    return not entry.anew or recorded.result.provenance is not None


def yield_to_others() -> None:
    """Lower the priority of this process, and of its session if that has no terminal.

    Linux shares the processor among sessions first, so niceness counts only within one (sched(7), "The autogroup
    feature").
    """
    os.nice(19)
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")


def work(data: str, path: Path = LIST, results: Path = RESULTS, folder: Path = WORK) -> None:
    """Run the waiting trials, one after the other. data: the folder with the data of all experiments."""
    while left := list(waiting(path, results, folder)):
        following = left[0]
        experiment = following.experiment
        trial = following.trial
        name = following.trial.experiment
        print(f"{name}: {trial.name}; {len(left)} left", file=sys.stderr, flush=True)
        of_entry = str(_small(following.entry.small, data, folder)) if following.entry.small else data
        where = Where(data=of_entry, folder=folder / name, processes=1)
        if following.tunes:
            _choose(experiment, trial, where, results)
            continue
        runner.run(experiment, name, where, scale=1.0, resume=True, only=(trial.label,), seeds=(trial.seed,))
        # A training has rows for all labels that judge it, whether they were asked for or not.
        known = rows.latest(rows.read(results / f"{name}.jsonl"))
        of_training = rows.latest(rows.read(folder / name / "results.jsonl")).values()
        for each in of_training:
            if not _is_done(following.entry, each.trial.asked, known):
                keep(results / f"{name}.jsonl", each)


def _small(name: str, data: str, folder: Path) -> Path:
    """Return the file of a small set of samples. Raises DataError for missing data."""
    path = folder / "small" / f"{name}.npz"
    if not path.exists():
        (path,) = write_sets(Path(data), path.parent, (name,))
    return path


def _tuned(entry: Entry, experiment: Experiment) -> list[str]:
    """Return the labels whose settings an entry's labels need."""
    wanted = [run for run in experiment.methods if not entry.only or run.label in entry.only]
    return [run.tuned_as or run.label for run in wanted]


def _choose(experiment: Experiment, trial: Trial, where: Where, results: Path) -> None:
    """Choose the settings of a tuning trial's label, and keep its rows and the choice."""
    name = trial.experiment
    file = where.folder / "tuning.jsonl"
    kept = results / f"{name}.tuning.jsonl"
    where.folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(rows.text_of(kept))
    tuning.tune(experiment, name, where, scale=1.0, resume=True, only=[trial.label])
    results.mkdir(parents=True, exist_ok=True)
    kept.with_name(kept.name + rows.GZIP).unlink(missing_ok=True)
    shutil.copyfile(file, kept)
    compress(kept)
    tuned = runner.TUNED
    record = json.loads(tuned.read_text()) if tuned.exists() else {}
    record[name] = json.loads((where.folder / "tuned.json").read_text())
    tuned.write_text(json.dumps(record, indent=1) + "\n")
