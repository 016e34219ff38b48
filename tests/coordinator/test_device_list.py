"""What is known of each device: why it failed, whether it is there, and what it did."""

from __future__ import annotations

import pytest

from sparrow.coordinator.errors import BadContent, Finished, NameTaken, NotAuthenticated, NotFound
from sparrow.coordinator.reports.device_list import DeviceLists, DeviceQuery
from sparrow.coordinator.storage.tables import Device
from sparrow.protocol.failures import FAILURES
from sparrow.protocol.messages import ChangeDevice, Conditions, Doing, Enrol, Evaluation, PauseReason, Receipt

OOM = "RuntimeError: CUDA out of memory"


@pytest.fixture
def begin(open_coordinator):
    """Makes a coordinator with a federation of two devices, and lists of its devices."""

    def make(**settings):
        coordinator = open_coordinator()
        coordinator.create(**{"cohort": 2, "min_devices": 2, "rounds": 2, **settings})
        lists = DeviceLists(coordinator.store, coordinator.clock, lambda: 10.0)
        return coordinator, coordinator.enrol("a", "b"), lists

    return make


def of(lists, name):
    return next(each for each in lists.list("f")[0] if each.name == name)


def test_why_work_was_handed_back_is_told_until_the_next_update(begin, answer):
    coordinator, (one, other), lists = begin()
    coordinator.rounds.advance()
    one.hand_back(one.ask(), OOM)
    failure = of(lists, "a").failure
    assert (failure.reason, failure.round, failure.kind) == (OOM, 1, "train")
    assert of(lists, "b").failure is None
    answer(other)
    coordinator.clock.pass_seconds(70)
    coordinator.rounds.advance()
    answer(one)
    assert of(lists, "a").failure is None


def test_a_device_that_was_refused_rests_and_the_list_says_why(begin):
    coordinator, (one, _), lists = begin()
    coordinator.rounds.advance()
    assignment = one.ask()
    for _ in range(3):
        with pytest.raises(BadContent):
            one.send(assignment, b"not an update")
    found = of(lists, "a")
    assert found.doing is Doing.resting
    assert found.refusals == 3
    assert found.failure.reason.startswith("3 updates in a row were refused; it gets no work for 10 minutes")


def test_why_a_device_left_is_told_with_work_and_without(begin):
    coordinator, (one, other), lists = begin()
    gone = Conditions(available=False, reason=OOM)
    coordinator.devices.change(other.id, ChangeDevice(conditions=gone))
    assert of(lists, "b").failure.round is None
    coordinator.devices.change(other.id, ChangeDevice(conditions=Conditions()))
    coordinator.rounds.advance()
    one.ask()
    coordinator.devices.change(one.id, ChangeDevice(conditions=gone))
    failure = of(lists, "a").failure
    assert (failure.reason, failure.round) == (OOM, 1)


def test_a_pause_of_its_policy_is_no_failure(begin):
    coordinator, (one, _), lists = begin()
    coordinator.devices.change(one.id, ChangeDevice(conditions=Conditions(available=False, reason="heat")))
    assert (of(lists, "a").doing, of(lists, "a").failure) == (Doing.paused, None)


def test_a_missed_deadline_and_silence_are_told_apart(begin):
    coordinator, (one, _), lists = begin(deadline_seconds=100, silence_seconds=1000)
    coordinator.rounds.advance()
    one.ask()
    coordinator.clock.pass_seconds(101)
    coordinator.rounds.advance()
    assert of(lists, "a").failure.reason == "it missed the deadline"


def test_nobody_that_died_is_shown_as_ready(begin):
    coordinator, devices, lists = begin(min_devices=3)
    assert {each.doing for each in lists.list("f")[0]} == {Doing.ready}
    coordinator.clock.pass_seconds(60)
    devices[0].ask()
    coordinator.last_seen.write()
    coordinator.clock.pass_seconds(60)
    assert (of(lists, "a").doing, of(lists, "b").doing) == (Doing.ready, Doing.offline)
    coordinator.clock.pass_seconds(600)
    found, count = lists.list("f", DeviceQuery(doing=Doing.offline))
    assert ([each.name for each in found], count) == (["a", "b"], 2)
    assert "Offline devices: 2" in [each.text for each in coordinator.overviews.look("f").notices]


def test_devices_of_a_federation_that_has_ended_are_done(begin, play):
    coordinator, devices, lists = begin(rounds=1)
    play(coordinator, devices)
    assert coordinator.info().status == "finished"
    coordinator.clock.pass_seconds(3600)
    assert {each.doing for each in lists.list("f")[0]} == {Doing.done}


