"""Rounds that do not wait for everybody: over-selection, rounds that lack updates, and buffered asynchronous ones."""

from __future__ import annotations

import numpy as np
import pytest

from sparrow.coordinator.commands.backup import blobs_named
from sparrow.coordinator.errors import BadContent, RoundClosed
from sparrow.coordinator.methods import load_method, why_not_buffered
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.masks import pack, unpack
from sparrow.protocol.messages import CreateFederation, Phase, UploadCost
from sparrow.protocol.settings import FederationSettings

from .fakes import DIGITS, STOPS

pytestmark = pytest.mark.integration  # plays whole federations


@pytest.fixture
def coordinator(open_coordinator):
    return open_coordinator()


def values(coordinator):
    """The global model, packed."""
    return pack(DIGITS, checkpoint.load(coordinator.model())[0], None)


def sent(train, assignment):
    """What a device that trains everything answers."""
    return bundle.decode(train(DIGITS, assignment), DIGITS).values.astype(np.float64)


# --- over-selection ------------------------------------------------------------------------------------------------


def test_more_are_drawn_than_are_waited_for(coordinator, answer, train):
    coordinator.create(cohort=4, over_selection=0.5, min_devices=8)
    devices = {device.name: device for device in coordinator.enrol(*"abcdefgh")}
    coordinator.rounds.advance()
    drawn = coordinator.record(1).cohort
    assert len(drawn) == 6
    late = devices[drawn[0]].ask()
    for name in drawn[2:]:
        assert coordinator.info().round == 0
        answer(devices[name])
        coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired, record.cohort) == ("closed", 4, 2, drawn)
    with pytest.raises(RoundClosed, match=r"round 1\b"):
        devices[drawn[0]].send(late, train(DIGITS, late))


def test_a_quorum_is_one_of_those_that_are_waited_for(coordinator, answer):
    coordinator.create(cohort=4, over_selection=0.5, quorum=0.5, min_devices=6)
    devices = coordinator.enrol(*"abcdef")
    coordinator.rounds.advance()
    for device in devices[:2]:
        answer(device)
    coordinator.rounds.advance()
    assert (coordinator.info().round, coordinator.record(1).updates) == (1, 2)


def test_where_fewer_are_there_all_of_them_are_waited_for(coordinator, answer):
    coordinator.create(cohort=4, over_selection=0.5, min_devices=3)
    devices = coordinator.enrol(*"abc")
    coordinator.rounds.advance()
    for device in devices[:2]:
        answer(device)
    coordinator.rounds.advance()
    assert coordinator.info().round == 0
    answer(devices[2])
    coordinator.rounds.advance()
    assert coordinator.info().round == 1


# --- rounds that lack updates --------------------------------------------------------------------------------------


def test_a_round_that_lacks_updates_is_extended_and_given_to_others(coordinator, clock, answer):
    coordinator.create(cohort=3, min_devices=5, min_updates=3, extensions=1, deadline_seconds=100)
    devices = {device.name: device for device in coordinator.enrol(*"abcde")}
    coordinator.rounds.advance()
    first = coordinator.record(1).cohort
    answer(devices[first[0]])
    clock.pass_seconds(100)
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired) == ("open", 1, 0)
    assert set(record.cohort) == set("abcde"), "two were missing, and two more were asked"
    assert devices[first[1]].ask().deadline_seconds == 100
    for name in (record.cohort[3], first[1]):
        answer(devices[name])
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired, record.left_out) == ("closed", 3, 2, {})
    assert coordinator.info().model_version == 1


def test_one_that_still_lacks_updates_is_skipped(coordinator, clock, answer):
    coordinator.create(cohort=3, min_devices=3, min_updates=3, extensions=1, deadline_seconds=100)
    devices = coordinator.enrol(*"abc")
    before = coordinator.model()
    coordinator.rounds.advance()
    answer(devices[0])
    for _ in range(2):
        assert coordinator.info().round == 0
        clock.pass_seconds(100)
        coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired) == ("closed", 1, 2)
    assert record.left_out == {"a": "skipped: 1 updates arrived, but min_updates is 3"}
    assert (coordinator.model(), coordinator.info().model_version) == (before, 0)
    assert (record.base_version, record.model_version) == (0, 0)
    assert coordinator.record(2).cohort == ("a",), "the others missed the deadline"


