"""INA3221 and INA238, the power monitors of a Jetson's rails, in the sysfs layouts of all its kernels.

    sys/class/hwmon/hwmonN            JetPack 5 to 7: volts and amperes per channel; Thor's INA238 also watts
    sys/bus/i2c/{devices,drivers/..}  the same chips by address; before JetPack 5 the only place, with names, volts,
                                      amperes and watts in a folder iio:deviceN

A chip may appear at several paths; the first layout with rails is used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .rails import PowerSource, believable, total_of, worst
from .readings import Files, Quality, ReadError, Reading, Reason

# Sources: the kernel's ina3221 and ina238 drivers (mV, mA, µW), NVIDIA's older driver (mV, mA, mW).
HWMON = "sys/class/hwmon"
I2C = "sys/bus/i2c"

HOW_TO_GRANT = (
    "let a group read it: an administrator adds a udev rule that sets the group of the ina3221x files to i2c and "
    "their mode to 0440, then runs: sudo usermod -aG i2c USER"
)

# In hwmon, channels 4 to 6 are shunt voltages in microvolts, and "sum of shunt voltages" is not a rail either.
_CHANNELS = (1, 2, 3)
_NOT_CONNECTED = "NC"
# The chip's largest number means that no limit is set.
_NO_LIMIT_AMPERES = 32.7


@dataclass(frozen=True)
class Rail:
    """One rail."""

    label: str
    volts: str
    amperes: str
    # File of the chip's own power, None for volts times amperes.
    watts: str | None = None
    watts_factor: float = 1e-3
    limit: str = ""

    def read(self, files: Files, now: float) -> Reading:
        """Return its power in watts."""
        if self.watts is not None:
            return files.reading(self.watts, "W", self.label, now, self.watts_factor)
        volts = files.reading(self.volts, "V", self.label, now, 1e-3)
        amperes = files.reading(self.amperes, "A", self.label, now, 1e-3)
        if volts.value is None or amperes.value is None:
            lost = volts if volts.value is None else amperes
            return Reading.failed("W", self.label, lost.source, now, lost.reason or Reason.ABSENT)
        return Reading(volts.value * amperes.value, "W", self.label, Quality.DERIVED, self.amperes, now)

    def current_limit(self, files: Files, now: float) -> Reading:
        """Return the current limit above which the board throttles, in amperes; ABSENT if none is set."""
        reading = files.reading(self.limit, "A", self.label, now, 1e-3)
        if reading.value is not None and reading.value >= _NO_LIMIT_AMPERES:
            return Reading.failed("A", self.label, self.limit, now, Reason.ABSENT)
        return reading


class Ina(PowerSource):
    """All rails of a board, and the total power."""

    shortest_period_seconds = 1.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.PERMISSION: f"this board's power sensor is readable by root only; {HOW_TO_GRANT}",
        Reason.ABSENT: "no known total for this board's rails; please report their names",
        Reason.STALE: "its rails read zero, or samples were too rare",
    }

    def __init__(self, files: Files, rails: list[Rail], unnamed: Reason | None) -> None:
        self._files = files
        self.rails = tuple(rails)
        self.total = total = total_of([rail.label for rail in rails])
        self._unnamed = unnamed
        self._counted = [rail for label in (total.rails if total else ()) for rail in rails if rail.label == label]
        self.scope = total.scope if total else "rails"
        self.quality = worst([Quality.MEASURED if rail.watts else Quality.DERIVED for rail in self._counted])
        self.name = f"INA {' + '.join(total.rails)}" if total else "INA3221"

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return the total power in watts."""
        if not self._counted:
            return (Reading.failed("W", self.scope, self.name, now, self._unnamed or Reason.ABSENT),)
        return believable(tuple(rail.read(self._files, now) for rail in self._counted))


def find_ina(files: Files) -> Ina | None:
    """Return the chips of this board, if any, including chips whose names are unreadable, with the reason."""
    for chips in (_hwmon_chips(files), _i2c_chips(files, "devices"), _i2c_chips(files, "drivers")):
        rails: list[Rail] = []
        unnamed: Reason | None = None
        for folder in chips:
            found, reason = _rails(files, folder)
            rails += [rail for rail in found if rail.label not in {other.label for other in rails}]
            unnamed = unnamed or reason
        if rails or unnamed:
            return Ina(files, rails, unnamed)
    return None


def _hwmon_chips(files: Files) -> list[str]:
    return [f for f in files.folders(HWMON, "hwmon") if re.fullmatch(r"ina(3221|238).*", files.text_or(f"{f}/name"))]


def _i2c_chips(files: Files, kind: str) -> list[str]:
    """Return the value folder of each chip, by its address."""
    parents = files.folders(f"{I2C}/{kind}")
    if kind == "drivers":
        parents = [chip for driver in parents if "ina3221" in driver for chip in files.folders(driver)]
    chips = []
    for chip in parents:
        if "ina3221" not in files.text_or(f"{chip}/name"):
            continue
        inside = [f for f in files.folders(chip, "iio:device") if re.fullmatch(r"iio:device\d+", f.rpartition("/")[2])]
        inside += files.folders(f"{chip}/hwmon", "hwmon")
        chips += inside[:1]
    return chips


def _rails(files: Files, folder: str) -> tuple[list[Rail], Reason | None]:
    """Return the connected rails of one chip, and the reason if a name could not be read."""
    if files.has(f"{folder}/power1_input"):
        label = files.text_or(f"{folder}/label", "INA238")
        watts = f"{folder}/power1_input"
        return [Rail(label, f"{folder}/in1_input", f"{folder}/curr1_input", watts, 1e-6, f"{folder}/curr1_max")], None
    iio = "iio:device" in folder
    rails = []
    unnamed = None
    for channel in _CHANNELS:
        n = channel - 1 if iio else channel
        try:
            label = files.text(f"{folder}/rail_name_{n}" if iio else f"{folder}/in{n}_label")
        except ReadError as failure:
            unnamed = failure.reason if failure.reason is not Reason.ABSENT else unnamed
            continue
        if label == _NOT_CONNECTED:
            continue
        if iio:
            volts, amperes, watts = (f"{folder}/in_{kind}{n}_input" for kind in ("voltage", "current", "power"))
            rails.append(Rail(label, volts, amperes, watts, limit=f"{folder}/crit_current_limit_{n}"))
        else:
            limit = f"{folder}/curr{n}_crit"
            rails.append(Rail(label, f"{folder}/in{n}_input", f"{folder}/curr{n}_input", limit=limit))
    return rails, unnamed
