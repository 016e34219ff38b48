"""``python -m benchmarks.training``: the cost of a training step with a frozen, gated or masked part of the model.

    python -m benchmarks.training freezing gates elements memory     measure these, or all by default
    python -m benchmarks.training page                               write the page of the recorded results

Every cell alternates its variants (``steps``) step by step in one process and compares medians, so changes of the
machine's speed affect all equally. Memory is measured in a separate process for every cell. Results replace those of
their kind in ``benchmarks/rows/training.jsonl``, from which a section of ``docs/results/speed.md`` and its plots are
made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import steps
from benchmarks.markdown import markdown_table
from benchmarks.places import PAGES, ROWS, write_section
from benchmarks.plots import curves
from benchmarks.steps import Setting, Step
from sparrow.bench.plots import Curve, colours
from sparrow.bench.server import machine
from sparrow.devices import memory
from sparrow.protocol.blocks import BlockTable
from sparrow.protocol.flops import training_flops

BUDGETS = (0.2, 0.4, 0.6, 0.8)
DENSITIES = (0.05, 0.1, 0.2, 0.5, 0.8)
BATCHES = (32, 128, 512)
THREADS = (1, 2)
MODELS = (
    "mnist:small",
    "mnist:fedsgc",
    "mnist:leaf",
    "cifar10:fedspu",
    "cifar10:fedsgc",
    "cifar10:dmpfl",
    "cifar10:pfedgate",
    "har:small",
)
WIDE = ("mnist:leaf", "cifar10:fedspu")
"""Measured at every batch size and thread count; the others at a batch of 128 in one thread."""
GATED = ("mnist:leaf", "cifar10:fedspu")
NARROW = ("cifar10:fedspu",)
"""Of which so few channels are on that they run faster in channels first, gated and small."""
SHARE = 0.3
BLOCKS = 10
PROBE = 1 / 8
SELECTIONS = 32
HELD = ("dense", "frozen at 0.2", "gates, exact", "gates, estimated", "elements at 0.05", "elements at 0.2")
SECONDS = 1.5
"""That every variant of a cell is timed for, about."""

Row = dict[str, Any]
Variants = Mapping[str, Step]


def alternate(variants: Variants) -> dict[str, float]:
    """Return the median seconds of a step of each variant; variants alternate."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    begin = time.perf_counter()
    for step in variants.values():
        step()
    each = (time.perf_counter() - begin) / len(variants)
    turns = int(min(60, max(9, SECONDS / each)))
    for turn in range(turns + 2):
        for name, step in variants.items():
            start = time.perf_counter()
            step()
            if turn > 1:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def _cell(kind: str, model: str, batch: int, threads: int, point: float, variants: Variants, **more: Any) -> Row:
    seconds = {name: round(taken, 6) for name, taken in alternate(variants).items()}
    where = {"row": kind, "model": model, "batch": batch, "threads": threads, "point": point}
    return {**where, "seconds": seconds, "machine": machine(), **more}


def _settings(models: Sequence[str]) -> list[tuple[str, int, int]]:
    return [
        (model, batch, threads)
        for model in models
        for batch in BATCHES
        for threads in THREADS
        if model in WIDE or (batch, threads) == (128, 1)
    ]


def freezing() -> Iterator[Callable[[], Row]]:
    """Measure FedSPU's masks at every budget."""

    def cell(model: str, batch: int, threads: int, budget: float) -> Row:
        torch.set_num_threads(threads)
        setting = Setting.of(model, batch)
        mask = setting.mask(budget)
        widths = {name: len(rows) for name, rows in mask.active.items()}
        variants = {
            "dense": steps.dense(setting),
            "hooks": steps.hooks(setting, steps.trained_values(setting, mask)),
            "small": steps.small(setting, widths),
            "ours": steps.freezing(setting, mask),
        }
        whole = training_flops(setting.manifest, batch)
        bound = training_flops(setting.manifest, batch, weight_gradients=mask) / whole
        return _cell("freezing", model, batch, threads, budget, variants, flops=round(bound, 4))

    for model, batch, threads in _settings(MODELS):
        for budget in BUDGETS:
            yield lambda a=model, b=batch, c=threads, d=budget: cell(a, b, c, d)  # type: ignore[misc]


