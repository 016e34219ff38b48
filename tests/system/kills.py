"""What tests of kills share: a federation of two devices, what is killed and how, and how it must end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .conftest import Coordinator, Device, Devices
from .proxy import Exchange, Fault, Proxy

NAME = "kills"
BUDGETS = {"small": "0.4", "large": "1.0"}
ACKNOWLEDGED = r"PUT /v1/assignments/\w+/update HTTP/1.1\" 201"


def join(devices: Devices, server: str, name: str) -> Device:
    return devices(server, NAME, name, "--budget", BUDGETS[name], "--quiet")


def join_all(coordinator: Coordinator, devices: Devices, settings: dict[str, Any]) -> dict[str, Device]:
    coordinator.create(NAME, **settings)
    return {name: join(devices, coordinator.url, name) for name in BUDGETS}


def kill_at(
    moments: Mapping[str, Callable[[Coordinator, int], None]], coordinator: Coordinator, devices: dict[str, Device]
) -> None:
    """Kill the coordinator and start it again at each moment, waited for from a place in its log."""
    for moment, wait in moments.items():
        wait(coordinator, coordinator.log_size())
        coordinator.kill()
        assert all(each.alive() for each in devices.values()), f"too late: {moment}"
        coordinator.start()


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

    def die_training(self) -> None:
        """Killed when its model has come, and nothing has been sent; started again."""
        self.wait_for(lambda exchange: exchange.path.endswith("/payload") and exchange.complete)
        self.device.kill()
        assert not [each for each in self.proxy.exchanges[self.seen :] if each.method == "PUT"], "too late"
        self.start()

    def die_with_coordinator_at(self, fault: Fault) -> None:
        """The same as ``die_at``, and the coordinator with it."""
        assert fault.reached.wait(30)
        self.coordinator.kill()
        self.device.kill()
        fault.ended.set()
        self.coordinator.start()
        self.start()

    def wait_for(self, wanted: Callable[[Exchange], bool]) -> Exchange:
        return self.proxy.wait_for(wanted, since=self.seen)


def update_answered(exchange: Exchange) -> bool:
    return exchange.method == "PUT" and exchange.complete


def model_files(coordinator: Coordinator) -> list[Path]:
    """Values and state of the models on the coordinator's disk, oldest first."""
    return sorted((coordinator.data / "blobs").glob("*/models/*.safetensors"))


@dataclass(frozen=True)
class Ending:
    """Digests of the global models, what each round counted, and on disks the last model, masks and exported models."""

    of_rounds: list[str]
    notes: list[dict[str, int]]
    files: dict[str, bytes]


def ending(coordinator: Coordinator, devices: Devices) -> Ending:
    records = coordinator.rounds(NAME)
    exported = [devices.onnx(name) for name in BUDGETS]
    files = [*model_files(coordinator), *devices.folder.glob("*/mask.bits"), *exported]
    return Ending(
        [record["model_sha256"] for record in records],
        [record["notes"] for record in records],
        {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files},
    )


def check_end(coordinator: Coordinator, devices: dict[str, Device], rounds: int) -> list[dict[str, Any]]:
    """All went to the end, and every update counts once; returns the rounds' records."""
    for name, device in devices.items():
        assert device.wait(60) == 0, device.output
        assert f"{name}: {rounds} rounds" in device.output
        assert "Traceback" not in device.output
    assert coordinator.logged("Traceback") == []
    info, records = coordinator.info(NAME), coordinator.rounds(NAME)
    assert (info["status"], info["reason"], info["round"]) == ("finished", "max_rounds", rounds)
    assert [record["round"] for record in records] == list(range(1, rounds + 1))
    for record in records:
        assert (sorted(record["cohort"]), record["updates"]) == (sorted(BUDGETS), len(BUDGETS))
        assert (record["handed_back"], record["expired"]) == (0, 0)
    return records
