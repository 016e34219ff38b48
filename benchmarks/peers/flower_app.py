"""The Flower app: a ClientApp of the message API and a ServerApp around Flower's own FedAvg.

It is a separate module, so that Ray's actors import it by name; each loads the data and builds the network once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from benchmarks import peers
from benchmarks.peers import work
from benchmarks.peers.report import Clock


@functools.cache
def _once(data: str, seed: int) -> tuple[work.Net, work.Samples, list[torch.Tensor]]:
    torch.set_num_threads(1)
    samples = work.load(Path(data))
    return work.Net(), samples, work.deal(len(samples), seed)


def train(message: Message, context: Context) -> Message:
    """Return one device's part of a round."""
    config = message.content["config"]
    device = int(context.node_config["partition-id"])
    seed = int(config["seed"])
    model, samples, shares = _once(str(config["data"]), seed)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    processor = work.train(model, samples, shares[device], hash((seed, int(config["server-round"]), device)))
    reply = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(shares[device]), "at": time.time(), "processor": processor}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


def apps(data: Path, rounds: int, seed: int, clock: Clock) -> tuple[ServerApp, ClientApp, Callable[[], dict[str, Any]]]:
    """Return the two apps, and a function that returns the last global model at the end."""
    models: list[ArrayRecord] = []

    def count(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        """Note the end of a round; FedAvg calls this once a round after averaging."""
        if len(replies) != peers.COHORT:
            raise RuntimeError(f"{len(replies)} of {peers.COHORT} devices answered")
        for reply in replies:
            clock.device_trained(float(reply["metrics"]["at"]), float(reply["metrics"]["processor"]))
        clock.round_ended()
        return MetricRecord()

    def serve(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        strategy = FedAvg(
            fraction_train=peers.COHORT / peers.DEVICES,
            fraction_evaluate=0.0,
            min_train_nodes=peers.COHORT,
            min_available_nodes=peers.DEVICES,
            train_metrics_aggr_fn=count,
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(work.Net().state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"data": str(data), "seed": seed}),
        )
        models.append(result.arrays)

    server = ServerApp()
    client = ClientApp()
    server.main()(serve)
    client.train()(train)

    def last() -> dict[str, Any]:
        state: dict[str, Any] = models[0].to_torch_state_dict()
        return state

    return server, client, last
