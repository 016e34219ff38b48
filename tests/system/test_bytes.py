"""What a device moves over the wire, counted by a proxy on it: what its budget leaves of the model, and little more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edge_sdk.join import JoinOptions, Result, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import mnist_leaf

from .conftest import Coordinator, Machine
from .proxy import Exchange, Proxy

BUDGETS = (0.2, 0.4, 1.0)
BYTES_PER_VALUE = {"fp32": 4, "fp16": 2}
ROUNDS = 3

CHANNELS, HIDDEN, CLASSES, SIDE = (32, 64), 128, 10, 16
PIXELS = (SIDE // 2) ** 2
"""Columns of the first linear layer that each channel owns."""


def network() -> nn.Module:
    first, second = CHANNELS
    return nn.Sequential(
        nn.Conv2d(3, first, 3, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * PIXELS, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def active_values(budget: float) -> int:
    """FedSPU's V = Σ_l a_l·a_{l-1}·κ_l + bias_l·a_l + 4·bn_l·a_l, with a_l = max(1, floor(p·n_l)), written out anew.

    Input and output are always whole. The factor 4 counts scale, shift, running mean and running variance.
    """
    first, second, hidden = (max(1, math.floor(budget * width + 1e-9)) for width in (*CHANNELS, HIDDEN))
    return (
        (first * 3 * 9 + 4 * first)
        + (second * first * 9 + second + 4 * second)
        + (hidden * second * PIXELS + hidden)
        + (CLASSES * hidden + CLASSES)
    )


def task() -> Task:
    inputs, targets = torch.randn(12, 3, SIDE, SIDE), torch.arange(12) % CLASSES
    train, validation = Arrays(inputs[:8], targets[:8]), Arrays(inputs[8:], targets[8:])
    return classification("random", network(), train, validation, None, batch_size=8)


def test_the_model_is_large_enough_and_its_formula_is_right():
    everything = network().state_dict()
    counted = sum(tensor.numel() for name, tensor in everything.items() if "num_batches" not in name)
    assert active_values(1.0) == counted
    assert sum(each.numel() for each in network().parameters()) >= 500_000


def send(server: str, federation: str, budget: float, folder: Path) -> Result:
    name = f"device-{budget}"
    return join(
        server,
        task(),
        federation=federation,
        name=name,
        state_dir=folder / name,
        options=JoinOptions(budget=budget, patience_seconds=30),
        quiet=True,
    )


@dataclass
class Traffic:
    """What proxies saw of a federation with one device per budget, and the coordinator's records of its rounds."""

    proxies: dict[float, Proxy]
    results: dict[float, Result]
    records: list[dict[str, Any]]

    def rounds(self, budget: float) -> dict[int, list[Exchange]]:
        """Every exchange, by the round it belongs to: from the end of one update to the end of the next."""
        found: dict[int, list[Exchange]] = {}
        mine: list[Exchange] = []
        for exchange in self.proxies[budget].exchanges:
            mine.append(exchange)
            if exchange.method == "PUT":
                found[len(found) + 1] = mine
                mine = []
        return found

    def payloads(self, number: int) -> int:
        return sum(exchange.payload for budget in self.proxies for exchange in self.rounds(budget)[number])

    def updates(self, number: int) -> int:
        return sum(self.rounds(budget)[number][-1].up for budget in self.proxies)


@pytest.fixture(scope="module")
def coordinator(machine: Machine) -> Coordinator:
    return machine()[0]


