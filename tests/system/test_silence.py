"""Devices that die, and devices that are slow, on a real port: the ones are not waited for, the others are."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.join import JoinOptions, join
from edge_sdk.publish import publish
from edge_sdk.tasks import Task
from sparrow.command_line.exits import Exit

from .conftest import wait_until

SECONDS = 1.0


@pytest.mark.slow
def test_a_long_training_is_waited_for_and_a_dead_device_is_not(coordinator, tmp_path):
    released = threading.Event()

    def slow(outputs, targets):
        if trains():  # and is not just checked, before anybody has enrolled
            assert released.wait(20)
        return F.cross_entropy(outputs, targets)

    def trains():
        return any(info["name"] == "f" for info in coordinator.get("/v1/federations").json()) and coordinator.rounds(
            "f"
        )

    data = [(torch.randn(6, 4), torch.zeros(6, dtype=torch.long))]
    task = Task("slow", nn.Sequential(nn.Linear(4, 2)), slow, data, data)
    settings = {"method": "fedavg", "rounds": 1, "local_steps": 1, "evaluation_interval": 0, "deadline_seconds": 600}
    publish(coordinator.url, "f", task, silence_seconds=SECONDS, min_devices=2, **settings)
    dead = {"name": "dead", "enrolment_key": "k" * 32}
    coordinator.http.post("/v1/federations/f/devices", json=dead).raise_for_status()
    results = []
    where = {"federation": "f", "name": "slow", "state_dir": tmp_path / "slow"}
    thread = threading.Thread(
        target=lambda: results.append(join(coordinator.url, task, options=JoinOptions(budget=1.0), quiet=True, **where))
    )
    thread.start()
    coordinator.wait_for_log(r"f: no longer waiting for devices silent for more than 1 s: dead")
    coordinator.wait_for_log(r"POST /v1/assignments/\w+/heartbeat HTTP/1.1\" 204", times=9)  # three times as long
    released.set()
    thread.join(60)
    assert results[0].rounds == 1
    (record,) = coordinator.rounds("f")
    assert (record["updates"], record["expired"]) == (1, 1)


@pytest.mark.slow
def test_a_killed_device_costs_its_round_seconds_and_later_ones_nothing(coordinator, device):
    settings = {"local_steps": 600, "min_devices": 2, "evaluation_interval": 0, "early_stopping": "off"}
    coordinator.create("f", rounds=3, silence_seconds=3, deadline_seconds=600, **settings)
    stays, dies = (device(coordinator.url, "f", name, "--quiet") for name in ("stays", "dies"))
    coordinator.wait_for_log(r"GET /v1/federations/\S+/assignment\S* HTTP/1.1\" 200", times=2)
    dies.kill()
    assert stays.wait(120) == 0, stays.output
    first, *later = coordinator.rounds("f")
    assert (first["updates"], first["expired"]) == (1, 1)
    assert [record["cohort"] for record in later] == [["stays"]] * 2


def test_who_joined_what_was_deleted_is_told_in_a_line(coordinator, device):
    told = "edge_sdk.join: the federation of this device was deleted by its operator"
    coordinator.create("f", min_devices=2)
    waiting = device(coordinator.url, "f", "pi", "--quiet")
    wait_until(lambda: coordinator.info("f")["devices"], "the device to enrol")
    coordinator.http.delete("/v1/federations/f").raise_for_status()
    assert waiting.wait() == Exit.NOT_FOUND
    about_the_model, line = waiting.output.splitlines()
    assert (about_the_model, line.startswith(told)) == ("the model of f is built in, known by its digest", True)
    again = device(coordinator.url, "f", "pi", "--quiet")
    assert again.wait() == Exit.NOT_FOUND
    assert [line.startswith(told) for line in again.output.splitlines()] == [False, True, True]
