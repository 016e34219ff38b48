"""A fleet whose calls are lost, cut, delayed and doubled on their way to a coordinator that is killed again and again:
the federation ends as if nothing had happened.

It is compared with an undisturbed one of the same devices, in one process, without sockets. Both have the same cohorts,
which follow from the federation's name and seed, the round and the devices' names: the first
round waits until all are enrolled, nobody hands back or leaves, and no deadline passes, so that all can be drawn in
every round, and a round closes only with the updates of its whole cohort. Then the same updates, each once, give the
same model bit for bit.

In the large form the devices die, too, in the middle of what they do, and send again what was not acknowledged.

``CHAOS_SEED=7 pytest -m slow tests/system/test_chaos.py`` draws other troubles.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.publish import publish
from edge_sdk.simulation import in_process as inprocess
from edge_sdk.simulation.fleet import run_fleet
from edge_sdk.simulation.host import Plan
from sparrow.coordinator.main import create_app
from sparrow.coordinator.settings import Settings

from ..coordinator.postgresql import serving
from .chaos import TROUBLES, Chaos, deaths
from .conftest import Coordinator, Devices, one_machine, wait_until
from .proxy import Proxy

NAME = "chaos"
SEED = int(os.environ.get("CHAOS_SEED", "1"))
BUDGETS = (0.3, 0.6, 1.0)
DATA = "partition=shards"  # however many devices, there is something for each
RESUMED = 30_000
"""Bytes from which updates go on where a connection broke: those of the largest budget are longer, others are not."""

Get = Callable[[str], Any]


@dataclass(frozen=True)
class Size:
    """Of a federation and its troubles."""

    devices: int
    cohort: int
    rounds: int
    kills: int
    processes: int

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "cohort": self.cohort,
            "min_devices": self.devices,
            "deadline_seconds": 3600.0,
            "local_steps": 2,
            "evaluation_interval": 0,
            "early_stopping": "off",
            "seed": 3,
        }


SMALL = Size(devices=20, cohort=12, rounds=2, kills=3, processes=3)
FULL = Size(devices=200, cohort=100, rounds=3, kills=10, processes=8)


@dataclass(frozen=True)
class Ending:
    """What became of a federation, but for what depends on clocks and on how often something was sent."""

    status: tuple[str, str, int]
    rounds: list[dict[str, Any]]
    reports: list[list[tuple[str, str, dict[str, Any]]]]
    models: list[tuple[int, str]]
    files: list[str]


COUNTED = ("round", "cohort", "updates", "handed_back", "expired", "num_examples", "model_sha256", "accuracy_personal")


def ending(get: Get, data: Path) -> Ending:
    info, records = get(""), get("/rounds")
    reports = [get(f"/rounds/{record['round']}/reports") for record in records]
    return Ending(
        (info["status"], info["reason"], info["round"]),
        [{key: record[key] for key in COUNTED} for record in records],
        [[(each["device"], each["kind"], of_report(each["report"])) for each in of_round] for of_round in reports],
        [(model["version"], model["model_sha256"]) for model in get("/models")],
        sorted(str(path.relative_to(data)) for folder in ("blobs", "uploads") for path in (data / folder).rglob("*.*")),
    )


def of_report(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in ("num_examples", "steps", "personal", "global_model") if key in report}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Size], Ending]:
    """What becomes of a federation of this size in peace; found out once."""
    return cache(lambda size: run_in_peace(size, tmp_path_factory.mktemp("peace")))


def run_in_peace(size: Size, folder: Path) -> Ending:
    app = create_app(Settings(data_dir=folder / "data", default_task=""))
    with inprocess.running(app) as client:
        publish(inprocess.ADDRESS, NAME, "digits", client=client, **size.settings)
    plan = Plan(NAME, size.devices, data=DATA, budgets=BUDGETS)
    run_fleet(None, plan, app=app, state_dir=folder / "fleet", quiet=True)
    with inprocess.running(app) as client:
        return ending(
            lambda path: client.get(f"/v1/federations/{NAME}{path}").raise_for_status().json(), folder / "data"
        )


def in_chaos(size: Size, coordinator: Coordinator, devices: Devices, *, fleet_kills: int = 0) -> tuple[Chaos, Proxy]:
    """Run the federation to its end. fleet_kills: how often all devices die, too, in the middle of a round."""
    died = deaths(SEED, size.kills, devices=size.devices, cohort=size.cohort, rounds=size.rounds)
    chaos = Chaos(coordinator, SEED, died)
    more = [*("--devices", str(size.devices), "--data", DATA), *("--budgets", ",".join(map(str, BUDGETS)))]
    more += ["--processes", str(size.processes)]
    coordinator.create(NAME, **size.settings)

    def reached(updates: int) -> bool:
        return len(chaos.trained) >= updates or not fleet.alive()

    with closing(Proxy(chaos.port, trouble=chaos)) as proxy:
        fleet = devices.fleet(proxy.url, NAME, *more, resumed=RESUMED)
        for number in range(fleet_kills):
            enough = (2 * number + 1) * size.rounds * size.cohort // (2 * fleet_kills)
            wait_until(partial(reached, enough), f"{enough} updates", timeout=600)
            fleet.kill()
            fleet = devices.fleet(proxy.url, NAME, *more, resumed=RESUMED)
        assert fleet.wait(1200) == 0, fleet.output
        chaos.send_all_copies()
        proxy.wait_until_over()
    assert chaos.errors == []
    assert chaos.kills == size.kills
    assert chaos.befell.keys() == TROUBLES.keys(), "a larger federation, or another seed, meets them all"
    assert "Traceback" not in fleet.output
    assert coordinator.logged(r"(?ms)^Traceback.*?^\w[^\n]*") == []
    return chaos, proxy


def check(size: Size, coordinator: Coordinator, chaos: Chaos, proxy: Proxy, expected: Ending) -> None:
    """After one more restart everything is as in peace, and what was acknowledged counts once."""
    coordinator.stop()
    coordinator.start()
    found = ending(lambda path: coordinator.get(f"/v1/federations/{NAME}{path}").json(), coordinator.data)
    assert found == expected
    assert found.status == ("finished", "max_rounds", size.rounds)
    assert [record["updates"] for record in found.rounds] == [size.cohort] * size.rounds

    told = given_out(proxy)
    counted = Counter(
        (number, device, kind) for number, of_round in enumerate(found.reports, 1) for device, kind, _ in of_round
    )
    assert Counter(told[path] for path in chaos.acknowledged) == counted
    assert set(counted.values()) == {1}
    assert {told[path][2] for path in chaos.trained} == {"train"}
    for codes in chaos.acknowledged.values():
        assert codes.count(201) <= 1, "it is new once, and from then on the same again (200)"


def given_out(proxy: Proxy) -> dict[str, tuple[int, str, str]]:
    """Round, device and kind of the assignments of which the coordinator spoke, by the path of their updates."""
    found = {}
    for exchange in proxy.exchanges:
        called = exchange.path.split("?")[0].rsplit("/", 1)[-1]
        if exchange.produced != 200 or called not in ("assignment", "assignments"):
            continue
        with suppress(ValueError):  # cut short: the coordinator was killed in the middle of it
            answer = json.loads(exchange.answer)
            for each in answer["assignments"] if called == "assignments" else [answer]:
                device = each["device"] if called == "assignments" else each["work"] and each["work"]["device"]
                if device is not None:
                    found[f"/v1/assignments/{each['assignment_id']}/update"] = (each["round"], device, each["kind"])
    return found


@pytest.mark.timeout(300)
def test_twenty_devices(coordinator, device, undisturbed):
    chaos, proxy = in_chaos(SMALL, coordinator, device)
    check(SMALL, coordinator, chaos, proxy, undisturbed(SMALL))


@pytest.fixture(params=["sqlite", "postgresql"])
def with_records(request, nursery, tmp_path) -> Iterator[tuple[Coordinator, Devices]]:
    """A coordinator that keeps its records so, whose devices renew their tokens every half minute, and its devices."""
    with ExitStack() as stack:
        settings = {"COORDINATOR_DEVICE_TOKEN_ROTATION_DAYS": "0.0003"}
        if request.param == "postgresql":
            settings["COORDINATOR_DATABASE_URL"] = stack.enter_context(serving()).new_database()
        yield stack.enter_context(one_machine(nursery, tmp_path, **settings))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_devices(with_records, undisturbed):
    coordinator, devices = with_records
    chaos, proxy = in_chaos(FULL, coordinator, devices, fleet_kills=2)
    check(FULL, coordinator, chaos, proxy, undisturbed(FULL))
