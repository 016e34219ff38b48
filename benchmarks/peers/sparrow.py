"""This project's fleet as a peer: a coordinator process, real sessions over HTTP, the same work as the others.

The same distribution of the same images to the same 100 devices, the product's own network (which pools before ReLU:
the same function), FedAvg. In addition, every device evaluates the model as it first receives it, and ten of them the
last one, on a hundredth of the test images each; the others judge the last model on all of them, once. As with them, no
device fetches the finished model (``adapt``).
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from sparrow.benchmarks import peers
from sparrow.benchmarks.peers import report
from sparrow.benchmarks.server import coordinator


def run(data: Path, rounds: int, processes: int, seed: int) -> dict[str, Any]:
    """Return one run as ``report.outcome`` has it."""
    # The coordinator starts while this process loads the data and its imports.
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        loading = pool.submit(_load, data)
        with coordinator(Path(folder)) as server:
            return _run(server, *loading.result(), rounds, processes, seed)


def _load(data: Path) -> tuple[Any, Any]:
    """Load the samples, train and test, and all imports."""
    importlib.import_module("edge_sdk.simulation.fleet")
    return peers.read(data, "train"), peers.read(data, "test")


def _run(server: str, train: Any, test: Any, rounds: int, processes: int, seed: int) -> dict[str, Any]:
    import numpy as np

    from edge_sdk.protocol.messages import FederationInfo, Kind, RoundRecord
    from edge_sdk.publish import publish
    from edge_sdk.simulation.fleet import run_fleet
    from edge_sdk.simulation.host import Plan, Stepped
    from edge_sdk.tasks import Task
    from edge_sdk.tasks.loading import Chosen, Scale, classification
    from edge_sdk.tasks.public import MODELS

    clock = report.Clock()
    (images, targets), (test_images, test_targets) = ((part[:, None], classes) for part, classes in (train, test))
    shares = peers.deal(len(images), seed)
    network = MODELS["mnist"]["small"]
    scale = Scale(network.mean, network.deviation)

    def make_task(index: int, info: FederationInfo) -> Task:
        judged = np.arange(index, len(test_images), peers.DEVICES)
        held_out = Chosen(test_images, test_targets, judged, scale)
        mine = Chosen(images, targets, shares[index], scale)
        return classification(info.task, None, mine, held_out, None, batch_size=info.settings.batch_size)

    def note(stepped: Stepped) -> None:
        if stepped.kind is Kind.train:
            clock.device_trained(time.time(), stepped.seconds)

    publish(
        server,
        "speed",
        "mnist",
        method="fedavg",
        rounds=rounds,
        cohort=peers.COHORT,
        min_devices=peers.DEVICES,
        local_epochs=1,
        batch_size=peers.BATCH,
        learning_rate=peers.LEARNING_RATE,
        early_stopping="off",
        evaluation_interval=0,
        seed=seed,
        draws="seed",
    )
    plan = Plan("speed", devices=peers.DEVICES, make_task=make_task)
    run_fleet(server, plan, processes=processes, in_memory=True, adapt=False, quiet=True, on_step=note)
    clock.stopped = time.time()
    records = [RoundRecord.model_validate(each) for each in httpx.get(f"{server}/v1/federations/speed/rounds").json()]
    clock.rounds = [datetime.fromisoformat(str(record.closed_at)).timestamp() for record in records]
    assert records[-1].accuracy_global is not None, "the last round is followed by an evaluation"
    return report.outcome("sparrow", "this commit", clock, peers.COHORT, records[-1].accuracy_global)


def main(arguments: list[str] | None = None) -> int:
    """Print one run as one line."""
    options = report.parser("sparrow").parse_args(arguments)
    if not options.unwatched:
        return report.watch("benchmarks.peers.sparrow", options)
    print(json.dumps(run(options.data, options.rounds, options.processes, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
