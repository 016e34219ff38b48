"""The compared unit: one engine, one model, a number of clients that all take part in every round, a number of rounds.

The process that sees the end of a round writes a line with the seconds to a file of marks. The measurement begins at
the mark after the first rounds, which include the start, and ends at the last mark.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.coordinator.processes import Side, Wire
from benchmarks.peers.memory import PROC, TreeMemory
from sparrow.bench.server import machine

Row = dict[str, Any]
LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Model:
    """A model of the comparison. shapes: of the arrays that are sent; parameters: the number of trained ones."""

    name: str
    parameters: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Contest:
    """``first`` rounds that are not measured, then ``rounds`` that are."""

    model: Model
    clients: int
    first: int
    rounds: int

    @property
    def all_rounds(self) -> int:
        """Return the rounds up to the last mark."""
        return self.first + self.rounds


class Marks:
    """The ends of rounds, read from a file to which a server adds a line per round."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wait(self, count: int, check: Callable[[], None], seconds: float) -> list[float]:
        """Return the marks as soon as there are ``count``.

        check: raises if the run failed. Raises SystemExit after the limit.
        """
        end = time.monotonic() + seconds
        while True:
            # Whole lines only: the last may be in the middle of being written.
            lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
            if len(lines) >= count:
                return [float(line.split()[0]) for line in lines]
            check()
            if time.monotonic() > end:
                raise SystemExit(
                    f"{len(lines)} of {count} rounds in {seconds:g} s; look into the logs beside {self.path}"
                )
            time.sleep(LOOK_SECONDS)


@dataclass(frozen=True)
class _Look:
    server_seconds: float
    client_seconds: float
    wire: tuple[int, int]


def measure(
    contest: Contest, server: Side, clients: Side, wire: Wire, marks: Marks, memory: TreeMemory, *, timeout: float = 300
) -> Row:
    """Return one measurement of a contest whose processes run; its engine adds its name.

    memory: the server's, watched since before the first round.
    """

    def check() -> None:
        server.check()
        clients.check()

    def look() -> _Look:
        return _Look(server.processor_seconds(), clients.processor_seconds(), wire.bytes())

    marks.wait(contest.first, check, timeout)
    before = look()
    ends = marks.wait(contest.all_rounds, check, timeout)
    after = look()
    memory.sample()
    seconds = ends[contest.all_rounds - 1] - ends[contest.first - 1]
    updates = contest.rounds * contest.clients
    down, up = (late - early for late, early in zip(after.wire, before.wire, strict=True))
    return {
        "model": contest.model.name,
        "parameters": contest.model.parameters,
        "clients": contest.clients,
        "rounds": contest.rounds,
        "seconds_per_round": seconds / contest.rounds,
        "updates_per_second": updates / seconds,
        "server_seconds_per_update": (after.server_seconds - before.server_seconds) / updates,
        "client_seconds_per_round": (after.client_seconds - before.client_seconds) / contest.rounds,
        "bytes_down_per_update": down / updates,
        "bytes_up_per_update": up / updates,
        "server_memory": {**memory.peak.bytes, "processes": memory.peak.processes},
        "server_peak_rss": sum(peak_rss(pid) for pid in memory.processes()),
        "machine": machine(),
        "load": os.getloadavg()[0],
    }


def peak_rss(pid: int) -> int:
    """Return the peak resident memory of this process in bytes, by the kernel's count; 0 if it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", (PROC / str(pid) / "status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0