@pytest.fixture(scope="module", params=sorted(BYTES_PER_VALUE))
def precision(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def traffic(coordinator: Coordinator, precision: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traffic]:
    """A whole federation without evaluations, so that every round is one assignment, one payload, one update."""
    folder = tmp_path_factory.mktemp(precision)
    publish(
        coordinator.url,
        precision,
        task(),
        rounds=ROUNDS,
        min_devices=len(BUDGETS),
        local_steps=1,
        batch_size=8,
        evaluation_interval=0,
        early_stopping="off",
        precision=precision,
    )
    with ExitStack() as stack:
        proxies = {budget: Proxy(coordinator.port) for budget in BUDGETS}
        for proxy in proxies.values():
            stack.callback(proxy.close)
        with ThreadPoolExecutor() as pool:
            running = {
                budget: pool.submit(send, proxy.url, precision, budget, folder) for budget, proxy in proxies.items()
            }
            results = {budget: future.result(60) for budget, future in running.items()}
        yield Traffic(proxies, results, coordinator.rounds(precision))


@pytest.mark.parametrize("budget", BUDGETS)
def test_bytes_of_a_round_are_those_of_its_active_values(traffic, precision, budget):
    wanted = BYTES_PER_VALUE[precision] * active_values(budget)
    rounds = traffic.rounds(budget)
    assert sorted(rounds)[:ROUNDS] == list(range(1, ROUNDS + 1))
    for number in range(2, ROUNDS + 1):
        exchanges = rounds[number]
        assert all(exchange.complete for exchange in exchanges)
        for direction in ("down", "up"):
            moved = sum(getattr(exchange, direction) for exchange in exchanges)
            print(f"round {number} {direction}: {moved} bytes, {moved / wanted:.4f} of {wanted}")
            assert abs(moved - wanted) <= 0.03 * wanted + 2048, (number, direction, moved, wanted)


def test_nothing_is_sent_chunked(traffic):
    assert [proxy.chunked for proxy in traffic.proxies.values()] == [[]] * len(BUDGETS)


def test_the_first_download_is_the_whole_model(traffic, precision):
    for budget in BUDGETS:
        down = sum(exchange.payload for exchange in traffic.rounds(budget)[1])
        assert abs(down - BYTES_PER_VALUE[precision] * active_values(1.0)) <= 2048


def test_the_records_say_what_the_proxies_saw(traffic):
    for number, record in enumerate(traffic.records, start=1):
        assert record["bytes_down"] == traffic.payloads(number)
        assert record["bytes_up"] == traffic.updates(number)


def test_the_devices_say_what_the_proxies_saw(traffic):
    for budget, result in traffic.results.items():
        mine = traffic.rounds(budget)
        training = [exchange for number in range(1, ROUNDS + 1) for exchange in mine[number]]
        payloads = sum(exchange.payload for exchange in training)
        updates = [exchange for exchange in training if exchange.method == "PUT"]
        assert result.training.bytes_down == payloads + sum(exchange.down for exchange in updates)
        assert result.training.bytes_up == sum(exchange.up for exchange in updates)


def test_with_default_settings_a_device_moves_little_more_than_its_training_and_two_models(coordinator, tmp_path):
    """LEAF's network at a budget of 0.2 over 20 rounds: a round is some 4 % of the model both ways."""
    inputs, targets = torch.rand(40, 1, 28, 28), torch.arange(40) % 10
    parts = [Arrays(inputs[part::4], targets[part::4]) for part in range(3)]
    leaf = classification("leaf", mnist_leaf(), *parts, batch_size=10)
    # Labels at random are learned by nobody: its rule would stop the device.
    publish(coordinator.url, "leaf", leaf, rounds=20, min_devices=1, local_steps=1, min_participations=30)
    between = Proxy(coordinator.port)
    try:
        result = join(
            between.url,
            leaf,
            federation="leaf",
            name="pi",
            state_dir=tmp_path / "pi",
            options=JoinOptions(budget=0.2, patience_seconds=30),
            export=tmp_path / "leaf.onnx",
            quiet=True,
        )
    finally:
        between.close()
    assert result.rounds == 20
    whole = 4 * sum(parameter.numel() for parameter in leaf.model.parameters())
    down, up = (sum(getattr(exchange, way) for exchange in between.exchanges) for way in ("down", "up"))
    training = result.training.bytes_down + result.training.bytes_up
    print(f"training {training:,}, everything {down + up:,}, the model {whole:,}")
    assert training < 4 * whole
    assert down + up <= 1.25 * training + 2 * whole
    assert down + up <= training + 1.05 * whole, "the finished model, and little else"
    assert result.everything.bytes_up == up
    assert abs(result.everything.bytes_down - down) <= 2048, "but for answers of polls that were not finished"
    (device,) = coordinator.get("/v1/federations/leaf/devices").json()
    assert device["everything"]["bytes_down"] <= result.everything.bytes_down


def test_a_broken_download_goes_on_where_it_broke(coordinator, tmp_path):
    publish(
        coordinator.url,
        "broken",
        task(),
        rounds=1,
        min_devices=1,
        local_steps=1,
        evaluation_interval=0,
        early_stopping="off",
    )
    between = Proxy(coordinator.port)
    try:
        between.fault("GET", "/payload", "answer", 1_500_000, hold=False)
        assert send(between.url, "broken", 0.2, tmp_path).rounds == 1
    finally:
        between.close()
    payloads = [exchange for exchange in between.exchanges if exchange.path.endswith("/payload")]
    first, rest, *_ = payloads
    assert (first.down, rest.status) == (1_500_000, 206)
    assert abs(first.down + rest.down - 4 * active_values(1.0)) <= 2048
    (record,) = coordinator.rounds("broken")
    assert record["bytes_down"] == first.down + rest.down
