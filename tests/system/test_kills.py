"""kill -9 of the coordinator and of devices, at points seen from outside, in federations that must end as if nothing
had happened: every acknowledged update counted once, and every round's global model the same bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Coordinator, Device, Machine, wait_until
from .kills import (
    ACKNOWLEDGED,
    NAME,
    Ending,
    Victim,
    check_end,
    ending,
    join,
    join_all,
    kill_at,
    update_answered,
)

ROUNDS = 8
STEPS = 60
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "local_steps": STEPS,
    "evaluation_interval": 3,
    "early_stopping": "off",
    "seed": 11,
}
PAYLOAD = r"GET /v1/assignments/\w+/payload HTTP/1.1\" 20"


@pytest.fixture(scope="module")
def undisturbed(machine: Machine) -> Ending:
    """What becomes of the federation when nobody is killed."""
    coordinator, devices = machine()
    check(coordinator, join_all(coordinator, devices, SETTINGS))
    return ending(coordinator, devices)


def check(coordinator: Coordinator, devices: dict[str, Device]) -> None:
    """All went to the end, and every update counts once, on both sides."""
    records, info = check_end(coordinator, devices, ROUNDS), coordinator.info(NAME)
    for name, device in devices.items():
        assert f"{name}: {ROUNDS} rounds, {ROUNDS * STEPS} local steps" in device.output
    assert info["model_version"] == ROUNDS, "one new model a round"
    assert records[-1]["model_sha256"] == info["model_sha256"]
    assert [record["evaluated_devices"] for record in records] == [0, 0, 2, 0, 0, 2, 0, 2]


# --- the coordinator ---------------------------------------------------------------------------------------------


def new_model_file(coordinator: Coordinator, pause_seconds: float = 0.0) -> None:
    """A round is being closed: the next model is in its folder, its transaction not yet in the records.

    That lasts for some milliseconds, so this looks without pause.
    """
    newest = max((coordinator.data / "blobs").glob("*/models/*.safetensors"))
    folder, following = newest.parent, f"{int(newest.name[:9]) + 1:09d}.*.safetensors"
    wait_until(lambda: any(folder.glob(following)), f"{following} in the coordinator's folder", interval=0)
    time.sleep(pause_seconds)


MOMENTS: dict[str, Callable[[Coordinator, int], None]] = {
    "a round has opened": lambda coordinator, since: coordinator.wait_for_log(r"round \d+ opens", since=since),
    "a payload is sent": lambda coordinator, since: coordinator.wait_for_log(PAYLOAD, since=since),
    "an update is acknowledged": lambda coordinator, since: coordinator.wait_for_log(ACKNOWLEDGED, since=since),
    "a round is being closed": lambda coordinator, since: new_model_file(coordinator),
    "it is a little later": lambda coordinator, since: new_model_file(coordinator, 0.001),
    "a round has closed": lambda coordinator, since: coordinator.wait_for_log(r"round \d+ closes", since=since),
    "at random": lambda coordinator, since: time.sleep(random.Random(5).uniform(0.02, 0.4)),
}


@pytest.mark.slow
def test_the_coordinator_is_killed_at_every_point_of_a_round(coordinator, device, undisturbed):
    devices = join_all(coordinator, device, SETTINGS)
    kill_at(MOMENTS, coordinator, devices)
    check(coordinator, devices)
    assert ending(coordinator, device) == undisturbed


# --- devices -----------------------------------------------------------------------------------------------------


def test_a_device_is_killed_at_every_point_of_a_round(coordinator, device, proxy, undisturbed):
    coordinator.create(NAME, **SETTINGS)
    other = join(device, coordinator.url, "large")
    between = proxy()

    # Enrolled, but the answer with its token is lost.
    enrolment = between.fault("POST", "/devices", "answer")
    victim = Victim(coordinator, device, between)
    victim.die_at(enrolment)

    # In the download of its first, whole model; then of a sparse one.
    victim.die_at(between.fault("GET", "/payload", "answer", 10_000))
    victim.wait_for(update_answered)
    victim.die_at(between.fault("GET", "/payload", "answer", 100))

    # While it trains: the payload is there, the update has not begun.
    victim.die_training()

    # In the upload: before its first byte, and in the middle.
    victim.die_at(between.fault("PUT", "/update", "request"))
    victim.die_at(between.fault("PUT", "/update", "request", 4000))

    # Acknowledged, but it never hears of it.
    victim.die_at(between.fault("PUT", "/update", "answer"))
    assert victim.wait_for(update_answered).status == 200, "the same again"

    # The same, and the coordinator dies with it.
    victim.die_with_coordinator_at(between.fault("PUT", "/update", "answer"))

    assert between.chunked == []
    check(coordinator, {"small": victim.device, "large": other})
    assert ending(coordinator, device) == undisturbed


# --- both --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_is_killed_at_random(coordinator, device, undisturbed):
    chance = random.Random(7)
    devices = join_all(coordinator, device, SETTINGS)
    for _ in range(6):
        time.sleep(chance.uniform(0.05, 0.5))
        if chance.random() < 0.3:
            coordinator.kill()
            coordinator.start()
        else:
            name = chance.choice(sorted(devices))
            if devices[name].alive():
                devices[name].kill()
                devices[name] = join(device, coordinator.url, name)
    check(coordinator, devices)
    assert ending(coordinator, device) == undisturbed