def gates() -> Iterator[Callable[[], Row]]:
    """Measure block gates: rows of every layer, blocks as the knapsack chooses them, blocks that cut rows."""

    def cell(model: str, kind: str) -> Row:
        torch.set_num_threads(1)
        setting = Setting.of(model, 128)
        part = setting.channels_first() if model in NARROW else setting
        shapes = {name: tuple(parameter.shape) for name, parameter in setting.model.named_parameters()}
        table = BlockTable.of(
            shapes,
            count=BLOCKS,
            smallest_share=min(1 / BLOCKS, SHARE / 2) if kind == "knapsack" else None,
            align_rows=kind != "cut",
        )
        draw = np.random.default_rng(0)
        if kind == "knapsack":
            selections = [table.select(draw.random(len(table.sizes)), SHARE) for _ in range(SELECTIONS)]
        else:
            selections = [steps.by_rows(table, SHARE, draw) for _ in range(SELECTIONS)]
        variants = {
            "dense": steps.dense(setting, 0.9),
            **{
                name: steps.gated(part, table, selections, probe)
                for name, probe in (("exact", 1.0), ("estimated", PROBE), ("none", 0.0))
            },
        }
        of_each = [
            steps.small(part, steps.rows_on(setting, table, selected), 0.9)
            for selected in selections[:: SELECTIONS // 8]
        ]
        # The first run of a network is slow, so it is not measured.
        for step in of_each:
            step()
        turn = 0

        def some_network() -> None:
            nonlocal turn
            of_each[turn % len(of_each)]()
            turn += 1

        for name in ("exact", "estimated", "none"):
            # Run until every block has a momentum.
            for _ in range(SELECTIONS):
                variants[name]()
        kept = float(np.mean([table.sizes[on].sum() / table.sizes.sum() for on in selections]))
        return _cell(
            "gates", model, 128, 1, SHARE, {**variants, "small": some_network}, blocks=kind, kept=round(kept, 3)
        )

    for model in GATED:
        for kind in ("rows", "knapsack", "cut"):
            yield lambda a=model, b=kind: cell(a, b)  # type: ignore[misc]


def elements() -> Iterator[Callable[[], Row]]:
    """Measure element masks at every density, of all weights except the output layer's."""

    def cell(model: str, density: float, momentum: float) -> Row:
        torch.set_num_threads(1)
        setting = Setting.of(model, 128)
        exist = _scattered(setting, density)
        trained = {
            name: exist.get(name, torch.ones_like(parameter, dtype=torch.bool))
            for name, parameter in setting.model.named_parameters()
        }
        variants = {
            "dense": steps.dense(setting, momentum),
            "hooks": steps.hooks(setting, trained, momentum),
            "ours": steps.freezing(setting, None, exist, momentum),
        }
        return _cell("elements", model, 128, 1, density, variants, momentum=momentum)

    for model in MODELS:
        for density in DENSITIES:
            for momentum in (0.0, 0.9) if model in WIDE else (0.9,):
                yield lambda a=model, b=density, c=momentum: cell(a, b, c)  # type: ignore[misc]


def _scattered(setting: Setting, density: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = [(name, p) for name, p in setting.model.named_parameters() if p.dim() > 1]
    return {name: torch.rand(p.shape, generator=generator) < density for name, p in weights[:-1]}


def peak_memory() -> Iterator[Callable[[], Row]]:
    """Return the peak memory of a few steps above the base process, each in a separate process."""

    def cell(model: str) -> Row:
        found = {kind: statistics.median(_in_a_process(model, kind) for _ in range(3)) for kind in HELD}
        return {"row": "memory", "model": model, "batch": 128, "bytes": found, "machine": machine()}

    for model in WIDE:
        yield lambda a=model: cell(a)  # type: ignore[misc]


def _in_a_process(model: str, kind: str) -> int:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak, model, kind).result()


def _peak(model: str, kind: str) -> int:
    """Return the peak in bytes above the memory before there was a model."""
    torch.set_num_threads(1)
    # Load all libraries now, so that they count as part of the base.
    steps.dense(Setting.of("mnist:small", 2), 0.9)()
    base = memory.resident()
    setting = Setting.of(model, 128)
    step = _step(setting, kind)
    memory.forget_peak()
    for _ in range(4):
        step()
    return memory.peak_resident() - base


def _step(setting: Setting, kind: str) -> Step:
    name, _, at = kind.partition(" at ")
    if kind == "dense":
        return steps.dense(setting, 0.9)
    if name == "frozen":
        return steps.freezing(setting, setting.mask(float(at)), momentum=0.9)
    if name == "elements":
        return steps.freezing(setting, None, _scattered(setting, float(at)), 0.9)
    shapes = {name: tuple(parameter.shape) for name, parameter in setting.model.named_parameters()}
    table = BlockTable.of(shapes, count=BLOCKS, align_rows=True)
    selections = [steps.by_rows(table, SHARE, np.random.default_rng(0))]
    return steps.gated(setting, table, selections, 1.0 if kind == "gates, exact" else PROBE)


KINDS: dict[str, Callable[[], Iterator[Callable[[], Row]]]] = {
    "freezing": freezing,
    "gates": gates,
    "elements": elements,
    "memory": peak_memory,
}

HEAD = """# Training that skips what is frozen, gated or masked

Made by `python -m benchmarks.training` from `training.jsonl`. The figures are the seconds of a step (forward, backward,
optimiser) of each variant, divided by those of dense PyTorch. The variants of a cell alternate step by step in one
process, and the medians are compared. Inputs are random, the optimiser is plain SGD unless stated otherwise, and the
memory format is channels last if the product uses it.

*hooks* multiplies whole gradients by masks and restores frozen weights, like the papers' code. *small* is a physically
smaller network of only the active neurons. It is a lower bound, but loses the contribution of the frozen neurons.
*FLOPs* is the share of arithmetic that is needed: the whole forward pass and all errors, but gradients only of active
weights. {machine}.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the results as Markdown."""
    parts = [HEAD.format(machine=rows[0]["machine"])]
    of = {kind: [row for row in rows if row["row"] == kind] for kind in KINDS}
    if of["freezing"]:
        parts.append("## Frozen neurons (FedSPU)\n\n![ratios](training-freezing.png)\n")
        head = ["model", "batch", "threads", "budget", "dense, ms", "hooks", "**ours**", "small", "FLOPs"]
        table = [
            [*_named(row), f"{row['point']:g}", *_ratios(row, "hooks", "ours", "small"), f"{row['flops']:.2f}"]
            for row in of["freezing"]
        ]
        parts.append(markdown_table(head, table))
    if of["gates"]:
        parts.append(
            f"## Block gates (pFedGate)\n\ns = {SHARE}, up to {BLOCKS} blocks per tensor, different gates in each "
            f"batch, momentum 0.9. *rows*: a share of {SHARE} of the rows of every layer. *knapsack*: blocks of "
            "whole rows, chosen by the knapsack for random importances. *cut*: blocks that end inside rows. "
            "*estimated*: gates of inactive rows learn from an eighth of the batch. *none*: these gates do not "
            "learn. *small*: networks of the active rows. Gates and small networks of CIFAR-10 run with channels "
            "first, which is faster if two of six channels are active.\n"
        )
        head = ["model", "blocks", "values on", "dense, ms", "exact", "estimated", "none", "small", "estimated / small"]
        parts.append(markdown_table(head, [_gated(row) for row in of["gates"]]))
    if of["elements"]:
        parts.append("## Element masks (FedSGC, DM-PFL)\n\n![ratios](training-elements.png)\n")
        head = ["model", "density", "momentum", "dense, ms", "hooks", "**ours**"]
        table = [
            [row["model"], f"{row['point']:g}", f"{row['momentum']:g}", *_ratios(row, "hooks", "ours")]
            for row in of["elements"]
        ]
        parts.append(markdown_table(head, table))
    if of["memory"]:
        parts.append(
            "## Peak memory above the base process\n\nBatch size 128, momentum 0.9, a separate process for each.\n"
        )
        table = [
            [row["model"], kind, f"{held / 1e6:.1f}", f"{held / row['bytes']['dense']:.2f}"]
            for row in of["memory"]
            for kind, held in row["bytes"].items()
        ]
        parts.append(markdown_table(["model", "what", "MB", "of dense"], table))
    return "\n".join(parts)


def _named(row: Row) -> list[str]:
    return [row["model"], str(row["batch"]), str(row["threads"])]


def _ratios(row: Row, *names: str) -> list[str]:
    seconds = row["seconds"]
    return [f"{1e3 * seconds['dense']:.1f}", *(f"{seconds[name] / seconds['dense']:.2f}" for name in names)]


def _gated(row: Row) -> list[str]:
    ratio = row["seconds"]["estimated"] / row["seconds"]["small"]
    ratios = _ratios(row, "exact", "estimated", "none", "small")
    return [row["model"], row["blocks"], f"{row['kept']:.2f}", *ratios, f"{ratio:.2f}"]


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Plot ratios to dense by budget and by density."""
    found = [row for row in rows if row["row"] == "freezing" and row["model"] in WIDE and row["threads"] == 1]
    panels: dict[str, dict[str, Curve]] = {}
    for model in WIDE:
        for batch in BATCHES:
            mine = sorted((r for r in found if (r["model"], r["batch"]) == (model, batch)), key=lambda r: r["point"])
            if mine:
                lines = {
                    name: [r["seconds"][name] / r["seconds"]["dense"] for r in mine]
                    for name in ("hooks", "ours", "small")
                }
                lines["FLOPs"] = [r["flops"] for r in mine]
                panels[f"{model}, batch {batch}"] = _curves([r["point"] for r in mine], lines)
    if panels:
        curves(
            panels,
            colours(["hooks", "ours", "small", "FLOPs"]),
            folder / "training-freezing.png",
            x="budget",
            y="time of dense",
        )
    masked = [row for row in rows if row["row"] == "elements" and row["momentum"] == 0.9]
    panels = {}
    for model in MODELS:
        mine = sorted((r for r in masked if r["model"] == model), key=lambda r: r["point"])
        if mine and model in (*WIDE, "cifar10:dmpfl", "mnist:fedsgc"):
            lines = {name: [r["seconds"][name] / r["seconds"]["dense"] for r in mine] for name in ("hooks", "ours")}
            panels[model] = _curves([r["point"] for r in mine], lines)
    if panels:
        curves(panels, colours(["hooks", "ours"]), folder / "training-elements.png", x="density", y="time of dense")


def _curves(points: Sequence[float], lines: Mapping[str, Sequence[float]]) -> dict[str, Curve]:
    return {name: Curve(points, line, line, line) for name, line in lines.items()}


def main(arguments: list[str] | None = None) -> int:
    """Measure, append the rows, write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=(*KINDS, "page", []), help="kinds to measure; all by default")
    options = parser.parse_args(arguments)
    file = ROWS / "training.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for kind in [kind for kind in options.kinds or KINDS if kind != "page"]:
        measured = [cell() for cell in tqdm(list(KINDS[kind]()), desc=kind, unit="cell", disable=None)]
        rows = [row for row in rows if row["row"] != kind] + measured
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not rows:
        raise SystemExit(f"{file} has no results; run `python -m benchmarks.training` first")
    write_section("speed", "training", page(rows))
    plot(rows, PAGES)
    print(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
