"""What a device is like, as tests have it."""

from __future__ import annotations

from sparrow.devices.conditions import Conditions
from sparrow.devices.readings import Quality, Reading, Reason

UNITS = {
    "temperature": "°C",
    "battery_temperature": "°C",
    "battery": "%",
    "on_mains": "",
    "throttled": "",
    "under_voltage": "",
    "load_by_others": "",
    "free_memory": "B",
    "free_storage": "B",
    "metered": "",
    "clock_synchronised": "",
}
GIB = 2**30
COOL = {
    "temperature": 45.0,
    "battery_temperature": 25.0,
    "battery": 90.0,
    "on_mains": 1.0,
    "throttled": 0.0,
    "under_voltage": 0.0,
    "load_by_others": 0.1,
    "free_memory": 4.0 * GIB,
    "free_storage": 8.0 * GIB,
    "metered": 0.0,
    "clock_synchronised": 1.0,
}


def reading(name: str, value: float | Reason) -> Reading:
    """A value, or why there is none."""
    if isinstance(value, Reason):
        return Reading.failed(UNITS[name], name, "test", 0.0, value)
    return Reading(value, UNITS[name], name, Quality.MEASURED, "test", 0.0)


def conditions(**changed: float | Reason) -> Conditions:
    """A cool, charged, idle device, but for what is given."""
    return Conditions(**{name: reading(name, value) for name, value in {**COOL, **changed}.items()})
