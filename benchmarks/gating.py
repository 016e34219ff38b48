"""``python -m benchmarks.gating``: the cost of a device-round of pFedGate, compared with FedAvg and small networks.

    python -m benchmarks.gating            measure, and write its rows and its section of docs/results/speed.md
    python -m benchmarks.gating --quick    the cells of mnist:leaf at a batch of 128 alone, printed

A device-round is one call of ``train`` of the method's device half with one epoch of BATCHES random batches in one
thread, from the received values to the values to send. *small* trains a network of only the rows that the gate chose
for the batch, and then the gate (forward, backward, step, knapsack): a lower bound for skipping blocks. Variants
alternate by round in one process; medians are compared. Memory is the peak of a separate process above its memory
without a model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks import steps
from benchmarks.markdown import markdown_table
from benchmarks.places import ROWS, write_section
from benchmarks.steps import Setting
from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods.pfedgate import gated_model
from edge_sdk.tasks import Task
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.gates.gated import GatedOptimisation
from edge_sdk.training.local import get_tensors, take_steps
from sparrow.bench.server import machine
from sparrow.coordinator.fleet.checks import completed
from sparrow.coordinator.methods import load_method as load_server_half
from sparrow.devices import memory
from sparrow.protocol.blocks import Selection
from sparrow.protocol.bundle import Bundle
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Assignment, Kind
from sparrow.protocol.settings import FederationSettings

NETWORKS = ("mnist:leaf", "cifar10:pfedgate")
SHARE = 0.3
BATCHES = 10
BATCH_SIZES = (32, 128, 512)
TURNS = 9

Row = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """One device-round of a method that is repeated from the same start."""

    method: str
    model: str
    batch: int
    own: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def setting(self) -> Setting:
        """Return the network and its first batch."""
        return Setting.of(self.model, self.batch)

    @cached_property
    def settings(self) -> FederationSettings:
        """Return momentum 0.9 and gradients clipped at 10, as in the paper's code."""
        return completed(
            FederationSettings(
                method=self.method,
                method_settings=dict(self.own),
                local_epochs=1,
                learning_rate=0.03,
                momentum=0.9,
                clip=10.0,
                early_stopping="off",
            )
        )

    @cached_property
    def manifest(self) -> Manifest:
        """Return the federation's manifest."""
        return load_server_half(self.method).manifest(self.setting.manifest, self.settings)

    @cached_property
    def task(self) -> Task:
        """Return a task of random batches."""
        classes = int(self.setting.targets.max()) + 1
        draw = torch.Generator().manual_seed(0)
        shape = self.setting.inputs.shape
        data = [
            (torch.randn(shape, generator=draw), torch.randint(classes, (len(self.setting.targets),), generator=draw))
            for _ in range(BATCHES)
        ]
        model = self.setting.channels_first().network()
        return Task(self.model, model, torch.nn.functional.cross_entropy, data, data[:1])

    @cached_property
    def job(self) -> Job:
        """Return the assignment, with the whole model as its payload."""
        values = pack(self.manifest, get_tensors(self.task.model, self.manifest), None)
        assignment = Assignment(
            assignment_id="a", kind=Kind.train, round=1, deadline_seconds=600.0, settings=self.settings
        )
        received = Bundle(np.asarray(values), None, None, "fp32", "")
        engine = TorchEngine(self.task, self.manifest)
        return Job(assignment, self.manifest, self.task, engine, DeviceState(), received, budget=SHARE)

    def __call__(self) -> None:
        """Run the round."""
        load_method(self.method).train(self.job)

    def choices(self) -> list[Selection]:
        """Return the blocks that the gate chooses in each batch of the round."""
        chosen: list[Selection] = []
        gated = gated_model(self.job, {})

        def run(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            outputs = gated(inputs)
            chosen.append(gated.chosen)
            return outputs

        optimisation = GatedOptimisation(gated, self.settings, model_rate=0.03, gate_rate=0.1)
        take_steps(gated.model, self.task, self.settings, optimisation, run, learning_rate=0.03, seed=0)
        return chosen


def _small(of: Round) -> Callable[[], None]:
    """Run, for each batch, a step of a network of the chosen rows, and one of the gate."""
    networks = [
        steps.small(of.setting, steps.rows_on(of.setting, of.manifest.block_table, choice), 0.9)
        for choice in of.choices()
    ]
    # The first run of a network is slow, so it is not measured.
    for network in networks:
        network()
    gated = gated_model(of.job, {})
    optimiser = torch.optim.SGD(gated.gate.parameters(), lr=0.1, momentum=0.9)

    def everything() -> None:
        gated.gate.train()
        for network, (inputs, _) in zip(networks, of.task.train, strict=True):
            network()
            optimiser.zero_grad()
            importances, scales = gated.gate(inputs)
            gated.select(importances)
            (importances.sum() + scales.sum()).backward()
            optimiser.step()

    return everything


def _rounds(model: str, batch: int) -> Iterator[tuple[str, Round]]:
    yield "FedAvg", Round("fedavg", model, batch)
    for cost, gradients in itertools.product(("parameters", "flops"), ("exact", "estimated")):
        own = {"smallest_budget": SHARE, "cost": cost, "gate_gradients": gradients}
        yield f"{cost}, {gradients}", Round("pfedgate", model, batch, tuple(own.items()))


def measure(model: str, batch: int) -> Row:
    """Return the median seconds of each variant, and the memory peaks of the device-rounds."""
    torch.set_num_threads(1)
    rounds = dict(_rounds(model, batch))
    variants: dict[str, Callable[[], None]] = dict(rounds)
    for cost in ("parameters", "flops"):
        variants[f"{cost}, small"] = _small(rounds[f"{cost}, exact"])
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(TURNS + 1):
        for name, variant in variants.items():
            start = time.perf_counter()
            variant()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {
        "row": "device-round",
        "model": model,
        "batch": batch,
        "share": SHARE,
        "seconds": {name: round(statistics.median(times), 5) for name, times in taken.items()},
        "bytes": {name: _peak_of(model, batch, name) for name in rounds},
        "gate": sum(p.numel() for p in gated_model(rounds["flops, exact"].job, {}).gate.parameters()),
        "machine": machine(),
    }


def _peak_of(model: str, batch: int, name: str) -> int:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak, model, batch, name).result()


