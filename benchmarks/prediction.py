"""``python -m benchmarks.prediction``: how well ``edge_sdk.profile`` predicts what a training step takes.

Every network of the built-in tasks, under FedSPU's masks at five budgets, in batches of 32 and 128, one thread. A cell
is predicted and measured in turn, several times over: a shared machine is now and then slower, never faster, so the
smallest seconds of each are compared. Memory is compared by its medians, in all and, harder, above what the process
holds without training. ``--only`` measures some of the tasks again and keeps the rows of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.server import machine
from edge_sdk.arguments import MIB
from edge_sdk.profile import BUDGETS, Subject, Taken, profile
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks.models import MODELS, full_name
from edge_sdk.training.compute import Compute

RESULTS = Path("docs/results")
TASKS = ("digits", *(full_name(task, model) for task, models in MODELS.items() for model in models))
BATCHES = (32, 128)
MEMORY_BOUND = 0.15
SECONDS_BOUND = 0.25

Row = dict[str, Any]


def measure(task: str, batch: int, repetitions: int, steps: int) -> list[Row]:
    """A row per budget."""
    settings = FederationSettings(method="fedspu", batch_size=batch)
    subject = Subject(task, settings, compute=Compute(threads=1))
    found = [profile(subject, BUDGETS, steps=steps) for _ in range(repetitions)]
    rows = []
    for cells in zip(*(each.rows for each in found), strict=True):
        measured = [cell.measured for cell in cells if cell.measured is not None]
        assert len(measured) == repetitions, "a machine for benchmarks has the memory"
        rows.append(
            {
                "task": task,
                "batch": batch,
                "budget": cells[0].budget,
                "repetitions": repetitions,
                "machine": machine(),
                "predicted": _summary([cell.predicted for cell in cells]),
                "measured": _summary(measured),
            }
        )
    return rows


def _summary(taken: Sequence[Taken]) -> Row:
    return {
        "flops": taken[0].flops,
        "above": median(each.above for each in taken),
        "memory": median(each.memory for each in taken),
        "seconds": min(each.seconds for each in taken),
    }


def off(row: Row, what: str) -> float:
    """How far the prediction is from what was measured, as a share of the latter, with its sign."""
    return float(row["predicted"][what] / row["measured"][what] - 1)


HEAD = """# What a training step takes, predicted and measured

Made with `python -m benchmarks.prediction` on {machine}; the figures lie in `prediction.jsonl`. FedSPU's masks, one
thread, batches of 32 and 128. Each cell was predicted and measured {repetitions} times in turn; memory is the median,
seconds the smallest of each. *In all* is what the process holds at its peak, *above* what of it training adds.
"""


def page(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        HEAD.format(machine=rows[0]["machine"], repetitions=rows[0]["repetitions"]),
        "| | within | cells | median error | largest |",
        "|---|---|---|---|---|",
        _share(rows, "memory", "peak memory in all", MEMORY_BOUND),
        _share(rows, "above", "peak memory above the process", MEMORY_BOUND),
        _share(rows, "seconds", "seconds per step", SECONDS_BOUND),
        "",
        "Memory in MiB; in brackets by how much the prediction is off.",
        "",
        "| task | batch | budget | in all: predicted | measured | above: predicted | measured "
        "| ms per step: predicted | measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["task"], str(row["batch"]), f"{row['budget']:g}"]
        for what, unit in (("memory", MIB), ("above", MIB), ("seconds", 1e-3)):
            predicted, measured = (row[which][what] / unit for which in ("predicted", "measured"))
            cells += [f"{predicted:.1f} ({100 * off(row, what):+.0f} %)", f"{measured:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _share(rows: Sequence[Row], what: str, name: str, bound: float) -> str:
    errors = [abs(off(row, what)) for row in rows]
    within = sum(error <= bound for error in errors)
    return (
        f"| {name} | {100 * bound:.0f} % | **{within} of {len(rows)}** | {100 * median(errors):.0f} % | "
        f"{100 * max(errors):.0f} % |"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=TASKS, action="append", help="may be given again (default: all)")
    parser.add_argument("--batch", type=int, choices=BATCHES, action="append", help="likewise")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="that are measured each time (default: %(default)s)")
    options = parser.parse_args(arguments)
    cells = [(task, batch) for task in options.only or TASKS for batch in options.batch or BATCHES]
    path = RESULTS / "prediction.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in kept if (row["task"], row["batch"]) not in cells]
    with tqdm(cells) as bar:
        for task, batch in bar:
            bar.set_description(f"{task}, {batch}")
            rows += measure(task, batch, options.repetitions, options.steps)
    rows.sort(key=lambda row: (TASKS.index(row["task"]), row["batch"], row["budget"]))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (RESULTS / "prediction.md").write_text(page(rows))
    print(page(rows))
    return 0


if __name__ == "__main__":
    # As a module it would be __main__ here, and be run again by the processes that measure.
    from benchmarks import prediction

    sys.exit(prediction.main())
