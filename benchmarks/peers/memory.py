"""Peak memory and processor seconds of a command with all its processes, observed from outside.

PSS counts a page shared by n processes as 1/n in each, so its sum is the memory of the tree; the sum of RSS counts
shared pages n times, the sum of USS omits them. All three come from the kernel's ``/proc/PID/smaps_rollup`` (Linux
only).

A tree is a process with its descendants, including daemons (of Ray): a process stays in the tree once it was seen, and
every process with the inherited marker in its environment belongs to it. Orphans become children of the measuring
process, so that the kernel adds up their usage.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")
ADOPT_ORPHANS = 36
"""``PR_SET_CHILD_SUBREAPER`` of prctl(2)."""
MARKER = "SPARROW_PROCESS_TREE"
INTERVAL = 0.25
_FIELDS = {"Pss:": "pss", "Rss:": "rss", "Private_Clean:": "uss", "Private_Dirty:": "uss"}


@dataclass
class Peak:
    """The largest sums over a tree of processes in bytes, each at its own moment."""

    pss: int = 0
    rss: int = 0
    uss: int = 0
    processes: int = 0
    samples: int = 0

    def add(self, sums: Mapping[str, int], processes: int) -> None:
        """Add one sample."""
        self.pss = max(self.pss, sums["pss"])
        self.rss = max(self.rss, sums["rss"])
        self.uss = max(self.uss, sums["uss"])
        self.processes = max(self.processes, processes)
        self.samples += 1

    @property
    def bytes(self) -> dict[str, int]:
        """Return the three peaks."""
        return {"pss": self.pss, "rss": self.rss, "uss": self.uss}


class TreeMemory:
    """A thread that samples the tree of processes ``pids`` within a ``with`` block; ``peak`` has the result.

    ``marker`` finds the processes that have ``SPARROW_PROCESS_TREE=marker`` in their environment as well.
    """

    def __init__(self, *pids: int, marker: str | None = None, interval: float = INTERVAL) -> None:
        self.peak = Peak()
        self._marker = None if marker is None else f"{MARKER}={marker}".encode()
        self._interval = interval
        # Process id -> start in clock ticks, because the system reuses process ids.
        self._members: dict[int, int] = {}
        self._others: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                self._members[pid] = _parent_and_start(pid)[1]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="tree-memory")

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.sample()
            if self._end.wait(self._interval):
                return

    def sample(self) -> None:
        """Take one sample."""
        sums = {"pss": 0, "rss": 0, "uss": 0}
        tree = self.processes()
        for pid in tree:
            # The process may have ended, or its memory may not be readable for us.
            with contextlib.suppress(OSError):
                for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                    name, *rest = line.split()
                    if name in _FIELDS:
                        sums[_FIELDS[name]] += 1024 * int(rest[0])
        self.peak.add(sums, len(tree))

    def processes(self) -> list[int]:
        """Return the tree's current processes."""
        parents: dict[int, int] = {}
        starts: dict[int, int] = {}
        for entry in PROC.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    pid = int(entry.name)
                    parents[pid], starts[pid] = _parent_and_start(pid)
        known = {pid for pid, start in starts.items() if self._members.get(pid) == start}
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in known} - known
            known |= more
            grown = bool(more)
        for pid, start in starts.items():
            if self._marker is not None and pid not in known and self._others.get(pid) != start:
                if self._marked(pid):
                    # Its children have the marker too, or the next sample finds them.
                    known.add(pid)
                else:
                    self._others[pid] = start
        self._members = {pid: starts[pid] for pid in known}
        return list(self._members)

    def _marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self._marker in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return False


def _parent_and_start(pid: int) -> tuple[int, int]:
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def process_age() -> float:
    """Return the seconds since this process was created, to a hundredth."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - _parent_and_start(os.getpid())[1] / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """A command that ended: its output, its duration, its peak memory. ``processor``: seconds of all its processes."""

    stdout: str
    seconds: float
    processor: float
    peak: Peak = field(default_factory=Peak)


def measure(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    interval: float | None = INTERVAL,
    timeout: float | None = None,
) -> Measured:
    """Run ``command`` and sample its tree every ``interval`` seconds; None does not sample, for undisturbed times.

    Raises SystemExit with the end of its standard error if it fails, subprocess.TimeoutExpired after ``timeout``.
    Remaining processes are killed in any case.
    """
    marker = uuid.uuid4().hex
    environment = {**(os.environ if env is None else env), MARKER: marker}
    # Files and not pipes: a daemon that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        _adopt_orphans()
        begin = time.monotonic()
        before = _processor_seconds()
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, cwd=cwd)
        _, started = _parent_and_start(process.pid)
        memory = TreeMemory(process.pid, marker=marker, interval=interval or INTERVAL)
        try:
            with memory if interval else contextlib.nullcontext():
                process.wait(timeout)
            seconds = time.monotonic() - begin
        finally:
            for pid in memory.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            while _wait_for_orphans(started):
                pass
        processor = _processor_seconds() - before
        out.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{errors.read()[-5000:]}")
        return Measured(out.read(), seconds, processor, memory.peak)


def _adopt_orphans() -> None:
    """Let processes whose parent ends become children of this one (Linux only)."""
    ctypes.CDLL(None, use_errno=True).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)


def _wait_for_orphans(since: int) -> bool:
    """Wait for the children of this process that were made ``since``, in clock ticks; return whether there were any."""
    found = False
    for folder in PROC.iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent, start = _parent_and_start(int(folder.name))
            if parent == os.getpid() and start >= since:
                os.waitpid(int(folder.name), 0)
                found = True
    return found


def _processor_seconds() -> float:
    """Return the processor seconds of all descendants that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
