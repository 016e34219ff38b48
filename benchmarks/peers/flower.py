"""``python -m benchmarks.peers.flower``: federated averaging on Flower's simulation engine with Ray.

Flower and Ray are installed in ``.venv-peers`` (``python -m benchmarks.peers.install``), where this command runs them.
The engine is started from Python by ``run_simulation``, without the SuperLink process of ``flwr run``: it starts
faster, takes less memory, and does the same work in a round. Telemetry, evaluation, dashboard and logs are off.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.peers import report
from benchmarks.peers.install import PYTHON

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_LOG_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "OMP_NUM_THREADS": "1",
}


def simulate(server: Any, client: Any, devices: int, processes: int) -> None:
    """Run two apps on the simulation engine. Their modules are to be imported by name, after ``SETTINGS`` are set."""
    from flwr.simulation import run_simulation

    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        run_simulation(
            server,
            client,
            num_supernodes=devices,
            backend_config={
                "init_args": {"num_cpus": processes, "_temp_dir": folder},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(data: Path, rounds: int, processes: int, seed: int) -> dict[str, Any]:
    """Run the whole experiment."""
    clock = report.Clock()
    # flwr and ray read these when they are imported.
    os.environ.update(SETTINGS)
    from importlib.metadata import version

    from benchmarks.peers import work
    from benchmarks.peers.flower_app import apps

    server, client, last = apps(data, rounds, seed, clock)
    simulate(server, client, peers.DEVICES, processes)
    clock.stopped = time.time()
    model = work.Net()
    model.load_state_dict(last())
    judged = work.accuracy(model, work.load(data, "test"))
    return report.outcome("flower", version("flwr"), clock, peers.COHORT, judged)


def main(arguments: list[str] | None = None) -> int:
    """Print one run as one line."""
    options = report.parser("flower").parse_args(arguments)
    if not options.unwatched:
        if not PYTHON.exists():
            raise SystemExit("Flower is not installed: python -m benchmarks.peers.install")
        return report.watch("benchmarks.peers.flower", options, python=PYTHON)
    print(json.dumps(run(options.data, options.rounds, options.processes, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
