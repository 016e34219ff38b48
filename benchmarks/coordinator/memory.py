"""The coordinator's peak memory by the number of updates in a round: one process plays all devices, a few at a time.

Each count has a new coordinator. Its peak is the kernel's peak of resident memory after the round. All updates of a
round are in the data folder until then: a thousand dense ones of the large model take 9 GB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.coordinator.client import Device
from benchmarks.coordinator.contest import Row, peak_rss
from benchmarks.coordinator.models import LARGE, model_of, task_of
from benchmarks.coordinator.processes import Side
from benchmarks.coordinator.sparrow import ALWAYS, SETTINGS
from edge_sdk.device.transport import Transport
from edge_sdk.errors import FederationOver
from edge_sdk.publish import publish
from sparrow.bench import server as ours
from sparrow.bench.server import free_port, machine
from sparrow.transport import connect

CLOSES_SECONDS = 120.0
AT_ONCE = 4
"""Devices that talk to the coordinator at the same time."""


def run(updates: int, folder: Path, note: Callable[[], object]) -> Row:
    """Run one round of ``count`` dense updates of the large model; call ``note`` after each."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with Side(folder, ours.environment(folder)) as server:
        process = server.start("coordinator", ours.command(port))
        ours.wait_until_healthy(address, process, folder / "coordinator.log")
        settings = {**ALWAYS, **SETTINGS["sparrow"], "rounds": 1, "deadline_seconds": 3600.0}
        publish(address, "contest", task_of(LARGE), **settings, cohort=updates, min_devices=updates)
        begin = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            shares = [range(first, updates, AT_ONCE) for first in range(AT_ONCE)]
            groups = list(pool.map(lambda share: _enrol(address, share), shares))
            list(pool.map(lambda group: _work(group, note), groups))
        _wait_until_closed(address)
        seconds = time.monotonic() - begin
        peak = peak_rss(process.pid)
    return {
        "engine": "sparrow",
        "kind": "memory",
        "model": LARGE,
        "parameters": model_of(LARGE).parameters,
        "updates": updates,
        "server_peak_rss": peak,
        "seconds": seconds,
        "machine": machine(),
    }


def _wait_until_closed(address: str) -> None:
    """Wait for the end of the round, because the last updates are summed after they were acknowledged."""
    with connect(address) as client:
        transport = Transport(client)
        end = time.monotonic() + CLOSES_SECONDS
        while transport.federation("contest").round == 0:
            if time.monotonic() > end:
                raise SystemExit(f"the round did not close within {CLOSES_SECONDS:g} s of its last update")
            time.sleep(0.1)


def _enrol(address: str, numbers: range) -> list[Device]:
    transport = Transport(connect(address))
    manifest = transport.manifest("contest")
    return [Device(transport, "contest", manifest, number) for number in numbers]


def _work(devices: list[Device], note: Callable[[], object]) -> None:
    for device in devices:
        try:
            while (assignment := device.ask(10.0)) is None:
                pass
        except FederationOver:
            raise SystemExit("the federation ended before its round") from None
        device.work(assignment)
        note()
