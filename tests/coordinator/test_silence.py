"""Devices that fall silent: who waits for them stops waiting, and nobody else is taken for one of them."""

from __future__ import annotations

import pytest
from sqlalchemy import event

from edge_sdk.protocol.messages import ChangeFederation
from sparrow.coordinator.errors import Finished, RoundClosed
from sparrow.coordinator.fleet.last_heard import WRITE_SECONDS
from sparrow.coordinator.rounds.engine import GAP_SECONDS
from sparrow.coordinator.storage.store import Store

from .fakes import FakeDevice, House

STEP = 5.0


@pytest.fixture
def house(open_house):
    return open_house()


@pytest.fixture
def wait(clock):
    """Lets seconds pass, looking every few of them, while these devices say that they work."""

    def wait(house, seconds, *working):
        for _ in range(int(seconds // STEP)):
            clock.pass_seconds(STEP)
            for device, assignment in working:
                device.beat(assignment)
            house.rounds.advance()

    return wait


def test_a_silent_device_is_waited_for_no_longer_than_a_minute(house, wait, answer, train):
    house.create(deadline_seconds=300)
    here, gone = house.enrol("a", "b")
    house.rounds.advance()
    late = gone.ask()
    answer(here)
    wait(house, 55)
    assert house.record(1).status == "open"
    wait(house, 5)
    record = house.record(1)
    assert (record.status, record.updates, record.expired, record.seconds) == ("closed", 1, 1, 60)
    assert house.record(2).cohort == ("a",), "the other is away"
    with pytest.raises(RoundClosed, match="nobody waits for it any more"):
        gone.beat(late)
    answer(here)
    wait(house, 5)
    assert house.record(3).cohort == ("a",), "a heartbeat is no call for work"
    assert gone.ask() is None
    answer(here)
    house.rounds.advance()
    assert house.record(4).cohort == ("a", "b"), "exactly as after a missed deadline"


def test_one_that_says_that_it_works_has_until_the_deadline(house, wait, answer):
    house.create(deadline_seconds=300)
    quick, slow = house.enrol("a", "b")
    house.rounds.advance()
    assignment = slow.ask()
    answer(quick)
    wait(house, 290, (slow, assignment))
    assert house.record(1).status == "open"
    answer(slow)
    house.rounds.advance()
    assert house.record(1).updates == 2


def test_one_that_died_before_it_asked_is_silent_from_the_start_of_its_round(house, wait, answer):
    house.create(deadline_seconds=300, silence_seconds=20)
    here, _ = house.enrol("a", "b")
    wait(house, 5)
    answer(here)
    wait(house, 15)
    assert house.record(1).status == "open", "it was given its work 15 seconds ago"
    wait(house, 5)
    assert (house.record(1).status, house.record(1).expired) == ("closed", 1)


def test_a_process_that_hosts_many_in_turn_may_leave_them_silent(house, wait, answer):
    house.create(deadline_seconds=300)
    (here,) = house.enrol("a")
    hosted = FakeDevice(house, "b", "f", 1.0, hosted=True)
    hosted.enrol()
    house.rounds.advance()
    answer(here)
    wait(house, 295)
    assert house.record(1).status == "open"
    wait(house, 5)
    assert house.record(1).expired == 1, "its deadline holds"


def test_evaluations_too_keep_nobody_waiting(house, wait, answer):
    house.create(rounds=1, deadline_seconds=300, evaluation_interval=1)
    here, gone = house.enrol("a", "b")
    house.rounds.advance()
    answer(here), answer(gone)
    house.rounds.advance()
    assert answer(here).kind == "evaluate"
    assert gone.ask().kind == "evaluate"
    wait(house, 55)
    assert house.info().status == "running"
    wait(house, 5)
    assert house.info().status == "finished"


def test_a_buffer_fills_with_those_that_are_there(house, wait, answer):
    house.create(deadline_seconds=300, buffer=2, cohort=2, min_devices=3)
    devices = house.enrol("a", "b", "c")
    house.rounds.advance()
    first, gone = [device for device in devices if device.ask()]
    answer(first)
    house.rounds.advance()
    (third,) = [device for device in devices if device not in (first, gone)]
    answer(third)
    house.rounds.advance()
    assert house.info().round == 1, "a buffer waits for nobody"
    for _ in range(12):
        wait(house, 5, *((device, asked) for device in (first, third) if (asked := device.ask())))
    (device,) = [device for device in house.roster.list("f")[0] if device.name == gone.name]
    assert device.doing == "away"


def test_another_device_prepares_the_model_where_the_first_one_is_gone(house, wait):
    house.create(method="grasp", deadline_seconds=300)
    devices = house.enrol("a", "b")
    house.rounds.advance()
    (asked,) = [device for device in devices if (given := device.ask()) and given.kind == "prepare"]
    wait(house, 60)
    house.rounds.advance()
    (other,) = [device for device in devices if device is not asked]
    assert other.ask().kind == "prepare"


def test_nobody_waits_for_a_device_that_adapts_the_finished_model(house, wait, play):
    house.create(rounds=1)
    play(house, house.enrol("a", "b"))
    (late,) = house.enrol("late")
    adapting = late.ask()
    assert adapting.kind == "adapt"
    wait(house, 600)
    late.beat(adapting)
    with pytest.raises(Finished):
        house.enrol("a")[0].ask()


def test_silence_counts_anew_where_nobody_could_be_heard(open_house, clock, wait, answer):
    house = open_house()
    house.create(deadline_seconds=10_000)
    devices = house.enrol("a", "b")
    house.rounds.advance()
    answer(devices[0])
    wait(house, 55)
    house = open_house()  # restarted
    house.rounds.resume_after_restart()
    wait(house, 55)
    assert house.record(1).status == "open"
    house.federations.change("f", ChangeFederation(action="pause"))
    wait(house, 300)
    house.federations.change("f", ChangeFederation(action="resume"))
    wait(house, 55)
    assert house.record(1).status == "open"
    clock.pass_seconds(GAP_SECONDS + 60)  # it stood still: a suspended machine, a disk that was full
    wait(house, 55)
    assert house.record(1).status == "open"
    wait(house, 10)
    assert house.record(1).status == "closed"


def test_heartbeats_are_written_down_together_and_seldom(house, clock):
    house.create(min_devices=3)
    devices = house.enrol("a", "b")
    commits = []
    event.listen(house.store._engine, "commit", commits.append)
    for _ in range(int(4 * WRITE_SECONDS)):
        clock.pass_seconds(1)
        for device in devices:
            house.heard.note(device.id)
        house.heard.write()
    assert len(commits) == 4
    house.heard.note(devices[0].id)
    seen = {device.name: device.seen_at for device in house.roster.list("f")[0]}
    assert seen["a"] == seen["b"] > "2023-11-14T22:14:00", "the records know, to within seconds"


def test_what_another_process_has_heard_counts(postgresql, tmp_path, clock, answer):
    url = postgresql.new_database()
    mover = House(tmp_path / "data", clock, lambda folder: Store(folder, url))
    mover.store.settled()
    other = House(tmp_path / "data", clock, lambda folder: Store(folder, url))
    try:
        mover.create(deadline_seconds=1000)
        works, gone = mover.enrol("a", "b")
        mover.rounds.advance()
        works.ask(), gone.ask()
        for passed in range(5, 301, 5):
            clock.pass_seconds(5)
            if passed % 20 == 0:
                other.heard.note(works.id)
            for each in (mover, other):
                each.heard.write()
            mover.rounds.advance()
            awaited = {each.device for each in mover.records.open_work("f").assignments}
            assert awaited == ({"a", "b"} if passed < 60 + WRITE_SECONDS else {"a"}), passed
    finally:
        other.store.close()
        mover.store.close()
