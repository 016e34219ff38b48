"""The coordinator's clock: seconds since the epoch, independent of changes of the machine's clock.

The machine's clock is read once per boot. Its offset to the time since boot is kept in the data folder. After a reboot
the machine's clock is read again, but the time is never before the last stored time, which is at most ``KEEP_SECONDS``
old. The file contains a digest, because one wrong digit could set the clock years ahead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

log = logging.getLogger(__name__)

FILE = "clock.json"
KEEP_SECONDS = 60.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def iso(seconds: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def since_boot() -> float:
    """Return the seconds since boot, including sleep if the system counts it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def boot_id() -> str:
    """Return an id of this boot; empty if the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class SteadyClock:
    """Callable clock with its anchor in ``folder``."""

    def __init__(
        self,
        folder: Path,
        *,
        now: Callable[[], float] = lambda: time.time(),
        passed: Callable[[], float] = since_boot,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        self._path = folder / FILE
        self._passed = passed
        self._boot = boot()
        self._kept_at = -KEEP_SECONDS
        offset, last = self._read()
        if offset is None:
            started = now()
            if started < last:
                log.warning(
                    "the machine's clock is %.0f s behind the coordinator's last time, which is used instead; "
                    "synchronise the clock (timedatectl set-ntp true)",
                    last - started,
                )
            offset = max(started, last) - passed()
        self._offset = offset

    def __call__(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self._offset + self._passed()

    def keep(self) -> None:
        """Write the anchor and the time to the file, at most every ``KEEP_SECONDS``."""
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
        except OSError as error:
            # A full disk is reported elsewhere, and only a restart needs this file.
            log.debug("%s is not written: %s", self._path, error)

    def _read(self) -> tuple[float | None, float]:
        """Return the offset if it is of this boot, and the last kept time."""
        try:
            kept = json.loads(self._path.read_text())
            if kept.pop("sha256") != _digest(kept):
                raise ValueError("its content does not match its SHA-256")
            offset = float(kept["offset"])
            last = float(kept["at"])
        except FileNotFoundError:
            return None, 0.0
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s): using the machine's clock", self._path, error)
            return None, 0.0
        return (offset if self._boot and kept.get("boot") == self._boot else None), last


def _digest(kept: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()
