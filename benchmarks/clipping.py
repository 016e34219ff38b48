"""``python -m benchmarks.clipping --data DIR``: effects of ``relative_clip`` on honest and on malicious devices.

Honest: FedSPU with budgets from 0.2 to 1, DEVICES devices in every round, with skewed classes and unequal numbers of
samples (``har``: people). If no update was clipped, the models without the clip are equal bit for bit; otherwise the
federation is run again without it.

Malicious: rounds without training, in which honest updates are random and of unequal lengths, f of n devices send 1e5
in every value of one direction. The mean's move along that direction is reported in median lengths of honest updates,
for the worst of ROUNDS rounds and for their sum, if no honest device pulls it back.

It prints both tables and writes the first one's rows to ``benchmarks/rows/clipping.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.markdown import markdown_table
from benchmarks.places import ROWS
from edge_sdk.tasks import Task, load_task
from sparrow.bench.server import machine
from sparrow.coordinator.rounds.intake import Intake, Update
from sparrow.coordinator.rounds.lengths import LENGTHS, WINDOW, usual
from sparrow.coordinator.sums.averages import MaskedSums
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import pack
from sparrow.protocol.settings import FederationSettings
from sparrow.simulation.result import Result
from sparrow.simulation.simulate import SimulationOptions, simulate

DEVICES = 10
ROUNDS = 20
SEEDS = (0, 1, 2)
BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)
TASKS = {
    "digits": ("partition=dirichlet,alpha=0.1", (10,)),
    "mnist": ("partition=dirichlet,alpha=0.3", (150, 300, 600)),
    "emnist": ("partition=dirichlet,alpha=0.1", (100, 200, 400)),
    "cifar10": ("partition=dirichlet,alpha=0.3", (150, 300, 600)),
    "har": ("partition=person", (23,)),
}
"""Task -> its partition, and of how many parts devices have theirs, in turn: of fewer parts, more samples."""
MALICIOUS = ((1, 10), (2, 10), (4, 10), (5, 10), (6, 10), (1, 2))
CLAIMS = (1, 10)
"""Times an honest device's samples: more than ten times the median do not count."""

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clipping", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with the tasks' files")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--times", type=float, default=FederationSettings().relative_clip, help="relative_clip")
    options = parser.parse_args(arguments)
    cells = [(task, seed) for task in options.tasks for seed in options.seeds]
    rows = [
        honest(task, seed, options.data, options.times) for task, seed in tqdm(cells, unit="federation", disable=None)
    ]
    (ROWS / "clipping.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{machine()}\n\n{table_of(rows)}\n\n{table_of_malicious()}")


def honest(task: str, seed: int, folder: Path, times: float) -> Row:
    """Play a task's federation with the clip, and without it if it clipped anybody."""
    began = time.perf_counter()
    result = play(task, seed, folder, relative_clip=times)
    clipped = Counter(name for record in result.rounds for name in record.clipped)
    drawn = Counter(name for record in result.rounds for name in record.cohort)
    without = play(task, seed, folder, relative_clip=0.0) if clipped else result
    return {
        "task": task,
        "seed": seed,
        "relative_clip": times,
        "clipped": sum(clipped.values()) / sum(drawn.values()),
        "most_clipped": max(clipped[name] / drawn[name] for name in drawn),
        "with": accuracies(result),
        "without": accuracies(without),
        "seconds": round(time.perf_counter() - began, 1),
    }


def play(task: str, seed: int, folder: Path, **settings: Any) -> Result:
    """Return the result of a federation of honest devices."""
    return simulate(
        task=partial(device_task, task, folder, seed),
        devices=DEVICES,
        cohort=DEVICES,
        rounds=ROUNDS,
        budgets=BUDGETS,
        seed=seed,
        local_epochs=2,
        early_stopping="off",
        evaluation_interval=0,
        options=SimulationOptions(in_memory=True, processes=1),
        quiet=True,
        **settings,
    )


