"""``python -m benchmarks COMMAND``: comparisons of methods, and the papers' tables.

python -m benchmarks compare --data mine.npz            methods side by side on your own data
python -m benchmarks tune fedspu-cifar10 --data DIR     choose settings on validation data
python -m benchmarks run fedspu-cifar10 --data DIR      run every trial; --resume continues after Ctrl-C
python -m benchmarks analyse fedspu-masks --data DIR    run every trial and analyse what its mechanism does
python -m benchmarks report fedspu-cifar10              tables and plots of the recorded trials
python -m benchmarks queue --data DIR                   the committed list of long trials, at low priority
python -m benchmarks small --data DIR --out DIR         small sets of samples, such as people bring
python -m benchmarks claims                             measured figures of the hand-written pages, from committed rows
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from edge_sdk.arguments import read_setting
from edge_sdk.device.opening import choose_compute
from edge_sdk.engines import EngineChoice
from edge_sdk.tasks.compute import ACCELERATORS, PROCESSOR
from sparrow.benchmarks import claims, queue, rows, runner, tuning
from sparrow.benchmarks.compare import METHODS, compared, name_of
from sparrow.benchmarks.experiment import FOLDER, Experiment, load_experiment
from sparrow.benchmarks.markdown import write_html
from sparrow.benchmarks.report.page import write_report
from sparrow.benchmarks.report.pictures import KINDS
from sparrow.benchmarks.report.summary import summary
from sparrow.benchmarks.runner import Where
from sparrow.benchmarks.small import SETS, write_sets
from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.command_line.nearest import nearest

REPEATED = (
    "task",
    "data",
    "methods",
    "devices",
    "rounds",
    "seeds",
    "partition",
    "scale",
    "processes",
    "folder",
    "engine",
    "accelerator",
)
"""The options that the page's command repeats."""


def _run(options: argparse.Namespace) -> None:
    if options.command == "claims":
        for path, text in claims.rebuild().items():
            if text != path.read_text():
                path.write_text(text)
                print(path)
        return
    if options.command == "queue":
        _queue(options)
        return
    if options.command == "small":
        for name in {*options.name} - {*SETS}:
            raise WrongUsage(f"{name}: there is no such set{nearest(name, SETS)}; there are {', '.join(SETS)}")
        for path in write_sets(Path(options.data), options.out, tuple(options.name)):
            print(path)
        return
    if options.command == "compare":
        experiment, name = _compared(options), name_of(options.task, options.data)
    else:
        experiment, name = load_experiment(options.experiment), Path(options.experiment).stem
    folder: Path = options.folder or Path("runs") / name
    if options.command == "report":
        both = [folder / "results.jsonl", folder / "analysis.jsonl"]
        recorded = rows.read(options.results or next((file for file in both if file.exists()), both[0]))
        if not recorded:
            raise FileNotFoundError(f"{folder} has no results; run `sparrow bench run {name}` first")
        recorded = list(rows.latest(recorded).values())
        what = "analyse" if any(each.analyses for each in recorded) else "run"
        command = f"python -m benchmarks {what} {name} --data DIR` and `python -m benchmarks report {name}"
        record = runner.read_tuning(folder, name, experiment)
        _report(experiment, recorded, options.out or folder, command, record, options.pictures)
        return
    _check_asked(options, experiment)
    asked = options.engine or experiment.engine
    engine, compute = choose_compute(asked, options.accelerator or PROCESSOR, None, bfloat16=False)
    experiment = experiment.model_copy(update={"engine": engine})
    where = Where(data=options.data, folder=folder, processes=options.processes, compute=compute)
    scale = 1.0 if options.scale is None else options.scale
    how = {"scale": scale, "resume": options.resume, "only": options.only or ()}
    try:
        if options.command == "tune":
            tuned = tuning.tune(experiment, name, where, **how)
            for label, chosen in tuned.items():
                print(f"{label}: {chosen}")
            return
        analyses = options.command == "analyse"
        recorded = runner.run(experiment, name, where, **how, seeds=options.seed or (), analyses=analyses)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command with --resume continues") from None
    record = runner.read_tuning(folder, name, experiment) if experiment.tune else {}
    page, *_ = _report(experiment, recorded, folder, _again(options), record)
    print(f"{write_html(page)}\n\n{summary(experiment, recorded)}")


def _queue(options: argparse.Namespace) -> None:
    if options.list:
        for each in queue.waiting():
            print(f"{each.trial.experiment}: {each.trial.name}")
        return
    try:
        os.nice(19)
        queue.work(options.data)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on where it was") from None


def _check_asked(options: argparse.Namespace, experiment: Experiment) -> None:
    """Raise WrongUsage if --only or --seed names what there is not."""
    for seed in options.seed or ():
        if seed not in experiment.seeds:
            raise WrongUsage(f"--seed {seed}: there are {', '.join(map(str, experiment.seeds))}")
    known = [run.label for run in (experiment.tuned if options.command == "tune" else experiment.methods)]
    for label in options.only or ():
        if label not in known:
            what = "tuned by itself" if options.command == "tune" else "run"
            raise WrongUsage(
                f"--only {label}: nothing of this label is {what}{nearest(label, known)}; there are {', '.join(known)}"
            )


