"""``.venv-peers/bin/python -m benchmarks.peers.secagg SHAPES DEVICES SHARES THRESHOLD``: a round of Flower's SecAgg+.

For every line of input, ``plain`` or ``secure``, it plays one round of FedAvg with so many devices and a model of these
shapes (JSON: lists of integers), and prints a line of JSON: processor seconds of all devices and of the server, and
the bytes that each device sends. Devices train nothing: what they send is drawn beforehand.

Everything is Flower's own, its client's mod and its server's workflow, but for the ``Grid``, which hands messages over
in memory: neither connections nor a SuperLink are counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.client import Client, ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import ndarrays_to_parameters
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid


class Drawn(NumPyClient):  # type: ignore[misc]
    """A device that has trained already. values: what it sends."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """Return the values."""
        return self._values, 100, {}


class InMemory(Grid):  # type: ignore[misc]
    """Hands each message to its device, and counts its processor time and bytes."""

    def __init__(self, devices: dict[int, tuple[ClientApp, Context]]) -> None:
        self._devices = devices
        self.device_seconds, self.serialising = 0.0, 0.0
        self.bytes_up = 0
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Nothing is to be kept of it."""

    @property
    def run(self) -> Any:
        """Return the run, of which its number is asked."""
        return SimpleNamespace(run_id=1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Return a message."""
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the devices."""
        return list(self._devices)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Nobody calls it: what is sent is answered at once."""
        raise NotImplementedError

    pull_messages = push_messages

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return what the devices answer."""
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


def play(values: list[list[Any]], secure: SecAggPlusWorkflow | None) -> dict[str, float]:
    """Return what one round costs."""

    def client_of(own: list[Any]) -> Any:
        def make(context: Context) -> Client:
            return Drawn(own).to_client()

        return make

    mods = [] if secure is None else [secaggplus_mod]
    devices = {
        number + 1: (ClientApp(client_of(own), mods=mods), Context(1, number + 1, {}, RecordDict(), {}))
        for number, own in enumerate(values)
    }
    grid = InMemory(devices)
    count = len(values)
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=count,
        min_available_clients=count,
        initial_parameters=ndarrays_to_parameters(values[0]),
    )
    context = LegacyContext(
        Context(1, 0, {}, RecordDict(), {}),
        config=ServerConfig(num_rounds=1),
        strategy=strategy,
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


def main() -> None:
    """Answer until the input ends."""
    shapes, devices, shares, threshold = (json.loads(each) for each in sys.argv[1:5])
    chance = np.random.Generator(np.random.PCG64(0))
    values = [[chance.uniform(-0.1, 0.1, shape).astype(np.float32) for shape in shapes] for _ in range(devices)]
    for line in sys.stdin:
        secure = SecAggPlusWorkflow(num_shares=shares, reconstruction_threshold=threshold)
        print(json.dumps(play(values, secure if line.strip() == "secure" else None)), flush=True)


if __name__ == "__main__":
    main()