def device_task(task: str, folder: Path, seed: int, index: int) -> Task:
    """Return the task of a device, with its part of the data."""
    path = "" if task == "digits" else f"{folder},"
    partition, parts = TASKS[task]
    data = f"{path}{partition},of={parts[index % len(parts)]},index={index}"
    return load_task(task, data, device=f"device-{index}", seed=seed, batch_size=16)


def accuracies(result: Result) -> dict[str, float]:
    """Return the accuracy of personal models, mean and worst tenth, and of the global model."""
    ended = result.ended
    assert ended is not None
    found = {
        "mean": ended.accuracy_personal,
        "decile": ended.accuracy_personal_decile,
        "global": ended.accuracy_global,
    }
    return {name: accuracy for name, accuracy in found.items() if accuracy is not None}


def table_of(rows: list[Row]) -> str:
    """Return the table of honest devices, a row for each task: means over seeds, and the worst seed's clipping."""
    names = ("mean", "decile", "global")
    header = ("task", "seeds", "clipped", "most of one device", *names, *(f"{name}, less without" for name in names))
    body = []
    for task in dict.fromkeys(row["task"] for row in rows):
        found = [row for row in rows if row["task"] == task]
        average = {name: 100 * statistics.mean(row["with"][name] for row in found) for name in names}
        moved = {
            name: 100 * statistics.mean(row["with"][name] - row["without"][name] for row in found) for name in names
        }
        body.append(
            (
                task,
                str(len(found)),
                f"{100 * statistics.mean(row['clipped'] for row in found):.2f} %",
                f"{100 * max(row['most_clipped'] for row in found):.0f} %",
                *(f"{average[name]:.1f} %" for name in names),
                *(f"{moved[name]:+.2f}" for name in names),
            )
        )
    return markdown_table(header, body)


# --- malicious devices -----------------------------------------------------------------------------------------------


def table_of_malicious() -> str:
    """Return the table of malicious devices: for each number of them, with honest weights and with ten times those."""
    header = ("malicious", "samples that each claims", "worst round", f"{ROUNDS} rounds")
    body = []
    for malicious, devices in MALICIOUS:
        for claim in CLAIMS:
            moves = list(lied(malicious, devices, claim))
            body.append((f"{malicious} of {devices}", f"{claim} times", f"{max(moves):.3g}", f"{sum(moves):.3g}"))
    return markdown_table(header, body)


def lied(malicious: int, devices: int, claim: int) -> Iterator[float]:
    """Yield how far each round's mean moves along their direction, in honest updates' median lengths."""
    manifest = load_builtin("digits").manifest
    chance = np.random.default_rng(0)
    sent = initial_values(manifest, 0)
    start = pack(manifest, sent, None)
    direction = chance.normal(size=len(start))
    direction /= np.linalg.norm(direction)
    noted: list[list[float]] = []
    for _ in range(ROUNDS):
        sizes = 0.01 * np.exp(chance.normal(0, 0.4, devices - malicious))
        moves = [size * chance.normal(size=len(start)) for size in sizes]
        updates = [Update((start + move).astype(np.float32), None, 10) for move in moves]
        far = np.float32(1e5 * len(start) ** 0.5) * direction
        updates += [Update((start + far).astype(np.float32), None, 10 * claim)] * malicious
        sums = MaskedSums(manifest)
        usual_length = usual(length for lengths in noted[-WINDOW:] for length in lengths)
        intake = Intake(sums, FederationSettings(), manifest, sent, usual_length)
        for place, update in enumerate(updates):
            intake.take(str(place), str(place), update)
        intake.finish(devices, lambda key: updates[int(key)])  # noqa: B023
        noted.append(intake.notes()[LENGTHS])
        mean = pack(manifest, sums.mean(sent), None)
        median = statistics.median(float(np.linalg.norm(move)) for move in moves)
        yield float((mean.astype(np.float64) - start) @ direction) / median


if __name__ == "__main__":
    main()
