"""Temperatures, above all the one that makes a board throttle.

Zones are known by their `type`, never by their number; `CPU-therm`, `cpu-thermal` and `cpu_thermal` are all "cpu". A
zone whose hardware is switched off fails or says -256 °C: that is no temperature. Sources: the kernel's documentation
of thermal zones and hwmon (thousandths of a degree), the zone names of Raspberry Pi's and NVIDIA's kernels.
"""

import re
from collections.abc import Mapping

from devices.board import BoardInfo
from devices.readings import Files, Quality, ReadError, Reading, Reason

THERMAL = "sys/class/thermal"
HWMON = "sys/class/hwmon"

IGNORED = frozenset({"pmic-die"})
"""Zones that say the same whatever happens (50 or 100 °C on a Jetson)."""

# Board (the beginning of its name) -> its zones that throttle it; the hottest of them counts.
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
_COLDEST, _HOTTEST = -60.0, 150.0
_SWITCHED_OFF = -200.0


def temperatures(files: Files, now: float) -> dict[str, Reading]:
    """Zone -> its temperature in °C, ignored ones left out. On x86 with those of the processor's own sensors."""
    found: dict[str, Reading] = {}
    for folder in files.folders(THERMAL, "thermal_zone"):
        try:
            name = _folded(files.text(f"{folder}/type"))
        except ReadError:
            continue  # without a name it could be anything
        if name not in IGNORED:
            found.setdefault(name, _degrees(files, f"{folder}/temp", name, now))
    for folder in files.folders(HWMON, "hwmon"):
        if files.text_or(f"{folder}/name") in _X86_SENSORS:
            for path in files.folders(folder, "temp"):
                if path.endswith("_input"):
                    name = files.text_or(path.replace("_input", "_label")).lower() or path.rpartition("/")[2]
                    found.setdefault(name, _degrees(files, path, name, now))
    return found


def decisive_temperature(files: Files, board: BoardInfo, now: float) -> Reading:
    """The temperature that makes this board throttle, in °C: the hottest of those that can.

    Where a board's zones are not known, the hottest that is named after a processor.
    """
    found = temperatures(files, now)
    key = next((key for key in _DECISIVE if board.name == key or board.name.startswith(f"{key}-")), "")
    wanted = [name for name in _DECISIVE.get(key, ()) if name in found]
    if not wanted:
        wanted = [name for name in found if _PROCESSOR.match(name)]
    if not wanted:
        return Reading.failed("°C", "processor", THERMAL, now, _why_none(files))
    readings = [found[name] for name in wanted]
    good = [reading for reading in readings if reading.value is not None]
    return max(good, key=lambda reading: reading.value or 0.0) if good else readings[0]


def _why_none(files: Files) -> Reason:
    try:
        files.children(THERMAL)
    except ReadError as failure:
        return failure.reason
    return Reason.ABSENT


def _folded(name: str) -> str:
    return re.sub(r"[-_]therm(al)?$", "", name.lower())


def _degrees(files: Files, path: str, zone: str, now: float) -> Reading:
    reading = files.reading(path, "°C", zone, now, 1e-3)
    if reading.value is None or _COLDEST <= reading.value <= _HOTTEST:
        return reading
    off = reading.value <= _SWITCHED_OFF
    return Reading.failed("°C", zone, path, now, Reason.POWERED_DOWN if off else Reason.IMPLAUSIBLE)


def fan(files: Files, now: float) -> Reading:
    """How fast the fan is asked to turn, 0 to 255; where there are several, the first."""
    for folder in files.folders(HWMON, "hwmon"):
        if files.text_or(f"{folder}/name") == "pwmfan":
            return files.reading(f"{folder}/pwm1", "1/255", "fan", now)
    return Reading.failed("1/255", "fan", HWMON, now, Reason.ABSENT)


def critical_temperature(files: Files, now: float) -> Reading:
    """Where the system switches itself off, in °C: the lowest critical trip point of any zone."""
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
