"""A reading: what a sensor said, or why it said nothing; and the one place that reads files.

Kernel files are small texts with habits of their own: a newline or a NUL at the end, sometimes a unit ("32760 ma"),
sometimes a sign. `Files` takes those off and turns every way a read can fail into a `Reason`. A failed read is never 0:
a zero in place of a counter becomes an energy spike of a full turn at the next read.
"""

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
    """The origin of a figure."""

    MEASURED = "measured"
    DERIVED = "derived"  # computed from measured values, such as volts times amperes
    ESTIMATED = "estimated"  # a model's answer, never to be added to measured ones
    UNAVAILABLE = "unavailable"

    def __str__(self) -> str:
        return self.value


class Reason(str, Enum):
    """Why there is no figure, the one a person can do most about first."""

    PERMISSION = "permission"
    CHARGING = "charging"  # a battery on external power, which says nothing about what the device draws
    STALE = "stale"  # too old, or the gauge has no value yet
    IMPLAUSIBLE = "implausible"  # two good reads, but the step between them cannot be true
    PARSE = "parse"
    POWERED_DOWN = "powered_down"  # the file is there, its hardware does not answer
    UNRELIABLE = "unreliable_current_unit"  # a phone's battery current: its unit and sign differ by maker
    CONTROLLER_ABSENT = "controller_absent"  # a kernel without control groups for memory
    ABSENT = "absent"

    def __str__(self) -> str:
        return self.value


class BadFigures(SdkError, ValueError):
    """A board's figures or a meter's readings cannot be used; the text says what was wanted."""


class ReadError(SdkError):
    """A file or a command gave no usable value; `reason` says which way it failed."""

    def __init__(self, what: Path | str, reason: Reason) -> None:
        super().__init__(f"{what}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Reading:
    """One value of one sensor at one moment.

    value: in `unit`, None when the read failed. scope: what the value covers (board, device, package, cpu).
    t_monotonic: seconds of the reader's clock. reason: None exactly when there is a value. Raises ValueError for a
    record that contradicts itself.
    """

    value: float | None
    unit: str
    scope: str
    quality: Quality
    source: str
    t_monotonic: float
    reason: Reason | None = None

    def __post_init__(self) -> None:
        failed = self.value is None
        if failed != (self.quality is Quality.UNAVAILABLE) or failed != (self.reason is not None):
            raise ValueError(f"{self.source}: without a value, and only then, a reading is unavailable for a reason")

    @classmethod
    def failed(cls, unit: str, scope: str, source: str, t_monotonic: float, reason: Reason) -> "Reading":
        """Return a reading that is not one."""
        return cls(None, unit, scope, Quality.UNAVAILABLE, source, t_monotonic, reason)

    @classmethod
    def taken(cls, unit: str, scope: str, source: str, t_monotonic: float, take: Callable[[], float]) -> "Reading":
        """Return what ``take`` gives, or why it fails: its ReadError's reason, or PARSE for what is no number."""
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
    except OSError as error:  # EIO, ENODEV, ENODATA, EAGAIN: the driver is there, the hardware behind it is off
        raise ReadError(path, Reason.POWERED_DOWN) from error


def _read(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:  # sysfs files are a line long, and read whole by one call
        return file.read()


def _by_numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*[^\W\d]*%?")


@dataclass(frozen=True)
class Files:
    """The files below a root, `/` or a copy of some board's tree; paths are relative to it.

    read and names do the input: tests give their own. Every method raises ReadError with its reason.
    """

    root: Path = Path("/")
    read: Callable[[Path], bytes] = _read
    names: Callable[[Path], Iterable[str]] = os.listdir

    def text(self, path: str) -> str:
        """Return the text of a file without the newlines, spaces and NULs around it."""
        return self.data(path).decode("utf-8", "replace").strip(" \t\r\n\x00")

    def number(self, path: str) -> float:
        """Return the number a file begins with, a unit behind it ignored."""
        match = _NUMBER.fullmatch(self.text(path))
        value = math.inf if match is None else float(match[1])
        if not math.isfinite(value):
            raise ReadError(self.root / path, Reason.PARSE)
        return value

    def strings(self, path: str) -> list[str]:
        """Return the entries of a NUL-separated file, as the device tree writes its lists."""
        return [entry for entry in self.data(path).decode("utf-8", "replace").split("\x00") if entry.strip()]

    def has(self, path: str) -> bool:
        """Return whether a file is there, readable or not."""
        try:
            self.data(path)
        except ReadError as failure:
            return failure.reason is not Reason.ABSENT
        return True

    def text_or(self, path: str, default: str = "") -> str:
        """Return the text of a file, `default` where it cannot be read."""
        try:
            return self.text(path)
        except ReadError:
            return default

    def children(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""
        with _translated(self.root / path):
            return sorted(self.names(self.root / path))

    def folders(self, path: str, prefix: str = "") -> list[str]:
        """Paths of what lies in a folder and begins with `prefix`; none where the folder cannot be read.

        In the order of their numbers: thermal_zone2 before thermal_zone10.
        """
        try:
            names = [name for name in self.children(path) if name.startswith(prefix)]
        except ReadError:
            return []
        return [f"{path}/{name}" for name in sorted(names, key=_by_numbers)]

    def reading(self, path: str, unit: str, scope: str, now: float, scale: float = 1.0) -> Reading:
        """Return a file's number times `scale` as a reading in `unit`; never raises."""
        return Reading.taken(unit, scope, path, now, lambda: self.number(path) * scale)

    def data(self, path: str) -> bytes:
        """Return the bytes of a file as they are."""
        with _translated(self.root / path):
            return self.read(self.root / path)
