"""The ServerApp: Flower's FedAvg over all SuperNodes; it records the end of each round."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Marking(FedAvg):  # type: ignore[misc]
    """FedAvg that writes a line when a round's new model exists."""

    def __init__(self, marks: Path, clients: int) -> None:
        super().__init__(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        self._marks = marks
        self._clients = clients

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        result: tuple[ArrayRecord | None, MetricRecord | None] = super().aggregate_train(server_round, replies)
        with self._marks.open("a") as file:
            file.write(f"{time.time()} {sum(not reply.has_error() for reply in replies)}\n")
        return result


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the whole federation from arrays of zeros."""
    config = context.run_config
    arrays = [np.zeros(shape, np.float32) for shape in json.loads(str(config["shapes"]))]
    strategy = Marking(Path(str(config["marks"])), int(config["clients"]))
    strategy.start(grid=grid, initial_arrays=ArrayRecord(arrays), num_rounds=int(config["rounds"]))
