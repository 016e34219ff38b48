"""Batteries: while one discharges, its power is the power of the whole device.

On external power it is the power of charging, which says nothing about the device; so any supply that is online, or a
battery in any state but discharging, makes the reading unavailable. Names of folders mean nothing (BAT0, bms,
axp20x-battery): `type` tells a battery from a supply, and `scope` = Device marks the battery of a mouse or a headset.
Source: the kernel's power_supply documentation (microwatts, microvolts, microamperes; the sign of a current differs
from driver to driver).
"""

from collections.abc import Mapping
from typing import ClassVar

from devices.readings import Files, Quality, ReadError, Reading, Reason

POWER_SUPPLY = "sys/class/power_supply"


class Batteries:
    """The device's own batteries together, in watts.

    A gauge refreshes every few seconds and answers slowly, so it is asked at most every five; in a phase shorter than
    that the figure may still be the one of the moment before.
    """

    name = "battery"
    scope = "device"
    shortest_period_seconds = 5.0
    advice: ClassVar[Mapping[Reason, str]] = {
        Reason.CHARGING: "it tells what the device draws only while it discharges; unplug the charger to measure",
        Reason.STALE: "the gauge gave no power, or too rarely",
    }

    def __init__(self, files: Files, batteries: list[str], supplies: list[str]) -> None:
        self._files = files
        self._batteries = batteries
        self._supplies = supplies
        self._own_watts = {battery for battery in batteries if _has(files, f"{battery}/power_now")}
        self.quality = Quality.MEASURED if len(self._own_watts) == len(batteries) else Quality.DERIVED

    def read(self, now: float) -> tuple[Reading, ...]:
        """The device's power: one reading in watts."""
        try:
            states = {battery: self._files.text(f"{battery}/status").lower() for battery in self._batteries}
            reason = self._not_discharging(set(states.values()))
            if reason is None:
                watts = sum(self._watts(battery) for battery, state in states.items() if state == "discharging")
                if watts > 0:
                    return (Reading(watts, "W", self.scope, self.quality, self.name, now),)
                reason = Reason.STALE  # a device that runs draws something: the gauge has no value yet
        except ReadError as failure:
            reason = failure.reason
        return (Reading.failed("W", self.scope, self.name, now, reason),)

    def joules(self, before: tuple[float, ...], after: tuple[float, ...], seconds: float) -> float:
        """Joules between two reads, by the trapezoid rule."""
        return (before[0] + after[0]) / 2 * seconds

    def longest_gap_seconds(self, period_seconds: float) -> float:
        """Five periods: over a longer gap the power in between is anybody's guess."""
        return 5 * max(period_seconds, self.shortest_period_seconds)

    def _not_discharging(self, states: set[str]) -> Reason | None:
        if "charging" in states or any(_online(self._files, supply) for supply in self._supplies):
            return Reason.CHARGING
        if "discharging" in states:
            return None  # of two batteries one may rest ("not charging") while the other carries the device
        return Reason.STALE if "unknown" in states else Reason.CHARGING

    def _watts(self, battery: str) -> float:
        if battery in self._own_watts:
            return abs(self._files.number(f"{battery}/power_now")) * 1e-6
        volts = self._files.number(f"{battery}/voltage_now") * 1e-6
        return volts * abs(self._files.number(f"{battery}/current_now")) * 1e-6


def find_batteries(files: Files) -> Batteries | None:
    """The batteries that feed this device, or None where it has none."""
    batteries, supplies = [], []
    try:
        paths = [f"{POWER_SUPPLY}/{name}" for name in files.children(POWER_SUPPLY)]
    except ReadError:
        return None
    for path in paths:
        if _text(files, f"{path}/scope") == "Device" or _text(files, f"{path}/present") == "0":
            continue
        kind = _text(files, f"{path}/type")
        if kind == "Battery":
            batteries.append(path)
        elif kind not in ("", "UPS"):  # Mains, USB and its variants, Wireless
            supplies.append(path)
    return Batteries(files, batteries, supplies) if batteries else None


def _text(files: Files, path: str) -> str:
    try:
        return files.text(path)
    except ReadError:
        return ""


def _online(files: Files, supply: str) -> bool:
    return _text(files, f"{supply}/online") not in ("", "0")  # 2 means online with programmable voltage


def _has(files: Files, path: str) -> bool:
    try:
        files.number(path)
    except ReadError as failure:
        return failure.reason is not Reason.ABSENT
    return True
