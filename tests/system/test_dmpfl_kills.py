"""kill -9 in a federation of DM-PFL, in each of its three stages: it goes on in that stage, to the same models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Coordinator, Device, Machine
from .kills import NAME, Ending, Victim, check_end, ending, join, join_all, kill_at, update_answered

pytestmark = pytest.mark.slow

STAGES = ("masks", "masks", "global", "personal") * 2
SETTINGS: dict[str, Any] = {
    "method": "dmpfl",
    "method_settings": {"density": 0.4, "iterations": 2, "replaced": 0.2, "adjust_interval": 1},
    "rounds": len(STAGES),
    "local_epochs": 3,
    "evaluation_interval": 4,
    "early_stopping": "off",
    "precision": "int8",
    "seed": 11,
}
"""int8, so that what rounding took, which devices keep from round to round, must survive, too."""


def check(coordinator: Coordinator, devices: dict[str, Device]) -> None:
    """All went through every stage, once."""
    records = check_end(coordinator, devices, len(STAGES))
    assert coordinator.info(NAME)["model_version"] == STAGES.count("masks") + STAGES.count("global")
    for stage, record in zip(STAGES, records, strict=True):
        assert (record["parts_up"] == {}) == (stage == "personal")
        assert ("private" in record["notes"]) == (stage != "global")
        assert ("replaced" in record["notes"]) == (stage == "masks")


@pytest.fixture(scope="module")
def undisturbed(machine: Machine) -> Ending:
    """What becomes of the federation when nobody is killed."""
    coordinator, devices = machine()
    check(coordinator, join_all(coordinator, devices, SETTINGS))
    return ending(coordinator, devices)


def opens(number: int) -> Callable[[Coordinator, int], None]:
    return lambda coordinator, since: coordinator.wait_for_log(rf"round {number} opens")


def test_the_coordinator_is_killed_in_every_stage(coordinator, device, undisturbed):
    devices = join_all(coordinator, device, SETTINGS)
    kill_at({f"round {number}": opens(number) for number in (2, 3, 4, 7, 8)}, coordinator, devices)
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
