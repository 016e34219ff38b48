"""Secure rounds with real processes: coordinator and devices are killed in each phase, and the sum comes out."""

from __future__ import annotations

import pytest

from ..kinds import chosen
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


def test_devices_that_know_one_another_take_part_with_nobody_else(nursery, tmp_path):
    """A file of identity keys keeps out what a coordinator invents; whoever demands masks sends nothing without."""
    with one_machine(nursery, tmp_path) as (coordinator, devices):
        coordinator.create("f", **SETTINGS | {"rounds": 1})
        coordinator.create("plain", method="fedavg", min_devices=1, rounds=1)
        (tmp_path / "wrong").write_text("d1 0123")

        def start(name, *more, federation="f"):
            data = ("--data", f"index={name[-1]},of=5", "--engine", "onnx")
            return devices(coordinator.url, federation, name, *data, *more)

        refused = start("x4", "--known-devices", str(tmp_path / "wrong"))
        assert refused.wait() == 2
        assert "line 1: " in refused.output
        refused = start("x4", "--require-secure", federation="plain")
        assert refused.wait() != 0
        assert "secure federation" in refused.output

        known = tmp_path / "known"
        known.write_text("# nobody yet")
        alone = start("d0", "--require-secure", "--known-devices", str(known))
        others = [start(f"d{number}") for number in range(1, 5)]
        wait_until(lambda: coordinator.info("f")["status"] == "finished", "the federation to finish", timeout=90)
        for each in others:
            assert each.wait() == 0, each.output
        alone.wait()
        assert "d1, d2, d3, d4: not in --known-devices" in alone.output
        (record,) = coordinator.rounds("f")
        assert record["updates"] in (0, 4)


@pytest.mark.parametrize("phase", chosen(PHASES, ("keys", "train", "unmask")))
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
