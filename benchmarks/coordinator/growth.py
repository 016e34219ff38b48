"""The cost of a device-round with many enrolled devices, and with several processes on the same records: ``python -m
benchmarks.coordinator.growth [--postgresql URL]`` prints a line of JSON for each measurement.

One process plays all devices. It asks which devices are awaited and lets them answer, a few at a time. Devices that are
not drawn cost only their rows in the records.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.coordinator.client import Device
from benchmarks.coordinator.contest import Row, peak_rss
from benchmarks.coordinator.models import SMALL, model_of, task_of
from benchmarks.coordinator.processes import Side
from benchmarks.coordinator.sparrow import ALWAYS
from edge_sdk.device.transport import Transport
from edge_sdk.publish import publish
from sparrow.bench import server as ours
from sparrow.bench.server import free_port, machine
from sparrow.transport import connect

FEDERATION = "crowd"
AT_ONCE = 4
"""Devices that talk to the coordinator at the same time."""
WAIT_SECONDS = 10.0
ENROLLED = ((100, 100, 100), (10_000, 200, 50))
"""Devices that are enrolled, that are drawn for a round, and rounds."""
QUICK = ((20, 20, 5), (200, 20, 5))
PROCESSES = (1, 2)


@dataclass(frozen=True)
class Crowd:
    """A number of devices. ``cohort`` of them are drawn for each of ``rounds`` rounds. ``processes``: of the
    coordinator, with a shared PostgreSQL database.
    """

    enrolled: int
    cohort: int
    rounds: int
    processes: int = 1
    database: str | None = None


def run(crowd: Crowd, folder: Path, note: Callable[[], object]) -> Row:
    """Return one measurement; call ``note`` after each device-round."""
    with ExitStack() as stack:
        server = stack.enter_context(Side(folder, _environment(folder, crowd)))
        addresses = []
        processes = []
        for number in range(crowd.processes):
            port = free_port()
            process = server.start(f"coordinator-{number}", ours.command(port))
            addresses.append(f"http://127.0.0.1:{port}")
            ours.wait_until_healthy(addresses[-1], process, folder / f"coordinator-{number}.log")
            processes.append(process)
        settings = {**ALWAYS, "method": "fedavg", "rounds": crowd.rounds + 1}
        settings |= {"cohort": crowd.cohort, "min_devices": crowd.enrolled}
        publish(addresses[0], FEDERATION, task_of(SMALL), **settings)
        with _players(addresses) as players:
            began = time.monotonic()
            enrolling = server.processor_seconds()
            devices = _enrol(players, crowd.enrolled)
            enrolled = server.processor_seconds() - enrolling
            seconds = time.monotonic() - began
            # Warm up: the first round is not measured.
            _play(addresses[0], devices, 1, note)
            began = time.monotonic()
            before = server.processor_seconds()
            own = time.process_time()
            updates = _play(addresses[0], devices, crowd.rounds, note)
            took = time.monotonic() - began
            used = server.processor_seconds() - before
            mine = time.process_time() - own
        return {
            "kind": "growth",
            "engine": "sparrow",
            "model": SMALL,
            "parameters": model_of(SMALL).parameters,
            "enrolled": crowd.enrolled,
            "cohort": crowd.cohort,
            "rounds": crowd.rounds,
            "updates": updates,
            "processes": crowd.processes,
            "records": "SQLite" if crowd.database is None else "PostgreSQL",
            "server_seconds_per_enrolment": enrolled / crowd.enrolled,
            "enrolments_per_second": crowd.enrolled / seconds,
            "server_seconds_per_update": used / updates,
            "client_seconds_per_update": mine / updates,
            "updates_per_second": updates / took,
            "server_peak_rss": max(peak_rss(process.pid) for process in processes),
            "machine": machine(),
        }


def _environment(folder: Path, crowd: Crowd) -> dict[str, str]:
    found = ours.environment(folder)
    if crowd.database is not None:
        found["COORDINATOR_DATABASE_URL"] = crowd.database
    return found


@dataclass(frozen=True)
class _Player:
    """One connection, and the thread that uses it."""

    transport: Transport
    thread: ThreadPoolExecutor


@contextmanager
def _players(addresses: list[str]) -> Iterator[list[_Player]]:
    with ExitStack() as stack:
        yield [
            _Player(Transport(stack.enter_context(connect(address))), stack.enter_context(ThreadPoolExecutor(1)))
            for _, address in zip(range(AT_ONCE), cycle(addresses), strict=False)
        ]


def _enrol(players: list[_Player], count: int) -> dict[str, tuple[_Player, Device]]:
    manifest = players[0].transport.manifest(FEDERATION)

    def enrol(player: _Player, number: int) -> Device:
        return Device(player.transport, FEDERATION, manifest, number)

    whose = dict(zip(range(count), cycle(players), strict=False))
    made = {number: player.thread.submit(enrol, player, number) for number, player in whose.items()}
    return {f"device-{number}": (whose[number], future.result()) for number, future in made.items()}


def _play(address: str, devices: dict[str, tuple[_Player, Device]], rounds: int, note: Callable[[], object]) -> int:
    """Let the awaited devices answer until this many rounds have closed; return the number of closed rounds."""
    with connect(address) as client:
        observer = Transport(client)
        etag = ""
        done = 0
        first = None
        while True:
            work, etag = observer.open_work(FEDERATION, WAIT_SECONDS, etag)
            if work is None:
                continue
            first = work.round if first is None else first
            if work.round >= first + rounds:
                return done
            answering = [_answer(*devices[each.device]) for each in work.assignments]
            for future in answering:
                done += bool(future.result())
                note()


def _answer(player: _Player, device: Device) -> Any:
    def work() -> bool:
        assignment = device.ask(0.0)
        if assignment is not None:
            device.work(assignment)
        return assignment is not None

    return player.thread.submit(work)


def crowds(enrolled: tuple[tuple[int, int, int], ...], postgresql: str | None) -> Iterator[Crowd]:
    """Yield the measurements: numbers of enrolled devices with SQLite, then 1 and 2 processes on PostgreSQL."""
    for each in enrolled:
        yield Crowd(*each)
    if postgresql is not None:
        for processes in PROCESSES:
            yield Crowd(*enrolled[0], processes=processes, database=new_database(postgresql))


def new_database(server: str) -> str:
    """Return the URL of a new database on the server of this URL."""
    # Only the extra "postgresql" has psycopg.
    import psycopg

    name = f"growth_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    before, _, options = server.partition("?")
    return f"{before.rpartition('/')[0]}/{name}" + (f"?{options}" if options else "")


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator.growth")
    parser.add_argument("--postgresql", metavar="URL", help="a server of which databases may be made: postgresql://...")
    parser.add_argument("--quick", action="store_true", help="a few devices")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the coordinators keep their data")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for crowd in crowds(QUICK if options.quick else ENROLLED, options.postgresql):
        with (
            tempfile.TemporaryDirectory(dir=options.folder) as folder,
            tqdm(unit=" device-round", leave=False, disable=None) as bar,
        ):
            print(json.dumps(run(crowd, Path(folder), bar.update)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
