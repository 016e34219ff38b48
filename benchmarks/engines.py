"""``python -m benchmarks.engines``: a training step of ONNX Runtime against one of PyTorch, on the same network.

    python -m benchmarks.engines                                     steps and device processes, and the page
    python -m benchmarks.engines footprint                           what a device process takes with each, alone
    python -m benchmarks.engines accuracy --data DIR                 models of three seeds; DIR: mnist.npz, cifar10.npz
    python -m benchmarks.engines page                                write the page of the recorded results

The variants of a cell alternate step by step in one process and one thread, in ``TURNS`` turns; a turn compares the
medians of its steps, a cell the median of its turns. A device process takes part in a federation with a coordinator on
this machine; the engines alternate. Rows are in ``benchmarks/rows/engines.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks import steps
from benchmarks.markdown import markdown_table
from benchmarks.places import ROWS, write_section
from benchmarks.steps import LEARNING_RATE, Setting, Step
from benchmarks.training import Row, alternate
from edge_sdk.engines import EngineName
from edge_sdk.engines.onnx import Network, Sessions, Training
from edge_sdk.engines.optimiser import Rule
from edge_sdk.engines.training import EVERYTHING, Part
from edge_sdk.publish import publish
from edge_sdk.publishing.step import compile_step
from sparrow.bench.server import coordinator, machine
from sparrow.graphs import Graphs
from sparrow.simulation.fleet import run_fleet
from sparrow.simulation.host import Plan

MODELS = ("mnist:small", "mnist:leaf", "cifar10:fedspu", "har:small")
BATCHES = (32, 128)
TURNS = 5
BUDGET = 0.2
DENSITIES = (0.05, 0.2, 0.5)
MASKED = "mnist:leaf"
"""Measured under FedSPU's mask at ``BUDGET``, and under masks of elements."""


ENGINES = {"onnx": "edge_sdk.engines.engine:OnnxEngine", "torch": "edge_sdk.training.engine:TorchEngine"}
FOOTPRINTS = (("digits", 20), ("mnist:leaf", 32))
"""Task and batch size of the federations that device processes take part in."""
DEVICES = {"digits": 10, "mnist": 100, "cifar10": 100}
"""Tasks whose accuracy is compared, and how many devices train them."""
COHORT = 5
ROUNDS = 20
SEEDS = 3
SAMPLES = 1000
"""Of the file of a device whose task has no data of its own."""

DEVICE = """
import json, os, sys, time

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

def age():
    started = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started

from edge_sdk.join import main
module, _, name = sys.argv[1].partition(":")
engine = getattr(__import__(module, fromlist=[name]), name)
train, found = engine.train, {}

def watched(*given, progress, **named):
    def after(done, total, loss):
        if not found:
            found.update(first_step_seconds=age(), first_step_processor=time.process_time())
        found["training_kib"] = max(found.get("training_kib", 0), status("VmRSS"))
        progress(done, total, loss)
    return train(*given, progress=after, **named)

engine.train = watched
code = main(sys.argv[2:])
found["peak_kib"] = status("VmHWM")
print(json.dumps(found))
sys.exit(code)
"""
"""A device process that says when its first step was done, and what it held."""


