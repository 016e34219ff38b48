"""``python -m benchmarks.energy``: joules of training on known boards, by method, from recorded trials.

Nothing is trained: FLOPs and bytes that trials have counted become the seconds and joules of each board that
``devices.simulation`` knows, as if every device of the trial were that board. Trials that simulated a mixed fleet have
its joules in their rows. Writes a section of ``docs/results/energy.md``; all figures are estimates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.markdown import markdown_table
from benchmarks.places import PAGES, ROWS, write_section
from sparrow.bench import rows
from sparrow.bench.metrics import Point
from sparrow.bench.rows import Recorded
from sparrow.devices.simulation import BOARDS, Board
from sparrow.protocol.settings import FederationSettings

EXPERIMENTS = ("fedspu-cifar10", "fedspu-early-stopping", "fedsgc-settings")

HEAD = """# Joules by method, estimated

Made by `python -m benchmarks.energy` from the rows of {sources}; nothing was trained for it.

Every figure is **estimated**. The seconds of a board are the counted FLOPs divided by a quarter of its published HPL
rate, plus the bytes divided by 10 Mbit/s. Its joules are full-load watts times the former plus idle watts times the
latter (`devices/simulation.py` names the sources). The energy of radio and USB devices, and of waiting for other
devices, is not included. The figures therefore compare methods on one board; they do not predict battery life. FLOPs
were counted when each trial was run. If a method's FLOPs equal FedAvg's, its frozen part was still computed at that
time, and its savings here are only those of bytes.

The figures include training and its transfers, but not evaluation. They are sums over all devices and rounds, and means
over seeds. An update is one device's round. A point is one percentage point of the final mean accuracy over devices.
"""


def joules_on(board: Board, point: Point) -> float:
    """Return the joules of all training up to ``point`` if every device were ``board``."""
    transfer = board.transfer_seconds(point.bytes_up + point.bytes_down)
    return board.joules(board.computing_seconds(point.training_flops), transfer)


def updates_of(trial: Recorded) -> int:
    """Return the number of device-rounds of a trial."""
    return sum(device.rounds for device in trial.result.devices)


def stops_early(trial: Recorded) -> bool:
    """Return True if the trial's devices stop early."""
    return bool(trial.trial.settings.get("early_stopping", FederationSettings().early_stopping) != "off")


def _title(trial: Recorded) -> str:
    axes = ", ".join(f"{key} = {value}" for key, value in trial.trial.axes.items())
    return f"{trial.trial.experiment}" + (f", {axes}" if axes else "")


def _groups(recorded: Sequence[Recorded]) -> dict[str, dict[str, list[Recorded]]]:
    """Return title -> label -> its trials."""
    found: dict[str, dict[str, list[Recorded]]] = {}
    for trial in recorded:
        found.setdefault(_title(trial), {}).setdefault(trial.trial.label, []).append(trial)
    return found


def _accuracy(trial: Recorded) -> float:
    accuracy = trial.points[-1].accuracy
    return 100 * accuracy.mean if accuracy else float("nan")


def _table(labels: dict[str, list[Recorded]]) -> str:
    head = ["", "seeds", "early stopping", "TFLOP", "MB", "accuracy, %"]
    head += [f"{name}: kJ in all; J an update; J a point" for name in BOARDS]
    lines = []
    for label, trials in labels.items():
        ends = [trial.points[-1] for trial in trials]
        line = [
            label,
            str(len(trials)),
            "on" if stops_early(trials[0]) else "off",
            f"{fmean(end.training_flops for end in ends) / 1e12:.2f}",
            f"{fmean(end.bytes_up + end.bytes_down for end in ends) / 1e6:,.0f}",
            f"{fmean(map(_accuracy, trials)):.1f}",
        ]
        for board in BOARDS.values():
            joules = [joules_on(board, end) for end in ends]
            line.append(_figures(joules, trials))
        lines.append(line)
    return markdown_table(head, lines)