def test_a_devices_history_has_work_and_results(begin, answer):
    coordinator, (one, other), lists = begin(evaluation_interval=1)
    coordinator.rounds.advance()
    answer(one)
    other.hand_back(other.ask(), OOM)
    coordinator.rounds.advance()
    answer(one)
    history = lists.history(one.id, 10)
    assert (history.federation, history.device.name) == ("f", "a")
    trained = next(each for each in history.work if each.kind == "train" and each.round == 1)
    judged = next(each for each in history.work if each.kind == "evaluate")
    assert (trained.status, trained.reason, judged.accuracy) == ("done", None, 0.5)
    failed = next(each for each in lists.history(other.id, 10).work if each.kind == "train")
    assert (failed.status, failed.reason) == ("returned", OOM)
    assert len(lists.history(one.id, 1).work) == 1
    with pytest.raises(NotFound, match="does not exist"):
        lists.history("nobody", 1)


def test_the_newest_failures_are_among_the_notices(begin):
    coordinator, (one, _), _ = begin()
    coordinator.rounds.advance()
    one.hand_back(one.ask(), OOM)
    assert f"a: {OOM}" in [each.text for each in coordinator.overviews.look("f").notices]


def test_a_failure_of_the_list_is_shown_in_words(begin, caplog):
    caplog.set_level("INFO")
    coordinator, (one, other), lists = begin()
    coordinator.rounds.advance()
    one.hand_back(one.ask(), "training-diverged/loss")
    gone = Conditions(available=False, reason="program-error/TypeError")
    coordinator.devices.change(other.id, ChangeDevice(conditions=gone))
    diverged = FAILURES["training-diverged/loss"]
    assert of(lists, "a").failure.reason == str(diverged)
    assert [each.reason for each in lists.history(one.id, 10).work] == [str(diverged)]
    assert of(lists, "b").failure.reason.startswith("its program failed (TypeError); ")
    notices = {each.text: each.remedy for each in coordinator.overviews.look("f").notices}
    assert notices[f"a: {diverged.cause}"].lower() == f"{diverged.advice}.".lower()
    assert notices["b: its program failed (TypeError)"] == "Read the traceback in its output."
    assert any(str(diverged) in each for each in caplog.messages)
    assert not any("training-diverged" in each for each in caplog.messages)


def test_a_failure_without_advice_has_no_remedy(begin):
    coordinator, (one, _), _ = begin()
    gone = Conditions(available=False, reason="interrupted/left")
    coordinator.devices.change(one.id, ChangeDevice(conditions=gone))
    notices = {each.text: each.remedy for each in coordinator.overviews.look("f").notices}
    assert notices["a: its user left the federation"] is None


def test_training_alone_is_the_devices_own_or_that_of_the_federation_local(begin, answer):
    coordinator, (one, two), lists = begin(evaluation_interval=1, rounds=1, cohort=2)

    def evaluated(device, accuracy, alone=None):
        found = Evaluation(num_examples=10, loss=1.0, accuracy=accuracy)
        others = {} if alone is None else {"alone": found.model_copy(update={"accuracy": alone})}
        device.send(device.ask(), Receipt(personal=found, others=others).model_dump_json().encode())

    coordinator.rounds.advance()
    for device in (one, two):
        answer(device)
    coordinator.rounds.advance()
    evaluated(one, 0.9, alone=0.6)
    evaluated(two, 0.5)
    assert (of(lists, "a").accuracy_alone, of(lists, "b").accuracy_alone) == (0.6, None)
    assert of(lists, "a").gain == pytest.approx(0.3)
    assert of(lists, "b").gain is None
    coordinator.create("by-itself", method="local", rounds=1, cohort=3, min_devices=3)
    others = coordinator.enrol("a", "b", "c", federation="by-itself")
    with coordinator.store.writing() as db:
        for device, accuracy in zip(others, (0.1, 0.7, 0.8), strict=True):
            db.get_one(Device, device.id).accuracy = accuracy
    assert of(lists, "a").accuracy_alone == 0.6
    assert of(lists, "b").gain == pytest.approx(-0.2)
    assert [each.name for each in lists.list("f", DeviceQuery(order="gain"))[0]] == ["b", "a"]
    assert [each.name for each in lists.list("f", DeviceQuery(order="-gain"))[0]] == ["a", "b"]
    assert lists.history(two.id, 1).device.gain == pytest.approx(-0.2)
    assert lists.list("by-itself")[0][0].gain is None


# --- a failure lasts until it is over ---------------------------------------------------------------------------------


