"""Battery power and charge. While a battery discharges, its power equals the power of the whole device."""

from collections.abc import Mapping
from typing import ClassVar

from .rails import PowerSource
from .readings import Files, Quality, ReadError, Reading, Reason

# Source: the kernel's power_supply documentation (µW, µV, µA; drivers differ in the current's sign).
POWER_SUPPLY = "sys/class/power_supply"


class Batteries(PowerSource):
    """The sum of the device's own batteries, in watts; unavailable on external power."""

    name = "battery"
    scope = "device"
    # A gauge refreshes every few seconds and answers slowly.
    shortest_period_seconds = 5.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.CHARGING: "on external power; unplug the charger to measure",
        Reason.STALE: "the gauge has no value yet or was read too rarely",
    }

    def __init__(self, files: Files, batteries: list[str], supplies: list[str]) -> None:
        self._files = files
        self._batteries = batteries
        self._supplies = supplies
        self._own_watts = {battery for battery in batteries if files.has(f"{battery}/power_now")}
        self.quality = Quality.MEASURED if len(self._own_watts) == len(batteries) else Quality.DERIVED

    def read(self, now: float) -> tuple[Reading, ...]:
        """Return one reading in watts."""
        try:
            states = {battery: self._files.text(f"{battery}/status").lower() for battery in self._batteries}
            reason = self._not_discharging(set(states.values()))
            if reason is None:
                watts = sum(self._watts(battery) for battery, state in states.items() if state == "discharging")
                if watts > 0:
                    return (Reading(watts, "W", self.scope, self.quality, self.name, now),)
                # A running device draws power, so the gauge has no value yet.
                reason = Reason.STALE
        except ReadError as failure:
            reason = failure.reason
        return (Reading.failed("W", self.scope, self.name, now, reason),)

    def charge(self, now: float) -> Reading:
        """Return the charge in per cent, weighted by full capacity; never ABSENT."""
        readings = [self._capacity(path, now) for path in self._batteries]
        lost = next((reading for reading in readings if reading.value is None), None)
        if lost is not None or len(readings) == 1:
            return lost or readings[0]
        weights = [self._watt_hours(path, "full", now).value or 1.0 for path in self._batteries]
        total = sum(weight * (reading.value or 0.0) for weight, reading in zip(weights, readings, strict=True))
        return Reading(total / sum(weights), "%", "battery", Quality.DERIVED, "capacity", now)

    def temperature(self, now: float) -> Reading:
        """Return the temperature of the warmest battery in °C."""
        readings = [self._files.reading(f"{path}/temp", "°C", "battery", now, 0.1) for path in self._batteries]
        good = [reading for reading in readings if reading.value is not None]
        return max(good, key=lambda reading: reading.value or 0.0) if good else readings[0]

    def energy_left(self, now: float) -> Reading:
        """Return the energy of all batteries, in watt-hours."""
        return self._sum("now", now)

    def health(self, now: float) -> Reading:
        """Return the full capacity relative to the design capacity, in per cent."""
        full = self._sum("full", now)
        design = self._sum("full_design", now)
        lost = next((each for each in (full, design) if each.value is None), None)
        if full.value is None or not design.value:
            reason = lost.reason if lost else Reason.IMPLAUSIBLE
            return Reading.failed("%", "battery", "energy_full", now, reason or Reason.IMPLAUSIBLE)
        return Reading(100 * full.value / design.value, "%", "battery", Quality.DERIVED, "energy_full", now)

    def status(self) -> str:
        """Return the distinct battery states that the kernel reports, such as "discharging"."""
        words = [self._files.text_or(f"{path}/status", "unknown").lower() for path in self._batteries]
        return ", ".join(dict.fromkeys(words))

    def _capacity(self, path: str, now: float) -> Reading:
        reading = self._files.reading(f"{path}/capacity", "%", "battery", now)
        # Some gauges report energy but no percentage.
        if reading.reason is Reason.ABSENT:
            left = self._watt_hours(path, "now", now).value
            full = self._watt_hours(path, "full", now).value
            if left is None or not full:
                return Reading.failed("%", "battery", path, now, Reason.STALE)
            reading = Reading(100 * left / full, "%", "battery", Quality.DERIVED, path, now)
        if reading.value is not None and not 0 <= reading.value <= 100:
            return Reading.failed("%", "battery", reading.source, now, Reason.IMPLAUSIBLE)
        return reading

    def _sum(self, which: str, now: float) -> Reading:
        readings = [self._watt_hours(path, which, now) for path in self._batteries]
        lost = next((reading for reading in readings if reading.value is None), None)
        if lost is not None:
            return lost
        total = sum(reading.value or 0.0 for reading in readings)
        first = readings[0]
        return Reading(total, "Wh", "battery", first.quality, first.source, now)

    def _watt_hours(self, path: str, which: str, now: float) -> Reading:
        """Return the energy of one battery; if it reports only charge, convert with the design voltage."""
        energy = self._files.reading(f"{path}/energy_{which}", "Wh", "battery", now, 1e-6)
        if energy.reason is not Reason.ABSENT:
            return energy
        charge = self._files.reading(f"{path}/charge_{which}", "Ah", "battery", now, 1e-6)
        volts = self._files.reading(f"{path}/voltage_min_design", "V", "battery", now, 1e-6)
        if charge.value is None or volts.value is None:
            return Reading.failed("Wh", "battery", charge.source, now, charge.reason or volts.reason or Reason.ABSENT)
        return Reading(charge.value * volts.value, "Wh", "battery", Quality.DERIVED, charge.source, now)

    def _not_discharging(self, states: set[str]) -> Reason | None:
        if "charging" in states or any(_online(self._files, supply) for supply in self._supplies):
            return Reason.CHARGING
        if "discharging" in states:
            # Of two batteries, one may rest ("not charging") while the other powers the device.
            return None
        return Reason.STALE if "unknown" in states else Reason.CHARGING

    def _watts(self, battery: str) -> float:
        if battery in self._own_watts:
            return abs(self._files.number(f"{battery}/power_now")) * 1e-6
        volts = self._files.number(f"{battery}/voltage_now") * 1e-6
        return volts * abs(self._files.number(f"{battery}/current_now")) * 1e-6


