"""When a device may work: limits one by one, the watch with a clock of its own, and work between two batches."""

from __future__ import annotations

from datetime import date, datetime, timezone

import pytest

from edge_sdk.arguments import MIB
from edge_sdk.device.policy import Policy, read_policy
from edge_sdk.device.watchdog import (
    CLEAR_SECONDS,
    COOLING_SECONDS,
    LOOK_SECONDS,
    Paused,
    Spent,
    Watchdog,
    WatchedWork,
    judge,
    read_spent,
)
from edge_sdk.errors import BadArgument
from sparrow.devices.readings import Reason
from sparrow.protocol.messages import PauseReason

from .conditions import conditions

NOON = datetime(2026, 11, 22, 12, 0, tzinfo=timezone.utc)
PHONE = Policy.for_board("phone", memory_bytes=8 * 2**30, has_battery=True)
LAPTOP = Policy.for_board("laptop", memory_bytes=8 * 2**30, has_battery=True)
PI = Policy.for_board("raspberry-pi", board="raspberry-pi-4", memory_bytes=4 * 2**30)


def words(policy, found, *, working=True, now=NOON, spent=None):
    return [each.reason.value for each in judge(policy, found, working=working, now=now, spent=spent)]


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changed", "said"),
    [
        (Policy(on_mains=True), {"on_mains": 0.0}, "charging"),
        (Policy(on_mains=True), {"on_mains": Reason.PERMISSION}, "charging"),
        (Policy(battery_start=50, battery_stop=30), {"battery": 29.0}, "battery"),
        (Policy(battery_start=50, battery_stop=30), {"battery": Reason.STALE}, "battery"),
        (Policy(battery_pause_celsius=40), {"battery_temperature": 40.0}, "heat"),
        (Policy(pause_celsius=78, resume_celsius=70), {"temperature": 78.0}, "heat"),
        (Policy(not_throttled=True), {"throttled": 1.0}, "throttled"),
        (Policy(not_under_voltage=True), {"under_voltage": 1.0}, "power"),
        (Policy(unmetered=True), {"metered": 1.0}, "network"),
        (Policy(unmetered=True, unknown_is_metered=True), {"metered": Reason.ABSENT}, "network"),
        (Policy(load_by_others=0.5), {"load_by_others": 0.6}, "load"),
        (Policy(free_memory_mib=256), {"free_memory": 100.0 * MIB}, "memory"),
        (Policy(free_memory_mib=256), {"free_memory": Reason.PARSE}, "memory"),
        (Policy(free_storage_mib=500), {"free_storage": 499.0 * MIB}, "storage"),
        (Policy(hours="22:00-07:00"), {}, "hours"),
    ],
)
def test_each_limit_has_a_word_of_its_own(policy, changed, said):
    assert words(policy, conditions(**changed)) == [said]
    assert words(Policy(), conditions(**changed)) == [], "what is not asked for is no matter"


@pytest.mark.parametrize(
    ("policy", "changed"),
    [
        (Policy(battery_start=50, battery_stop=30), {"battery": Reason.ABSENT}),
        (Policy(battery_pause_celsius=40), {"battery_temperature": Reason.ABSENT}),
        (Policy(pause_celsius=78), {"temperature": Reason.ABSENT}),
        (
            Policy(not_throttled=True, not_under_voltage=True),
            {"throttled": Reason.ABSENT, "under_voltage": Reason.ABSENT},
        ),
        (Policy(unmetered=True), {"metered": Reason.ABSENT}),
        (Policy(load_by_others=0.5), {"load_by_others": Reason.PERMISSION}),
        (Policy(free_storage_mib=500), {"free_storage": Reason.ABSENT}),
        (Policy(hours="22:00-07:00"), {"clock_synchronised": 0.0}),
        (Policy(on_mains=True, battery_instead=80), {"on_mains": 0.0, "battery": 80.0}),
    ],
)
def test_what_cannot_be_read_and_need_not_be_is_passed_over(policy, changed):
    assert words(policy, conditions(**changed)) == []


@pytest.mark.parametrize(
    ("changed", "starts", "goes_on"),
    [
        ({"battery": 49.0}, False, True),
        ({"battery": 50.0}, True, True),
        ({"battery": 29.0}, False, False),
        ({"temperature": 85.0}, False, True),
        ({"temperature": 80.0}, True, True),
        ({"temperature": 90.0}, False, False),
    ],
)
def test_work_begins_well_within_what_it_goes_on_to(changed, starts, goes_on):
    assert (not words(LAPTOP, conditions(**changed), working=False)) is starts
    assert (not words(LAPTOP, conditions(**changed))) is goes_on


