"""``.venv-peers/bin/python -m benchmarks.peers.secagg KIND SHAPES DEVICES SHARES THRESHOLD ROUNDS``: Flower's SecAgg+.

Run rounds of FedAvg with DEVICES devices and a model of these shapes (JSON: lists of integers). Devices do not train;
their updates are drawn beforehand. KIND:

    memory    Flower's own client mod and server workflow, messages handed over in memory: neither connections nor an
              engine are counted. For every line of input, ``plain`` or ``secure``, it plays one round and prints a line
              of JSON: processor seconds of all devices and of the server, and the bytes that each device sends
    plain     FedAvg on Flower's simulation engine, which starts one process for each core
    secure    the same with SecAgg+
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from benchmarks.peers import flower

# flwr and ray read these when they are imported.
os.environ.update(flower.SETTINGS)

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.client import Client, ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import ndarrays_to_parameters
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.server import LegacyContext, ServerApp, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid


@functools.cache
def drawn(shapes: str, device: int) -> list[Any]:
    """Return a device's update."""
    chance = np.random.Generator(np.random.PCG64(device))
    return [chance.uniform(-0.1, 0.1, shape).astype(np.float32) for shape in json.loads(shapes)]


def client_app(shapes: str, *, secure: bool) -> ClientApp:
    """Return Flower's client: FedAvg's, with the mod of SecAgg+ or without."""

    def make(context: Context) -> Client:
        return Drawn(drawn(shapes, int(context.node_config.get("partition-id", 0)))).to_client()

    return ClientApp(make, mods=[secaggplus_mod] if secure else [])


def strategy_of(shapes: str, devices: int) -> FedAvg:
    """Return FedAvg over all devices."""
    return FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=devices,
        min_available_clients=devices,
        initial_parameters=ndarrays_to_parameters(drawn(shapes, 0)),
    )


class Drawn(NumPyClient):  # type: ignore[misc]
    """A device after training. values: its update."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """Return the values."""
        return self._values, 100, {}


class InMemory(Grid):  # type: ignore[misc]
    """Hands each message to its device, and counts its processor time and bytes."""

    def __init__(self, devices: dict[int, tuple[ClientApp, Context]]) -> None:
        self._devices = devices
        self.device_seconds = 0.0
        self.serialising = 0.0
        self.bytes_up = 0

    def set_run(self, run: Any) -> None:
        """Ignore the run."""

    @property
    def run(self) -> Any:
        """Return the run with its number."""
        return SimpleNamespace(run_id=1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Return a message."""
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the devices."""
        return list(self._devices)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Unused: messages are answered immediately."""
        raise NotImplementedError

    pull_messages = push_messages

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the devices' answers."""
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            app, context = self._devices[node]
            begin = time.process_time()
            # A copy, as over a network: the mod takes entries out of what it is given, which several devices share.
            message.content = recorddict_from_proto(recorddict_to_proto(message.content))
            self.serialising += time.process_time() - begin
            begin = time.process_time()
            reply = app(message, context)
            self.device_seconds += time.process_time() - begin
            begin = time.process_time()
            self.bytes_up += recorddict_to_proto(reply.content).ByteSize()
            self.serialising += time.process_time() - begin
            replies.append(reply)
        return replies


def play(shapes: str, count: int, secure: SecAggPlusWorkflow | None) -> dict[str, float]:
    """Return the cost of one round in memory."""
    app = client_app(shapes, secure=secure is not None)
    devices = {
        number + 1: (app, Context(1, number + 1, {"partition-id": number}, RecordDict(), {})) for number in range(count)
    }
    grid = InMemory(devices)
    context = LegacyContext(
        Context(1, 0, {}, RecordDict(), {}),
        config=ServerConfig(num_rounds=1),
        strategy=strategy_of(shapes, count),
        client_manager=SimpleClientManager(),
    )
    begin = time.process_time()
    DefaultWorkflow(fit_workflow=secure)(grid, context)
    whole = time.process_time() - begin
    return {
        "devices": grid.device_seconds,
        "server": whole - grid.device_seconds - grid.serialising,
        "bytes_up": grid.bytes_up / count,
    }


def simulate(shapes: str, devices: int, rounds: int, secure: SecAggPlusWorkflow | None) -> None:
    """Play rounds on the simulation engine."""
    server = ServerApp()

    def serve(grid: Grid, context: Context) -> None:
        legacy = LegacyContext(context, config=ServerConfig(num_rounds=rounds), strategy=strategy_of(shapes, devices))
        DefaultWorkflow(fit_workflow=secure)(grid, legacy)

    server.main()(serve)
    flower.simulate(server, client_app(shapes, secure=secure is not None), devices, os.cpu_count() or 1)


def main() -> None:
    """Play, in memory until the input ends."""
    kind, shapes = sys.argv[1:3]
    devices, shares, threshold, rounds = map(int, sys.argv[3:7])

    def workflow() -> SecAggPlusWorkflow:
        return SecAggPlusWorkflow(num_shares=shares, reconstruction_threshold=threshold)

    if kind != "memory":
        simulate(shapes, devices, rounds, workflow() if kind == "secure" else None)
        return
    for device in range(devices):
        drawn(shapes, device)
    for line in sys.stdin:
        print(json.dumps(play(shapes, devices, workflow() if line.strip() == "secure" else None)), flush=True)


if __name__ == "__main__":
    # Imported by name, because the engine's processes find the module by it.
    from benchmarks.peers import secagg

    secagg.main()
