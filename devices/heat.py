"""Temperatures of a board, including the temperature that triggers throttling."""

import re
from collections.abc import Mapping

from .board import BoardInfo
from .readings import Files, Quality, ReadError, Reading, Reason

# Sources: the kernel's documentation of thermal zones and hwmon (thousandths of a degree), the zone names of Raspberry
# Pi's and NVIDIA's kernels. Zones are identified by their `type`, not by their number.
THERMAL = "sys/class/thermal"
HWMON = "sys/class/hwmon"

IGNORED = frozenset({"pmic-die"})
"""Zones with a constant value (50 or 100 °C on a Jetson)."""

# Board (prefix of its name) -> the zones that throttle it; the hottest counts.
_DECISIVE: Mapping[str, tuple[str, ...]] = {
    "raspberry-pi": ("cpu",),
    "jetson-nano": ("cpu", "gpu"),
    "jetson-tx1": ("cpu", "gpu"),
    "jetson-tx2": ("bcpu", "mcpu", "gpu"),
    "jetson-xavier": ("cpu", "gpu", "aux"),
    "jetson-agx-xavier": ("cpu", "gpu", "aux"),
    "jetson": ("tj",),
    "x86": ("x86_pkg_temp", "package id 0", "tctl", "tdie"),
}
_PROCESSOR = re.compile(r"(cpu|soc|package|cluster|big|little|core)")
_X86_SENSORS = ("coretemp", "k10temp", "zenpower")
_COLDEST = -60.0
_HOTTEST = 150.0
# A zone whose hardware is off fails or reads -256 °C.
_SWITCHED_OFF = -200.0


def temperatures(files: Files, now: float) -> dict[str, Reading]:
    """Return the temperature of each thermal zone in °C; on x86 also of the processor's own sensors."""
    return {name: _degrees(files, path, name, now) for name, path in _zones(files).items()}


class Thermometer:
    """The hottest of the zones that trigger throttling; on unknown boards, the hottest zone named after a processor."""

    def __init__(self, files: Files, board: BoardInfo) -> None:
        self._files = files
        self._board = board
        self._zones = _decisive(files, board)

    def read(self, now: float) -> Reading:
        """Return the temperature in °C."""
        readings = [_degrees(self._files, path, name, now) for name, path in self._zones]
        good = [reading for reading in readings if reading.value is not None]
        if good:
            return max(good, key=lambda reading: reading.value or 0.0)
        if all(reading.reason is Reason.ABSENT for reading in readings):
            # All zones have disappeared.
            self._zones = _decisive(self._files, self._board)
        return readings[0] if readings else Reading.failed("°C", "processor", THERMAL, now, _why_none(self._files))


def _zones(files: Files) -> dict[str, str]:
    # Zone -> file of its temperature.
    found: dict[str, str] = {}
    for folder in files.folders(THERMAL, "thermal_zone"):
        try:
            name = _folded(files.text(f"{folder}/type"))
        # A zone without a name could be anything.
        except ReadError:
            continue
        if name not in IGNORED:
            found.setdefault(name, f"{folder}/temp")
    for folder in files.folders(HWMON, "hwmon"):
        if files.text_or(f"{folder}/name") in _X86_SENSORS:
            for path in files.folders(folder, "temp"):
                if path.endswith("_input"):
                    name = files.text_or(path.replace("_input", "_label")).lower() or path.rpartition("/")[2]
                    found.setdefault(name, path)
    return found


def _decisive(files: Files, board: BoardInfo) -> list[tuple[str, str]]:
    found = _zones(files)
    key = next((key for key in _DECISIVE if board.name == key or board.name.startswith(f"{key}-")), "")
    wanted = [name for name in _DECISIVE.get(key, ()) if name in found]
    return [(name, found[name]) for name in wanted or found if wanted or _PROCESSOR.match(name)]


def _why_none(files: Files) -> Reason:
    try:
        files.children(THERMAL)
    except ReadError as failure:
        return failure.reason
    return Reason.ABSENT


def _folded(name: str) -> str:
    # CPU-therm, cpu-thermal and cpu_thermal are all "cpu".
    return re.sub(r"[-_]therm(al)?$", "", name.lower())


def _degrees(files: Files, path: str, zone: str, now: float) -> Reading:
    reading = files.reading(path, "°C", zone, now, 1e-3)
    if reading.value is None or _COLDEST <= reading.value <= _HOTTEST:
        return reading
    off = reading.value <= _SWITCHED_OFF
    return Reading.failed("°C", zone, path, now, Reason.POWERED_DOWN if off else Reason.IMPLAUSIBLE)


def hwmon(files: Files, name: str) -> str:
    """Return the hwmon folder of the first chip or driver with this name, or ""."""
    return next((f for f in files.folders(HWMON, "hwmon") if files.text_or(f"{f}/name") == name), "")


def fan(files: Files, now: float) -> Reading:
    """Return the fan's requested speed, 0 to 255."""
    folder = hwmon(files, "pwmfan")
    if not folder:
        return Reading.failed("1/255", "fan", HWMON, now, Reason.ABSENT)
    return files.reading(f"{folder}/pwm1", "1/255", "fan", now)


def critical_temperature(files: Files, now: float) -> Reading:
    """Return the shutdown temperature in °C: the lowest critical trip point."""
    trips = []
    for folder in files.folders(THERMAL, "thermal_zone"):
        for path in files.folders(folder, "trip_point_"):
            if path.endswith("_type") and files.text_or(path) == "critical":
                reading = files.reading(f"{path.removesuffix('type')}temp", "°C", "zone", now, 1e-3)
                if reading.value is not None:
                    trips.append(reading)
    if not trips:
        return Reading.failed("°C", "zone", THERMAL, now, Reason.ABSENT)
    lowest = min(trips, key=lambda reading: reading.value or 0.0)
    return Reading(lowest.value, "°C", "zone", Quality.MEASURED, lowest.source, now)
