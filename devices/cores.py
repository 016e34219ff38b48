"""Processor cores: online cores, system load, this process's load, and clock frequencies."""

import os

from .readings import Files, Quality, ReadError, Reading, Reason
from .system import System

# Sources: the kernel's documentation of /proc/stat, /proc/self/stat and cpufreq.
CPU = "sys/devices/system/cpu"
# USER_HZ, the unit of /proc/stat on all supported architectures.
JIFFIES_PER_SECOND = 100


def online_cores(files: Files) -> list[int]:
    """Return the numbers of the online cores."""
    try:
        spans = [span.split("-") for span in files.text(f"{CPU}/online").split(",")]
        cores = [core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)]
    except (ReadError, ValueError):
        cores = []
    return cores or list(range(os.cpu_count() or 1))


def busy_seconds(files: Files, now: float) -> Reading:
    """Return the busy time of all cores since boot, in core-seconds."""
    path = "proc/stat"

    def take() -> float:
        label, user, nice, system, _idle, _iowait, irq, softirq = files.text(path).split(maxsplit=8)[:8]
        jiffies = int(user) + int(nice) + int(system) + int(irq) + int(softirq)
        if label != "cpu" or jiffies < 0:
            raise ReadError(path, Reason.PARSE)
        return jiffies / JIFFIES_PER_SECOND

    return Reading.taken("s", "cpu", path, now, take)


def own_seconds(files: Files, now: float) -> Reading:
    """Return the processor time of this process, in core-seconds."""
    path = "proc/self/stat"

    def take() -> float:
        # The process's name is in parentheses and may itself contain spaces and parentheses.
        user, system = files.text(path).rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / JIFFIES_PER_SECOND

    return Reading.taken("s", "process", path, now, take)


def load_average(files: Files, now: float) -> Reading:
    """Return the load average of the last minute."""
    path = "proc/loadavg"
    return Reading.taken("tasks", "cpu", path, now, lambda: float(files.text(path).split()[0]))


def clock(files: Files, core: int, now: float, which: str = "scaling_cur_freq") -> Reading:
    """Return a core's clock frequency in Hz, or a limit of it (`scaling_max_freq`, `cpuinfo_max_freq`).

    The kernel's value does not include throttling by a Pi's firmware; see `arm_clock`.
    """
    return files.reading(f"{CPU}/cpu{core}/cpufreq/{which}", "Hz", "cpu", now, 1e3)


def arm_clock(system: System, now: float) -> Reading:
    """Return the clock frequency in Hz that a Pi's firmware has set, including throttling."""
    source = "vcgencmd measure_clock arm"

    def take() -> float:
        digits = system.commands.text(source.split()).partition("=")[2]
        if not digits.isdecimal():
            raise ReadError(source, Reason.PARSE)
        return float(digits)

    return Reading.taken("Hz", "cpu", source, now, take)


class LoadOfOthers:
    """CPU utilisation by other processes over the last minute, from 0 to 1.

    The first value is the load average minus this process's load; later values are computed from the counters of two
    reads.
    """

    window_seconds = 60.0
    shortest_seconds = 1.0

    def __init__(self, files: Files) -> None:
        self._files = files
        self._past: list[tuple[float, float, float]] = []

    def read(self, now: float) -> Reading:
        """Return the utilisation, or a failed reading with the reason."""
        busy = busy_seconds(self._files, now)
        own = own_seconds(self._files, now)
        if busy.value is None:
            return Reading.failed("1", "cpu", busy.source, now, busy.reason or Reason.ABSENT)
        mine = own.value or 0.0
        while len(self._past) > 1 and self._past[1][0] <= now - self.window_seconds:
            self._past.pop(0)
        # Cores that went offline took their counts along.
        if self._past and busy.value < self._past[-1][1]:
            self._past.clear()
        self._past.append((now, busy.value, mine))
        seconds = now - self._past[0][0]
        cores = len(online_cores(self._files))
        if seconds < self.shortest_seconds:
            average = load_average(self._files, now)
            if average.value is None:
                return Reading.failed("1", "cpu", average.source, now, average.reason or Reason.ABSENT)
            share = (average.value - mine / self.window_seconds) / cores
            source = average.source
        else:
            by_others = busy.value - self._past[0][1] - (mine - self._past[0][2])
            share = by_others / (seconds * cores)
            source = busy.source
        return Reading(min(1.0, max(0.0, share)), "1", "cpu", Quality.DERIVED, source, now)
