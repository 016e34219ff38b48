"""``python -m benchmarks.secure``: what secure aggregation costs, beside the same rounds without it.

Whole federations in one process, alternating: 20 devices of ``mnist:leaf`` (2.2 million parameters), two local steps on
made-up data, so that what is compared is not hidden behind training. Processor seconds are those of the process,
coordinator and devices together, per device-round; bytes are those of bodies, up, of all calls. Results are
``docs/results/secure.jsonl``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from edge_sdk.simulation.simulate import simulate
from edge_sdk.tasks import Task
from sparrow.benchmarks.markdown import markdown_table
from sparrow.benchmarks.server import machine
from sparrow.benchmarks.training import FOLDER
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings

DEVICES, ROUNDS, TURNS = 20, 3, 3
SETTINGS: dict[str, Any] = {
    "method": "fedavg",
    "rounds": ROUNDS,
    "cohort": DEVICES,
    "local_steps": 2,
    "learning_rate": 0.01,
    "early_stopping": "off",
    "evaluation_interval": 0,
    "draws": "seed",
}


def _task(number: int) -> Task:
    from edge_sdk.tasks.models import mnist_leaf

    chance = np.random.default_rng(number)
    batches = [(chance.random((8, 1, 28, 28), np.float32), np.arange(8) % 10) for _ in range(2)]
    return Task("leaf", mnist_leaf(), _loss, batches, batches[:1])


def _loss(outputs: Any, targets: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(outputs, targets)


def measure(secure: bool) -> dict[str, Any]:
    """Return what one federation takes for each of its device-rounds."""
    begin, wall = time.process_time(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(
            app=create_app(Settings(data_dir=Path(folder), default_task="")),
            task=_task,
            devices=DEVICES,
            engine="onnx",
            in_memory=True,
            quiet=True,
            adapt=False,
            secure=secure,
            **SETTINGS,
        )
    assert result.ended is not None
    rounds = DEVICES * ROUNDS
    return {
        "secure": secure,
        "cpu_seconds": (time.process_time() - begin) / rounds,
        "wall_seconds": (time.perf_counter() - wall) / rounds,
        "bytes_up": result.ended.bytes_up / rounds,
        "machine": machine(),
    }


def main() -> None:
    """Measure, and write rows and page."""
    rows = []
    measure(secure=False)  # compiling, and what is loaded once
    with (FOLDER / "secure.jsonl").open("w") as file:
        for _ in range(TURNS):
            for secure in (False, True):
                rows.append(measure(secure))
                file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1])

    def middle(secure: bool, name: str) -> float:
        return float(statistics.median(row[name] for row in rows if row["secure"] is secure))

    table = [
        [
            "secure" if secure else "plain",
            f"{1e3 * middle(secure, 'cpu_seconds'):.0f}",
            f"{1e3 * middle(secure, 'wall_seconds'):.0f}",
            f"{middle(secure, 'bytes_up') / 1e6:.2f}",
        ]
        for secure in (False, True)
    ]
    share = middle(True, "bytes_up") / middle(False, "bytes_up")
    (FOLDER / "secure.md").write_text(
        f"""# The cost of secure aggregation

Made by `python -m benchmarks.secure` from `secure.jsonl` beside this page: {DEVICES} devices, mnist:leaf (2.2 million
parameters), two local steps, {TURNS} turns of {ROUNDS} rounds, alternating; medians. {rows[0]["machine"]}.
Processor time is that of coordinator and devices together; all phases, signatures and unmasking included.

{markdown_table(["rounds", "CPU, ms a device-round", "wall, ms", "up, MB an update"], table)}

An update takes {share:.2f} of the bytes of fp32's. Not measured yet: coordinator and
devices apart, vanishing devices, and Flower's SecAgg+ beside it.
"""
    )


if __name__ == "__main__":
    main()
