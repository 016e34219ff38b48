"""One side of a comparison, the server's processes or the clients', observed from outside: processor time, memory,
bytes.

All of it comes from Linux: ``/proc`` and, for the bytes, the kernel's counters of each TCP connection (``ss -ti`` of
iproute2), so no proxy affects the measurement.
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

from benchmarks.peers.memory import MARKER, PROC, TreeMemory

TICK = os.sysconf("SC_CLK_TCK")


class Side:
    """Processes that started together, with their descendants. Leaving its ``with`` block ends them.

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
        """Sample their memory within the ``with`` block."""
        return TreeMemory(*(process.pid for process, _ in self._processes), marker=self._marker)

    def processor_seconds(self) -> float:
        """Return the user and system seconds of these processes and of their ended children."""
        return processor_seconds(self.watch().processes())

    def check(self) -> None:
        """Raise SystemExit with the end of its log if one of them has ended."""
        for process, log in self._processes:
            if process.poll() is not None:
                raise SystemExit(f"{log.stem} ended with {process.returncode}:\n{log.read_text()[-3000:]}")

    def stop(self) -> None:
        """End all of them, first with SIGTERM."""
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
    """Return the user and system seconds of these processes and of their ended children.

    An ended process counts once: itself until it is waited for, then as a child.
    """
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / TICK


class Wire:
    """Bytes of all connections of the server's port so far: TCP's content, with the headers of HTTP or gRPC and
    without TCP's own.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: dict[str, tuple[int, int]] = {}

    def bytes(self) -> tuple[int, int]:
        """Return (down, up): from the server, and to it. For a closed connection the last reading counts."""
        command = ["ss", "-tinHO", "state", "connected", "sport", "=", f":{self._port}"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            raise SystemExit("bytes on the wire are counted with ss, which is not here; install iproute2") from None
        self._seen |= parse(text)
        return sum(down for down, _ in self._seen.values()), sum(up for _, up in self._seen.values())


def parse(text: str) -> dict[str, tuple[int, int]]:
    """Parse the output of ``ss -tinHO``: peer -> (bytes sent, bytes received)."""
    found = {}
    for line in text.splitlines():
        # The columns are state, two queues, own address and peer address.
        peer = line.split()[4]
        counts = [re.search(rf"\b{name}:(\d+)", line) for name in ("bytes_sent", "bytes_received")]
        found[peer] = (int(counts[0][1]) if counts[0] else 0, int(counts[1][1]) if counts[1] else 0)
    return found
