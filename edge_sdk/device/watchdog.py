"""Enforce a device's policy: object to work, and pause between batches.

    watchdog = Watchdog(policy, ConditionsReader(System.here()).read)
    watchdog.look()                  # None, or the reason why the device may not work now

Two bad readings in a row pause work, and a minute without bad readings resumes it. The effect of a missing reading
depends on the limit: an unknown battery level refuses work, an unknown temperature slows a small board
(``blind_duty``), unknown throttling is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache

from pydantic import BaseModel, ConfigDict, ValidationError

from sparrow.command_line.installed import installed, load
from sparrow.command_line.table import percent
from sparrow.devices.conditions import Conditions
from sparrow.devices.readings import Reading, Reason
from sparrow.protocol.errors import MissingPart
from sparrow.protocol.messages import PauseReason

from ..arguments import MIB
from ..errors import SdkError
from .policy import Policy

# Shortest interval between readings.
LOOK_SECONDS = 5.0

# Bad readings in a row that pause running work; a single one prevents its start.
BAD_LOOKS = 2

# Time without objections before paused work resumes; longer after throttling, which ends before the heat is gone.
CLEAR_SECONDS = 60.0
COOLING_SECONDS = 120.0


class Spent(BaseModel):
    """A device's seconds and joules on one day; measured and estimated joules together."""

    model_config = ConfigDict(frozen=True)

    day: date
    seconds: float = 0.0
    joules: float = 0.0


@dataclass(frozen=True)
class Objection:
    """The reason why a device may not work now."""

    # Reason for the coordinator.
    reason: PauseReason
    # Text, only for the user.
    text: str


# Cached, because searching the installed packages takes milliseconds.
@cache
def installed_conditions() -> tuple[Callable[..., Objection | None], ...]:
    """Return the functions that packages register under ``sparrow.device_conditions``.

    Each takes the ``Conditions`` and ``working``, and returns an objection or None.
    """
    found = installed("sparrow.device_conditions").values()
    return tuple(load(entry, MissingPart, what="device condition") for entry in found)


def judge(
    policy: Policy, conditions: Conditions, *, working: bool, now: datetime, spent: Spent | None = None
) -> list[Objection]:
    """Return the objections of ``policy``, most urgent first; empty if the device may work.

    working: whether work is running. now: local time.
    """
    found = [
        *_judge_board(policy, conditions, working),
        *_judge_battery(policy, conditions, working),
        *_judge_others(policy, conditions),
        *_judge_space(policy, conditions, working),
    ]
    if policy.hours is not None and conditions.clock_synchronised.value != 0 and not policy.within_hours(now):
        found.append(Objection(PauseReason.hours, f"it is {now:%H:%M}, the working hours are {policy.hours}"))
    found += _judge_spending(policy, spent, now)
    others = (condition(conditions, working=working) for condition in installed_conditions())
    return found + [objection for objection in others if objection is not None]


def _judge_board(policy: Policy, conditions: Conditions, working: bool) -> Iterator[Objection]:
    if policy.not_under_voltage and conditions.under_voltage.value:
        yield Objection(PauseReason.power, "the supply voltage is too low; use another supply or cable")
    for reading, pause, resume, part in (
        (conditions.temperature, policy.pause_celsius, policy.resume_celsius, "the chip"),
        (conditions.battery_temperature, policy.battery_pause_celsius, policy.battery_resume_celsius, "the battery"),
    ):
        highest = pause if working or resume is None else resume
        if highest is None or reading.value is None:
            continue
        if reading.value >= highest if working else reading.value > highest:
            yield Objection(PauseReason.heat, f"{part} is at {reading.value:.0f} °C, the limit is {highest:g}")
    if policy.not_throttled and conditions.throttled.value:
        yield Objection(PauseReason.throttled, "the chip is throttled")


