"""This project's fleet as a peer: a coordinator and real sessions, the same work as the others.

The same distribution of the same images to the same 100 devices, the product's own network (which pools before ReLU:
the same function), FedAvg. The coordinator runs in the fleet's process; with ``--http`` in a separate process, called
over HTTP. In addition, every device evaluates the first model that it receives, and ten devices the last one, on a
hundredth of the test images each; other peers evaluate the last model once on all test images. As with other peers, no
device downloads the finished model (``adapt``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.peers import report
from sparrow.bench.server import coordinator


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return one run as ``report.outcome`` has it."""
    clock = report.Clock()
    with tempfile.TemporaryDirectory() as folder:
        if not options.http:
            return _run(None, _application(Path(folder)), *_load(options.data), clock, options)
        # The coordinator starts while this process loads the data and its imports.
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(_load, options.data)
            with coordinator(Path(folder)) as server:
                return _run(server, None, *loading.result(), clock, options)


def _application(folder: Path) -> Any:
    from sparrow.coordinator.main import create_app
    from sparrow.coordinator.settings import Settings

    return create_app(Settings(data_dir=folder, default_task=""))


def _load(data: Path) -> tuple[Any, Any]:
    """Load the samples, train and test, and all imports."""
    importlib.import_module("sparrow.simulation.fleet")
    return peers.read(data, "train"), peers.read(data, "test")


def _run(
    server: str | None, app: Any, train: Any, test: Any, clock: report.Clock, options: argparse.Namespace
) -> dict[str, Any]:
    import numpy as np

    from edge_sdk.device.transport import Transport
    from edge_sdk.publish import publish
    from edge_sdk.tasks import Seeded, Task
    from edge_sdk.tasks.loading import Chosen, Scale, classification
    from edge_sdk.tasks.public import MODELS
    from sparrow.protocol.messages import FederationInfo, Kind
    from sparrow.simulation import in_process
    from sparrow.simulation.fleet import connect_to, run_fleet
    from sparrow.simulation.host import Plan, Stepped

    (images, targets), (test_images, test_targets) = ((part[:, None], classes) for part, classes in (train, test))
    shares = peers.deal(len(images), options.seed)
    network = MODELS["mnist"]["small"]
    scale = Scale(network.mean, network.deviation)
    model = Seeded(network.build) if options.engine == "torch" else None

    def make_task(index: int, info: FederationInfo) -> Task:
        judged = np.arange(index, len(test_images), peers.DEVICES)
        held_out = Chosen(test_images, test_targets, judged, scale)
        mine = Chosen(images, targets, shares[index], scale)
        return classification(info.task, model, mine, held_out, None, batch_size=info.settings.batch_size)

    def note(stepped: Stepped) -> None:
        if stepped.kind is Kind.train:
            clock.device_trained(time.time(), stepped.seconds)

    with connect_to(server, app, None) as client:
        publish(
            server or in_process.ADDRESS,
            "speed",
            "mnist",
            client=client,
            method="fedavg",
            rounds=options.rounds,
            cohort=peers.COHORT,
            min_devices=peers.DEVICES,
            local_epochs=1,
            batch_size=peers.BATCH,
            learning_rate=peers.LEARNING_RATE,
            early_stopping="off",
            evaluation_interval=0,
            seed=options.seed,
            draws="seed",
        )
    plan = Plan("speed", devices=peers.DEVICES, make_task=make_task)
    run_fleet(
        server,
        plan,
        app=app,
        engine=options.engine,
        processes=options.processes,
        in_memory=True,
        adapt=False,
        quiet=True,
        on_step=note,
    )
    clock.stopped = time.time()
    with connect_to(server, app, None) as client:
        records = Transport(client).rounds("speed")
    clock.rounds = [datetime.fromisoformat(str(record.closed_at)).timestamp() for record in records]
    assert records[-1].accuracy_global is not None, "the last round is followed by an evaluation"
    return report.outcome("sparrow", "this commit", clock, peers.COHORT, records[-1].accuracy_global)


def main(arguments: list[str] | None = None) -> int:
    """Print one run as one line."""
    parser = report.parser("sparrow")
    parser.add_argument("--http", action="store_true", help="a coordinator in a process of its own")
    parser.add_argument("--engine", choices=("onnx", "torch"), default="onnx")
    options = parser.parse_args(arguments)
    if not options.unwatched:
        return report.watch("benchmarks.peers.sparrow", options, "--engine", options.engine, *["--http"] * options.http)
    print(json.dumps(run(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