def test_when_all_handed_back_others_are_asked_at_once_or_when_they_come(coordinator, clock, answer):
    coordinator.create(cohort=1, min_devices=1, extensions=5, deadline_seconds=100)
    (tired,) = coordinator.enrol("a")
    coordinator.rounds.advance()
    tired.hand_back(tired.ask())
    assert not coordinator.rounds.advance(), "nobody else is there"
    (fresh,) = coordinator.enrol("b")
    coordinator.rounds.advance()
    assert answer(fresh).round == 1
    coordinator.rounds.advance()
    assert (coordinator.record(1).updates, coordinator.record(1).handed_back) == (1, 1)


def test_an_extended_round_survives_a_restart_and_folds_in_the_same_order(open_coordinator, clock, answer):
    coordinator = open_coordinator()
    coordinator.create(cohort=2, min_devices=4, min_updates=2, extensions=1, deadline_seconds=100)
    devices = {device.name: device for device in coordinator.enrol(*"abcd")}
    coordinator.rounds.advance()
    first, second = coordinator.record(1).cohort
    answer(devices[second])
    clock.pass_seconds(100)
    coordinator.rounds.advance()
    coordinator = open_coordinator()
    for device in devices.values():
        device.coordinator = coordinator
    coordinator.rounds.resume_after_restart()
    third = coordinator.record(1).cohort[2]
    answer(devices[third])
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 2
    assert coordinator.record(1).cohort == (first, second, third)


# --- buffered rounds -----------------------------------------------------------------------------------------------


def test_a_round_closes_when_its_buffer_is_full_and_late_updates_count_in_the_next(coordinator, answer, train):
    coordinator.create(buffer=2, cohort=3, min_devices=4, rounds=10)
    devices = {device.name: device for device in coordinator.enrol(*"abcd")}
    coordinator.rounds.advance()
    drawn = coordinator.record(1).cohort
    assert len(drawn) == 3
    slow, (idle,) = devices[drawn[0]], set("abcd") - set(drawn)
    began, w0 = slow.ask(), values(coordinator)
    assert devices[idle].ask() is None
    done = [answer(devices[drawn[1]])]
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 1, "what waits shows in the open round"
    assert devices[idle].ask().round == 1, "who is done makes room for another"
    done.append(answer(devices[drawn[2]]))
    coordinator.rounds.advance()
    first = coordinator.record(1)
    assert (first.status, first.updates, first.expired, first.notes["stale_updates"]) == ("closed", 2, 0, 0)
    w1 = values(coordinator)
    wanted = np.mean([sent(train, each) for each in done], axis=0)
    np.testing.assert_allclose(w1, wanted, rtol=2e-7, atol=1e-7)

    assert slow.ask().assignment_id == began.assignment_id, "it trains on"
    assert len(coordinator.record(2).cohort) == 1, "two of three still train, so that one more is asked"
    fresh = answer(devices[coordinator.record(2).cohort[0]])
    assert slow.send(began, train(DIGITS, began))
    coordinator.rounds.advance()
    second = coordinator.record(2)
    assert (second.status, second.updates) == ("closed", 2)
    assert (second.notes["stale_updates"], second.notes["most_stale"]) == (1, 1)
    moved = [sent(train, fresh) - w1, 2**-0.5 * (sent(train, began) - w0)]
    np.testing.assert_allclose(values(coordinator), w1 + np.mean(moved, axis=0), rtol=1e-5, atol=1e-6)
    assert {each.device for each in coordinator.records.reports("f", 2)} == {slow.name, second.cohort[0]}


