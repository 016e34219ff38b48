"""Three coordinator processes on one PostgreSQL database and one folder of models, behind a load balancer: any of them
serves any call, one of them moves rounds, and each is killed once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..coordinator.postgresql import serving
from .conftest import Coordinator, Machine, wait_until
from .kills import NAME, check_end, join, join_all
from .proxy import Proxy

ROUNDS = 6
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "local_steps": 40,
    "evaluation_interval": 3,
    "early_stopping": "off",
    "seed": 11,
}
MOVES = "this process moves rounds on from now on"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Coordinator]]:
    with serving() as server, ExitStack() as stack:
        url, processes = server.new_database(), []
        for name in ("one", "two", "three"):
            process = Coordinator(tmp_path / name, data=tmp_path / "data", COORDINATOR_DATABASE_URL=url)
            stack.callback(process.close)
            processes.append(process)
        with ThreadPoolExecutor() as pool:
            list(pool.map(Coordinator.start, processes))
        yield processes


def mover(processes: list[Coordinator], since: dict[Coordinator, int]) -> Coordinator:
    """Who has said last, after these places of the logs, that it moves rounds."""
    return wait_until(
        lambda: next((each for each in processes if each.logged(MOVES, since=since[each])), None),
        "a process that moves rounds",
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_is_killed_once_and_the_federation_ends_as_with_one(three: list[Coordinator], device, machine: Machine):
    alone, devices = machine()
    check_end(alone, join_all(alone, devices, SETTINGS), ROUNDS)
    wanted = [record["model_sha256"] for record in alone.rounds(NAME)]

    turns = itertools.cycle(three)
    balancer = Proxy(lambda: next(process.port for process in turns if process.runs))
    three[0].create(NAME, **SETTINGS)
    running = {name: join(device, balancer.url, name) for name in ("small", "large")}

    # Who moves rounds is killed first, then who does after it; the last has to be one that was started again.
    since = dict.fromkeys(three, 0)
    for left in (2, 1, 0):
        victim = mover(three, since)
        since = {each: each.log_size() for each in three}
        victim.wait_for_log(r"round \d+ closes", since=since[victim])
        victim.kill()
        assert left == 0 or all(each.alive() for each in running.values()), "too late"
        if left < 2:
            victim.start()
    for each in three:
        if not each.runs:
            each.start()

    for each in running.values():
        assert each.wait(60) == 0, each.output
    balancer.close()
    for process in three:
        assert process.logged("Traceback") == []
        assert process.logged(r"/v1/\S+ HTTP/1.1\" 20"), "each was asked to"
    records = three[1].rounds(NAME)
    assert [record["model_sha256"] for record in records] == wanted
    assert [record["updates"] for record in records] == [2] * ROUNDS
    assert three[2].info(NAME)["status"] == "finished"