def _judge_battery(policy: Policy, conditions: Conditions, working: bool) -> Iterator[Objection]:
    level = conditions.battery.value
    charged = policy.battery_instead is not None and level is not None and level >= policy.battery_instead
    if policy.on_mains and not conditions.on_mains.value and not charged:
        known = "it runs on its battery" if conditions.on_mains.value is not None else _unknown(conditions.on_mains)
        yield Objection(PauseReason.charging, f"the policy requires external power: {known}")
    lowest = policy.battery_stop if working else (policy.battery_start or policy.battery_stop)
    if lowest is None or conditions.battery.reason is Reason.ABSENT:
        return
    if level is None:
        yield Objection(PauseReason.battery, f"the battery level {_unknown(conditions.battery)}")
    elif level < lowest:
        yield Objection(PauseReason.battery, f"the battery is at {level:.0f} %, the policy requires {lowest:g} %")


def _judge_others(policy: Policy, conditions: Conditions) -> Iterator[Objection]:
    metered = conditions.metered.value
    if policy.unmetered and (metered or (metered is None and policy.unknown_is_metered)):
        known = "it is metered" if metered else _unknown(conditions.metered)
        yield Objection(PauseReason.network, f"the policy requires an unmetered network: {known}")
    load = conditions.load_by_others.value
    if policy.load_by_others is not None and load is not None and load > policy.load_by_others:
        yield Objection(
            PauseReason.load,
            f"other programs use {percent(load, 0)} of the cores, more than {percent(policy.load_by_others, 0)}",
        )


def _judge_space(policy: Policy, conditions: Conditions, working: bool) -> list[Objection]:
    found = []
    if policy.free_memory_mib is not None:
        free = conditions.free_memory.value
        if free is None:
            found.append(Objection(PauseReason.memory, f"the free memory {_unknown(conditions.free_memory)}"))
        # Running work itself takes memory: half of the limit must stay free.
        elif free < policy.free_memory_mib * MIB * (0.5 if working else 1):
            found.append(
                Objection(
                    PauseReason.memory,
                    f"{free / MIB:,.0f} MiB of memory are free, the limit is {policy.free_memory_mib:,.0f}",
                )
            )
    free = conditions.free_storage.value
    if policy.free_storage_mib is not None and free is not None and free < policy.free_storage_mib * MIB:
        found.append(
            Objection(
                PauseReason.storage,
                f"{free / MIB:,.0f} MiB of storage are free, the limit is {policy.free_storage_mib:,.0f}",
            )
        )
    return found


def _judge_spending(policy: Policy, spent: Spent | None, now: datetime) -> list[Objection]:
    if spent is None or spent.day != now.date():
        return []
    if policy.joules_per_day is not None and spent.joules >= policy.joules_per_day:
        return [Objection(PauseReason.energy, f"today's {policy.joules_per_day:g} J are spent")]
    if policy.hours_per_day is not None and spent.seconds >= 3600 * policy.hours_per_day:
        return [Objection(PauseReason.hours, f"today's {policy.hours_per_day:g} h of work are over")]
    return []


def _unknown(reading: Reading) -> str:
    return f"cannot be read ({reading.reason})"


def _local_time() -> datetime:
    return datetime.now().astimezone()


