"""The dropout family over real connections: what each method moves, counted by a proxy; and kill -9 of one that has
devices choose."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish

from .conftest import Coordinator, Device, Devices, Machine, wait_until
from .proxy import Exchange, Proxy
from .test_bytes import CHANNELS, CLASSES, HIDDEN, PIXELS, active_values, task

CHOOSING = {
    "hermes": {"pruning": "once"},
    "fedmp": {"ratios": "budget", "residual": False},
    "prunefl_neurons": {"importance": "once"},
}
"""Methods whose devices choose, in the forms in which they do so once."""
METHODS = ("feddrop", "fjord", "heterofl", *CHOOSING)
BUDGETS = (0.4, 1.0)
ROUNDS = 2
SPARE = 2048


def values(method: str, budget: float) -> int:
    if method != "heterofl":
        return active_values(budget)
    first, second, hidden = (math.ceil(budget * width) for width in (*CHANNELS, HIDDEN))
    maps = first * 3 * 9 + 4 * first + second * first * 9 + 5 * second
    return maps + hidden * second * PIXELS + hidden + CLASSES * hidden + CLASSES


@pytest.fixture(scope="module")
def coordinator(machine: Machine) -> Coordinator:
    return machine()[0]


def sizes(proxy: Proxy) -> dict[str, list[int]]:
    """Bytes of payloads and of updates, in order."""
    found: dict[str, list[int]] = {"down": [], "up": []}
    each: Exchange
    for each in proxy.exchanges:
        if each.method == "PUT":
            found["up"].append(each.up)
        if each.payload:
            found["down"].append(each.payload)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_round_moves_what_its_budget_leaves_of_the_model(coordinator: Coordinator, tmp_path: Path, method: str):
    settings = {"rounds": ROUNDS, "min_devices": len(BUDGETS), "local_steps": 1, "evaluation_interval": 0}
    settings["method_settings"] = CHOOSING.get(method, {})
    publish(coordinator.url, method, task(), method=method, batch_size=8, early_stopping="off", **settings)

    def run(budget: float) -> None:
        name = f"device-{budget}"
        join(
            proxies[budget].url,
            task(),
            federation=method,
            name=name,
            state_dir=tmp_path / name,
            options=JoinOptions(budget=budget, patience_seconds=30),
            quiet=True,
        )

    with ExitStack() as stack:
        proxies = {budget: Proxy(coordinator.port) for budget in BUDGETS}
        for proxy in proxies.values():
            stack.callback(proxy.close)
        with ThreadPoolExecutor() as pool:
            list(pool.map(run, BUDGETS, timeout=60))
        whole = 4 * active_values(1.0)
        for budget, proxy in proxies.items():
            wanted, moved = 4 * values(method, budget), sizes(proxy)
            expected = {"down": [wanted] * ROUNDS, "up": [wanted] * ROUNDS}
            if method in CHOOSING:
                expected["down"][0] = whole
            if method == "heterofl":  # training data have 8 of the 10 classes: the rows of the others stay
                expected["up"] = [wanted - 4 * 2 * (math.ceil(budget * HIDDEN) + 1)] * ROUNDS
            for direction, sent in expected.items():
                spare = [size - least for size, least in zip(moved[direction], sent, strict=False)]
                assert all(0 <= each <= SPARE for each in spare[:ROUNDS]), (budget, direction, moved, expected)
    records = coordinator.rounds(method)
    assert [(record["updates"], record["handed_back"]) for record in records] == [(len(BUDGETS), 0)] * ROUNDS


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def play(coordinator: Coordinator, devices: Devices, disturbed: bool) -> tuple[list[str], dict[str, bytes]]:
    """Digests of a federation's global models, and the exported personal ones."""
    name, budgets = "hermes", {"small": "0.4", "large": "1.0"}
    coordinator.create(name, method=name, rounds=4, local_steps=60, evaluation_interval=2, early_stopping="off", seed=3)

    def start(device: str) -> Device:
        return devices(coordinator.url, name, device, "--budget", budgets[device], "--quiet")

    running = {device: start(device) for device in budgets}
    if disturbed:
        wait_until((devices.folder / "small" / "mask.bits").exists, "the neurons that the device chose")
        running["small"].kill()
        running["small"] = start("small")
        coordinator.wait_for_log(r"PUT /v1/assignments/\w+/update\S* HTTP/1.1\" 201")
        coordinator.kill()
        coordinator.start()
    for device in running.values():
        assert device.wait(60) == 0, device.output
    assert coordinator.logged("Traceback") == []
    digests = [record["model_sha256"] for record in coordinator.rounds(name)]
    assert len(digests) == 4
    return digests, {device: devices.onnx(device).read_bytes() for device in budgets}


def test_what_a_device_chose_survives_kills_on_both_sides(machine: Machine):
    assert play(*machine(), disturbed=True) == play(*machine(), disturbed=False)
