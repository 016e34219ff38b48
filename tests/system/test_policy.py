"""Devices under policies, against a real coordinator on a real port; what they feel, and their time, is the test's."""

from __future__ import annotations

from contextlib import ExitStack, closing
from datetime import datetime, timezone

import pytest

from edge_sdk.device.policy import Policy
from edge_sdk.device.session import Outcome, Session, SessionOptions
from edge_sdk.device.state import StateFolder
from edge_sdk.device.transport import Transport
from edge_sdk.device.watchdog import LOOK_SECONDS, Watchdog
from edge_sdk.tasks.digits import load
from sparrow.protocol.messages import PauseReason
from sparrow.transport import httpx

from ..edge_sdk.conditions import conditions
from .conftest import wait_until

NAME = "f"
STEPS = 40
DEADLINE = 300.0
BOARD_ON_A_BATTERY = Policy.for_board("raspberry-pi", board="raspberry-pi-4", has_battery=True)


class Device:
    """A session of the digits whose every step takes a second of its own clock.

    after: seconds of that clock -> what its sensors say from then on.
    """

    def __init__(self, stack, server, folder, name, *, after=None, policy=BOARD_ON_A_BATTERY):
        self.now, self.after, self.sensors, self.said = 0.0, dict(after or {}), {}, []
        self.watch = Watchdog(
            policy,
            self._read,
            clock=lambda: self.now,
            local_time=lambda: datetime(2026, 11, 22, 12, tzinfo=timezone.utc),
            sleep=self.wait,
            say=self.said.append,
        )
        state = stack.enter_context(closing(StateFolder(folder / name)))
        client = stack.enter_context(httpx.Client(base_url=server, timeout=30))
        index = "ab".index(name)
        self.session = Session(
            Transport(client),
            state,
            federation=NAME,
            name=name,
            make_task=lambda info, manifest: load(f"index={index},of=2,alpha=1", device=name, seed=0, batch_size=16),
            options=SessionOptions(progress=lambda assignment, done, total, loss: self.wait(1.0), watchdog=self.watch),
        )

    def wait(self, seconds):
        self.now += seconds

    def _read(self):
        for moment in sorted(moment for moment in self.after if moment <= self.now):
            self.sensors.update(self.after.pop(moment))
        return conditions(**self.sensors)

    def step(self):
        """One step of the session; idle time passes."""
        step = self.session.step(0.2)
        if step.outcome is Outcome.idle:
            self.wait(step.pause_seconds)
        return step


@pytest.fixture
def federation(coordinator, tmp_path):
    """Makes devices of a federation whose rounds may take five minutes."""
    coordinator.create(
        NAME,
        rounds=2,
        local_steps=STEPS,
        evaluation_interval=0,
        early_stopping="off",
        deadline_seconds=DEADLINE,
    )
    with ExitStack() as stack:
        yield lambda name, **how: Device(stack, coordinator.url, tmp_path, name, **how)


def play(*devices, until=lambda: False):
    """Let the devices work in turn until all are done, or ``until`` holds."""
    running = list(devices)
    while running and not until():
        for device in list(running):
            if device.step().outcome is Outcome.over:
                running.remove(device)


def device_info(coordinator, name):
    return next(each for each in coordinator.get(f"/v1/federations/{NAME}/devices").json() if each["name"] == name)


def test_a_device_that_grows_hot_pauses_between_batches_resumes_and_finishes(coordinator, federation):
    hot = federation("a", after={20: {"temperature": 80.0}, 60: {"temperature": 65.0}})
    other = federation("b")
    play(hot, other)
    assert hot.said == ["paused: the chip is at 80 °C, the limit is 78", "all conditions are met: working again"]
    first, second = coordinator.rounds(NAME)
    for record in (first, second):
        assert (record["updates"], record["handed_back"], record["expired"]) == (2, 0, 0)
        assert record["seconds"] < DEADLINE
    # The session's phases run on this machine's clock, the pause on the device's.
    assert first["train"]["paused_seconds"] == pytest.approx(95, abs=15)
    assert second["train"]["paused_seconds"] == 0
    assert hot.now >= 2 * STEPS + 60


def test_a_device_with_a_low_battery_returns_work_until_charged(coordinator, federation):
    falling = {10: {"on_mains": 0.0, "battery": 60.0}, 20: {"battery": 39.0}}
    tired, other = federation("a", after={**falling, 900: {"battery": 45.0}, 1000: {"battery": 61.0}}), federation("b")
    tired.step(), other.step()
    while not coordinator.rounds(NAME):
        tired.step(), other.step()
    play(tired, until=lambda: coordinator.rounds(NAME)[0]["handed_back"])
    begun = tired.now
    assert begun < DEADLINE - STEPS, "it does not wait for the deadline to say so"
    info = device_info(coordinator, "a")
    assert (info["present"], info["paused"]) == (False, "battery")

    play(other, until=lambda: coordinator.info(NAME)["round"] == 2)
    rounds = coordinator.rounds(NAME)
    assert [record["cohort"] for record in rounds] == [["a", "b"], ["b"]], "who is away is not drawn"
    assert [record["expired"] for record in rounds] == [0, 0]
    assert all(record["seconds"] < 60 for record in rounds), "nobody waited for the deadline"

    play(tired, other)
    assert tired.now >= 1060, "it needs the level from which work begins, for a minute"
    info = device_info(coordinator, "a")
    assert (info["present"], info["paused"]) == (True, None)
    assert tired.session.personal is not None, "it adapts the finished model"


def test_the_coordinator_learns_a_word_and_no_more(coordinator, federation):
    device = federation("a", policy=Policy(on_mains=True))
    device.sensors["on_mains"] = 0.0
    step = device.step()
    assert (step.outcome, step.paused, step.pause_seconds) == (Outcome.idle, PauseReason.charging, LOOK_SECONDS)
    coordinator.wait_for_log("PATCH /v1/devices/")
    assert device_info(coordinator, "a")["paused"] == "charging"
    assert "battery" not in coordinator.log.read_text()
    other = federation("b", policy=Policy(on_mains=True))
    other.sensors["on_mains"] = 0.0
    other.step()
    waiting = wait_until(lambda: coordinator.info(NAME)["waiting_for"], "the coordinator to say who is missing")
    assert waiting == "a device whose policy lets it work (paused: 2 charging)"
    assert all(record["status"] == "closed" for record in coordinator.rounds(NAME)), "nothing is left open"
