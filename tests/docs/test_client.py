"""The client of docs/contract.md: short, without a line of ours, and a device like any other to a coordinator."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sparrow.transport import httpx

from ..system.conftest import Coordinator, environment

CLIENT = Path(__file__).parents[2] / "docs" / "client.py"
PAGE = CLIENT.with_name("contract.md")
FEATURES, CLASSES = 4, 3
SETTINGS = {"learning_rate": 0.5, "learning_rate_decay": 0.9, "local_epochs": 3, "evaluation_interval": 1}


def test_it_needs_the_standard_library_and_numpy_alone():
    imported = set()
    for node in ast.walk(ast.parse(CLIENT.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            imported |= {name.partition(".")[0] for name in names}
    assert imported <= sys.stdlib_module_names | {"numpy"}


@pytest.fixture
def coordinator(tmp_path):
    made = Coordinator(tmp_path / "coordinator")
    made.start()
    yield made
    made.close()


@pytest.fixture
def published(coordinator):
    """Publishes what the page says, with these settings; gives its first weight and bias."""
    torch = pytest.importorskip("torch")
    script = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]

    def make(**settings):
        assert "http://127.0.0.1:8000" in script
        assert "rounds=10, learning_rate=0.5" in script
        more = ", ".join(f"{key}={value}" for key, value in {**SETTINGS, **settings}.items())
        found = {}
        torch.manual_seed(0)
        exec(
            script.replace("http://127.0.0.1:8000", coordinator.url).replace("rounds=10, learning_rate=0.5", more),
            found,
        )
        return [parameter.detach().numpy().astype(np.float64) for parameter in found["task"].model.parameters()]

    return make


def samples(seed, count):
    """Inputs [count, features] whose class is the largest of the first ones."""
    x = np.random.default_rng(seed).normal(size=(count, FEATURES))
    return x, x[:, :CLASSES].argmax(axis=1)


@pytest.fixture
def start(coordinator, tmp_path):
    """Starts the client with these samples, as a user does."""
    started = []

    def run(name, x, y):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "enrolment_key": name.ljust(32, "k")}))
        process = subprocess.Popen(
            [sys.executable, CLIENT, coordinator.url, "plain", f"{name}.json", f"{name}.npz"],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def trained(weight, bias, x, y, rate):
    """Gradient steps of softmax regression on all samples, in float64."""
    for _ in range(SETTINGS["local_epochs"]):
        powers = np.exp(x @ weight.T + bias)
        wrong = powers / powers.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]
        weight, bias = weight - rate * wrong.T @ x / len(x), bias - rate * wrong.mean(axis=0)
    return weight, bias


@pytest.mark.integration
def test_two_of_them_are_a_federation_whose_model_moves_as_they_train(coordinator, published, start):
    weight, bias = published(rounds=2, min_devices=2)
    data = {"one": samples(1, 100), "two": samples(2, 55)}
    outputs = [process.communicate(timeout=60)[0] for process in [start(name, *data[name]) for name in data]]
    assert all('"status":410,"detail":"plain is finished after 2 rounds' in text for text in outputs), outputs

    records = coordinator.rounds("plain")
    assert [(record["status"], record["updates"], record["evaluated_devices"]) for record in records] == [
        ("closed", 2, 2)
    ] * 2
    assert [record["num_examples"] for record in records] == [80 + 44] * 2
    assert records[-1]["accuracy_global"] > 0.7
    assert coordinator.info("plain")["status"] == "finished"

    for number in range(2):
        rate = SETTINGS["learning_rate"] * SETTINGS["learning_rate_decay"] ** number
        found = []
        for x, y in data.values():
            rest = np.arange(len(x)) % 5 > 0
            found.append((rest.sum(), *trained(weight, bias, x[rest], y[rest], rate)))
        whole = sum(count for count, _, _ in found)
        weight = sum(count / whole * each for count, each, _ in found)
        bias = sum(count / whole * each for count, _, each in found)
    model = safetensors.numpy.load(coordinator.get("/v1/federations/plain/model").content)
    np.testing.assert_allclose(model["0.weight"], weight, atol=1e-5)
    np.testing.assert_allclose(model["0.bias"], bias, atol=1e-5)


@pytest.mark.integration
def test_who_takes_anothers_name_is_told(coordinator, start):
    coordinator.create("plain", method="fedavg")
    other = {"name": "one", "enrolment_key": "of another device, of this length."}
    httpx.post(f"{coordinator.url}/v1/federations/plain/devices", json=other).raise_for_status()
    assert '"status":409' in start("one", *samples(1, 20)).communicate(timeout=30)[0]