def _figures(joules: Sequence[float], trials: Sequence[Recorded]) -> str:
    each = [value / max(1, updates_of(trial)) for value, trial in zip(joules, trials, strict=True)]
    point = [value / _accuracy(trial) for value, trial in zip(joules, trials, strict=True)]
    return f"**{fmean(joules) / 1e3:,.1f}**; {fmean(each):,.1f}; {fmean(point):,.0f}"


def _saved(groups: dict[str, dict[str, list[Recorded]]]) -> str:
    """Return the savings of early stopping for the same method on the same seeds."""
    lines = []
    for title, labels in groups.items():
        for label, trials in labels.items():
            for other, others in labels.items():
                alike = trials[0].trial.method == others[0].trial.method
                if not (alike and stops_early(trials[0]) and not stops_early(others[0])):
                    continue
                pairs = [(one, two) for one in trials for two in others if one.trial.seed == two.trial.seed]
                if not pairs:
                    continue
                shares = [
                    1
                    - sum(joules_on(board, one.points[-1]) for one, _ in pairs)
                    / sum(joules_on(board, two.points[-1]) for _, two in pairs)
                    for board in BOARDS.values()
                ]
                lost = fmean(_accuracy(one) - _accuracy(two) for one, two in pairs)
                figures = [f"{share:.1%}" for share in shares]
                lines.append([title, f"{label} against {other}", str(len(pairs)), *figures, f"{lost:+.1f}"])
    head = ["experiment", "", "seeds", *(f"{name}: joules saved" for name in BOARDS), "accuracy, points"]
    return markdown_table(head, lines)


def _mixed(recorded: Sequence[Recorded]) -> str:
    """Return the trials whose rows have the joules of a mixed fleet."""
    lines = []
    for trial in recorded:
        end = trial.points[-1]
        if trial.trial.boards:
            boards = ", ".join(
                f"{budget:g}: {board}" for budget, board in zip(trial.trial.budgets, trial.trial.boards, strict=False)
            )
            lines.append(
                [
                    f"{trial.trial.label}, {trial.result.rounds} rounds",
                    boards,
                    "on" if stops_early(trial) else "off",
                    f"{end.seconds:,.0f}",
                    _figures([end.joules_estimated], [trial]),
                    f"{_accuracy(trial):.1f}",
                ]
            )
    head = ["", "board of each budget", "early stopping", "device seconds", "kJ in all; J an update; J a point"]
    return markdown_table([*head, "accuracy, %"], lines)


def page(recorded: Sequence[Recorded], sources: Sequence[str]) -> str:
    """Return the whole page."""
    groups = _groups(recorded)
    parts = [HEAD.format(sources=", ".join(f"`{name}.jsonl`" for name in sources))]
    parts.append("\n## Savings of early stopping\n\n" + _saved(groups))
    parts.append(
        "\n## A fleet of unequal boards\n\nThe five budgets of FedSPU's paper, each on a board that can afford it. "
        "The trial recorded the energy as the sum over its devices.\n\n" + _mixed(recorded)
    )
    for title, labels in groups.items():
        task = next(iter(labels.values()))[0].trial
        parts.append(f"\n## {title}\n\nTask {task.task}, {task.devices} devices.\n\n" + _table(labels))
    return "".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Write the page; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.energy", description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROWS, help="folder of the rows (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="output file (default: the page of results)")
    options = parser.parse_args(arguments)
    recorded = [
        trial
        for name in EXPERIMENTS
        for trial in rows.latest(rows.read(options.results / f"{name}.jsonl")).values()
        if trial.points
    ]
    if not recorded:
        raise SystemExit(f"{options.results} has no rows of {', '.join(EXPERIMENTS)}; run an experiment first")
    text = page(recorded, EXPERIMENTS)
    if options.output:
        options.output.write_text(text)
    else:
        write_section("energy", "boards", text)
    print(options.output or PAGES / "energy.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
