"""The power-management chip of the Raspberry Pi 5, 500 and CM5: voltages and currents of twelve rails."""

import re
from collections.abc import Mapping
from typing import ClassVar

from .rails import PowerSource
from .readings import Quality, ReadError, Reading, Reason
from .system import Commands, System

COMMAND = ("vcgencmd", "pmic_read_adc")

# Watts at the input = slope * watts of the rails + offset: a fit to jfikar's measurements of one board against a USB
# meter. The sum of the rails leaves out loads on the 5 V input (USB, PCIe, HATs, the fan) and the chip's own loss, and
# the input has no current reading.
INPUT_SLOPE = 1.1451
INPUT_WATTS = 0.5879

# The start of a phase may have to wait for it.
_TIMEOUT_SECONDS = 1.0

_LINE = re.compile(r"\s*(\w+)_([AV])\s+(current|volt)\(\d+\)=(-?\d+(?:\.\d+)?)[AV]\s*")


class Pmic(PowerSource):
    """The sum of the rails, as a power source."""

    name = "PMIC rails"
    scope = "rails"
    quality = Quality.DERIVED
    # The command takes about 14 ms of processor time.
    shortest_period_seconds = 2.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.PERMISSION: "vcgencmd refuses this user; sudo usermod -aG video USER, then log in again",
        Reason.ABSENT: "vcgencmd is missing; sudo apt install raspi-utils (in a container: pass /dev/vcio in)",
    }

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return the sum of the rails in watts."""
        try:
            total = sum(self.rails().values())
        except ReadError as failure:
            return (Reading.failed("W", self.scope, self.name, now, failure.reason),)
        if total <= 0:
            return (Reading.failed("W", self.scope, self.name, now, Reason.STALE),)
        return (Reading(total, "W", self.scope, self.quality, self.name, now),)

    def rails(self) -> dict[str, float]:
        """Return watts per rail. Raises ReadError, also if a rail reports no voltage, because the sum would be too
        small.
        """
        amperes, volts = parse(self._commands.text(COMMAND, _TIMEOUT_SECONDS))
        if not amperes or amperes.keys() - volts.keys():
            raise ReadError(" ".join(COMMAND), Reason.PARSE)
        return {rail: amperes[rail] * volts[rail] for rail in amperes}

    def input_watts(self, now: float) -> Reading:
        """Return the input power of the board, estimated from its rails."""
        (rails,) = self.read(now)
        if rails.value is None:
            return Reading.failed("W", "board", self.name, now, rails.reason or Reason.ABSENT)
        return Reading(
            INPUT_SLOPE * rails.value + INPUT_WATTS, "W", "board", Quality.ESTIMATED, "fit to PMIC rails", now
        )


def find_pmic(system: System) -> Pmic | None:
    """Return the power-management chip if the board has one; the firmware of older boards lacks the command."""
    try:
        names = system.files.strings("proc/device-tree/compatible")
    except ReadError:
        names = []
    return Pmic(system.commands) if "brcm,bcm2712" in names else None


def parse(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return amperes and volts per rail from lines in any order and indentation."""
    amperes: dict[str, float] = {}
    volts: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match and (match[2], match[3]) in (("A", "current"), ("V", "volt")):
            (amperes if match[2] == "A" else volts)[match[1]] = float(match[4])
    return amperes, volts
