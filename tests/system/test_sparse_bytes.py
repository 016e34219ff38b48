"""What FedSGC moves over the wire, counted by a proxy on it: the weights that exist, and little more.

The network is FedSGC's (section 4.1): at a density of 0.2 the 261,750 weights of
the MNIST network come down to 52,349.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_sdk.join import JoinOptions, Result, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.public import MODELS

from .conftest import Coordinator, Machine
from .proxy import Exchange, Proxy

DENSITY = 0.2
KEPT, WEIGHTS, BIASES = 52_349, 261_750, 90
"""Weights that exist, all maskable weights, and other values."""

NAMES = ("one", "two")
ROUNDS, ADJUSTING = 5, (2, 4)
BYTES_PER_VALUE = {"fp32": 4, "fp16": 2, "int8": 1}
SPARE = 2048
"""What an exchange may take beside its values: JSON, a header, a report."""


def task() -> Task:
    # The same ones each time: the step is compiled once.
    inputs, targets = torch.randn(20, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 10
    train, validation = Arrays(inputs[:16], targets[:16]), Arrays(inputs[16:], targets[16:])
    return classification("random", MODELS["mnist"]["fedsgc"].build(), train, validation, None, batch_size=4)


def send(server: str, federation: str, name: str, folder: Path) -> Result:
    return join(
        server,
        task(),
        federation=federation,
        name=name,
        state_dir=folder / name,
        options=JoinOptions(patience_seconds=30),
        quiet=True,
    )


@dataclass
class Traffic:
    """What proxies saw of a federation, device by device, and the coordinator's records of its rounds."""

    proxies: dict[str, Proxy]
    results: dict[str, Result]
    records: list[dict[str, Any]]

    def rounds(self, name: str) -> dict[int, list[Exchange]]:
        """Every exchange, by the round it belongs to: from the end of one update to the end of the next."""
        found: dict[int, list[Exchange]] = {}
        mine: list[Exchange] = []
        for exchange in self.proxies[name].exchanges:
            mine.append(exchange)
            if exchange.method == "PUT":
                found[len(found) + 1] = mine
                mine = []
        return found

    def up(self, name: str, number: int) -> int:
        return self.rounds(name)[number][-1].up

    def down(self, name: str, number: int) -> int:
        return sum(each.payload for each in self.rounds(name)[number])


@pytest.fixture(scope="module")
def coordinator(machine: Machine) -> Coordinator:
    return machine()[0]


@pytest.fixture(scope="module")
def traffic(coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Traffic]]:
    """The same federation in each number format. Without evaluations: a round is one payload and one update."""
    with ExitStack() as stack:
        yield {precision: play(coordinator, precision, tmp_path_factory, stack) for precision in BYTES_PER_VALUE}


def play(
    coordinator: Coordinator, precision: str, tmp_path_factory: pytest.TempPathFactory, stack: ExitStack
) -> Traffic:
    folder = tmp_path_factory.mktemp(precision)
    publish(
        coordinator.url,
        precision,
        task(),
        method="fedsgc",
        method_settings={"density": DENSITY, "adjust_interval": 2, "device_interval": 1},
        rounds=ROUNDS,
        min_devices=len(NAMES),
        local_epochs=1,
        evaluation_interval=0,
        early_stopping="off",
        precision=precision,
    )
    proxies = {name: Proxy(coordinator.port) for name in NAMES}
    for proxy in proxies.values():
        stack.callback(proxy.close)
    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(send, proxy.url, precision, name, folder) for name, proxy in proxies.items()}
        results = {name: future.result(60) for name, future in running.items()}
    return Traffic(proxies, results, coordinator.rounds(precision))


def ordinary(numbers: range) -> list[int]:
    return [number for number in numbers if number not in ADJUSTING]


@pytest.mark.parametrize("precision", BYTES_PER_VALUE)
@pytest.mark.parametrize("name", NAMES)
def test_an_update_is_what_exists(traffic, precision, name):
    wanted = BYTES_PER_VALUE[precision] * (KEPT + BIASES)
    for number in range(1, ROUNDS + 1):
        up = traffic[precision].up(name, number)
        print(f"{precision} round {number} up: {up} bytes, {up / wanted:.4f} of {wanted}")
        assert wanted <= up
        # A mask of one's own goes up where a round re-adjusts: its bits at most.
        assert up - wanted <= (WEIGHTS / 8 if number in ADJUSTING else 0.03 * wanted) + SPARE


@pytest.mark.parametrize("precision", BYTES_PER_VALUE)
@pytest.mark.parametrize("name", NAMES)
def test_payloads_have_existing_values_and_unknown_masks(traffic, precision, name):
    wanted = (2 if precision == "fp16" else 4) * (KEPT + BIASES)  # int8 is for updates alone
    downs = {number: traffic[precision].down(name, number) for number in range(1, ROUNDS + 1)}
    print(downs)
    assert all(down >= wanted for down in downs.values())
    assert WEIGHTS / 8 <= downs[1] - wanted <= WEIGHTS / 8 + SPARE, "the whole first mask"
    for number in ADJUSTING:
        assert downs[number] - wanted <= 2 * KEPT / 8 + SPARE, "the directions of what exists"
        assert 0 < downs[number + 1] - wanted <= WEIGHTS / 8 + SPARE, "what changed since"


def test_a_mask_travels_once_and_directions_where_a_round_re_adjusts(traffic):
    for precision, seen in traffic.items():
        wanted = (2 if precision == "fp16" else 4) * (KEPT + BIASES)
        parts = [record["parts_down"] for record in seen.records]
        assert [part["values"] for part in parts] == [2 * wanted] * ROUNDS
        assert ["mask" in part for part in parts] == [True, False, True, False, True]
        assert ["signs" in part for part in parts] == [False, True, False, True, False]


def test_updates_are_a_half_in_fp16_and_less_than_a_third_in_int8(traffic):
    for number in ordinary(range(1, ROUNDS + 1)):
        up = {precision: sum(seen.up(name, number) for name in NAMES) for precision, seen in traffic.items()}
        assert abs(up["fp16"] / up["fp32"] - 0.5) < 0.01
        assert up["int8"] / up["fp32"] < 0.3


def test_positions_are_replaced_meanwhile(traffic):
    for seen in traffic.values():
        replaced = [record["notes"]["positions_replaced"] for record in seen.records]
        assert [number for number, count in enumerate(replaced, start=1) if count] == list(ADJUSTING)
        assert all(record["notes"]["union"] >= KEPT for record in seen.records)


def test_proxies_records_and_devices_agree(traffic):
    for seen in traffic.values():
        for number, record in enumerate(seen.records, start=1):
            assert record["bytes_down"] == sum(seen.down(name, number) for name in NAMES)
            assert record["bytes_up"] == sum(seen.up(name, number) for name in NAMES)
            assert record["bytes_up"] == sum(record["parts_up"].values()), "every byte belongs to a part"
            assert record["bytes_down"] == sum(record["parts_down"].values())
        for name, result in seen.results.items():
            assert result.rounds == ROUNDS
            assert seen.proxies[name].chunked == []