def test_the_exponent_decides_what_old_updates_count(coordinator, answer, train):
    coordinator.create(buffer=1, cohort=2, min_devices=2, rounds=10, staleness_exponent=2)
    first, slow = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    began, w0 = slow.ask(), values(coordinator)
    for _ in range(2):
        answer(first)
        coordinator.rounds.advance()
    before = values(coordinator)
    slow.send(began, train(DIGITS, began))
    coordinator.rounds.advance()
    wanted = before + (sent(train, began) - w0) / 9
    for spec, _, part in unpack(DIGITS, wanted, None):
        if spec.name.endswith("running_var"):  # of which no model has any below 0
            np.maximum(part, 0, out=part)
    np.testing.assert_allclose(values(coordinator), wanted, rtol=1e-5, atol=1e-6)
    assert coordinator.record(3).notes["most_stale"] == 2


def test_every_acknowledged_update_counts_once_and_the_last_round_takes_all(coordinator, answer, train):
    coordinator.create(buffer=2, cohort=4, min_devices=5, rounds=3)
    devices = coordinator.enrol(*"abcde")
    acknowledged = 0
    coordinator.rounds.advance()
    for _ in range(50):
        if coordinator.info().status == "finished":
            break
        for device in devices:  # several come before rounds move
            assignment = device.ask() if coordinator.info().status == "running" else None
            if assignment is not None and assignment.kind == "train":
                acknowledged += device.send(assignment, train(DIGITS, assignment))
            elif assignment is not None:
                answer(device)
        coordinator.rounds.advance()
    records = coordinator.records.rounds("f")
    assert coordinator.info().status == "finished"
    assert sum(record.updates for record in records) == acknowledged
    assert [record.updates for record in records[:2]] == [2, 2]
    assert records[2].updates > 2, "nothing follows that it could count in"
    assert not coordinator.store.blobs.keys("1/updates")


def test_a_restart_makes_the_same_model_of_what_had_arrived(open_coordinator, clock, train, tmp_path):
    def play(name, *, restarts):
        coordinator = open_coordinator()
        settings = FederationSettings(buffer=3, cohort=4, min_devices=4, rounds=2, evaluation_interval=0, seed=1)
        coordinator.publisher.create(CreateFederation(name=name, task="digits", settings=settings))
        devices = coordinator.enrol(*"abcd", federation=name)
        coordinator.rounds.advance()
        for device in (devices[2], devices[0], devices[3], devices[1]):
            assignment = device.ask()
            # Not of the key, which the name of the federation decides.
            work = assignment.work.model_copy(update={"key": device.name})
            body = train(DIGITS, assignment.model_copy(update={"work": work}))
            device.send(assignment, body)
            if restarts:
                coordinator = open_coordinator()
                for each in devices:
                    each.coordinator = coordinator
            coordinator.rounds.advance()
        return coordinator.federations.get(name).model_sha256

    assert play("plain", restarts=False) == play("restarted", restarts=True)


def test_what_still_waits_keeps_its_files_and_the_model_it_was_trained_on(coordinator, answer, train):
    coordinator.create(buffer=1, cohort=3, min_devices=3, rounds=10)
    devices = coordinator.enrol(*"abc")
    coordinator.rounds.advance()
    for device in devices:
        device.send(assignment := device.ask(), train(DIGITS, assignment))
    with coordinator.store.reading() as db:
        named = blobs_named(db)
    assert sum(key.startswith("1/updates/") for key in named) == 3, "a backup has what no model holds yet"
    stored = {key for folder in ("updates", "models", "files") for key in coordinator.store.blobs.keys(f"1/{folder}")}
    assert named <= stored
    coordinator.rounds.advance()
    assert [record.updates for record in coordinator.records.rounds("f")[:3]] == [1, 1, 1]
    assert [record.notes["most_stale"] for record in coordinator.records.rounds("f")[:3]] == [0, 1, 2]


def test_a_device_that_takes_too_long_makes_room(coordinator, clock, answer):
    coordinator.create(buffer=1, cohort=2, min_devices=2, rounds=10, deadline_seconds=100)
    quick, gone = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    gone.ask()
    clock.pass_seconds(60)
    answer(quick)
    coordinator.rounds.advance()
    answer(quick)
    clock.pass_seconds(40)
    coordinator.rounds.advance()
    clock.pass_seconds(1)
    coordinator.rounds.advance()
    assert coordinator.record(1).expired == 1
    assert coordinator.info().status == "running"