class Watchdog:
    """Enforcement of a policy: decide whether a device may work, and count its daily spending.

    keep: stores the spending, which becomes ``spent`` after a restart. ``hot``: it paused for heat or throttling since
    this was last reset.
    """

    def __init__(
        self,
        policy: Policy,
        read: Callable[[], Conditions],
        *,
        clock: Callable[[], float] = time.monotonic,
        local_time: Callable[[], datetime] = _local_time,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda text: None,
        spent: Spent | None = None,
        keep: Callable[[Spent], None] = lambda spent: None,
    ) -> None:
        self.policy = policy
        self.read = read
        self.clock = clock
        self.sleep = sleep
        self.say = say
        self.spent = spent
        self._local_time = local_time
        self._keep = keep
        self._looked = -float("inf")
        self._bad = 0
        # A starting device need not wait.
        self._clear_since: float | None = -float("inf")
        self._clear_seconds = 0.0
        self._paused: Objection | None = None
        self._working = False
        self._blind = False
        self.hot = False

    @property
    def duty(self) -> float:
        """Current share of the time that work may compute."""
        return min(self.policy.duty, self.policy.blind_duty) if self._blind else self.policy.duty

    def look(self) -> PauseReason | None:
        """Return the reason not to work now, or None; read the conditions at most every ``LOOK_SECONDS``."""
        now = self.clock()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._decide(now)
        return self._paused.reason if self._paused else None

    def earliest(self) -> float:
        """Return the earliest time, on the clock, at which paused work can resume."""
        now = self.clock()
        if self._paused is None:
            return now
        return (now if self._clear_since is None else self._clear_since) + self._clear_seconds

    def _decide(self, now: float) -> None:
        conditions = self.read()
        self._blind = conditions.temperature.value is None
        objections = judge(self.policy, conditions, working=self._working, now=self._local_time(), spent=self.spent)
        if self._working:
            self._bad = self._bad + 1 if objections else 0
            # A falling voltage may stop the machine at any moment: do not wait for a second reading.
            if objections and (self._bad >= BAD_LOOKS or objections[0].reason is PauseReason.power):
                self._pause(objections[0])
            return
        if objections:
            if self._paused is None or self._paused.reason is not objections[0].reason:
                self._pause(objections[0])
            self._clear_since = None
            return
        if self._clear_since is None:
            self._clear_since = now
        if now - self._clear_since >= self._clear_seconds:
            if self._paused is not None:
                self.say("all conditions are met: working again")
            self._paused = None
            self._working = True
            self._bad = 0

    def _pause(self, objection: Objection) -> None:
        self.say(f"paused: {objection.text}")
        self._paused = objection
        self._working = False
        self._clear_since = None
        self._clear_seconds = COOLING_SECONDS if objection.reason is PauseReason.throttled else CLEAR_SECONDS
        self.hot = self.hot or objection.reason in (PauseReason.heat, PauseReason.throttled)

    def count(self, seconds: float, joules: float | None) -> None:
        """Add to today's spending."""
        today = self._local_time().date()
        before = self.spent if self.spent is not None and self.spent.day == today else Spent(day=today)
        self.spent = Spent(day=today, seconds=before.seconds + seconds, joules=before.joules + (joules or 0.0))
        self._keep(self.spent)


class Paused(SdkError):
    """Work cannot be finished in time and is returned for ``reason``."""

    def __init__(self, reason: PauseReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class WatchedWork:
    """Work under a watchdog: pause between steps, and return the work if it would be late.

    deadline: time on the watchdog's clock, including ``reserve`` seconds to send the answer.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        deadline: float | None,
        *,
        reserve: float = 0.0,
        on_pause: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._watchdog = watchdog
        self._deadline = None if deadline is None else deadline - reserve
        self._on_pause = on_pause
        self._began = self._stepped = watchdog.clock()
        self._paused = 0.0

    def after_step(self, done: int, total: int) -> None:
        """Rest or pause after ``done`` steps of ``total``. Raises Paused if the work cannot be finished in time."""
        watchdog = self._watchdog
        if done >= total:
            return
        worked = watchdog.clock() - self._stepped
        if watchdog.duty < 1:
            watchdog.sleep(worked * (1 / watchdog.duty - 1))
        if watchdog.look() is not None:
            self._wait(done, total)
        self._stepped = watchdog.clock()

    def _wait(self, done: int, total: int) -> None:
        watchdog = self._watchdog
        begin = watchdog.clock()
        per_step = (begin - self._began - self._paused) / done
        try:
            while (reason := watchdog.look()) is not None:
                left = (total - done) * per_step
                if self._deadline is not None and (
                    reason is PauseReason.power or watchdog.earliest() + left > self._deadline
                ):
                    raise Paused(reason)
                watchdog.sleep(LOOK_SECONDS)
        finally:
            self._paused += watchdog.clock() - begin
            self._on_pause(watchdog.clock() - begin)


def read_spent(data: bytes | None) -> Spent | None:
    """Return the stored spending; None if it cannot be read."""
    try:
        return None if data is None else Spent.model_validate_json(data)
    except ValidationError:
        return None
