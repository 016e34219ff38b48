"""A phone's battery under Termux, through Termux:API."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from .readings import Quality, ReadError, Reading, Reason
from .system import System

# Apps may not read /sys/class/power_supply. The command prints JSON, but slowly.
COMMAND = "termux-battery-status"
HOW_TO_GET = "install the app Termux:API and its package: pkg install termux-api"
_ASK_AGAIN_SECONDS = 60.0
_TIMEOUT_SECONDS = 5.0


class TermuxBattery:
    """The phone's battery, read at most once a minute."""

    def __init__(self, system: System) -> None:
        self._commands = system.commands
        self._answer: Mapping[str, Any] | ReadError | None = None
        self._asked_at = 0.0

    def charge(self, now: float) -> Reading:
        """Return the charge in per cent."""
        return self._reading("%", now, lambda status: status["percentage"])

    def temperature(self, now: float) -> Reading:
        """Return the battery's temperature in °C."""

        def value(status: Mapping[str, Any]) -> float | None:
            # A temperature of exactly 0 with unknown health is missing.
            unknown = status["temperature"] == 0 and status.get("health") == "UNKNOWN"
            return None if unknown else status["temperature"]

        return self._reading("°C", now, value)

    def on_mains(self, now: float) -> Reading:
        """Return 1.0 on a cable or a wireless charger, else 0.0."""
        return self._reading("1", now, lambda status: float(status["plugged"] != "UNPLUGGED"))

    def power(self, now: float) -> Reading:
        """Return a failed reading with the reason; never watts."""
        # The current has no reliable unit or sign.
        charge = self.charge(now)
        return Reading.failed("W", "device", COMMAND, now, charge.reason or Reason.UNRELIABLE)

    def words(self, now: float) -> dict[str, str]:
        """Return status, power source and health as text; {} if unavailable."""
        status = self._status(now)
        if isinstance(status, ReadError):
            return {}
        return {key: str(status[key]).lower().replace("plugged_", "") for key in ("status", "plugged", "health")}

    def _reading(self, unit: str, now: float, value: Callable[[Mapping[str, Any]], Any]) -> Reading:
        status = self._status(now)
        if isinstance(status, ReadError):
            return Reading.failed(unit, "battery", COMMAND, now, status.reason)
        found = value(status)
        if found is None:
            return Reading.failed(unit, "battery", COMMAND, now, Reason.ABSENT)
        return Reading(float(found), unit, "battery", Quality.MEASURED, COMMAND, now)

    def _status(self, now: float) -> Mapping[str, Any] | ReadError:
        if self._answer is None or now - self._asked_at >= _ASK_AGAIN_SECONDS:
            self._asked_at = now
            try:
                self._answer = _checked(self._commands.text([COMMAND], _TIMEOUT_SECONDS))
            except ReadError as failure:
                self._answer = failure
        return self._answer


def _checked(text: str) -> Mapping[str, Any]:
    try:
        status = json.loads(text)
        numbers = [float(status[key]) for key in ("percentage", "temperature")]
        strings = [status[key] for key in ("status", "plugged", "health")]
        valid = 0 <= numbers[0] <= 100 and math.isfinite(numbers[1])
        if not valid or not all(isinstance(each, str) for each in strings):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ReadError(COMMAND, Reason.PARSE) from None
    return dict(status)