def _peak(model: str, batch: int, name: str) -> int:
    """Return the peak in bytes above the memory before there was a model; the data are not part of it."""
    torch.set_num_threads(1)
    # Load all libraries now, so that they count as part of the base.
    dict(_rounds("mnist:small", 2))[name]()
    measured = dict(_rounds(model, batch))[name]
    # The model is made together with the data, so its parameters are subtracted from the base.
    held: list[torch.nn.Parameter] = list(measured.task.model.parameters())
    base = memory.resident() - sum(parameter.nbytes for parameter in held)
    memory.forget_peak()
    measured()
    return memory.peak_resident() - base


def page(rows: list[Row]) -> str:
    """Return the results as Markdown."""
    names = [f"{cost}, {gradients}" for cost in ("parameters", "flops") for gradients in ("exact", "estimated")]
    lines = []
    for row in rows:
        seconds = row["seconds"]
        held = row["bytes"]
        for name in names:
            small = seconds[f"{name.partition(',')[0]}, small"]
            lines.append(
                [
                    *(row["model"], str(row["batch"]), name, f"{1000 * seconds['FedAvg'] / BATCHES:.1f}"),
                    *(f"{1000 * seconds[name] / BATCHES:.1f}", f"**{seconds[name] / seconds['FedAvg']:.2f}**"),
                    *(f"{seconds[name] / small:.2f}", f"{held[name] / 1e6:.0f}"),
                    f"{held[name] / held['FedAvg']:.2f}",
                ]
            )
    head = [
        "network",
        "batch",
        "budget in, gates of off blocks",
        "FedAvg, ms a batch",
        "pFedGate, ms",
        "ratio",
        "to small networks",
        "memory, MB",
        "to FedAvg's",
    ]
    return HEAD.format(machine=rows[0]["machine"], share=SHARE) + "\n" + markdown_table(head, lines) + "\n"


HEAD = """# A device-round of pFedGate

Made by `python -m benchmarks.gating` from `gating.jsonl`; {machine}. A device-round is one epoch of 10 random batches
in one thread, with momentum 0.9, gradient clipping and a budget of {share}. The table of blocks is derived for this
budget. *Small networks* are networks of only the rows that were chosen in each batch, plus the gate; skipping blocks
cannot be faster. Memory is the peak of a process above its memory before it created a model. The paper reports 72 % of
FedAvg's time and 66 % of its memory at a batch size of 128, with code that skips no block.
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gating", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one network, one batch size, nothing written")
    options = parser.parse_args(arguments)
    cells = [("mnist:leaf", 128)] if options.quick else list(itertools.product(NETWORKS, BATCH_SIZES))
    rows = [measure(*cell) for cell in tqdm(cells, unit="cell", disable=None)]
    print(page(rows))
    if not options.quick:
        (ROWS / "gating.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_section("speed", "gating", page(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