def _compared(options: argparse.Namespace) -> Experiment:
    return compared(
        options.task,
        options.data,
        methods=options.methods,
        devices=options.devices,
        rounds=options.rounds,
        seeds=options.seeds,
        partition=options.partition,
        settings=dict(options.set),
    )


def _again(options: argparse.Namespace) -> str:
    """Return the command that runs the same trials again."""
    words = [options.command, *([options.experiment] if options.command != "compare" else [])]
    for name in REPEATED:
        value = getattr(options, name, None)
        if value not in (None, ""):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    words += [word for label in options.only or () for word in ("--only", label)]
    words += [word for seed in options.seed or () for word in ("--seed", str(seed))]
    words += [word for pair in getattr(options, "set", ()) for word in ("--set", "=".join(pair))]
    return f"sparrow bench {shlex.join(words)}"


def _report(
    experiment: Experiment,
    recorded: list[rows.Recorded],
    folder: Path,
    command: str,
    tuned: dict[str, Any],
    kinds: Sequence[str] = KINDS,
) -> list[Path]:
    """Write the page and its pictures, and print the names of the files."""
    written = write_report(experiment, recorded, folder, command=command, tuning=tuned, kinds=kinds)
    for path in written:
        print(path)
    return written


def _options(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))
    own = commands.add_parser("compare", help="methods side by side on your own data")
    own.add_argument("--task", default="npz", help="a task built in or installed (default: %(default)s)")
    own.add_argument(
        "--data",
        default="",
        help="a file or folder with the samples of all devices; a folder, a pattern or a path with {index} or {name} "
        "for an npz file per device; for other tasks their --data",
    )
    own.add_argument(
        "--methods",
        default=METHODS,
        help="separated by commas; +ft: with an epoch of fine-tuning on each device (default: %(default)s)",
    )
    own.add_argument("--devices", type=int, help="number of devices (default: that of people or files)")
    own.add_argument("--rounds", type=int, help="rounds of every method (default: that of sparrow publish)")
    own.add_argument("--seeds", type=int, default=3, help="number of repetitions (default: %(default)s)")
    own.add_argument("--partition", metavar="RULE", help="distribution of one file: dirichlet,alpha=0.3, ...")
    own.add_argument(
        "--set", type=read_setting, action="append", default=[], metavar="KEY=VALUE", help="a setting of every method"
    )
    own.set_defaults(scale=None, only=None, seed=None)
    _add_work(own)
    for command, help_text in (
        ("run", "run every trial"),
        ("analyse", "run every trial, one device at a time, and analyse what its mechanism does"),
        ("tune", "choose settings on validation data"),
    ):
        each = commands.add_parser(command, help=help_text)
        each.add_argument("experiment", help=f"one of {known}, or a .toml file")
        each.add_argument("--data", default="", help="the task's data, a folder or file; none for digits")
        each.add_argument("--scale", type=float, help="factor on the number of rounds, for a preview")
        each.add_argument("--only", action="append", metavar="LABEL", help="only this method; may be repeated")
        _add_work(each)
        if command != "tune":
            each.add_argument("--seed", type=int, action="append", help="only this seed; may be repeated")
        else:
            each.set_defaults(seed=None)
    report = commands.add_parser("report", help="tables and plots of the recorded trials")
    report.add_argument("experiment", help=f"one of {known}, or a .toml file")
    report.add_argument("--folder", type=Path, help="folder of the run (default: runs/EXPERIMENT)")
    report.add_argument("--results", type=Path, help="other rows: a NAME.jsonl")
    report.add_argument(
        "--pictures", nargs="*", choices=KINDS, metavar="KIND", default=KINDS, help=f"of {', '.join(KINDS)}"
    )
    report.add_argument("--out", type=Path, help="folder of the report (default: beside the results)")
    queued = commands.add_parser(
        "queue", help="run the committed list of long trials, one after the other, at low priority"
    )
    queued.add_argument("--data", default="", help="the folder with the data of all experiments")
    queued.add_argument("--list", action="store_true", help="print the trials that wait, and run none")
    small = commands.add_parser("small", help="make small sets of samples, such as people bring, for experiments")
    small.add_argument("--data", default="", help="the folder with the data of all experiments")
    small.add_argument("--out", type=Path, default=Path("runs/small"), help="where they go (default: %(default)s)")
    small.add_argument("name", nargs="*", help=f"of {', '.join(SETS)} (default: all)")
    commands.add_parser("claims", help="write the measured figures of results/*.md from their rows")


def _add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="keep existing results and continue")
    parser.add_argument("--processes", type=int, help="processes that host devices (default: one per core)")
    parser.add_argument("--folder", type=Path, help="work folder (default: runs/ and the experiment's or data's name)")
    parser.add_argument(
        "--engine", choices=get_args(EngineChoice), help="what trains (default: what the experiment says)"
    )
    parser.add_argument("--accelerator", choices=ACCELERATORS, help="where PyTorch trains (default: cpu)")


COMMAND = Command("sparrow bench", "Comparisons of methods.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
