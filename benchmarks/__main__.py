"""``python -m benchmarks run|tune|report EXPERIMENT``: comparisons of methods, and the papers' tables.

python -m benchmarks tune fedspu-cifar10 --data DIR     choose settings on validation data
python -m benchmarks run fedspu-cifar10 --data DIR      run every trial; --resume goes on after Ctrl-C
python -m benchmarks report fedspu-cifar10              tables and plots of what has been run
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks import rows, runner
from benchmarks.experiment import FOLDER, BadExperiment, Experiment, UnknownExperiment, load_experiment
from benchmarks.report import write_report
from benchmarks.runner import Where
from command_line.command import Command, Exits, Parser
from command_line.exits import Exit
from edge_sdk.tasks.exits import EXITS as TASKS

EXITS: Exits = {
    **TASKS,
    UnknownExperiment: Exit.NOT_FOUND,
    BadExperiment: Exit.USAGE,
    ValueError: Exit.FAILED,
}


def _run(options: argparse.Namespace) -> None:
    experiment, name = load_experiment(options.experiment), Path(options.experiment).stem
    folder: Path = options.folder or Path("runs") / name
    if options.command == "report":
        recorded = rows.read(options.results or folder / "results.jsonl")
        if not recorded:
            raise FileNotFoundError(f"{folder} holds no results; run `python -m benchmarks run {name}` first")
        recorded = list(rows.latest(recorded).values())
        command = f"python -m benchmarks run {name} --data DIR` and `python -m benchmarks report {name}"
        _report(experiment, recorded, options.out or folder, command)
        return
    where = Where(data=options.data, folder=folder, processes=options.processes)
    how = {"scale": options.scale, "resume": options.resume, "only": options.only or ()}
    try:
        if options.command == "tune":
            tuned = runner.tune(experiment, name, where, **how)
            for label, chosen in tuned.items():
                print(f"{label}: {chosen}")
            return
        recorded = runner.run(experiment, name, where, **how)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command with --resume goes on") from None
    _report(experiment, recorded, folder, _again(options))


def _again(options: argparse.Namespace) -> str:
    """The command that runs the same trials once more."""
    words = [options.command, options.experiment, "--data", options.data]
    if options.scale != 1:
        words += ["--scale", f"{options.scale:g}"]
    for label in options.only or ():
        words += ["--only", label]
    for option in ("processes", "folder"):
        if getattr(options, option) is not None:
            words += [f"--{option}", str(getattr(options, option))]
    return f"python -m benchmarks {shlex.join(words)}"


def _report(experiment: Experiment, recorded: list[rows.Recorded], folder: Path, command: str) -> None:
    for path in write_report(experiment, recorded, folder, command=command):
        print(path)


def _options(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="command", required=True)
    known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))
    for command, help_text in (("run", "run every trial"), ("tune", "choose settings on validation data")):
        each = commands.add_parser(command, help=help_text)
        each.add_argument("experiment", help=f"one of {known}, or a .toml file")
        each.add_argument("--data", required=True, help="where the task's data are: a folder or file ('' for digits)")
        each.add_argument("--scale", type=float, default=1.0, help="factor on the number of rounds, for a quick look")
        each.add_argument("--resume", action="store_true", help="keep what is there and go on")
        each.add_argument("--processes", type=int, help="processes that host devices (default: one per core)")
        each.add_argument("--folder", type=Path, help="where to work (default: runs/EXPERIMENT)")
        each.add_argument("--only", action="append", metavar="LABEL", help="only this method; may be repeated")
    report = commands.add_parser("report", help="tables and plots of what has been run")
    report.add_argument("experiment", help=f"one of {known}, or a .toml file")
    report.add_argument("--folder", type=Path, help="where it was run (default: runs/EXPERIMENT)")
    report.add_argument("--results", type=Path, help="rows elsewhere, such as docs/results/NAME.jsonl")
    report.add_argument("--out", type=Path, help="where the report goes (default: beside the results)")


COMMAND = Command("benchmarks", "Comparisons of methods.", _options, _run, EXITS)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
