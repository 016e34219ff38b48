"""Sensor readings, with a reason for each missing value, and file access."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sparrow.protocol.errors import SdkError


class Quality(str, Enum):
    """How a value was obtained."""

    MEASURED = "measured"
    # computed from measured values, such as volts times amperes
    DERIVED = "derived"
    # from a model; never added to measured ones
    ESTIMATED = "estimated"
    UNAVAILABLE = "unavailable"

    def __str__(self) -> str:
        return self.value


class Reason(str, Enum):
    """Why a value is missing; reasons that a user can resolve come first."""

    PERMISSION = "permission"
    # a battery on external power, which does not show the device's power
    CHARGING = "charging"
    # too old, or the gauge has no value yet
    STALE = "stale"
    # two good reads that contradict each other
    IMPLAUSIBLE = "implausible"
    PARSE = "parse"
    # the file exists but its hardware does not respond
    POWERED_DOWN = "powered_down"
    # a phone's battery current, whose unit and sign differ by maker
    UNRELIABLE = "unreliable_current_unit"
    # a kernel without control groups for memory
    CONTROLLER_ABSENT = "controller_absent"
    ABSENT = "absent"

    def __str__(self) -> str:
        return self.value


class BadFigures(SdkError, ValueError):
    """Raised for invalid board values or meter readings."""


class ReadError(SdkError):
    """Raised if a file or a command has no usable value; carries the `reason`."""

    def __init__(self, source: Path | str, reason: Reason) -> None:
        super().__init__(f"{source}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Reading:
    """A sensor value with its time. A failed read has no value instead of 0, which would look like a spike."""

    # Value in `unit`, None if the read failed.
    value: float | None
    unit: str
    # The part that the value covers (board, device, package, cpu).
    scope: str
    quality: Quality
    source: str
    # Seconds of the reader's clock. Raises ValueError unless there is either a value or a reason.
    t_monotonic: float
    reason: Reason | None = None

    def __post_init__(self) -> None:
        failed = self.value is None
        if failed != (self.quality is Quality.UNAVAILABLE) or failed != (self.reason is not None):
            raise ValueError(f"{self.source}: a reading has either a value, or a reason and the quality unavailable")

    @classmethod
    def failed(cls, unit: str, scope: str, source: str, t_monotonic: float, reason: Reason) -> "Reading":
        """Return a reading without a value."""
        return cls(None, unit, scope, Quality.UNAVAILABLE, source, t_monotonic, reason)

    @classmethod
    def taken(cls, unit: str, scope: str, source: str, t_monotonic: float, take: Callable[[], float]) -> "Reading":
        """Call ``take`` and return its value as a reading, or a failed reading: a ReadError's reason, or PARSE if the
        value is not a number.
        """
        try:
            return cls(take(), unit, scope, Quality.MEASURED, source, t_monotonic)
        except ReadError as failure:
            reason = failure.reason
        except (ValueError, IndexError):
            reason = Reason.PARSE
        return cls.failed(unit, scope, source, t_monotonic, reason)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ReadError(path, Reason.ABSENT) from error
    except PermissionError as error:
        raise ReadError(path, Reason.PERMISSION) from error
    # EIO, ENODEV, ENODATA, EAGAIN: the driver is present, its hardware is off.
    except OSError as error:
        raise ReadError(path, Reason.POWERED_DOWN) from error


def _read(path: Path) -> bytes:
    # A sysfs file is a line long and read by one call.
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _by_numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


# Kernel files may end with a newline, a NUL or a unit ("32760 ma").
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*[^\W\d]*%?")


@dataclass(frozen=True)
class Files:
    """The files below a root folder: `/`, or a copy of a board's file tree. Paths are relative to the root."""

    root: Path = Path("/")
    # Input functions, replaced by tests. Every method raises ReadError.
    read: Callable[[Path], bytes] = _read
    names: Callable[[Path], Iterable[str]] = os.listdir

    def text(self, path: str) -> str:
        """Return the text of a file, stripped of newlines, spaces and NULs."""
        return self.data(path).decode("utf-8", "replace").strip(" \t\r\n\x00")

    def number(self, path: str) -> float:
        """Return the number at the start of a file, ignoring a unit."""
        match = _NUMBER.fullmatch(self.text(path))
        value = math.inf if match is None else float(match[1])
        if not math.isfinite(value):
            raise ReadError(self.root / path, Reason.PARSE)
        return value

    def strings(self, path: str) -> list[str]:
        """Return the entries of a NUL-separated list, such as a device-tree property."""
        return [entry for entry in self.data(path).decode("utf-8", "replace").split("\x00") if entry.strip()]

    def has(self, path: str) -> bool:
        """Return whether a file exists, readable or not."""
        try:
            self.data(path)
        except ReadError as failure:
            return failure.reason is not Reason.ABSENT
        return True

    def text_or(self, path: str, default: str = "") -> str:
        """Return the text of a file, or `default` if it cannot be read."""
        try:
            return self.text(path)
        except ReadError:
            return default

    def children(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""
        with _translated(self.root / path):
            return sorted(self.names(self.root / path))

    def folders(self, path: str, prefix: str = "") -> list[str]:
        """Return the paths in a folder with this prefix, in numerical order (zone2 before zone10); [] if unreadable."""
        try:
            names = [name for name in self.children(path) if name.startswith(prefix)]
        except ReadError:
            return []
        return [f"{path}/{name}" for name in sorted(names, key=_by_numbers)]

    def reading(self, path: str, unit: str, scope: str, now: float, scale: float = 1.0) -> Reading:
        """Return a file's number times `scale` as a reading in `unit`; never raises."""
        return Reading.taken(unit, scope, path, now, lambda: self.number(path) * scale)

    def data(self, path: str) -> bytes:
        """Return the raw bytes of a file."""
        with _translated(self.root / path):
            return self.read(self.root / path)
