"""Three coordinator processes on one PostgreSQL database and one folder of models, behind a load balancer: any of them
serves any call, one of them moves rounds, and each is killed once, or stopped."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
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


IN_ITS_TURN = """
SELECT count(*) FROM pg_locks waiting JOIN pg_locks turn USING (pid)
WHERE NOT waiting.granted AND waiting.relation = 'rounds'::regclass
AND turn.granted AND turn.relation = 'alembic_version'::regclass AND turn.mode = 'ExclusiveLock'
"""


def stop_in_its_turn(victim: Coordinator) -> None:
    """Stop the process in the middle of a transaction in which all others wait for it."""
    with psycopg.connect(victim.settings["COORDINATOR_DATABASE_URL"], autocommit=True) as somebody:

        def waits() -> bool:
            return bool(somebody.execute(IN_ITS_TURN).fetchone()[0])

        with somebody.transaction():
            somebody.execute("LOCK TABLE rounds IN SHARE MODE")  # who only reads goes on
            wait_until(waits, "a process that waits, in its turn, for the table of the rounds")
            victim.signal(signal.SIGSTOP)
    # Its statement is carried out now, and the server waits for its next one.


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["anywhere", "in its turn to write"])
def test_one_that_is_stopped_is_replaced_and_does_no_harm_when_it_goes_on(
    three: list[Coordinator], device, machine: Machine, where: str
):
    alone, devices = machine()
    check_end(alone, join_all(alone, devices, SETTINGS), ROUNDS)
    wanted = [record["model_sha256"] for record in alone.rounds(NAME)]

    stopped: list[Coordinator] = []
    turns = itertools.cycle(three)
    balancer = Proxy(lambda: next(process.port for process in turns if process not in stopped))
    three[0].create(NAME, **SETTINGS)
    victim = mover(three, dict.fromkeys(three, 0))
    running = {name: join(device, balancer.url, name) for name in ("small", "large")}
    victim.wait_for_log(r"round \d+ closes")
    since = {each: each.log_size() for each in three}
    others = [each for each in three if each is not victim]
    if where == "anywhere":
        victim.signal(signal.SIGSTOP)
    else:
        stop_in_its_turn(victim)
    stopped.append(victim)
    balancer.cut()
    successor = mover(others, since)
    successor.wait_for_log(r"round \d+ closes", since=since[successor])
    for each in others:
        wait_until(lambda each=each: each.http.get("/readyz").status_code == 200, "readiness")
    victim.signal(signal.SIGCONT)
    victim.wait_for_log("another process moves rounds on from now on")
    stopped.clear()

    for each in running.values():
        assert each.wait(120) == 0, each.output
    balancer.close()
    assert victim.logged(r"round \d+ closes", since=since[victim]) == [], "it has moved nothing since"
    for process in three:
        assert process.logged("Traceback") == []
        records = process.rounds(NAME)
        assert [record["model_sha256"] for record in records] == wanted
        assert [record["updates"] for record in records] == [2] * ROUNDS
        wait_until(lambda process=process: process.http.get("/readyz").status_code == 200, "readiness")
