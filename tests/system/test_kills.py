"""kill -9 of the coordinator and of devices, at points seen from outside, in federations that must end as if nothing
had happened: every acknowledged update counted once, and every round's global model the same bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from .conftest import Coordinator, Device, Devices, Machine, wait_until
from .proxy import Exchange, Fault, Proxy

NAME = "kills"
ROUNDS = 8
STEPS = 60
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "local_steps": STEPS,
    "evaluation_interval": 3,
    "early_stopping": False,
    "seed": 11,
}
BUDGETS = {"small": "0.4", "large": "1.0"}
PAYLOAD = r"GET /v1/assignments/\w+/payload HTTP/1.1\" 20"
ACKNOWLEDGED = r"PUT /v1/assignments/\w+/update HTTP/1.1\" 201"


def join(devices: Devices, server: str, name: str) -> Device:
    return devices(server, NAME, name, "--budget", BUDGETS[name], "--quiet")


def join_all(coordinator: Coordinator, devices: Devices) -> dict[str, Device]:
    coordinator.create(NAME, **SETTINGS)
    return {name: join(devices, coordinator.url, name) for name in BUDGETS}


@dataclass(frozen=True)
class Models:
    """Digests of the global models, round by round, and the exported personal models."""

    of_rounds: list[str]
    personal: dict[str, bytes]


def models(coordinator: Coordinator, devices: Devices) -> Models:
    return Models(
        [record["model_sha256"] for record in coordinator.rounds(NAME)],
        {name: devices.onnx(name).read_bytes() for name in BUDGETS},
    )


@pytest.fixture(scope="module")
def undisturbed(machine: Machine) -> Models:
    """What becomes of the federation when nobody is killed."""
    coordinator, devices = machine()
    check(coordinator, join_all(coordinator, devices))
    return models(coordinator, devices)


def check(coordinator: Coordinator, devices: dict[str, Device]) -> None:
    """All went to the end, and every update counts once, on both sides."""
    for name, device in devices.items():
        assert device.wait(60) == 0, device.output
        assert f"{name}: {ROUNDS} rounds, {ROUNDS * STEPS} local steps" in device.output
        assert "Traceback" not in device.output
    assert coordinator.logged("Traceback") == []
    info, records = coordinator.info(NAME), coordinator.rounds(NAME)
    assert (info["status"], info["reason"], info["round"]) == ("finished", "max_rounds", ROUNDS)
    assert info["model_version"] == ROUNDS, "one new model a round"
    assert [record["round"] for record in records] == list(range(1, ROUNDS + 1))
    for record in records:
        assert record["cohort"] == sorted(BUDGETS)
        assert record["updates"] == len(record["cohort"])
        assert (record["handed_back"], record["expired"]) == (0, 0)
    assert records[-1]["model_sha256"] == info["model_sha256"]
    assert [record["evaluated_devices"] for record in records] == [0, 0, 2, 0, 0, 2, 0, 2]
    assert f'sparrow_updates_accepted_total{{federation="{NAME}"}} {2.0 * ROUNDS}' in coordinator.get("/metrics").text


# --- the coordinator ---------------------------------------------------------------------------------------------


def new_model_file(coordinator: Coordinator, pause_seconds: float = 0.0) -> None:
    """A round is being closed: the next model is in its folder, its transaction not yet in the records.

    That lasts for some milliseconds, so this looks without pause.
    """
    newest = max((coordinator.data / "blobs").glob("*/models/*.safetensors"))
    following = newest.with_name(f"{int(newest.stem) + 1:0{len(newest.stem)}}{newest.suffix}")
    wait_until(following.exists, f"{following.name} in the coordinator's folder", interval=0)
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


def test_the_coordinator_is_killed_at_every_point_of_a_round(coordinator, device, undisturbed):
    devices = join_all(coordinator, device)
    for moment, wait in MOMENTS.items():
        wait(coordinator, coordinator.log_size())
        coordinator.kill()
        assert all(each.alive() for each in devices.values()), f"too late: {moment}"
        coordinator.start()
    check(coordinator, devices)
    assert models(coordinator, device) == undisturbed


# --- devices -----------------------------------------------------------------------------------------------------


class Victim:
    """The device ``small`` behind a proxy, killed and started again with the same state folder."""

    def __init__(self, coordinator: Coordinator, devices: Devices, proxy: Proxy) -> None:
        self.coordinator, self.proxy = coordinator, proxy
        self._devices = devices
        self.seen = 0  # exchanges before its last start
        self.start()

    def start(self) -> None:
        self.seen = len(self.proxy.exchanges)
        self.device = join(self._devices, self.proxy.url, "small")

    def die_at(self, fault: Fault) -> None:
        """Killed with the connection held at that point, which is then cut; started again."""
        assert fault.reached.wait(30), f"{fault.method} {fault.ending} did not come by"
        self.device.kill()
        fault.ended.set()
        self.start()

    def wait_for(self, wanted: Callable[[Exchange], bool]) -> Exchange:
        return self.proxy.wait_for(wanted, since=self.seen)


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
    victim.wait_for(lambda exchange: exchange.path.endswith("/payload") and exchange.complete)
    victim.device.kill()
    assert not [each for each in between.exchanges[victim.seen :] if each.method == "PUT"], "too late"
    victim.start()

    # In the upload: before its first byte, and in the middle.
    victim.die_at(between.fault("PUT", "/update", "request"))
    victim.die_at(between.fault("PUT", "/update", "request", 4000))

    # Acknowledged, but it never hears of it.
    victim.die_at(between.fault("PUT", "/update", "answer"))
    assert victim.wait_for(update_answered).status == 200, "the same again"

    # The same, and the coordinator dies with it.
    unheard = between.fault("PUT", "/update", "answer")
    assert unheard.reached.wait(30)
    coordinator.kill()
    victim.device.kill()
    unheard.ended.set()
    coordinator.start()
    victim.start()

    assert between.chunked == []
    check(coordinator, {"small": victim.device, "large": other})
    assert models(coordinator, device) == undisturbed


def update_answered(exchange: Exchange) -> bool:
    return exchange.method == "PUT" and exchange.complete


# --- both --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_is_killed_at_random(coordinator, device, undisturbed):
    chance = random.Random(7)
    devices = join_all(coordinator, device)
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
    assert models(coordinator, device) == undisturbed
