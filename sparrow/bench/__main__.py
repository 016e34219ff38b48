"""``sparrow bench COMMAND``: comparisons of methods.

sparrow bench compare --data mine.npz            methods side by side on your own data
sparrow bench tune fedspu-cifar10 --data DIR     choose settings on validation data
sparrow bench run fedspu-cifar10 --data DIR      run every trial; --resume continues after Ctrl-C
sparrow bench report fedspu-cifar10              tables and plots of the recorded trials
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from edge_sdk.arguments import add_settings, settings_of
from edge_sdk.device.opening import choose_compute
from edge_sdk.engines import EngineChoice
from edge_sdk.tasks.compute import ACCELERATORS, PROCESSOR

from ..command_line.command import Command, Parser, WrongUsage
from ..command_line.nearest import nearest
from . import rows, runner, tuning
from .compare import METHODS, compared, name_of
from .experiment import FOLDER, Experiment, load_experiment
from .html import write_html
from .report.page import write_report
from .report.summary import summary
from .rows import Recorded
from .runner import Where

REPEATED = (
    "task",
    "data",
    "methods",
    "devices",
    "seeds",
    "partition",
    "scale",
    "processes",
    "folder",
    "engine",
    "accelerator",
)
"""Options in the command that a report prints."""


def _run(options: argparse.Namespace) -> None:
    if options.command == "compare":
        experiment = _compared(options)
        name = name_of(options.task, options.data)
    else:
        experiment = load_experiment(options.experiment)
        name = Path(options.experiment).stem
    folder: Path = options.folder or Path("runs") / name
    if options.command == "report":
        recorded = recorded_in(options.results or folder / "results.jsonl", f"sparrow bench run {name}")
        command = f"sparrow bench run {name} --data DIR` and `sparrow bench report {name}"
        record = runner.read_tuning(folder, name, experiment)
        _report(experiment, recorded, options.output or folder, command, record)
        return
    experiment, where, how = prepared(options, experiment, folder)
    try:
        if options.command == "tune":
            for label, chosen in tuning.tune(experiment, name, where, **how).items():
                print(f"{label}: {chosen}")
            return
        recorded = runner.run(experiment, name, where, **how, seeds=options.seed or ())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(INTERRUPTED) from None
    record = runner.read_tuning(folder, name, experiment) if experiment.tune else {}
    page, *_ = _report(experiment, recorded, folder, again(options), record)
    print(f"{write_html(page)}\n\n{summary(experiment, recorded)}")


INTERRUPTED = "interrupted; the same command with --resume continues"


def recorded_in(file: Path, command: str) -> list[Recorded]:
    """Return the last rows of each trial in a file. Raises FileNotFoundError if it is missing."""
    recorded = rows.read(file)
    if not recorded:
        raise FileNotFoundError(f"{file} has no results; run `{command}` first")
    return list(rows.latest(recorded).values())


def prepared(
    options: argparse.Namespace, experiment: Experiment, folder: Path
) -> tuple[Experiment, Where, dict[str, Any]]:
    """Return the experiment with the chosen engine, and the arguments of ``runner.run``.

    Raises WrongUsage if options contradict.
    """
    _check_asked(options, experiment)
    asked = options.engine or experiment.engine
    engine, compute = choose_compute(asked, options.accelerator or PROCESSOR, None, bfloat16=False)
    where = Where(data=options.data, folder=folder, processes=options.processes, compute=compute)
    scale = 1.0 if options.scale is None else options.scale
    how = {"scale": scale, "resume": options.resume, "only": options.only or ()}
    return experiment.model_copy(update={"engine": engine}), where, how


def _check_asked(options: argparse.Namespace, experiment: Experiment) -> None:
    """Raise WrongUsage for unknown values of --only and --seed."""
    for seed in options.seed or ():
        if seed not in experiment.seeds:
            raise WrongUsage(f"--seed {seed}: there are {', '.join(map(str, experiment.seeds))}")
    known = [run.label for run in (experiment.tuned if options.command == "tune" else experiment.methods)]
    for label in options.only or ():
        if label not in known:
            action = "tuned separately" if options.command == "tune" else "run"
            raise WrongUsage(
                f"--only {label}: no method of this label is {action}{nearest(label, known)}; there are "
                f"{', '.join(known)}"
            )


def _compared(options: argparse.Namespace) -> Experiment:
    return compared(
        options.task,
        options.data,
        methods=options.methods,
        devices=options.devices,
        seeds=options.seeds,
        partition=options.partition,
        settings=settings_of(options.settings),
    )


def again(options: argparse.Namespace, program: str = "sparrow bench") -> str:
    """Return the command that repeats these trials."""
    words = [options.command, *([options.experiment] if options.command != "compare" else [])]
    for name in REPEATED:
        value = getattr(options, name, None)
        if value not in (None, ""):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    words += [word for label in options.only or () for word in ("--only", label)]
    words += [word for seed in options.seed or () for word in ("--seed", str(seed))]
    words += ["=".join(pair) for pair in getattr(options, "settings", ())]
    return f"{program} {shlex.join(words)}"


def _report(
    experiment: Experiment, recorded: Sequence[Recorded], folder: Path, command: str, tuned: dict[str, Any]
) -> list[Path]:
    """Write the report and its pictures, and print the files' names."""
    written = write_report(experiment, recorded, folder, command=command, tuning=tuned)
    for path in written:
        print(path)
    return written


def _options(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    own = commands.add_parser("compare", help="compare methods on your own data")
    add_settings(own, more=", of every method")
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
    own.add_argument("--seeds", type=int, default=3, help="number of repetitions (default: %(default)s)")
    own.add_argument("--partition", metavar="RULE", help="distribution of one file: dirichlet,alpha=0.3, ...")
    own.set_defaults(scale=None, only=None, seed=None)
    _add_work(own)
    add_run(commands.add_parser("run", help="run every trial"))
    add_run(commands.add_parser("tune", help="choose settings on validation data"), seed=False)
    report = commands.add_parser("report", help="write tables and plots of the recorded trials")
    add_report(report)


def add_run(parser: argparse.ArgumentParser, *, seed: bool = True) -> None:
    """Add the options of a command that runs an experiment. seed: add ``--seed``."""
    _add_experiment(parser)
    parser.add_argument("--data", default="", help="the task's data, a folder or file; none for digits")
    parser.add_argument("--scale", type=float, help="factor on the number of rounds, for a preview")
    parser.add_argument("--only", action="append", metavar="LABEL", help="only this method; may be repeated")
    _add_work(parser)
    if seed:
        parser.add_argument("--seed", type=int, action="append", help="only this seed; may be repeated")
    else:
        parser.set_defaults(seed=None)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that reports recorded trials."""
    _add_experiment(parser)
    parser.add_argument("--folder", type=Path, help="folder of the run (default: runs/EXPERIMENT)")
    parser.add_argument("--results", type=Path, help="other rows: a NAME.jsonl or NAME.jsonl.gz")
    parser.add_argument("--output", type=Path, help="folder of the report (default: beside the results)")


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))
    parser.add_argument("experiment", help=f"one of {known}, or a .toml file")


def _add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="keep existing results and continue")
    parser.add_argument("--processes", type=int, help="processes that host devices (default: one per core)")
    parser.add_argument("--folder", type=Path, help="work folder (default: runs/ and the experiment's or data's name)")
    parser.add_argument(
        "--engine", choices=get_args(EngineChoice), help="engine that trains (default: the experiment's)"
    )
    parser.add_argument("--accelerator", choices=ACCELERATORS, help="where PyTorch trains (default: cpu)")


COMMAND = Command("sparrow bench", "Compare methods.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
