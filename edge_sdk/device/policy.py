"""The policy that decides when this device may train; ``edge_sdk.device.watchdog`` enforces it.

Limits come in pairs, so that a device does not alternate: work begins at ``battery_start`` and continues down to
``battery_stop``.

The defaults for phones follow Bonawitz et al., arXiv:1902.01046 (idle, charging, unmetered); the numbers are this
project's choice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sparrow.command_line.faults import faults
from sparrow.devices.conditions import ConditionsReader
from sparrow.devices.readings import Reason
from sparrow.devices.system import System

from ..arguments import MIB
from ..errors import BadArgument

__all__ = ["Policy"]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The board whose firmware throttles from 60 °C.
WARM_BOARD = "raspberry-pi-3-plus"


class Policy(BaseModel):
    """Limits within which a device works; the default is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on_mains: bool = Field(default=False, description="Work only on external power, not if it is unknown")
    battery_instead: float | None = Field(
        default=None, ge=0, le=100, description="Battery level accepted instead of external power, %"
    )
    battery_start: float | None = Field(default=None, ge=0, le=100, description="Battery level at which work begins, %")
    battery_stop: float | None = Field(
        default=None, ge=0, le=100, description="Battery level in percent; work pauses below it"
    )
    battery_pause_celsius: float | None = Field(
        default=None, ge=-50, le=150, description="Battery temperature at which work pauses, °C"
    )
    battery_resume_celsius: float | None = Field(
        default=None, ge=-50, le=150, description="Battery temperature at which work resumes, °C"
    )
    pause_celsius: float | None = Field(
        default=None, ge=-50, le=150, description="Temperature of the chip at which work pauses, °C"
    )
    resume_celsius: float | None = Field(
        default=None, ge=-50, le=150, description="Temperature of the chip at which work resumes, °C"
    )
    not_throttled: bool = Field(default=False, description="Pause while the chip is throttled")
    not_under_voltage: bool = Field(default=False, description="Return work while the supply voltage is too low")
    unmetered: bool = Field(default=False, description="Work only on networks that are not metered")
    unknown_is_metered: bool = Field(default=False, description="Treat a network of unknown kind as metered")
    load_by_others: float | None = Field(
        default=None, gt=0, le=1, description="Share of all cores that other programs may use"
    )
    free_memory_mib: float | None = Field(
        default=None, ge=0, description="Memory to leave free, MiB; no work if it is unknown"
    )
    free_storage_mib: float | None = Field(default=None, ge=0, description="Storage to leave free, MiB")
    hours: str | None = Field(
        default=None, description="Local working hours, such as 22:00-07:00; ignored while the clock is not set"
    )
    joules_per_day: float | None = Field(default=None, gt=0, description="Maximum energy per day, J")
    hours_per_day: float | None = Field(default=None, gt=0, le=24, description="Maximum working time per day, h")
    duty: float = Field(default=1.0, gt=0, le=1, description="Share of the time spent computing, with rests between")
    blind_duty: float = Field(default=1.0, gt=0, le=1, description="The same if the chip's temperature cannot be read")

    @field_validator("hours")
    @classmethod
    def _hours(cls, value: str | None) -> str | None:
        if value is not None:
            _window(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Policy:
        for lower, upper in (
            ("battery_stop", "battery_start"),
            ("battery_resume_celsius", "battery_pause_celsius"),
            ("resume_celsius", "pause_celsius"),
        ):
            low = getattr(self, lower)
            high = getattr(self, upper)
            if low is not None and high is not None and low > high:
                raise ValueError(f"{lower} is {low:g}, above {upper}, {high:g}; give it the lower value")
        return self

    @classmethod
    def for_board(cls, kind: str, *, board: str = "", memory_bytes: int = 0, has_battery: bool = False) -> Policy:
        """Return the defaults for a kind of device: phone, laptop, raspberry-pi, jetson or linux.

        board: name, for a board that throttles early.
        """
        memory = memory_bytes / MIB
        if kind == "phone":
            return cls(
                on_mains=True,
                battery_start=80,
                battery_stop=60,
                battery_pause_celsius=40,
                battery_resume_celsius=37,
                unmetered=True,
                unknown_is_metered=True,
                free_memory_mib=0.25 * memory,
                free_storage_mib=1024,
                hours="22:00-07:00",
                hours_per_day=1,
            )
        if kind == "laptop":
            return cls(
                on_mains=True,
                battery_start=50,
                battery_stop=30,
                battery_pause_celsius=45,
                battery_resume_celsius=42,
                pause_celsius=90,
                resume_celsius=80,
                unmetered=True,
                load_by_others=0.3,
                free_memory_mib=0.2 * memory,
                free_storage_mib=2048,
                hours_per_day=4,
            )
        pause, resume = {"raspberry-pi": (78.0, 70.0), "jetson": (88.0, 80.0)}.get(kind, (90.0, 80.0))
        if board == WARM_BOARD:
            pause, resume = 68.0, 60.0
        small = cls(
            pause_celsius=pause,
            resume_celsius=resume,
            not_throttled=True,
            not_under_voltage=True,
            unmetered=True,
            load_by_others=0.5,
            free_memory_mib=max(128.0, 0.15 * memory),
            free_storage_mib=500,
            blind_duty=0.5 if kind in ("raspberry-pi", "jetson") else 1.0,
        )
        if has_battery:
            return small.model_copy(
                update={
                    "battery_start": 60.0,
                    "battery_stop": 40.0,
                    "battery_pause_celsius": 45.0,
                    "battery_resume_celsius": 42.0,
                }
            )
        return small if kind in ("raspberry-pi", "jetson") else cls()

    def changed(self, changes: Mapping[str, object]) -> Policy:
        """Return this policy with limits replaced by texts or values; ``none`` removes one.

        Raises BadArgument for an unknown or invalid limit.
        """
        given = {key: None if value in ("none", "") else value for key, value in changes.items()}
        cleared = {key for key, value in given.items() if value is None}
        kept = {key: value for key, value in self.model_dump().items() if key not in cleared}
        unknown = sorted(cleared - set(type(self).model_fields))
        return _checked({**kept, **dict.fromkeys(unknown), **{k: v for k, v in given.items() if v is not None}})

    def within_hours(self, now: datetime) -> bool:
        """Return whether ``now``, local time, is within the working hours."""
        if self.hours is None:
            return True
        begin, end = _window(self.hours)
        minute = 60 * now.hour + now.minute
        return begin <= minute < end if begin <= end else minute >= begin or minute < end

    @property
    def asks(self) -> bool:
        """Whether the policy has any limit."""
        return self != Policy()


def policy_here(system: System) -> Policy:
    """Return the defaults for this machine."""
    reader = ConditionsReader(system)
    board = reader.board
    return Policy.for_board(
        board.kind,
        board=board.name,
        memory_bytes=board.memory_bytes or 0,
        has_battery=reader.read().battery.reason is not Reason.ABSENT,
    )


def read_policy(path: Path) -> Policy:
    """Read a policy from a TOML file of ``KEY = VALUE`` lines. Raises BadArgument if it is unreadable or invalid."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadArgument(f"{path}: {error.strerror}; give --policy a TOML file, auto or none") from None
    except ValueError as error:
        raise BadArgument(
            f"{path}: {error}; write KEY = VALUE lines; sparrow join --help-settings lists the keys"
        ) from None
    return _checked(found)


def _checked(values: Mapping[str, object]) -> Policy:
    try:
        return Policy.model_validate(values)
    except ValidationError as error:
        key, text = faults(error, Policy.model_fields)[0]
        known = "" if key in Policy.model_fields or not key else f"; there are {', '.join(Policy.model_fields)}"
        raise BadArgument(f"policy: {key + ': ' if key else ''}{text}{known}") from None


def _window(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time of day; give hours such as 22:00-07:00")
    hours, minutes, to_hours, to_minutes = map(int, match.groups())
    if max(hours, to_hours) > 24 or max(minutes, to_minutes) > 59:
        raise ValueError(f"{text!r} is not a time of day; give hours such as 22:00-07:00")
    return 60 * hours + minutes, 60 * to_hours + to_minutes
