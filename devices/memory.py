"""Memory of this process in bytes: resident, peak and available; swap never counts as available."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .readings import Files, Quality, ReadError, Reading, Reason

PROC = Path("/proc")
CGROUP = "sys/fs/cgroup"

# Version 1 of control groups writes "no limit" as a number above this.
_NO_LIMIT = 1 << 62


def resident(proc: Path = PROC) -> int:
    """Return the resident memory of this process in bytes; on systems other than Linux, its peak."""
    held = _kilobytes(proc / "self/status", "VmRSS")
    return peak_resident(proc) if held is None else held


def peak_resident(proc: Path = PROC) -> int:
    """Return the peak resident memory since the process's start or ``forget_peak``, in bytes."""
    held = _kilobytes(proc / "self/status", "VmHWM")
    if held is not None:
        return held
    # Windows lacks this module.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak(proc: Path = PROC) -> bool:
    """Reset the peak to the current size; return False if the system cannot."""
    try:
        (proc / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def give_back() -> None:
    """Release free heap memory of the C library to the system, if supported."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available(files: Files | None = None) -> int:
    """Return the memory that this process can still allocate without swapping, within its control groups, in bytes."""
    files = files or Files()
    free = _meminfo(files, "MemAvailable", 0.0).value
    if free is None:
        free = max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - resident())
    return int(min([free, *(group.left for group in _limited_groups(files))]))


def free_memory(files: Files, now: float) -> Reading:
    """Return the available memory as a reading in bytes; it has no value if the machine does not report it."""
    reading = _meminfo(files, "MemAvailable", now)
    if reading.value is None:
        return reading
    least = min((group.left for group in _limited_groups(files)), default=reading.value)
    if least < reading.value:
        return Reading(float(least), "B", "control group", Quality.DERIVED, "cgroup", now)
    return reading


def total_memory(files: Files, now: float) -> Reading:
    """Return the total memory usable by the system in bytes, which is less than the installed memory."""
    return _meminfo(files, "MemTotal", now)


def memory_limit(files: Files, now: float) -> Reading:
    """Return the lowest memory limit of this process's control groups, in bytes.

    CONTROLLER_ABSENT if the kernel has no control groups for memory (Raspberry Pi OS disables them), ABSENT if there is
    no limit.
    """
    groups = _limited_groups(files)
    if groups:
        return Reading(
            float(min(group.limit for group in groups)), "B", "control group", Quality.MEASURED, "cgroup", now
        )
    controllers = files.text_or(f"{CGROUP}/cgroup.controllers").split()
    counted = "memory" in controllers or bool(_version_1(files))
    return Reading.failed("B", "control group", "cgroup", now, Reason.ABSENT if counted else Reason.CONTROLLER_ABSENT)


def core_quota(files: Files, now: float) -> Reading:
    """Return the CPU quota of this process's control groups, in cores; ABSENT without a limit."""
    quotas = []
    for folder in _version_2(files):
        quota, _, period = files.text_or(f"{folder}/cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    if quotas:
        return Reading(min(quotas), "cores", "control group", Quality.MEASURED, "cpu.max", now)
    return Reading.failed("cores", "control group", "cpu.max", now, Reason.ABSENT)


@dataclass(frozen=True)
class _Group:
    """A control group with a limit, and its remaining bytes."""

    limit: int
    left: int


def _limited_groups(files: Files) -> list[_Group]:
    groups = [_group(files, folder, "memory.current", "inactive_file", "memory.max") for folder in _version_2(files)]
    groups += [_group(files, folder, "memory.current", "inactive_file", "memory.high") for folder in _version_2(files)]
    groups += [
        _group(files, folder, "memory.usage_in_bytes", "total_inactive_file", "memory.limit_in_bytes")
        for folder in _version_1(files)
    ]
    return [group for group in groups if group is not None]


def _group(files: Files, folder: str, used: str, cached: str, limit: str) -> _Group | None:
    try:
        most = int(files.text(f"{folder}/{limit}"))
        now = int(files.text(f"{folder}/{used}"))
    # "max" is no limit.
    except (ReadError, ValueError):
        return None
    if most >= _NO_LIMIT:
        return None
    # Cached files count as used until another process needs their memory.
    found = re.search(rf"^{cached} (\d+)$", files.text_or(f"{folder}/memory.stat"), re.MULTILINE)
    return _Group(most, max(0, most - now + (int(found[1]) if found else 0)))


def _version_2(files: Files) -> list[str]:
    # The folders of the control groups that hold this process, innermost first: each may have a limit.
    own = _own_group(files, "")
    return [] if own is None else _upwards(CGROUP, own)


def _version_1(files: Files) -> list[str]:
    # Version 1 has a hierarchy of its own for memory.
    own = _own_group(files, "memory")
    return [] if own is None else _upwards(f"{CGROUP}/memory", own)


def _own_group(files: Files, controller: str) -> str | None:
    for line in files.text_or("proc/self/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if path and controller in names.split(","):
            return path.strip("/")
    return None


def _upwards(base: str, group: str) -> list[str]:
    parts = group.split("/") if group else []
    return ["/".join([base, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def _meminfo(files: Files, key: str, now: float) -> Reading:
    def take() -> float:
        found = re.search(rf"^{key}:\s+(\d+) kB", files.text("proc/meminfo"), re.MULTILINE)
        if found is None:
            raise ReadError("proc/meminfo", Reason.PARSE)
        return float(int(found[1]) * 1024)

    return Reading.taken("B", "memory", f"proc/meminfo {key}", now, take)


def _kilobytes(path: Path, key: str) -> int | None:
    # Lines such as "VmRSS:  1234 kB".
    try:
        for line in path.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