def given(coordinator, answer, kind, device, other):
    """Let both work until the device is given work of this kind."""
    for _ in range(10):
        coordinator.rounds.advance()
        assignment = device.ask()
        if assignment is not None and assignment.kind == kind:
            return assignment
        if assignment is not None:
            answer(device)
        answer(other)
        # Longer than a device rests.
        coordinator.clock.pass_seconds(70)
    raise AssertionError(f"no {kind} in ten rounds")


@pytest.mark.parametrize("how", ["refused", "handed back", "late"])
def test_only_an_accepted_update_ends_a_failure_of_training(begin, answer, how):
    coordinator, (one, other), lists = begin(global_evaluation_interval=1, rounds=9)
    assignment = given(coordinator, answer, "train", one, other)
    answer(other)
    if how == "refused":
        with pytest.raises(BadContent):
            one.send(assignment, b"not an update")
        one.hand_back(assignment, "update-refused")
    elif how == "handed back":
        one.hand_back(assignment, "training-diverged/loss")
    else:
        coordinator.clock.pass_seconds(101)
        coordinator.rounds.advance()
    before = of(lists, "a").failure
    assert before.kind == "train"
    assert ("refused: " in before.reason) == (how == "refused")
    given(coordinator, answer, "evaluate", one, other)
    answer(one)
    assert of(lists, "a").failure == before
    given(coordinator, answer, "train", one, other)
    answer(one)
    found = of(lists, "a")
    assert (found.failure, found.refusals) == (None, 0)


def test_only_an_accepted_evaluation_ends_a_failure_of_one(begin, answer):
    coordinator, (one, other), lists = begin(global_evaluation_interval=1, rounds=9)
    one.hand_back(given(coordinator, answer, "evaluate", one, other), "program-error/TypeError")
    before = of(lists, "a").failure
    given(coordinator, answer, "train", one, other)
    answer(one)
    assert of(lists, "a").failure == before
    given(coordinator, answer, "evaluate", one, other)
    answer(one)
    assert of(lists, "a").failure is None


def test_updates_refused_in_a_row_are_counted_over_rounds_with_evaluations(begin, answer):
    coordinator, (one, other), lists = begin(global_evaluation_interval=1, rounds=9)
    for count in (1, 2, 3):
        assignment = given(coordinator, answer, "train", one, other)
        with pytest.raises(BadContent):
            one.send(assignment, b"not an update")
        assert of(lists, "a").refusals == count
        if count < 3:
            one.hand_back(assignment, "update-refused")
            given(coordinator, answer, "evaluate", one, other)
            answer(one)
    coordinator.last_seen.write()
    assert of(lists, "a").doing is Doing.resting
    assert coordinator.overviews.look("f").failing == 1


def test_a_lesser_failure_does_not_hide_a_worse_one_and_the_first_one_has_the_time(begin, answer):
    coordinator, (one, other), lists = begin(global_evaluation_interval=1, rounds=9)
    one.hand_back(given(coordinator, answer, "train", one, other), "training-diverged/loss")
    first = of(lists, "a").failure
    one.hand_back(given(coordinator, answer, "evaluate", one, other), "no-memory")
    assert of(lists, "a").failure == first
    stopped = Conditions(available=False, reason="interrupted/user")
    coordinator.devices.change(one.id, ChangeDevice(conditions=stopped))
    assert of(lists, "a").failure == first
    coordinator.clock.pass_seconds(70)
    failed = Conditions(available=False, reason="program-error/TypeError")
    coordinator.devices.change(one.id, ChangeDevice(conditions=failed))
    found = of(lists, "a").failure
    assert (found.kind, found.at) == (None, first.at)
    assert found.reason.startswith("its program failed (TypeError)")


@pytest.mark.parametrize(("reason", "over"), [("interrupted/user", True), ("program-error/TypeError", False)])
def test_a_device_that_was_interrupted_has_recovered_with_any_work(begin, answer, reason, over):
    coordinator, (one, other), lists = begin(global_evaluation_interval=1, rounds=9)
    coordinator.devices.change(one.id, ChangeDevice(conditions=Conditions(available=False, reason=reason)))
    assert of(lists, "a").failure is not None
    coordinator.rounds.advance()
    answer(other)
    given(coordinator, answer, "evaluate", one, other)
    answer(one)
    assert (of(lists, "a").failure is None) == over


# --- devices that could not join --------------------------------------------------------------------------------------


def tells(coordinator, name, failure, key="k", **more):
    request = Enrol(name=name, enrolment_key=name.ljust(32, key), failure=failure, **more)
    return coordinator.devices.enrol("f", request)


