"""A federation from the command line: two devices, one coordinator, and what is left when all is over."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import pytest

from sparrow.devices import EnergyMeter, Quality

from .conftest import Coordinator, Device, Devices, Machine, environment, wait_until

NAME = "digits"
ROUNDS = 3
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "local_steps": 30,
    "evaluation_interval": 2,
    "early_stopping": "off",
    "seed": 3,
}
SMALL, LARGE = "pi", "jetson"
INTERRUPTED = (130, -signal.SIGINT)
"""A shell shows 130 for both. Python itself makes it the second when the signal fell into generated code (``exec`` of a
string, as when torch imports its parts late), although the program caught it, said goodbye and exits with 130."""


@dataclass
class Run:
    coordinator: Coordinator
    devices: Devices
    ended: dict[str, Device]

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.coordinator.rounds(NAME)


@pytest.fixture(scope="module")
def run(machine: Machine) -> Run:
    """Two devices, started as a user starts them, to the end."""
    coordinator, devices = machine()
    coordinator.create(NAME, **SETTINGS)
    ended = {
        SMALL: devices.command(coordinator.url, NAME, SMALL, "--budget", "0.4", "--watts", "2:6"),
        LARGE: devices.command(coordinator.url, NAME, LARGE, "--budget", "1.0", "--quiet"),
    }
    for device in ended.values():
        assert device.wait() == 0, device.output
    return Run(coordinator, devices, ended)


def test_it_finishes_and_says_so(run):
    info = run.coordinator.info(NAME)
    assert (info["status"], info["reason"], info["round"]) == ("finished", "max_rounds", ROUNDS)
    for name, device in run.ended.items():
        assert f"{name}: {ROUNDS} rounds, {ROUNDS * SETTINGS['local_steps']} local steps" in device.output


def test_every_round_has_the_updates_of_its_cohort_once(run):
    assert [record["round"] for record in run.records] == [1, 2, 3]
    for record in run.records:
        assert record["status"] == "closed"
        assert record["cohort"] == [LARGE, SMALL]
        assert (record["updates"], record["handed_back"], record["expired"]) == (2, 0, 0)
        assert record["num_examples"] > 0
        assert 0 < record["train_loss"] < 5
        assert record["opened_at"] < record["closed_at"]
    assert run.records[-1]["model_sha256"] == run.coordinator.info(NAME)["model_sha256"]


def test_evaluations_come_when_due_and_after_the_last_round(run):
    assert [record["evaluated_devices"] for record in run.records] == [0, 2, 2]
    for record in run.records[1:]:
        assert 0 <= record["accuracy_personal"] <= 1
    assert [record["accuracy_global"] is None for record in run.records] == [True, True, False], "judged at the end"
    assert [record["evaluation_bytes_down"] > 0 for record in run.records] == [False, False, True]


def test_bytes_follow_the_budget(run):
    whole = len(run.coordinator.get(f"/v1/federations/{NAME}/model").content)
    first, *later = run.records
    assert 2 * whole < first["bytes_down"] + 4096, "each device downloads the whole model first"
    for record in later:
        assert record["bytes_down"] < 1.6 * whole, "0.4 of the neurons are less than 0.6 of the values"
    for record in run.records:
        assert whole < record["bytes_up"] < 1.6 * whole


@pytest.fixture
def no_sensor():
    with EnergyMeter() as meter:
        with meter.phase("look") as phase:
            pass
        if phase.energy.quality is not Quality.UNAVAILABLE:
            pytest.skip(f"this machine can tell what it draws: {meter.describe()}")


@pytest.mark.usefixtures("no_sensor")
def test_joules_are_estimated_where_watts_are_known_and_unavailable_where_not(run):
    for record in run.records:
        assert record["train"]["joules_estimated"] > 0
        assert record["train"]["joules_measured"] == 0
        assert 0 < record["train"]["seconds_without_joules"] < record["train"]["seconds"]
    assert "J estimated" in run.ended[SMALL].output
    assert "J measured" not in run.ended[SMALL].output
    assert "joules unavailable" in run.ended[LARGE].output


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_exported_models_predict_without_torch(run, tmp_path, name):
    samples = tmp_path / "samples.npy"
    np.save(samples, np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32))
    session = onnxruntime.InferenceSession(str(run.devices.onnx(name)), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: np.load(samples)})
    assert scores.shape == (3, 10)

    command = [sys.executable, "-m", "edge_sdk.predict", str(run.devices.onnx(name)), "--input", str(samples)]
    printed = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True).stdout
    for number, best in enumerate(scores.argmax(axis=1)):
        assert f"sample {number}: class {best} " in printed


def test_what_a_device_kept_can_be_exported_afterwards(run, tmp_path):
    """From its state folder alone, by a program that has no torch, to the same predictions."""
    output = tmp_path / "later.onnx"
    command = [
        sys.executable,
        "-m",
        "sparrow.export",
        str(run.devices.folder / SMALL),
        "--output",
        str(output),
        "--quick",
    ]
    subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    inputs = np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32)
    later, before = (onnxruntime.InferenceSession(str(path)) for path in (output, run.devices.onnx(SMALL)))
    np.testing.assert_allclose(*(each.run(None, {"input": inputs})[0] for each in (later, before)), atol=1e-4)
    says, said = (each.get_modelmeta().custom_metadata_map for each in (later, before))
    assert says == {**said, "mode": "packed", "precision": "fp32"}
    assert (says["method"], says["device"], says["round"], says["classes"]) == ("fedspu", SMALL, "3", "10")


def test_the_same_again_in_fresh_folders_gives_the_same_models(run, machine):
    coordinator, devices = machine()
    coordinator.create(NAME, **SETTINGS)
    again = [
        devices(coordinator.url, NAME, LARGE, "--budget", "1.0"),
        devices(coordinator.url, NAME, SMALL, "--budget", "0.4"),
    ]
    assert [device.wait() for device in again] == [0, 0]
    assert [record["model_sha256"] for record in coordinator.rounds(NAME)] == [
        record["model_sha256"] for record in run.records
    ]
    assert devices.onnx(SMALL).read_bytes() == run.devices.onnx(SMALL).read_bytes()


def test_a_device_that_comes_after_the_end_adapts_and_exports(run):
    before = run.coordinator.info(NAME)["model_sha256"]
    late = run.devices(run.coordinator.url, NAME, "late", "--budget", "0.4", "--quiet")
    assert late.wait() == 0, late.output
    assert "late: 0 rounds" in late.output
    session = onnxruntime.InferenceSession(str(run.devices.onnx("late")), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape[1:] == [1, 8, 8]
    assert run.coordinator.info(NAME)["model_sha256"] == before, "adapting sends nothing of the model up"
    assert "adapted the finished global model" in late.output
    assert [record["updates"] for record in run.records] == [2, 2, 2]


def test_ctrl_c_hands_the_assignment_back_and_nobody_waits(coordinator, device):
    coordinator.create(NAME, rounds=2, local_steps=400, evaluation_interval=0, early_stopping="off", seed=3)
    leaving = device.command(coordinator.url, NAME, "leaving", "--budget", "0.4")
    staying = device(coordinator.url, NAME, "staying", "--budget", "0.4")
    coordinator.wait_for_log(r'GET /v1/federations/\S+/assignment\S* HTTP/1.1" 200', times=2)
    assert coordinator.rounds(NAME)[0]["updates"] == 0, "both are at work"
    leaving.signal(signal.SIGINT)
    assert leaving.wait(60) in INTERRUPTED, leaving.output
    assert "left the federation" in leaving.output
    assert "Traceback" not in leaving.output

    assert staying.wait() == 0, staying.output  # the deadline is 300 s away
    first, second = coordinator.rounds(NAME)
    assert (first["cohort"], first["updates"], first["handed_back"]) == (["leaving", "staying"], 1, 1)
    assert (second["cohort"], second["updates"], second["handed_back"]) == (["staying"], 1, 0)
    assert (first["expired"], second["expired"]) == (0, 0)


def test_ctrl_c_while_waiting_for_work_keeps_a_device_out_of_later_rounds(coordinator, device, proxy):
    """Behind a proxy, the coordinator does not even see that the long poll has nobody at its end any more."""
    coordinator.create(NAME, rounds=3, cohort=1, local_steps=200, evaluation_interval=0, early_stopping="off")
    proxies = {name: proxy() for name in ("a", "b")}
    started = {name: device(proxies[name].url, NAME, name, "--budget", "0.4") for name in proxies}
    (chosen,) = wait_until(lambda: coordinator.rounds(NAME), "round 1 to open")[0]["cohort"]
    (idle,) = set(started) - {chosen}
    proxies[idle].wait_for(lambda exchange: "/assignment?" in exchange.path)
    proxies[chosen].wait_for(lambda exchange: "/assignment?" in exchange.path and exchange.produced == 200)
    started[idle].signal(signal.SIGINT)
    assert started[idle].wait(60) in INTERRUPTED, started[idle].output

    assert started[chosen].wait(60) == 0, started[chosen].output
    assert [record["cohort"] for record in coordinator.rounds(NAME)] == [[chosen]] * 3


def test_a_device_without_pytorch_trains_beside_one_with_it(coordinator, device):
    """The one has numpy and ONNX Runtime, takes the other half of the images, and exports what it has become."""
    coordinator.create("mixed", method="fedspu", min_devices=2, **SETTINGS)
    small = device.without_torch(coordinator.url, "mixed", "small", "--budget", "auto", "--data", "index=0,of=2")
    large = device.command(coordinator.url, "mixed", "large", "--engine", "torch", "--data", "index=1,of=2")
    for each in (small, large):
        assert each.wait() == 0, each.output
    assert "largest difference from ONNX Runtime" in small.output
    assert "PyTorch was asked for" not in small.output
    assert "budget 1: a round takes" in small.output
    assert "largest difference from PyTorch" in large.output
    rounds = coordinator.rounds("mixed")
    assert [record["updates"] for record in rounds] == [2] * ROUNDS
    assert rounds[-1]["train_loss"] < rounds[0]["train_loss"]


def test_a_method_that_needs_pytorch_says_so_to_a_device_without(coordinator, device):
    coordinator.create("gated", method="pfedgate", **SETTINGS)
    refused = device.without_torch(coordinator.url, "gated", "small")
    assert refused.wait() != 0
    assert "torch" in refused.output