def cells(models: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the measured cells: model and batch size."""
    for model in models:
        for batch in BATCHES:
            yield model, batch


def measure(model: str, batch: int, turns: int = TURNS) -> Row:
    """Return the seconds of a step of each variant, of each turn."""
    torch.set_num_threads(1)
    setting = Setting.of(model, batch)
    graphs = compile_step(setting.model, F.cross_entropy, setting.inputs[:8].contiguous(), setting.targets[:8])
    variants = {"torch": steps.dense(setting), "onnx": onnx_step(setting, graphs)}
    if model == MASKED:
        mask = setting.mask(BUDGET)
        variants[f"torch, budget {BUDGET:g}"] = steps.freezing(setting, mask)
        variants[f"onnx, budget {BUDGET:g}"] = onnx_step(setting, graphs, Part(mask))
        for density in DENSITIES:
            variants[f"onnx, density {density:g}"] = onnx_step(setting, graphs, scattered(setting, density))
    taken = [alternate(variants) for _ in range(turns)]
    seconds = {name: [round(turn[name], 6) for turn in taken] for name in variants}
    return {"row": "engines", "model": model, "batch": batch, "seconds": seconds, "machine": machine()}


def onnx_step(setting: Setting, graphs: Graphs, part: Part = EVERYTHING) -> Step:
    """Return a step of the setting's batch, of a part of its network."""
    network = Network(setting.manifest, Sessions(graphs))
    state: dict[str, Any] = {name: value.numpy() for name, value in setting.model.state_dict().items()}
    tensors = {spec.name: np.ascontiguousarray(state[spec.name]) for spec in setting.manifest.kept}
    network.load(tensors | {name: tensors[name] * exists for name, exists in (part.elements or {}).items()})
    training = Training(network, Rule(learning_rate=LEARNING_RATE), part)
    inputs = setting.inputs.contiguous().numpy()
    targets = setting.targets.numpy()

    def step() -> None:
        training.step(inputs, targets)

    return step


def scattered(setting: Setting, density: float) -> Part:
    """Return random elements of all weights."""
    chance = np.random.default_rng(0)
    return Part(elements={spec.name: chance.random(spec.shape) < density for spec in setting.manifest.maskable})


def footprint(task: str, batch: int, turns: int = TURNS) -> Row:
    """Return the seconds until the first step and the memory of a device process, by engine and turn."""
    taken: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as folder, coordinator(Path(folder)) as server:
        data = [] if task == "digits" else ["--data", str(_samples(Path(folder), task))]
        for turn in range(turns):
            for engine, place in ENGINES.items():
                name = f"{engine}-{turn}"
                publish(server, name, task, rounds=2, cohort=1, min_devices=1, batch_size=batch)
                options = [
                    "--server",
                    server,
                    "--federation",
                    name,
                    "--device-name",
                    "device",
                    "--engine",
                    engine,
                    *data,
                ]
                options += ["--budget", "1", "--threads", "1", "--policy", "none", "--quiet"]
                done = subprocess.run(
                    [sys.executable, "-c", DEVICE, place, *options, "--state-dir", f"{folder}/{name}"],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                taken[engine].append(json.loads(done.stdout.splitlines()[-1]))
    return {"row": "footprint", "model": task, "batch": batch, "engines": taken, "machine": machine()}


def accuracy(task: str, data: Path | None, seeds: int) -> Row:
    """Return the mean accuracy of FedSPU's personal models with each engine, by seed, all else being the same."""
    found: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for engine, named in found.items():
        with tempfile.TemporaryDirectory() as folder, coordinator(Path(folder)) as server:
            for seed in range(seeds):
                name = f"seed-{seed}"
                publish(
                    server,
                    name,
                    task,
                    method="fedspu",
                    rounds=ROUNDS,
                    cohort=COHORT,
                    min_devices=DEVICES[task],
                    early_stopping="off",
                    seed=seed,
                    draws="seed",
                )
                dealt = f"partition=dirichlet,alpha=0.3,seed={seed}"
                place = dealt if task == "digits" else f"{data},{dealt}"
                plan = Plan(name, devices=DEVICES[task], data=place, budgets=(0.2, 0.4, 0.6, 0.8, 1.0))
                ended = run_fleet(server, plan, engine=cast(EngineName, engine), in_memory=True, quiet=True).ended
                assert ended is not None, "the last round is followed by an evaluation"
                assert ended.accuracy_personal is not None, "FedSPU's devices have personal models"
                named.append(round(ended.accuracy_personal, 4))
    return {"row": "accuracy", "model": task, "engines": found, "machine": machine()}


def _samples(folder: Path, task: str) -> Path:
    """Write a file of a device's own samples, random images, for MNIST's tasks."""
    chance = np.random.default_rng(0)
    images = chance.integers(0, 256, (SAMPLES, 28, 28), np.uint8)
    file = folder / "own.npz"
    np.savez(file, x_train=images, y_train=np.arange(SAMPLES, dtype=np.uint8) % 10)
    return file


def install(sources: Path, folder: Path, extra: str) -> tuple[Path, int]:
    """Install Sparrow with an extra into a new environment in ``folder``; return its Python, and the bytes it took."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
    shutil.copytree(sources, folder / "sources", ignore=left_out)
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    python = folder / "environment" / "bin" / "python"
    before = _bytes(folder / "environment")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(folder / "sources" / "constraints.txt")]
    subprocess.run([*pip, *constraints, f"{folder / 'sources'}[{extra}]"], check=True)
    return python, _bytes(folder / "environment") - before


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def ratio(row: Row, name: str, to: str) -> float:
    """Return the median over turns of one variant's seconds over another's of the same turn."""
    seconds = row["seconds"]
    return float(statistics.median(one / other for one, other in zip(seconds[name], seconds[to], strict=True)))


HEAD = """# Engines: ONNX Runtime against PyTorch

Made by `python -m benchmarks.engines` from `engines.jsonl`. The figures are the seconds of a training step (batch in,
forward, backward, SGD) on random inputs. The variants alternate in one process and one thread. A ratio is the median
over {turns} turns of the ratio of medians. {machine}.

Over {count} cells the geometric mean of onnx / torch is **{mean:.2f}**, and the largest ratio is {largest:.2f}.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the results as Markdown."""
    sections = {"engines": steps_section, "footprint": footprint_section, "accuracy": accuracy_section}
    by_kind = {kind: [row for row in rows if row["row"] == kind] for kind in sections}
    return "\n".join(sections[kind](found) for kind, found in by_kind.items() if found)


def accuracy_section(rows: Sequence[Row]) -> str:
    """Return the accuracies of federations by engine and seed."""
    table = []
    for row in rows:
        by = row["engines"]
        apart = statistics.mean(by["onnx"]) - statistics.mean(by["torch"])
        spread = max(max(each) - min(each) for each in by.values())
        seeds = [", ".join(f"{100 * each:.1f}" for each in by[engine]) for engine in ("torch", "onnx")]
        table.append([row["model"], str(DEVICES[row["model"]]), *seeds, f"{100 * apart:+.2f}", f"{100 * spread:.2f}"])
    head = ["task", "devices", "torch, %", "onnx, %", "onnx less torch, means", "between seeds, at most"]
    said = (
        f"## Accuracy\n\nFedSPU, budgets of 0.2 to 1 in equal shares, {COHORT} devices per round, {ROUNDS} rounds of "
        f"five epochs, Dirichlet 0.3. The table shows the mean accuracy of all personal models, by seed. Both engines "
        f"have the same data, draws and batches. {rows[0]['machine']}.\n"
    )
    return "\n".join([said, markdown_table(head, table)])


def footprint_section(rows: Sequence[Row]) -> str:
    """Return the figures of device processes, medians over turns."""
    table = []
    for row in rows:
        for engine, turns in row["engines"].items():
            median = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
            seconds = [f"{median[f'first_step_{each}']:.2f}" for each in ("seconds", "processor")]
            held = [f"{median[f'{each}_kib'] / 1000 * 1.024:.0f}" for each in ("training", "peak")]
            table.append([row["model"], str(row["batch"]), engine, *seconds, *held])
    head = ["task", "batch", "engine", "first step, s", "of the processor, s", "training, MB", "at most, MB"]
    said = (
        f"## A device process\n\nThe table shows the time from the start of the process to the end of its first step, "
        f"the peak of resident memory after a step, and its peak at any time, over two rounds. "
        f"{rows[0]['machine']}.\n"
    )
    return "\n".join([said, markdown_table(head, table)])


def steps_section(rows: Sequence[Row]) -> str:
    """Return the section about the time of steps."""
    ratios = [ratio(row, "onnx", "torch") for row in rows]
    turns = len(rows[0]["seconds"]["onnx"])
    mean = prod(ratios) ** (1 / len(ratios))
    head = HEAD.format(turns=turns, machine=rows[0]["machine"], count=len(rows), mean=mean, largest=max(ratios))
    table = []
    for row, each in zip(rows, ratios, strict=True):
        seconds = [f"{1e3 * statistics.median(row['seconds'][name]):.2f}" for name in ("torch", "onnx")]
        table.append([row["model"], str(row["batch"]), *seconds, f"{each:.2f}"])
    parts = [head, markdown_table(["model", "batch", "torch, ms", "onnx, ms", "onnx / torch"], table)]
    masked = [
        [row["model"], str(row["batch"]), name, f"{ratio(row, name, 'torch'):.2f}", f"{ratio(row, name, 'onnx'):.2f}"]
        for row in rows
        for name in row["seconds"]
        if ", " in name
    ]
    if masked:
        parts.append("## A part of the network\n\n*budget*: FedSPU's mask; *density*: masks of elements.\n")
        parts.append(markdown_table(["model", "batch", "step", "over torch, dense", "over onnx, dense"], masked))
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Measure, write rows and page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("all", "footprint", "accuracy", "page"), default="all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--data", type=Path, help="the folder of mnist.npz and cifar10.npz, for accuracy")
    options = parser.parse_args(arguments)
    file = ROWS / "engines.jsonl"
    if options.what != "page":
        known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        made = ("engines", "footprint") if options.what == "all" else (options.what,)
        found = [row for row in known if row["row"] not in made]
        if "engines" in made:
            found += [
                measure(*cell, options.turns) for cell in tqdm(list(cells(options.models)), unit="cell", disable=None)
            ]
        if "footprint" in made:
            found += [footprint(*cell, options.turns) for cell in tqdm(FOOTPRINTS, unit="device", disable=None)]
        if "accuracy" in made:
            tasks = [task for task in DEVICES if task == "digits" or options.data]
            found += [accuracy(task, options.data, SEEDS) for task in tqdm(tasks, unit="task", disable=None)]
        file.write_text("".join(json.dumps(row) + "\n" for row in found))
    if not file.exists():
        raise SystemExit(f"{file} has no results; run `python -m benchmarks.engines` first")
    text = page([json.loads(line) for line in file.read_text().splitlines()])
    write_section("speed", "engines", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