def test_stopping_takes_what_came_and_refuses_the_rest(coordinator, answer, train):
    coordinator.create(buffer=2, cohort=2, min_devices=2, rounds=10)
    first, slow = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    late = slow.ask()
    answer(first)
    coordinator.rounds.advance()
    coordinator.change(action="stop")
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired) == ("closed", 1, 1)
    with pytest.raises(RoundClosed):
        slow.send(late, train(DIGITS, late))


def test_when_all_have_stopped_what_waits_still_counts(coordinator, answer):
    coordinator.create(buffer=2, cohort=3, min_devices=3, rounds=10, **STOPS)
    devices = coordinator.enrol(*"abc")
    coordinator.rounds.advance()
    for device in devices:
        answer(device, stopped=True)
    coordinator.rounds.advance()
    for device in devices:
        answer(device)  # the last evaluation
    coordinator.rounds.advance()
    records = coordinator.records.rounds("f")
    assert [record.updates for record in records] == [2, 1]
    assert (coordinator.info().status, coordinator.info().reason) == ("finished", "all_stopped")


def test_an_older_model_is_taken_up_without_what_was_trained_on_later_ones(coordinator, answer, train):
    coordinator.create(buffer=1, cohort=2, min_devices=2, rounds=10)
    first, slow = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(first)
    coordinator.rounds.advance()
    late = slow.ask()
    coordinator.change(action="rollback", model_version=1)
    answer(first)
    coordinator.rounds.advance()
    assert coordinator.info().model_version == 1
    with pytest.raises(RoundClosed):
        slow.send(late, train(DIGITS, late))
    assert coordinator.record(2).undone
    answer(first)
    coordinator.rounds.advance()
    assert coordinator.record(3).base_version == 1


@pytest.mark.parametrize(
    "method",
    ["fedavg", "fedprox", "fedspu", "feddrop", "heterofl", "fjord", "ditto", "fedem", "pfedme", "perfedavg", "fedper"],
)
def test_methods_that_take_a_mean_can(method):
    assert why_not_buffered(load_method(method), FederationSettings()) is None


@pytest.mark.parametrize("method", ["fedsgc", "feddst", "votedst", "prunefl", "grasp", "dmpfl", "pfedgate"])
def test_methods_whose_rounds_build_on_one_model_cannot(coordinator, method):
    with pytest.raises(BadContent, match=f"buffer: {method} "):
        coordinator.create(method=method, buffer=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"buffer": 4, "cohort": 3}, "buffer: a round would wait for 4 updates, but only 3 devices train at a time"),
        (
            {"buffer": 2, "quorum": 0.5},
            "buffer: a round closes when the buffer is full, so quorum, over_selection, min_updates",
        ),
        ({"min_updates": 4, "cohort": 3}, "min_updates: 4 is more than cohort, 3"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        FederationSettings(**settings)


def test_a_change_that_would_contradict_is_refused_and_changes_nothing(coordinator):
    coordinator.create(buffer=4, cohort=5)
    with pytest.raises(BadContent, match=r"buffer: .*\b4\b.*\b3\b"):
        coordinator.change(cohort=3)
    coordinator.enrol("a")
    assert coordinator.info().round == 0


def test_upload_costs_are_recorded_in_the_counted_round(coordinator, answer):
    coordinator.create(cohort=3, buffer=2, min_devices=3, rounds=10)
    one, two, slow = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    late = slow.ask()
    for device in (one, two):
        answer(device)
    coordinator.rounds.advance()
    answer(slow)
    answer(one)
    coordinator.rounds.advance()
    before = coordinator.record(2)
    assert (before.status, before.upload.seconds) == ("closed", 0.0)
    cost = UploadCost(assignment_id=late.assignment_id, upload=Phase(seconds=7.0, bytes_up=100))
    coordinator.costs.note(slow.id, cost)
    assert coordinator.record(1).upload.seconds == 0.0
    assert coordinator.record(2).upload.seconds == 7.0, "though it was given out in round 1"
