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

import httpx

from benchmarks import rows, runner
from benchmarks.experiment import FOLDER, Experiment, load_experiment
from benchmarks.report import write_report
from benchmarks.runner import Where
from edge_sdk.errors import SdkError
from edge_sdk.methods import UnknownMethod
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.tasks import UnknownTask
from edge_sdk.tasks.loading import DataError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    experiment, name = load_experiment(options.experiment), Path(options.experiment).stem
    folder: Path = options.folder or Path("runs") / name
    if options.command == "report":
        recorded = rows.read(options.results or folder / "results.jsonl")
        if not recorded:
            raise SystemExit(f"{folder} holds no results; run `python -m benchmarks run {name}` first")
        recorded = list(rows.latest(recorded).values())
        command = f"python -m benchmarks run {name} --data DIR` and `python -m benchmarks report {name}"
        _report(experiment, recorded, options.out or folder, command)
        return 0
    where = Where(data=options.data, folder=folder, processes=options.processes)
    how = {"scale": options.scale, "resume": options.resume, "only": options.only or ()}
    try:
        if options.command == "tune":
            tuned = runner.tune(experiment, name, where, **how)
            for label, chosen in tuned.items():
                print(f"{label}: {chosen}")
            return 0
        recorded = runner.run(experiment, name, where, **how)
    except KeyboardInterrupt:
        print(f"interrupted; `python -m benchmarks {options.command} {name} ... --resume` goes on", file=sys.stderr)
        return 130
    except (SdkError, ProtocolError, DataError, UnknownMethod, UnknownTask, httpx.HTTPError, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    _report(experiment, recorded, folder, "python -m benchmarks " + shlex.join(arguments or sys.argv[1:]))
    return 0


def _report(experiment: Experiment, recorded: list[rows.Recorded], folder: Path, command: str) -> None:
    for path in write_report(experiment, recorded, folder, command=command):
        print(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Comparisons of methods.")
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