@pytest.mark.parametrize(("hour", "allowed"), [(21, False), (22, True), (0, True), (6, True), (7, False), (12, False)])
def test_hours_may_pass_midnight(hour, allowed):
    now = NOON.replace(hour=hour)
    assert (words(Policy(hours="22:00-07:00"), conditions(), now=now) == []) is allowed


def test_a_days_energy_and_time_are_spent_on_that_day_only():
    policy = Policy(joules_per_day=1000, hours_per_day=1)
    assert words(policy, conditions(), spent=Spent(day=NOON.date(), joules=1000)) == ["energy"]
    assert words(policy, conditions(), spent=Spent(day=NOON.date(), seconds=3600)) == ["hours"]
    assert words(policy, conditions(), spent=Spent(day=date(2026, 11, 21), seconds=9e9, joules=9e9)) == []


def test_the_most_pressing_comes_first():
    bad = conditions(under_voltage=1.0, temperature=99.0, throttled=1.0, metered=1.0)
    assert words(PI, bad) == ["power", "heat", "throttled", "network"]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("phone", {"on_mains": True, "battery_start": 80, "hours": "22:00-07:00", "unknown_is_metered": True}),
        ("laptop", {"on_mains": True, "battery_stop": 30, "load_by_others": 0.3, "pause_celsius": 90}),
        ("raspberry-pi", {"on_mains": False, "battery_start": None, "pause_celsius": 78, "blind_duty": 0.5}),
        ("jetson", {"pause_celsius": 88, "resume_celsius": 80, "free_memory_mib": 614.4}),
    ],
)
def test_each_kind_of_device_has_defaults(kind, policy):
    chosen = Policy.for_board(kind, memory_bytes=4096 * MIB)
    assert {key: getattr(chosen, key) for key in policy} == pytest.approx(policy)


def test_a_board_on_a_battery_minds_it_and_a_server_is_left_to_its_owner():
    assert Policy.for_board("raspberry-pi", has_battery=True).battery_stop == 40
    assert Policy.for_board("raspberry-pi", board="raspberry-pi-3-plus").pause_celsius == 68
    assert not Policy.for_board("linux", memory_bytes=2**36).asks
    assert Policy.for_board("linux", has_battery=True).asks


# --- files and flags -------------------------------------------------------------------------------------------------


def test_a_file_and_flags_change_single_limits(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('pause_celsius = 75\nhours = "08:00-20:00"\n')
    policy = read_policy(path).changed({"load_by_others": "none", "on_mains": "true"})
    assert (policy.pause_celsius, policy.hours, policy.load_by_others, policy.on_mains) == (
        75,
        "08:00-20:00",
        None,
        True,
    )
    assert policy.resume_celsius is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "pause_celcius = 75",
            "pause_celcius: there is no such setting (did you mean pause_celsius?); there are on_mains,",
        ),
        ("pause_celsius = 'hot'", "pause_celsius: hot is invalid; give a number"),
        ("hours = 'night'", "'night' is not a time of day; give hours such as 22:00-07:00"),
        ("hours = '25:00-26:00'", "is not a time of day"),
        ("battery_start = 20\nbattery_stop = 40", "battery_stop is 40, above battery_start, 20"),
        ("on_mains", "write KEY = VALUE lines"),
    ],
)
def test_a_file_that_means_nothing_is_refused_with_what_would(tmp_path, text, said):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(BadArgument) as refusal:
        read_policy(path)
    assert said in str(refusal.value)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(BadArgument, match="give --policy a TOML file, auto or none"):
        read_policy(tmp_path / "none.toml")


def test_spent_energy_survives_restarts_and_damaged_files_are_ignored():
    spent = Spent(day=NOON.date(), seconds=3.0, joules=2.5)
    assert read_spent(spent.model_dump_json().encode()) == spent
    assert read_spent(b"{") is None
    assert read_spent(None) is None


# --- the watch -------------------------------------------------------------------------------------------------------


class Device:
    """A device whose conditions and time are the test's; ``after`` maps seconds of its time to new conditions."""

    def __init__(self, policy, *, after=None, **changed):
        self.now, self.changed, self.after, self.looks, self.said = 0.0, dict(changed), dict(after or {}), 0, []
        self.kept = []
        self.watch = Watchdog(
            policy,
            self.read,
            clock=lambda: self.now,
            local_time=lambda: NOON,
            sleep=self.sleep,
            say=self.said.append,
            keep=self.kept.append,
        )

    def sleep(self, seconds):
        self.now += seconds

    def read(self):
        self.looks += 1
        for moment in [moment for moment in self.after if moment <= self.now]:
            self.changed.update(self.after.pop(moment))
        return conditions(**self.changed)

    def look(self, seconds=LOOK_SECONDS, **changed):
        self.now += seconds
        self.changed.update(changed)
        return self.watch.look()


