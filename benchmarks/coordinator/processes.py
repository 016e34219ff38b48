"""One side of a contest - the server's processes, or the clients' - seen from outside: processor time, memory, bytes.

All of it comes from Linux: ``/proc`` and, for the bytes, the kernel's counters of each TCP connection (``ss -ti`` of
iproute2), so that nothing stands between the two sides.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sparrow.benchmarks.peers.memory import MARKER, PROC, TreeMemory

TICK = os.sysconf("SC_CLK_TCK")


class Side:
    """Processes started together, with all that descends from them. ``stop`` ends them, from ``with`` to its end.

    folder: where each process leaves its output, as NAME.log. environment: on top of this process's own.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._marker = uuid.uuid4().hex
        self._environment = {**os.environ, **environment, MARKER: self._marker}
        self._processes: list[tuple[subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start one process."""
        with (log := self._folder / f"{name}.log").open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=self._environment, cwd=cwd)
        self._processes.append((process, log))
        return process

    def watch(self) -> TreeMemory:
        """Their memory, sampled from ``with`` to its end."""
        return TreeMemory(*(process.pid for process, _ in self._processes), marker=self._marker)

    def processor_seconds(self) -> float:
        """What they have used so far, those that have ended included."""
        return processor_seconds(self.watch().processes())

    def check(self) -> None:
        """Raise SystemExit with the end of its log where one of them has ended."""
        for process, log in self._processes:
            if process.poll() is not None:
                raise SystemExit(f"{log.stem} ended with {process.returncode}:\n{log.read_text()[-3000:]}")

    def stop(self) -> None:
        """End them all, gently first."""
        tree = self.watch()
        tree.processes()
        for process, _ in self._processes:
            process.terminate()
        for process, _ in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        for pid in tree.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process, _ in self._processes:
            process.wait()
        self._processes.clear()


def processor_seconds(pids: Iterable[int]) -> float:
    """User and system seconds of these processes and of their children that have ended and been waited for.

    A process that has ended counts for itself until it is waited for, so nothing is missing and nothing counts twice.
    """
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / TICK


class Wire:
    """Bytes that have crossed the server's port so far, of all its connections: what TCP carried, headers of HTTP or
    gRPC included and TCP's own left out."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: dict[str, tuple[int, int]] = {}

    def bytes(self) -> tuple[int, int]:
        """(down, up): from the server, and to it. Of a connection that has closed, what was there when last asked."""
        command = ["ss", "-tinHO", "state", "connected", "sport", "=", f":{self._port}"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            raise SystemExit("bytes on the wire are counted with ss, which is not here; install iproute2") from None
        self._seen |= parse(text)
        return sum(down for down, _ in self._seen.values()), sum(up for _, up in self._seen.values())


def parse(text: str) -> dict[str, tuple[int, int]]:
    """What ``ss -tinHO`` says of each connection, by its peer: (bytes sent, bytes received)."""
    found = {}
    for line in text.splitlines():
        peer = line.split()[4]  # state, two queues, own address, peer's
        counts = [re.search(rf"\b{name}:(\d+)", line) for name in ("bytes_sent", "bytes_received")]
        found[peer] = (int(counts[0][1]) if counts[0] else 0, int(counts[1][1]) if counts[1] else 0)
    return found