def test_a_device_that_could_not_join_is_listed_with_its_reason_and_takes_no_part(begin):
    coordinator, _, lists = begin(min_devices=3)
    enrolled = tells(coordinator, "small", "no-memory")
    found = of(lists, "small")
    assert (found.status, found.doing, found.present) == ("not_joined", Doing.not_joined, False)
    assert found.failure.reason == str(FAILURES["no-memory"])
    with pytest.raises(NotAuthenticated):
        coordinator.devices.authenticate(enrolled.token)
    coordinator.rounds.advance()
    assert (coordinator.info().status, coordinator.info().devices) == ("waiting", 2)
    overview = coordinator.overviews.look("f")
    (notice,) = (each for each in overview.notices if each.kind == "failed")
    assert notice.text == f"small could not join: {FAILURES['no-memory'].cause}"
    assert notice.remedy.endswith(" If it will not join again: sparrow device remove f small.")
    assert (overview.doing[Doing.not_joined], overview.failing) == (1, 1)
    assert "small" in lists.states("f", 10).names


def test_a_device_that_could_not_join_joins_later_and_its_failure_is_over(begin):
    coordinator, _, lists = begin(min_devices=3)
    tells(coordinator, "small", "no-memory")
    first = of(lists, "small").failure.at
    coordinator.clock.pass_seconds(100)
    tells(coordinator, "small", "data-unusable/values")
    found = of(lists, "small")
    assert (found.failure.at, found.failure.reason) == (first, str(FAILURES["data-unusable/values"]))
    enrolled = tells(coordinator, "small", None)
    assert coordinator.devices.authenticate(enrolled.token).federation == "f"
    assert (of(lists, "small").doing, of(lists, "small").failure) == (Doing.ready, None)
    coordinator.rounds.advance()
    assert coordinator.info().status == "running"


def test_a_device_that_could_not_join_can_be_removed(begin):
    coordinator, _, lists = begin()
    enrolled = tells(coordinator, "small", "no-memory")
    coordinator.devices.remove(enrolled.device_id)
    assert "small" not in [each.name for each in lists.list("f")[0]]
    assert [each for each in coordinator.overviews.look("f").notices if each.kind == "failed"] == []


def test_the_name_of_a_device_that_could_not_join_stays_free(begin):
    coordinator, _, lists = begin()
    tells(coordinator, "small", "no-memory")
    tells(coordinator, "small", None, key="x")
    assert (of(lists, "small").status, of(lists, "small").failure) == ("active", None)
    with pytest.raises(NameTaken):
        tells(coordinator, "small", None)
    assert len(lists.list("f")[0]) == 3


# --- after the end ----------------------------------------------------------------------------------------------------


def test_after_stop_each_device_keeps_its_state_until_it_has_heard_of_the_end(begin, answer):
    coordinator, devices, lists = begin(min_devices=6, cohort=6)
    well, dead, hot, failed = [*devices, *coordinator.enrol("hot", "failed")]
    late, lost = coordinator.enrol("late", "lost")
    coordinator.rounds.advance()
    for device in (well, dead, late):
        answer(device)
    hot.hand_back(hot.ask(), PauseReason.heat)
    failed.hand_back(failed.ask(), "training-diverged/loss")
    lost.ask()
    coordinator.clock.pass_seconds(101)
    coordinator.rounds.advance()
    coordinator.change(action="stop")
    coordinator.rounds.advance()
    assert answer(failed).kind == "adapt"
    for device in (well, failed):
        with pytest.raises(Finished):
            device.ask()
    coordinator.last_seen.write()
    coordinator.clock.pass_seconds(3600)
    expected = {
        "a": Doing.done,
        "b": Doing.offline,
        "hot": Doing.paused,
        "failed": Doing.untrained,
        "late": Doing.offline,
        "lost": Doing.away,
    }
    assert {each.name: each.doing for each in lists.list("f")[0]} == expected
    texts = [each.text for each in coordinator.overviews.look("f").notices]
    assert "lost: it missed the deadline" in texts
    assert "Offline devices: 2" in texts
    with pytest.raises(Finished):
        late.ask()
    coordinator.clock.pass_seconds(20)
    coordinator.last_seen.write()
    assert of(lists, "late").doing is Doing.done


def test_who_did_not_export_is_listed(begin, answer, play):
    coordinator, devices, lists = begin(rounds=1)
    tells(coordinator, "small", "no-memory")
    play(coordinator, devices)
    coordinator.devices.change(devices[0].id, ChangeDevice(exported=True))
    overview = coordinator.overviews.look("f")
    found, count = lists.list("f", DeviceQuery(only="not_exported"))
    assert ([each.name for each in found], count, overview.not_exported) == (["b"], 1, 1)
    assert of(lists, "a").exported
    # A model that has been trained on is not exported.
    coordinator.change(action="reopen", rounds=2)
    play(coordinator, devices)
    assert coordinator.overviews.look("f").not_exported == 2
