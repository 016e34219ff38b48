"""``python -m benchmarks COMMAND``, in a clone: analyses, the papers' tables, and rows that are committed.

python -m benchmarks analyse fedspu-masks --data DIR    run every trial and analyse what its mechanism does
python -m benchmarks report fedspu-cifar10              all tables and plots of the recorded trials
python -m benchmarks queue --data DIR                   the committed list of long trials, at low priority
python -m benchmarks small --data DIR --output DIR         small sets of samples, such as people bring
python -m benchmarks claims                             measured figures of the hand-written pages, from committed rows
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import claims, queue
from benchmarks.analysis.observing import observed
from benchmarks.places import ROWS
from benchmarks.report.page import KINDS, write_page
from benchmarks.small import SETS, write_sets
from sparrow.bench import runner
from sparrow.bench.__main__ import INTERRUPTED, add_report, add_run, again, prepared, recorded_in
from sparrow.bench.experiment import Experiment, load_experiment
from sparrow.bench.html import write_html
from sparrow.bench.report.summary import summary
from sparrow.bench.rows import Recorded
from sparrow.command_line.command import Command, Parser, WrongUsage
from sparrow.command_line.nearest import nearest


def _run(options: argparse.Namespace) -> None:
    {
        "analyse": _analyse,
        "report": _report,
        "queue": _queue,
        "small": _small,
        "claims": _claims,
    }[options.command](options)


def _analyse(options: argparse.Namespace) -> None:
    name = Path(options.experiment).stem
    folder: Path = options.folder or Path("runs") / name
    experiment, where, how = prepared(options, load_experiment(options.experiment), folder)
    try:
        recorded = runner.run(experiment, name, where, **how, seeds=options.seed or (), observe=observed)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(INTERRUPTED) from None
    page, *_ = _write(experiment, name, recorded, folder, again(options, "python -m benchmarks"), folder, KINDS)
    print(f"{write_html(page)}\n\n{summary(experiment, recorded)}")


def _report(options: argparse.Namespace) -> None:
    experiment = load_experiment(options.experiment)
    name = Path(options.experiment).stem
    folder: Path = options.folder or Path("runs") / name
    both = [folder / "results.jsonl", folder / "analysis.jsonl"]
    file = options.results or next((file for file in both if file.exists()), both[0])
    if not options.results and not file.exists():
        file = ROWS / f"{name}.jsonl"
    recorded = recorded_in(file, f"sparrow bench run {name}")
    run = "python -m benchmarks analyse" if any(each.analyses for each in recorded) else "sparrow bench run"
    command = f"{run} {name} --data DIR` and `python -m benchmarks report {name}"
    _write(experiment, name, recorded, options.output or folder, command, folder, options.pictures)


def _write(
    experiment: Experiment,
    name: str,
    recorded: Sequence[Recorded],
    out: Path,
    command: str,
    folder: Path,
    kinds: Sequence[str],
) -> list[Path]:
    """Write the page and its pictures into ``out``, and print the names of the files. folder: of the run."""
    record = runner.read_tuning(folder, name, experiment)
    written = write_page(experiment, recorded, out, command=command, tuning=record, kinds=kinds)
    for path in written:
        print(path)
    return written


def _queue(options: argparse.Namespace) -> None:
    if options.list:
        for each in queue.waiting():
            print(f"{each.trial.experiment}: {each.trial.name}")
        return
    try:
        queue.yield_to_others()
        queue.work(options.data)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on where it was") from None


def _small(options: argparse.Namespace) -> None:
    for name in {*options.name} - {*SETS}:
        raise WrongUsage(f"{name}: there is no such set{nearest(name, SETS)}; there are {', '.join(SETS)}")
    for path in write_sets(Path(options.data), options.output, tuple(options.name)):
        print(path)


def _claims(options: argparse.Namespace) -> None:
    for path in claims.draw_pictures() if options.pictures else ():
        print(path)
    for path, text in claims.rebuild().items():
        if not path.exists() or text != path.read_text():
            path.write_text(text)
            print(path)


def _options(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_run(commands.add_parser("analyse", help="run every trial, one device at a time, and analyse its mechanism"))
    report = commands.add_parser("report", help="write all tables and plots of the recorded trials")
    add_report(report)
    report.add_argument(
        "--pictures",
        nargs="*",
        choices=KINDS,
        metavar="KIND",
        default=KINDS,
        help=f"plots: {', '.join(KINDS)}",
    )
    queued = commands.add_parser(
        "queue", help="run the committed list of long trials, one after the other, at low priority"
    )
    queued.add_argument("--data", default="", help="folder with the data of all experiments")
    queued.add_argument("--list", action="store_true", help="print the pending trials without running them")
    small = commands.add_parser("small", help="make small data sets, like those of users, for experiments")
    small.add_argument("--data", default="", help="folder with the data of all experiments")
    small.add_argument("--output", type=Path, default=Path("runs/small"), help="output folder (default: %(default)s)")
    small.add_argument("name", nargs="*", help=f"sets to make: {', '.join(SETS)} (default: all)")
    measured = commands.add_parser("claims", help="write the numbers on the pages of results from committed rows")
    measured.add_argument("--pictures", action="store_true", help="also draw their pictures")


COMMAND = Command("python -m benchmarks", "Analyses, and the rows and pages of results.", _options, _run)
main = COMMAND.main


if __name__ == "__main__":
    sys.exit(main())
