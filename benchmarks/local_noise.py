"""``python -m benchmarks.local_noise``: the accuracy lost by ``join --local-noise`` (docs/results/security.md).

    python -m benchmarks.local_noise             all rows, and the page; 3 seeds
    python -m benchmarks.local_noise --page      the page anew, from the rows that are there
    python -m benchmarks.local_noise --clips     FedAvg by clip on another seed, printed: how CLIP was chosen

Devices send no accuracy under local noise, so models are evaluated here on each device's test samples: the
coordinator's final model, and the personal ones in the devices' state folders.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.markdown import markdown_table
from benchmarks.places import ROWS, write_section
from edge_sdk.device.local_noise import DELTA, LocalNoise, epsilon
from edge_sdk.device.state import Reference, StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.publish import PublishOptions, publish
from edge_sdk.tasks import Seeded, Task, as_arrays
from edge_sdk.tasks.compute import Compute
from edge_sdk.tasks.digits import load
from sparrow.bench.server import machine
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings
from sparrow.protocol import checkpoint
from sparrow.protocol.manifest import Tensors
from sparrow.simulation import in_process
from sparrow.simulation.fleet import MEMORY, run_fleet
from sparrow.simulation.host import Plan

DEVICES = 20
ROUNDS = 10
LEARNING_RATE = 0.1
SEEDS = (0, 1, 2)
OTHER_SEED = 100
MULTIPLIERS = (0.0, 0.5, 1.0, 2.0, 4.0)
CLIP = 0.3
CLIPS = (0.1, 0.3, 1.0, 3.0)
METHODS: dict[str, tuple[float, ...]] = {"fedavg": (1.0,), "fedspu": (0.2, 0.4, 0.6, 0.8, 1.0)}
"""Methods, and the budgets of their devices."""

Row = dict[str, Any]


def _network() -> nn.Module:
    # Without batch norm, whose statistics get no noise; and small, because noise grows with the root of its values.
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@cache
def task(seed: int, index: int) -> Task:
    """Return the task of a device."""
    dealt = f"index={index},of={DEVICES},alpha=0.5,seed={seed}"
    digits = load(dealt, device=f"device-{index}", seed=seed, batch_size=16)
    return replace(digits, name="digits-mlp", model=Seeded(_network))


def play(method: str, seed: int, multiplier: float, clip: float) -> Row:
    """Run a federation, and return the accuracies of its models and the epsilon of a device."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        settings = Settings(data_dir=folder / "data", default_task="", log_level="ERROR")
        with in_process.running(create_app(settings)) as client:
            publish(
                in_process.ADDRESS,
                "f",
                task(seed, 0),
                client=client,
                options=PublishOptions(compiled=False),
                method=method,
                rounds=ROUNDS,
                cohort=DEVICES,
                min_devices=DEVICES,
                learning_rate=LEARNING_RATE,
                early_stopping="off",
                evaluation_interval=0,
                seed=seed,
                draws="seed",
            )
        plan = Plan(
            "f",
            DEVICES,
            budgets=METHODS[method],
            compute=Compute("cpu"),
            make_task=lambda index, info: task(seed, index),
            local_noise=LocalNoise(multiplier, clip) if multiplier else None,
        )
        app = create_app(settings)
        root = folder / "devices"
        run_fleet(None, plan, app=app, engine="torch", state_dir=root, adapt=False, quiet=True)
        with in_process.running(create_app(settings)) as client:
            transport = Transport(client)
            manifest = transport.manifest("f")
            shared = transport.model("f", manifest)
        tensors, _ = checkpoint.load((root / "reference.safetensors").read_bytes())
        found: dict[str, list[float]] = {"global": [], "personal": []}
        spent = set()
        for index in range(DEVICES):
            device = StateFolder(root / f"device-{index}", durable=False, reference=Reference.of(tensors))
            last, progress = device.load(manifest)
            personal = device.best(manifest) or last
            device.close()
            spent.add(epsilon(progress.updates) if multiplier else None)
            found["global"].append(accuracy(shared, task(seed, index)))
            if method == "fedspu" and personal is not None:
                found["personal"].append(accuracy(personal, task(seed, index)))
        (cost,) = spent
    means = {f"accuracy_{whose}": fmean(values) if values else None for whose, values in found.items()}
    return {"method": method, "seed": seed, "multiplier": multiplier, "clip": clip, "epsilon": cost, **means}


