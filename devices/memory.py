"""How much memory a process holds, has held at most, and could still get, in bytes.

From Linux's /proc, and the limits of containers and systemd units from their control groups (version 2); where there is
none of that, only the peak that every Unix counts.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def resident(proc: Path = PROC) -> int:
    """What this process holds in memory now; elsewhere than on Linux, what it has held at most."""
    held = _kilobytes(proc / "self/status", "VmRSS")
    return peak_resident(proc) if held is None else held


def peak_resident(proc: Path = PROC) -> int:
    """What this process has held at most, since its start or ``forget_peak``."""
    held = _kilobytes(proc / "self/status", "VmHWM")
    if held is not None:
        return held
    import resource  # which Windows has not

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak(proc: Path = PROC) -> bool:
    """Let the peak begin anew from what is held now; False where the system cannot."""
    try:
        (proc / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def give_back() -> None:
    """Return to the system what the C library's heap holds free, where it is one that can be told to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """What this process could still get without swapping: of the machine, or of a control group that it is in where
    that is less."""
    free = _kilobytes(proc / "meminfo", "MemAvailable")
    if free is None:
        free = max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - resident(proc))
    return min([free, *(left for group in _groups(proc, cgroup) if (left := _left(group)) is not None)])


def _groups(proc: Path, cgroup: Path) -> list[Path]:
    """The folders of the control groups that hold this process, the innermost first: each may have a limit."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((Path(line[3:].lstrip("/")) for line in lines if line.startswith("0::")), None)
    return [] if own is None else [cgroup / group for group in (own, *own.parents)]


def _left(group: Path) -> int | None:
    """What a control group may still take; None where it has no limit."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return None
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        # Files that were read count as used until somebody needs their memory.
        return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):
        return None


def _kilobytes(path: Path, key: str) -> int | None:
    """The value behind ``key:`` in a file of lines such as ``VmRSS:  1234 kB``, in bytes; None where there is none."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
