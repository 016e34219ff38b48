"""Flower's deprecated gRPC API, ``start_server`` and ``start_client``, which has the least overhead.

It is flwr 1.32.0 in ``.venv-peers``, older than the release of the deployment engine.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.coordinator.contest import Contest, Marks, Row, measure
from benchmarks.coordinator.flower import environment
from benchmarks.coordinator.processes import Side, Wire
from benchmarks.peers.install import PEERS, ROOT
from sparrow.bench.server import free_port

PEER = PEERS["peers"]


def run(contest: Contest, folder: Path) -> Row:
    """Return one measurement."""
    PEER.check()
    port = free_port()
    address = f"127.0.0.1:{port}"
    marks = Marks(folder / "marks")
    module = [str(PEER.python), "-m"]
    mine = environment(folder, PEER.python)
    with Side(folder, mine) as server, Side(folder, mine) as clients:
        server.start(
            "server",
            [
                *(*module, "benchmarks.coordinator.grpc_server", address, str(contest.clients)),
                # One more than is measured: the clients leave when the last has ended.
                *(str(contest.all_rounds + 1), json.dumps(contest.model.shapes), str(marks.path)),
            ],
            cwd=ROOT,
        )
        with server.watch() as memory:
            for number in range(contest.clients):
                command = [*module, "benchmarks.coordinator.grpc_client", address, str(number)]
                clients.start(f"client-{number}", command, cwd=ROOT)
            row = measure(contest, server, clients, Wire(port), marks, memory)
    return {"engine": "grpc", "version": PEER.version("flwr"), **row}