def test_a_device_that_is_well_works_at_once_and_one_that_is_not_waits_a_minute():
    assert Device(PI).look() is None
    device = Device(PI, temperature=75.0)  # between resume and pause: too hot to begin
    assert device.look() is PauseReason.heat
    assert device.look(temperature=60.0) is PauseReason.heat
    assert device.look(CLEAR_SECONDS - 1) is PauseReason.heat
    assert device.look() is None
    assert device.said == ["paused: the chip is at 75 °C, the limit is 70", "all conditions are met: working again"]


def test_one_bad_look_is_chance_and_two_in_a_row_pause():
    device = Device(PI)
    assert device.look() is None
    assert device.look(load_by_others=0.9) is None
    assert device.look(load_by_others=0.1) is None
    assert device.look(load_by_others=0.9) is None
    assert device.look() is PauseReason.load


def test_a_failing_supply_is_not_looked_at_twice():
    device = Device(PI)
    assert device.look() is None
    assert device.look(under_voltage=1.0) is PauseReason.power


def test_the_minute_begins_anew_with_every_bad_look_and_throttling_takes_two():
    device = Device(PI, throttled=1.0)
    assert device.look() is PauseReason.throttled
    assert device.look(throttled=0.0) is PauseReason.throttled
    assert device.look(COOLING_SECONDS - 5) is PauseReason.throttled
    assert device.look(throttled=1.0) is PauseReason.throttled
    assert device.look(throttled=0.0) is PauseReason.throttled
    assert device.look(COOLING_SECONDS) is None
    assert device.watch.hot


def test_it_looks_no_more_often_than_it_may():
    device = Device(PI)
    for _ in range(100):
        device.look(0.1)
    assert device.looks <= 100 * 0.1 / LOOK_SECONDS + 1


def test_a_board_that_cannot_tell_its_temperature_computes_half_of_the_time():
    device = Device(PI, temperature=Reason.ABSENT)
    device.look()
    assert device.watch.duty == 0.5
    device.look(temperature=50.0)
    assert device.watch.duty == 1.0


def test_what_is_spent_adds_up_and_is_kept():
    device = Device(Policy(joules_per_day=10))
    device.watch.count(2.0, 4.0)
    device.watch.count(3.0, None)
    device.watch.count(1.0, 6.0)
    assert device.kept[-1] == Spent(day=NOON.date(), seconds=6.0, joules=10.0)
    assert device.look() is PauseReason.energy


# --- between batches -------------------------------------------------------------------------------------------------


def work(device, steps, step_seconds=1.0, *, deadline=None, reserve=0.0):
    """Train ``steps`` steps; the seconds that were paused."""
    paused = []
    watched = WatchedWork(device.watch, deadline, reserve=reserve, on_pause=paused.append)
    for done in range(1, steps + 1):
        device.now += step_seconds
        watched.after_step(done, steps)
    return paused


def test_work_pauses_between_batches_and_resumes():
    device = Device(PI, after={20: {"temperature": 80.0}, 60: {"temperature": 65.0}})
    device.watch.look()
    (paused,) = work(device, 40, deadline=300)
    assert 60 <= paused <= 120
    assert device.now == pytest.approx(40 + paused)
    assert device.watch.hot


def test_work_that_cannot_meet_its_deadline_is_returned():
    device = Device(PI, after={20: {"temperature": 80.0}})
    device.watch.look()
    with pytest.raises(Paused) as pause:
        work(device, 40, deadline=150)
    assert pause.value.reason is PauseReason.heat
    assert device.now < 150 - (40 - 25), "in time: another minute of waiting, and the rest of the work would be late"


def test_where_even_a_minute_is_too_long_nothing_is_waited_for():
    device = Device(PI, after={20: {"temperature": 80.0}})
    device.watch.look()
    with pytest.raises(Paused):
        work(device, 40, deadline=60)
    assert device.now <= 30 + 1


def test_a_failing_supply_hands_back_at_once():
    device = Device(PI, after={20: {"under_voltage": 1.0}})
    device.watch.look()
    with pytest.raises(Paused) as pause:
        work(device, 40, deadline=10_000)
    assert pause.value.reason is PauseReason.power
    assert device.now <= 26


def test_work_without_a_deadline_waits_indefinitely():
    device = Device(PI, after={20: {"temperature": 80.0}, 5000: {"temperature": 50.0}})
    device.watch.look()
    (paused,) = work(device, 40)
    assert paused > 4900


def test_work_that_is_done_is_not_held_up():
    device = Device(PI, after={6: {"temperature": 95.0}})
    device.watch.look()
    assert work(device, 10, deadline=1000) == []


def test_duty_rests_as_long_as_it_says():
    device = Device(Policy(duty=0.25))
    work(device, 5, step_seconds=2.0)
    assert device.now == pytest.approx(5 * 2 + 4 * 6), "nobody rests after the last step"
