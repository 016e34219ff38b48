"""kill -9 in a federation of DM-PFL, in each of its three stages: it goes on in that stage, to the same models.

How devices and coordinators are killed there is that of ``test_kills``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from .conftest import Coordinator, Device, Devices, Machine
from .test_kills import BUDGETS, NAME, Victim, join, update_answered

pytestmark = pytest.mark.slow

STAGES = ("masks", "masks", "global", "personal") * 2
SETTINGS: dict[str, Any] = {
    "method": "dmpfl",
    "method_settings": {"density": 0.4, "iterations": 2, "replaced": 0.2, "adjust_interval": 1},
    "rounds": len(STAGES),
    "local_epochs": 3,
    "evaluation_interval": 4,
    "early_stopping": False,
    "precision": "int8",
    "seed": 11,
}
"""int8, so that what rounding took, which devices keep from round to round, must survive, too."""


@dataclass(frozen=True)
class Ending:
    """Digests of the global models, what each round counted, and the models that devices export and keep."""

    of_rounds: list[str]
    notes: list[dict[str, int]]
    masks: dict[str, bytes]
    personal: dict[str, bytes]


def ending(coordinator: Coordinator, devices: Devices) -> Ending:
    records = coordinator.rounds(NAME)
    return Ending(
        [record["model_sha256"] for record in records],
        [record["notes"] for record in records],
        {name: (devices.folder / name / "mask.bits").read_bytes() for name in BUDGETS},
        {name: devices.onnx(name).read_bytes() for name in BUDGETS},
    )


def check(coordinator: Coordinator, devices: dict[str, Device]) -> None:
    """All went through every stage, once."""
    for name, device in devices.items():
        assert device.wait(60) == 0, device.output
        assert f"{name}: {len(STAGES)} rounds" in device.output
        assert "Traceback" not in device.output
    assert coordinator.logged("Traceback") == []
    info, records = coordinator.info(NAME), coordinator.rounds(NAME)
    assert (info["status"], info["reason"], info["round"]) == ("finished", "max_rounds", len(STAGES))
    assert info["model_version"] == STAGES.count("masks") + STAGES.count("global")
    assert [record["round"] for record in records] == list(range(1, len(STAGES) + 1))
    for stage, record in zip(STAGES, records, strict=True):
        assert (sorted(record["cohort"]), record["updates"]) == (sorted(BUDGETS), len(BUDGETS))
        assert (record["handed_back"], record["expired"]) == (0, 0)
        assert (record["parts_up"] == {}) == (stage == "personal")
        assert ("private" in record["notes"]) == (stage != "global")
        assert ("replaced" in record["notes"]) == (stage == "masks")


def join_all(coordinator: Coordinator, devices: Devices) -> dict[str, Device]:
    coordinator.create(NAME, **SETTINGS)
    return {name: join(devices, coordinator.url, name) for name in BUDGETS}


@pytest.fixture(scope="module")
def undisturbed(machine: Machine) -> Ending:
    """What becomes of the federation when nobody is killed."""
    coordinator, devices = machine()
    check(coordinator, join_all(coordinator, devices))
    return ending(coordinator, devices)


def test_the_coordinator_is_killed_in_every_stage(coordinator, device, undisturbed):
    devices = join_all(coordinator, device)
    for number in (2, 3, 4, 7, 8):
        coordinator.wait_for_log(rf"round {number} opens")
        coordinator.kill()
        assert all(each.alive() for each in devices.values()), f"too late: round {number}"
        coordinator.start()
    check(coordinator, devices)
    assert ending(coordinator, device) == undisturbed


def test_a_device_is_killed_in_every_stage(coordinator, device, proxy, undisturbed):
    """Before a byte of its answer is sent in the first iteration, after it was taken but not heard of in the second,
    and at last while it trains."""
    coordinator.create(NAME, **SETTINGS)
    other = join(device, coordinator.url, "large")
    between = proxy()
    fault = between.fault("PUT", "/update", "request")
    victim = Victim(coordinator, device, between)
    died: list[str] = []
    for place in range(4):
        assert fault.reached.wait(30)
        died.append(STAGES[coordinator.info(NAME)["round"]])
        victim.die_at(fault)
        victim.wait_for(update_answered)
        fault = between.fault("PUT", "/update", "request" if place < 3 else "answer")
    assert died == ["masks", "masks", "global", "personal"]
    victim.die_at(fault)
    # While it trains: its model has come, and nothing has been sent.
    victim.wait_for(update_answered)
    victim.seen = len(between.exchanges)
    victim.wait_for(lambda exchange: exchange.path.endswith("/payload") and exchange.complete)
    victim.device.kill()
    victim.start()
    check(coordinator, {"small": victim.device, "large": other})
    assert ending(coordinator, device) == undisturbed
