"""Devices that fall silent: who waits for them stops waiting, and nobody else is taken for one of them."""

from __future__ import annotations

import pytest
from sqlalchemy import event

from sparrow.coordinator.errors import Finished, RoundClosed
from sparrow.coordinator.rounds.expiry import GAP_SECONDS
from sparrow.coordinator.rounds.last_seen import WRITE_SECONDS
from sparrow.protocol.messages import ChangeFederation

from .fakes import FakeDevice, LocalCoordinator

STEP = 5.0


@pytest.fixture
def coordinator(open_coordinator):
    return open_coordinator()


@pytest.fixture
def wait(clock):
    """Lets seconds pass, looking every few of them, while these devices say that they work."""

    def wait(coordinator, seconds, *working):
        for _ in range(int(seconds // STEP)):
            clock.pass_seconds(STEP)
            for device, assignment in working:
                device.beat(assignment)
            coordinator.rounds.advance()

    return wait


def test_a_silent_device_is_waited_for_no_longer_than_a_minute(coordinator, wait, answer, train):
    coordinator.create(deadline_seconds=300)
    here, gone = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    late = gone.ask()
    answer(here)
    wait(coordinator, 55)
    assert coordinator.record(1).status == "open"
    wait(coordinator, 5)
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired, record.seconds) == ("closed", 1, 1, 60)
    assert coordinator.record(2).cohort == ("a",), "the other is away"
    with pytest.raises(RoundClosed, match="its round no longer waits for it"):
        gone.beat(late)
    answer(here)
    wait(coordinator, 5)
    assert coordinator.record(3).cohort == ("a",), "a heartbeat is no call for work"
    assert gone.ask() is None
    answer(here)
    coordinator.rounds.advance()
    assert coordinator.record(4).cohort == ("a", "b"), "exactly as after a missed deadline"


def test_one_that_says_that_it_works_has_until_the_deadline(coordinator, wait, answer):
    coordinator.create(deadline_seconds=300)
    quick, slow = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = slow.ask()
    answer(quick)
    wait(coordinator, 290, (slow, assignment))
    assert coordinator.record(1).status == "open"
    answer(slow)
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 2


def test_one_that_died_before_it_asked_is_silent_from_the_start_of_its_round(coordinator, wait, answer):
    coordinator.create(deadline_seconds=300, silence_seconds=19)
    here, _ = coordinator.enrol("a", "b")
    wait(coordinator, 5)
    answer(here)
    wait(coordinator, 15)
    assert coordinator.record(1).status == "open", "it was given its work 15 seconds ago"
    wait(coordinator, 5)
    assert (coordinator.record(1).status, coordinator.record(1).expired) == ("closed", 1)


def test_a_process_that_hosts_many_in_turn_may_leave_them_silent(coordinator, wait, answer):
    coordinator.create(deadline_seconds=300)
    (here,) = coordinator.enrol("a")
    hosted = FakeDevice(coordinator, "b", "f", 1.0, hosted=True)
    hosted.enrol()
    coordinator.rounds.advance()
    answer(here)
    wait(coordinator, 295)
    assert coordinator.record(1).status == "open"
    wait(coordinator, 5)
    assert coordinator.record(1).expired == 1, "its deadline holds"


def test_evaluations_too_keep_nobody_waiting(coordinator, wait, answer):
    coordinator.create(rounds=1, deadline_seconds=300, evaluation_interval=1)
    here, gone = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(here), answer(gone)
    coordinator.rounds.advance()
    assert answer(here).kind == "evaluate"
    assert gone.ask().kind == "evaluate"
    wait(coordinator, 55)
    assert coordinator.info().status == "running"
    wait(coordinator, 5)
    assert coordinator.info().status == "finished"


def test_a_buffer_fills_with_those_that_are_there(coordinator, wait, answer):
    coordinator.create(deadline_seconds=300, buffer=2, cohort=2, min_devices=3)
    devices = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    first, gone = [device for device in devices if device.ask()]
    answer(first)
    coordinator.rounds.advance()
    (third,) = [device for device in devices if device not in (first, gone)]
    answer(third)
    coordinator.rounds.advance()
    assert coordinator.info().round == 1, "a buffer waits for nobody"
    for _ in range(12):
        wait(coordinator, 5, *((device, asked) for device in (first, third) if (asked := device.ask())))
    (device,) = [device for device in coordinator.device_lists.list("f")[0] if device.name == gone.name]
    assert device.doing == "away"


def test_another_device_prepares_the_model_where_the_first_one_is_gone(coordinator, wait):
    coordinator.create(method="grasp", deadline_seconds=300)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    (asked,) = [device for device in devices if (given := device.ask()) and given.kind == "prepare"]
    wait(coordinator, 60)
    coordinator.rounds.advance()
    (other,) = [device for device in devices if device is not asked]
    assert other.ask().kind == "prepare"


def test_nobody_waits_for_a_device_that_adapts_the_finished_model(coordinator, wait, play):
    coordinator.create(rounds=1)
    play(coordinator, coordinator.enrol("a", "b"))
    (late,) = coordinator.enrol("late")
    adapting = late.ask()
    assert adapting.kind == "adapt"
    wait(coordinator, 600)
    late.beat(adapting)
    with pytest.raises(Finished):
        coordinator.enrol("a")[0].ask()


def test_silence_is_counted_from_the_coordinators_restart(open_coordinator, clock, wait, answer):
    coordinator = open_coordinator()
    coordinator.create(deadline_seconds=10_000)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(devices[0])
    wait(coordinator, 55)
    coordinator = open_coordinator()  # restarted
    coordinator.rounds.resume_after_restart()
    wait(coordinator, 55)
    assert coordinator.record(1).status == "open"
    coordinator.federations.change("f", ChangeFederation(action="pause"))
    wait(coordinator, 300)
    coordinator.federations.change("f", ChangeFederation(action="resume"))
    wait(coordinator, 55)
    assert coordinator.record(1).status == "open"
    clock.pass_seconds(GAP_SECONDS + 60)  # it stood still: a suspended machine, a disk that was full
    wait(coordinator, 55)
    assert coordinator.record(1).status == "open"
    wait(coordinator, 10)
    assert coordinator.record(1).status == "closed"


def test_heartbeats_are_written_down_together_and_seldom(coordinator, clock):
    coordinator.create(min_devices=3)
    devices = coordinator.enrol("a", "b")
    commits = []
    event.listen(coordinator.store.engine, "commit", commits.append)
    for _ in range(int(4 * WRITE_SECONDS)):
        clock.pass_seconds(1)
        for device in devices:
            coordinator.last_seen.note(device.id)
        coordinator.last_seen.write()
    assert len(commits) == 4
    coordinator.last_seen.note(devices[0].id)
    seen = {device.name: device.seen_at for device in coordinator.device_lists.list("f")[0]}
    assert seen["a"] == seen["b"] > "2023-11-14T22:14:00", "the records know, to within seconds"


def test_what_another_process_has_heard_counts(postgresql, tmp_path, clock, answer):
    url = postgresql.new_database()
    mover = LocalCoordinator(tmp_path / "data", clock, database_url=url)
    mover.store.settled()
    other = LocalCoordinator(tmp_path / "data", clock, database_url=url)
    try:
        mover.create(deadline_seconds=1000)
        works, gone = mover.enrol("a", "b")
        mover.rounds.advance()
        works.ask(), gone.ask()
        for passed in range(5, 301, 5):
            clock.pass_seconds(5)
            if passed % 20 == 0:
                other.last_seen.note(works.id)
            for each in (mover, other):
                each.last_seen.write()
            mover.rounds.advance()
            awaited = {each.device for each in mover.open_assignments.list("f").assignments}
            assert awaited == ({"a", "b"} if passed < 60 + WRITE_SECONDS else {"a"}), passed
    finally:
        other.store.close()
        mover.store.close()
