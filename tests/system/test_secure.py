"""Secure rounds with real processes: coordinator and devices are killed in each phase, and the sum comes out."""

from __future__ import annotations

import pytest

from .conftest import one_machine, wait_until

PHASES = ("keys", "shares", "train", "agree", "unmask")
SETTINGS = {
    "method": "fedavg",
    "secure": True,
    "rounds": 3,
    "cohort": 5,
    "min_devices": 5,
    "local_epochs": 1,
    "early_stopping": "off",
    "draws": "seed",
    "evaluation_interval": 0,
}

pytestmark = pytest.mark.integration


@pytest.fixture
def played(nursery, tmp_path):
    """A coordinator with a secure federation, and a function that starts a device again or anew."""
    with one_machine(nursery, tmp_path) as (coordinator, devices):
        coordinator.create("f", **SETTINGS)
        yield (
            coordinator,
            lambda name: devices(coordinator.url, "f", name, "--data", f"index={name[-1]},of=5", "--engine", "onnx"),
        )


def notes(coordinator):
    return [record["notes"] for record in coordinator.rounds("f") if record["status"] == "closed"]


@pytest.mark.parametrize("phase", PHASES)
def test_who_is_killed_in_a_phase_goes_on(played, phase):
    """The coordinator and a device are killed when the phase is there, and started again: nothing is lost."""
    coordinator, start = played
    started = {f"d{number}": start(f"d{number}") for number in range(5)}

    def is_there():
        open_work = coordinator.get("/v1/federations/f/assignments").json()["assignments"]
        return any(each["kind"] == phase for each in open_work)

    wait_until(is_there, f"the phase {phase}")
    coordinator.kill()
    started["d2"].kill()
    coordinator.start()
    started["d2"] = start("d2")
    wait_until(lambda: coordinator.info("f")["status"] == "finished", "the federation to finish", timeout=90)
    for device in started.values():
        assert device.wait() == 0, device.output
    found = notes(coordinator)
    assert [each["secure_cells"] for each in found] == [1, 1, 1]
    assert [each["secure_train_vanished"] for each in found] == [0, 0, 0]
    assert all(record["updates"] == 5 for record in coordinator.rounds("f"))