def accuracy(tensors: Tensors, judged: Task) -> float:
    """Return a model's accuracy on a device's test samples."""
    model = _network()
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    right = samples = 0
    with torch.no_grad():
        for batch in judged.held_out:
            inputs, targets = as_arrays(batch)
            found = model(torch.from_numpy(inputs)).argmax(dim=1).numpy()
            right += int((found == targets).sum())
            samples += len(targets)
    return right / samples


def page(rows: list[Row]) -> str:
    """Return the rows as a page of Markdown."""
    lines = []
    for multiplier in MULTIPLIERS:
        here = [row for row in rows if row["multiplier"] == multiplier]
        cost = here[0]["epsilon"]
        lines.append(
            [
                f"{multiplier:g}" if multiplier else "off",
                "–" if cost is None else f"{cost:.3g}",
                _percent(here, "fedavg", "global"),
                _percent(here, "fedspu", "global"),
                _percent(here, "fedspu", "personal"),
            ]
        )
    head = ("z", "ε", "FedAvg, global model", "FedSPU, global model", "FedSPU, personal models")
    today = datetime.now(timezone.utc).date()
    values = sum(value.numel() for value in _network().parameters())
    return f"""# Local noise on digits

This table shows the accuracy with `join --local-noise Z` ([privacy](../privacy.md#local-noise)). The federation has
{DEVICES} devices, all in each of {ROUNDS} rounds, a network of {values:,} values (64-32-10, no batch norm),
Dirichlet(0.5), clip C = {CLIP:g}, learning rate {LEARNING_RATE:g}, no early stopping, and defaults otherwise. FedSPU
has budgets from 0.2 to 1.0. Every device adds noise with the same z. ε is the privacy loss of one device after {ROUNDS}
updates, at δ = {DELTA:g}, if all of its data are replaced.

`python -m benchmarks.local_noise` made the table from `local-noise.jsonl` on {today}, {machine()}. The figures are
means over the devices' own test samples and {len(SEEDS)} seeds, ± the standard deviation over seeds.

{markdown_table(head, lines)}
The clip is the best of {", ".join(f"{clip:g}" for clip in CLIPS)} for FedAvg and z = 1 on another seed (`--clips`).
The difference between 0.3 and 1 is smaller than the difference between seeds.

**Conclusion.** With 20 devices, local noise removes nearly all accuracy of the global model. At an ε near 10 the model
is little better than guessing (10 %). At z = 0.5 it loses half of its accuracy or more, for an ε of 139, which gives
almost no protection. The noise on an update is {values**0.5:.0f} z times as long as the clip (√{values:,}), and the
mean over {DEVICES} devices reduces it only by a factor of {DEVICES**0.5:.1f}. FedSPU's personal models lose less,
because noise reaches them only through received values. This table does not compare them with local-only training. If
you can trust the coordinator, use [noise at the
coordinator](../privacy.md#differential-privacy-of-the-global-models) instead.
"""


def _percent(rows: list[Row], method: str, whose: str) -> str:
    values = [100 * row[f"accuracy_{whose}"] for row in rows if row["method"] == method]
    return f"{fmean(values):.1f} % ± {stdev(values):.1f}"


def main() -> int:
    """Run all rows and write the page, or print accuracy by clip."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local_noise", description="Cost of local noise.")
    parser.add_argument("--clips", action="store_true", help="print accuracy by clip instead")
    parser.add_argument("--page", action="store_true", help="only write the page from recorded rows")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="federations at a time (default: cores)")
    options = parser.parse_args()
    if options.clips:
        for clip in CLIPS:
            print(play("fedavg", OTHER_SEED, 1.0, clip), flush=True)
        return 0
    if options.page:
        lines = (ROWS / "local-noise.jsonl").read_text().splitlines()
        write_section("security", "local-noise", page([json.loads(line) for line in lines]))
        return 0
    runs = [(method, seed, multiplier) for seed in SEEDS for method in METHODS for multiplier in MULTIPLIERS]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        played = pool.map(play, *zip(*runs, strict=True), [CLIP] * len(runs))
        rows = list(tqdm(played, total=len(runs), desc="federations", unit="federation", disable=None))
    (ROWS / "local-noise.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_section("security", "local-noise", page(rows))
    print(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
