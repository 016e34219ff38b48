"""The coordinator's clock: seconds since the epoch that pass evenly, however often the machine's clock is set.

The machine's clock is read once a boot. What it said then, less the time since the boot, is kept in the data folder: a
process that is started again goes on by the time since the boot alone. After a reboot the machine's clock is read anew,
but time does not go back: not before the last moment that was kept, which is at most ``KEEP_SECONDS`` old. The file has
its own digest: one wrong digit would be years, from which the time would not come back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

FILE = "clock.json"
KEEP_SECONDS = 60.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> float:
    """Return seconds since the boot, those in which the machine slept included where it counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def boot_id() -> str:
    """Return what tells this boot from others; empty where the system has nothing."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class SteadyClock:
    """A clock, to be called, whose anchor is kept in ``folder``. now, passed and boot are injected by tests."""

    def __init__(
        self,
        folder: Path,
        *,
        now: Callable[[], float] = lambda: time.time(),
        passed: Callable[[], float] = since_boot,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        self._path, self._passed, self._boot = folder / FILE, passed, boot()
        self._kept_at = -KEEP_SECONDS
        offset, last = self._read()
        if offset is None:
            started = now()
            if started < last:
                log.warning(
                    "the machine's clock is %.0f s behind the coordinator's last time, from which it goes on; set the "
                    "clock, and keep it set (timedatectl set-ntp true)",
                    last - started,
                )
            offset = max(started, last) - passed()
        self._offset = offset

    def __call__(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self._offset + self._passed()

    def keep(self) -> None:
        """Keep the anchor and the time for the next process, at most every ``KEEP_SECONDS``."""
        passed = self._passed()
        if passed - self._kept_at < KEEP_SECONDS:
            return
        self._kept_at = passed
        partial = self._path.with_suffix(".partial")
        kept = {"boot": self._boot, "offset": self._offset, "at": self._offset + passed}
        text = json.dumps({**kept, "sha256": _digest(kept)})
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            partial.replace(self._path)
        except OSError as error:  # the disk is full: that is said elsewhere, and nothing but a restart needs this file
            log.debug("%s is not written: %s", self._path, error)

    def _read(self) -> tuple[float | None, float]:
        """Return the offset where it is of this boot, and the last time that was kept."""
        try:
            kept = json.loads(self._path.read_text())
            if kept.pop("sha256") != _digest(kept):
                raise ValueError("its SHA-256 is not the one in it")
            offset, last = float(kept["offset"]), float(kept["at"])
        except FileNotFoundError:
            return None, 0.0
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s): the time is that of the machine's clock", self._path, error)
            return None, 0.0
        return (offset if self._boot and kept.get("boot") == self._boot else None), last


def _digest(kept: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()
