"""kill -9 in a federation of FedSGC: models, masks and direction maps must end as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

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
    model_files,
    update_answered,
)

pytestmark = pytest.mark.slow

ROUNDS = 6
ADJUSTING = (2, 4)
SETTINGS: dict[str, Any] = {
    "method": "fedsgc",
    "method_settings": {"density": 0.3, "adjust_interval": 2, "device_interval": 3, "direction_memory": True},
    "rounds": ROUNDS,
    "local_epochs": 6,
    "evaluation_interval": 3,
    "early_stopping": "off",
    "precision": "int8",
    "seed": 11,
}
"""int8, so that what rounding took, which devices keep from round to round, must survive, too."""


def check(coordinator: Coordinator, devices: dict[str, Device]) -> None:
    """All went to the end, and the mask is what it should be."""
    records, info = check_end(coordinator, devices, ROUNDS), coordinator.info(NAME)
    assert (info["model_version"], info["warning"]) == (ROUNDS, None), "one new model a round"
    for record in records:
        assert (record["notes"]["positions_replaced"] > 0) == (record["round"] in ADJUSTING)
    values, state = (load_file(path) for path in model_files(coordinator)[-2:])
    replaced = sum(record["notes"]["positions_replaced"] for record in records)
    assert state["own:replaced"].tolist() == [replaced]
    start = 0
    exists = np.unpackbits(state["mask"])
    for name in ("conv1.weight", "conv2.weight", "fc1.weight", "out.weight"):
        flags = exists[start : start + values[name].size]
        start += values[name].size
        assert not values[name].reshape(-1)[flags == 0].any()
        assert state[f"own:direction:{name}"].shape == flags.shape
        assert np.abs(state[f"own:direction:{name}"]).max() == 1


@pytest.fixture(scope="module")
def undisturbed(machine: Machine) -> Ending:
    """What becomes of the federation when nobody is killed."""
    coordinator, devices = machine()
    check(coordinator, join_all(coordinator, devices, SETTINGS))
    return ending(coordinator, devices)


# --- the coordinator ---------------------------------------------------------------------------------------------


def new_file(coordinator: Coordinator, suffix: str) -> None:
    """A round is being closed: of the next model there is the state, or the values as well, but no record yet."""
    newest = max(int(path.name.split(".")[0]) for path in model_files(coordinator))
    folder, following = model_files(coordinator)[0].parent, f"{newest + 1:09d}{suffix}"
    wait_until(lambda: list(folder.glob(following)), f"{following} in the coordinator's folder", interval=0)


MOMENTS: dict[str, Callable[[Coordinator, int], None]] = {
    "a mask and directions are there": lambda coordinator, since: new_file(coordinator, ".state.*.safetensors"),
    "an update is acknowledged": lambda coordinator, since: coordinator.wait_for_log(ACKNOWLEDGED, since=since),
    "values are there, too": lambda coordinator, since: new_file(coordinator, ".[!s]*.safetensors"),
    "a round has closed": lambda coordinator, since: coordinator.wait_for_log(r"round \d+ closes", since=since),
}


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

    # In the download of its first mask and model.
    first = between.fault("GET", "/payload", "answer", 10_000)
    victim = Victim(coordinator, device, between)
    victim.die_at(first)

    # Acknowledged, but it never hears of it; the next round re-adjusts.
    victim.die_at(between.fault("PUT", "/update", "answer"))
    assert victim.wait_for(update_answered).status == 200, "the same again"

    # Before the first byte of an update under a mask of its own.
    victim.die_at(between.fault("PUT", "/update", "request"))

    # While it trains: what changed of the mask is there and on its disk, the update has not begun.
    victim.wait_for(update_answered)
    victim.seen = len(between.exchanges)
    victim.die_training()

    # In the middle of an update, and the coordinator dies with it.
    victim.die_with_coordinator_at(between.fault("PUT", "/update", "request", 1000))

    assert between.chunked == []
    check(coordinator, {"small": victim.device, "large": other})
    assert ending(coordinator, device) == undisturbed
