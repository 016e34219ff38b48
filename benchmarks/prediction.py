"""``python -m benchmarks.prediction``: the error of ``sparrow profile``'s predictions of a training step.

Every network of the built-in tasks, under FedSPU's masks at five budgets, in batches of 32 and 128, one thread. Each
run predicts and measures a cell in turn, and adds a row to ``benchmarks/rows/prediction.jsonl``. Seconds are the
processor's, because other work would count otherwise. Of several runs of a cell the medians are compared;
memory in total and, as a harder test, above the process without training. Remove the file to begin again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.places import ROWS, write_section
from edge_sdk.arguments import MIB
from edge_sdk.profile import BUDGETS, Subject, profile
from edge_sdk.tasks.compute import Compute
from edge_sdk.tasks.public import MODELS, full_name
from sparrow.bench.server import machine
from sparrow.protocol.settings import FederationSettings

TASKS = ("digits", *(full_name(task, model) for task, models in MODELS.items() for model in models))
BATCHES = (32, 128)
MEMORY_BOUND = 0.15
SECONDS_BOUND = 0.25

Row = dict[str, Any]


def measure(task: str, batch: int, steps: int) -> list[Row]:
    """Return one run: a row per budget."""
    subject = Subject(
        task, FederationSettings(method="fedspu", batch_size=batch), compute=Compute(threads=1), engine="torch"
    )
    rows = []
    for cell in profile(subject, BUDGETS, steps=steps, clock=time.process_time).rows:
        measured = cell.measured
        predicted = cell.predicted
        memory = cell.memory
        assert measured is not None, "a machine for benchmarks has the memory"
        assert measured.flops is not None, "PyTorch counts them"
        rows.append(
            {
                "task": task,
                "batch": batch,
                "budget": predicted.budget,
                "machine": machine(),
                "predicted": _figures(predicted.flops, memory.held, memory.training, predicted.step_seconds),
                "measured": _figures(measured.flops, measured.base, measured.above, measured.seconds),
            }
        )
    return rows


def _figures(flops: int, base: int, above: int, seconds: float) -> Row:
    return {"flops": flops, "above": above, "memory": base + above, "seconds": seconds}


def cells(rows: Sequence[Row]) -> list[Row]:
    """Return the runs of each cell as one row, in the order of the page."""
    found: dict[tuple[int, int, float], list[Row]] = {}
    for row in rows:
        found.setdefault((TASKS.index(row["task"]), row["batch"], row["budget"]), []).append(row)
    return [
        {**found[key][0], "runs": len(found[key])}
        | {which: _summary([row[which] for row in found[key]]) for which in ("predicted", "measured")}
        for key in sorted(found)
    ]


def _summary(figures: Sequence[Row]) -> Row:
    return {what: median(each[what] for each in figures) for what in ("flops", "above", "memory", "seconds")}


def off(row: Row, what: str) -> float:
    """Return the prediction's error as a share of the measured value, with its sign."""
    return float(row["predicted"][what] / row["measured"][what] - 1)


HEAD = """# What a training step takes, predicted and measured

Made by `python -m benchmarks.prediction` on {machine}; the rows are in `prediction.jsonl`. FedSPU's masks, one thread,
batches of {batches}. Each cell was predicted and measured in turn, {runs}, and the medians are compared. Times are
processor seconds. *In all* is the peak memory of the process, and *above* is the memory that training adds.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the cells as Markdown."""
    lines = [
        HEAD.format(
            machine=rows[0]["machine"],
            runs=_span([row["runs"] for row in rows]),
            batches=" and ".join(map(str, sorted({row["batch"] for row in rows}))),
        ),
        "| | within | cells | median error | largest |",
        "|---|---|---|---|---|",
        _share(rows, "memory", "peak memory in all", MEMORY_BOUND),
        _share(rows, "above", "peak memory above the process", MEMORY_BOUND),
        _share(rows, "seconds", "seconds per step", SECONDS_BOUND),
        "",
        "Memory is in MiB; the parentheses contain the error of the prediction.",
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


def _span(numbers: Sequence[int]) -> str:
    least = min(numbers)
    most = max(numbers)
    if most == 1:
        return "once"
    return f"{least} times" if least == most else f"{least} to {most} times"


def _share(rows: Sequence[Row], what: str, name: str, bound: float) -> str:
    errors = [abs(off(row, what)) for row in rows]
    within = sum(error <= bound for error in errors)
    return (
        f"| {name} | {100 * bound:.0f} % | **{within} of {len(rows)}** | {100 * median(errors):.0f} % | "
        f"{100 * max(errors):.0f} % |"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and save the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=TASKS, action="append", help="a task; may be repeated (default: all)")
    parser.add_argument(
        "--batch", type=int, choices=BATCHES, action="append", help="a batch size; may be repeated (default: all)"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each cell (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps per run (default: %(default)s)")
    options = parser.parse_args(arguments)
    turns = [(t, b) for _ in range(options.runs) for t in options.only or TASKS for b in options.batch or BATCHES]
    path = ROWS / "prediction.jsonl"
    with tqdm(turns, disable=None) as bar:
        for task, batch in bar:
            bar.set_description(f"{task}, {batch}")
            rows = measure(task, batch, options.steps)
            with path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    text = page(cells([json.loads(line) for line in path.read_text().splitlines()]))
    write_section("speed", "prediction", text)
    print(text)
    return 0


if __name__ == "__main__":
    # As a module it would be __main__ here, and be run again by the processes that measure.
    from benchmarks import prediction

    sys.exit(prediction.main())
