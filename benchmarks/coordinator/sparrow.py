"""This project's side: a coordinator as in production, records and updates on disk, devices over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.coordinator.contest import Contest, Marks, Row, measure
from benchmarks.coordinator.models import task_of
from benchmarks.coordinator.processes import Side, Wire
from edge_sdk.publish import publish
from sparrow.bench import server as ours
from sparrow.bench.server import free_port

DENSITY = 0.2
ALWAYS: dict[str, Any] = {"early_stopping": "off", "evaluation_interval": 0, "deadline_seconds": 600.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "sparrow": {"method": "fedavg"},
    # No round of it replaces weights, so that all updates are alike: those under the mask that everybody holds.
    f"sparrow {DENSITY}": {
        "method": "fedsgc",
        "method_settings": {"density": DENSITY, "adjust_interval": 0},
    },
}
"""A federation's settings by the engine's name: whole models, or a share of their weights."""


def run(engine: str, contest: Contest, folder: Path) -> Row:
    """Return one measurement."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    marks = Marks(folder / "marks")
    with Side(folder, ours.environment(folder)) as server, Side(folder, {"OMP_NUM_THREADS": "1"}) as clients:
        process = server.start("coordinator", ours.command(port))
        ours.wait_until_healthy(address, process, folder / "coordinator.log")
        with server.watch() as memory:
            publish(
                address,
                "contest",
                task_of(contest.model.name),
                **ALWAYS,
                **SETTINGS[engine],
                # One more than is measured, because the end of a federation takes extra work.
                rounds=contest.all_rounds + 1,
                cohort=contest.clients,
                min_devices=contest.clients,
            )
            for number in range(contest.clients):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.coordinator.client",
                    address,
                    "contest",
                    str(number),
                ]
                clients.start(f"client-{number}", command + (["--marks", str(marks.path)] if number == 0 else []))
            row = measure(contest, server, clients, Wire(port), marks, memory)
    return {"engine": engine, **row}