def find_batteries(files: Files) -> Batteries | None:
    """Return the batteries that power this device, if any."""
    batteries, supplies = _supplies(files)
    return Batteries(files, batteries, supplies) if batteries else None


def on_mains(files: Files, now: float) -> Reading:
    """Return 1.0 on external power, 0.0 on battery; a device that reports neither battery nor supply counts as on
    mains.
    """
    try:
        files.children(POWER_SUPPLY)
    except ReadError as failure:
        if failure.reason is not Reason.ABSENT:
            return Reading.failed("1", "device", POWER_SUPPLY, now, failure.reason)
    batteries, supplies = _supplies(files)
    reporting = [supply for supply in supplies if files.text_or(f"{supply}/online") in ("0", "1", "2")]
    states = {files.text_or(f"{battery}/status").lower() for battery in batteries}
    if any(_online(files, supply) for supply in reporting) or "charging" in states:
        return Reading(1.0, "1", "device", Quality.MEASURED, POWER_SUPPLY, now)
    if not batteries:
        return Reading(1.0, "1", "device", Quality.DERIVED, "it runs and has no battery", now)
    if reporting or "discharging" in states:
        return Reading(0.0, "1", "device", Quality.MEASURED, POWER_SUPPLY, now)
    return Reading.failed("1", "device", POWER_SUPPLY, now, Reason.STALE)


def _supplies(files: Files) -> tuple[list[str], list[str]]:
    # Folder names (BAT0, bms, axp20x-battery) carry no meaning: `type` separates batteries from supplies, and `scope` =
    # Device marks the battery of a mouse or a headset.
    batteries = []
    supplies = []
    for path in files.folders(POWER_SUPPLY):
        if files.text_or(f"{path}/scope") == "Device" or files.text_or(f"{path}/present") == "0":
            continue
        kind = files.text_or(f"{path}/type")
        if kind == "Battery":
            batteries.append(path)
        # Mains, USB and its variants, Wireless.
        elif kind not in ("", "UPS"):
            supplies.append(path)
    return batteries, supplies


def _online(files: Files, supply: str) -> bool:
    # 2: online with a negotiated voltage.
    return files.text_or(f"{supply}/online") in ("1", "2")
