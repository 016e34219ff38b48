"""kill -9 in a federation of pFedGate: gates, bases of differences and what rounding took survive, to the same models.

The personal models that devices export are θ under their mean gates: with another gate they would be others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import Coordinator, Device, Machine
from .kills import BUDGETS, NAME, Ending, Victim, check_end, ending, join, join_all, kill_at, update_answered

pytestmark = pytest.mark.slow

ROUNDS = 6
SETTINGS: dict[str, Any] = {
    "method": "pfedgate",
    "method_settings": {"blocks": 10, "touched_limit": 0.6, "gate_learning_rate": 0.5},
    "rounds": ROUNDS,
    "local_epochs": 5,
    "evaluation_interval": 3,
    "early_stopping": "off",
    "precision": "int8",
    "min_devices": 2,
    "seed": 11,
}


def check(coordinator: Coordinator, devices: dict[str, Device]) -> None:
    """All went to the end, and only parts of the model went by."""
    records = check_end(coordinator, devices, ROUNDS)
    assert coordinator.info(NAME)["model_version"] == ROUNDS
    first, *_, last = records
    assert last["parts_down"]["values"] < first["parts_down"]["values"]


@pytest.fixture(scope="module", autouse=True)
def _nobody_touches_everything() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUDGETS, "large", "0.6")
        yield


@pytest.fixture(scope="module")
def undisturbed(_nobody_touches_everything: None, machine: Machine) -> Ending:
    """What becomes of the federation when nobody is killed."""
    coordinator, devices = machine()
    check(coordinator, join_all(coordinator, devices, SETTINGS))
    return ending(coordinator, devices)


def test_the_coordinator_is_killed_between_rounds(coordinator, device, undisturbed):
    devices = join_all(coordinator, device, SETTINGS)
    moments = {
        f"round {number}": lambda coordinator, since, number=number: coordinator.wait_for_log(rf"round {number} opens")
        for number in (2, 4, 5)
    }
    kill_at(moments, coordinator, devices)
    check(coordinator, devices)
    assert ending(coordinator, device) == undisturbed


def test_a_device_is_killed_before_and_after_it_sends_and_while_it_trains(coordinator, device, proxy, undisturbed):
    coordinator.create(NAME, **SETTINGS)
    other = join(device, coordinator.url, "large")
    between = proxy()
    fault = between.fault("PUT", "/update", "request")
    victim = Victim(coordinator, device, between)
    victim.die_at(fault)
    victim.wait_for(update_answered)
    victim.die_at(between.fault("PUT", "/update", "answer"))
    victim.wait_for(update_answered)
    victim.seen = len(between.exchanges)
    victim.die_training()
    check(coordinator, {"small": victim.device, "large": other})
    assert ending(coordinator, device) == undisturbed
