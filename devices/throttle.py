"""Read whether a board is throttled because of heat, under-voltage or over-current."""

import re
from collections.abc import Mapping

from .board import BoardInfo
from .heat import THERMAL, hwmon
from .readings import Files, Quality, ReadError, Reading, Reason
from .system import System

# Sources: Raspberry Pi's documentation of get_throttled, NVIDIA's thermal documentation and the kernel's soctherm
# driver. `get_throttled` gets no argument, which would reset its bits.
NOW_BITS: Mapping[int, str] = {0: "under_voltage", 1: "freq_capped", 2: "throttled", 3: "soft_temp_limit"}
SINCE_BOOT = 16
"""Shift of the bits that report an event since the start of the system."""

_UNDER_VOLTAGE_BIT = 0b1
_THROTTLE_BITS = 0b1110
# Deprecated, and up to two seconds old.
_WORD_FILE = "sys/devices/platform/soc/soc:firmware/get_throttled"
_ALERTS = ("throttle-alert", "hot-surface-alert")


def throttle_word(system: System) -> int:
    """Return a Pi's throttle flags from its firmware, or else from the kernel. Raises ReadError if neither works."""
    try:
        text = system.commands.text(["vcgencmd", "get_throttled"])
    except ReadError as failure:
        text = system.files.text_or(_WORD_FILE)
        if not text:
            raise failure from None
        return _hex(text, _WORD_FILE)
    return _hex(text.partition("=")[2], "vcgencmd get_throttled")


def words(word: int, shift: int = 0) -> list[str]:
    """Return the names of the set flags: current flags, or with `shift=SINCE_BOOT` all flags since boot."""
    return [name for bit, name in NOW_BITS.items() if word >> shift >> bit & 1]


class Throttle:
    """Throttling and under-voltage of a board, as 1.0 or 0.0.

    On a Jetson, over-current events are counted since the previous read, or since the object was created.
    """

    def __init__(self, system: System, board: BoardInfo) -> None:
        self._system = system
        self._board = board
        self._alerts = Alerts(system.files)
        self._events = over_current_events(system.files, 0.0) if board.kind == "jetson" else {}

    def read(self, now: float) -> tuple[Reading, Reading]:
        """Return readings of throttling and under-voltage."""
        if self._board.kind == "raspberry-pi":
            return self._raspberry(now)
        if self._board.kind == "jetson":
            return self._jetson(now)
        absent = Reading.failed("1", "board", "throttle state", now, Reason.ABSENT)
        return absent, absent

    def _raspberry(self, now: float) -> tuple[Reading, Reading]:
        source = "get_throttled"
        try:
            word = throttle_word(self._system)
        except ReadError as failure:
            throttled = Reading.failed("1", "board", source, now, failure.reason)
            weak = _alarm(self._system.files, now) or Reading.failed("1", "board", source, now, failure.reason)
        else:
            throttled = Reading(float(word & _THROTTLE_BITS > 0), "1", "board", Quality.MEASURED, source, now)
            weak = Reading(float(word & _UNDER_VOLTAGE_BIT > 0), "1", "board", Quality.MEASURED, source, now)
        if not self._board.detects_under_voltage:
            weak = Reading.failed("1", "board", "this board has no detector", now, Reason.ABSENT)
        return throttled, weak

    def _jetson(self, now: float) -> tuple[Reading, Reading]:
        events = over_current_events(self._system.files, now)
        rising = {name for name, reading in events.items() if _rose(self._events.get(name), reading)}
        self._events = {**self._events, **{name: each for name, each in events.items() if each.value is not None}}
        alert = self._alerts.read(now)
        if alert.value is not None and rising & {"oc2", "oc3"}:
            alert = Reading(1.0, "1", "board", Quality.MEASURED, "soctherm_oc", now)
        supply = events.get("oc1") or Reading.failed("1", "board", "soctherm_oc", now, Reason.ABSENT)
        if supply.value is not None:
            supply = Reading(float("oc1" in rising), "1", "board", Quality.DERIVED, supply.source, now)
        return alert, supply


class Alerts:
    """A Jetson's thermal alerts; the search is repeated until all alerts have names."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._paths: list[str] | None = None

    def read(self, now: float) -> Reading:
        """Return 1.0 while an alert is active, else 0.0."""
        try:
            if self._paths is None:
                self._paths = self._find()
        except ReadError as failure:
            return Reading.failed("1", "board", THERMAL, now, failure.reason)
        states = [self._files.reading(path, "1", "board", now) for path in self._paths]
        active = any(state.value is not None and state.value > 0 for state in states)
        lost = next((state for state in states if state.reason is not None), None)
        if lost is not None and not active:
            self._paths = None
            return lost
        # A kernel without alerts (before JetPack 5) does not show throttling.
        return Reading(float(active), "1", "board", Quality.MEASURED if states else Quality.DERIVED, THERMAL, now)

    def _find(self) -> list[str]:
        # Of all cooling devices only alerts count, not fans and clocks.
        devices = [name for name in self._files.children(THERMAL) if name.startswith("cooling_device")]
        if not devices:
            raise ReadError(THERMAL, Reason.ABSENT)
        kinds = {device: self._files.text(f"{THERMAL}/{device}/type").lower() for device in devices}
        if not all(kinds.values()):
            raise ReadError(THERMAL, Reason.PARSE)
        return [f"{THERMAL}/{device}/cur_state" for device, kind in kinds.items() if kind.endswith(_ALERTS)]


def over_current_events(files: Files, now: float) -> dict[str, Reading]:
    """Return the counts of oc1 (under-voltage), oc2 (average current) and oc3 (instantaneous current)."""
    folder = hwmon(files, "soctherm_oc")
    names = ("oc1", "oc2", "oc3") if folder else ()
    return {name: _count(files, f"{folder}/{name}_event_cnt", now) for name in names}


def _count(files: Files, path: str, now: float) -> Reading:
    reading = files.reading(path, "events", "board", now)
    if reading.value is not None and reading.value < 0:
        return Reading.failed("events", "board", path, now, Reason.IMPLAUSIBLE)
    return reading


def _rose(before: Reading | None, after: Reading) -> bool:
    if before is None or before.value is None or after.value is None:
        return False
    return after.value > before.value


def _alarm(files: Files, now: float) -> Reading | None:
    # The kernel's own alarm needs no permission.
    folder = hwmon(files, "rpi_volt")
    return files.reading(f"{folder}/in0_lcrit_alarm", "1", "board", now) if folder else None


def _hex(text: str, source: str) -> int:
    # The firmware writes 0x, the kernel does not.
    if not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text):
        raise ReadError(source, Reason.PARSE)
    return int(text, 16)
