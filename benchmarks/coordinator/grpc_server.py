"""The server of Flower's old gRPC API: ``grpc_server ADDRESS CLIENTS ROUNDS SHAPES MARKS``, run in the peers'
environment.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg


class Marking(FedAvg):  # type: ignore[misc]
    """Flower's FedAvg that writes a line when a round's new model exists."""

    def __init__(self, marks: Path, clients: int, shapes: list[list[int]]) -> None:
        super().__init__(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=clients,
            min_available_clients=clients,
            initial_parameters=ndarrays_to_parameters([np.zeros(shape, np.float32) for shape in shapes]),
        )
        self._marks = marks

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        result = super().aggregate_fit(server_round, results, failures)
        with self._marks.open("a") as file:
            file.write(f"{time.time()} {len(results)}\n")
        return result


if __name__ == "__main__":
    address, clients, rounds, shapes, marks = sys.argv[1:]
    strategy = Marking(Path(marks), int(clients), json.loads(shapes))
    start_server(server_address=address, config=ServerConfig(num_rounds=int(rounds)), strategy=strategy)
