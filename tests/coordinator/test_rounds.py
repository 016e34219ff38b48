"""The life of rounds over real records and files, without HTTP, torch or waiting: devices here answer from a seed."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from edge_sdk.protocol import bundle, checkpoint
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.manifest import initial_values
from edge_sdk.protocol.masks import Block, NeuronDraw, NeuronMask, count_values, draw_neurons, pack
from edge_sdk.protocol.messages import (
    BudgetLimit,
    ChangeDevice,
    Conditions,
    FederationStatus,
    HandBack,
    PauseReason,
    Phase,
    PhaseSum,
    Telemetry,
    UpdateReport,
    UploadCost,
)
from sparrow.coordinator.errors import (
    BadContent,
    DifferentUpdate,
    Finished,
    NameTaken,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    RoundClosed,
    WrongState,
)
from sparrow.coordinator.reports.records import with_joules_per_point
from sparrow.coordinator.rounds.cohort import Candidate, choose
from sparrow.coordinator.rounds.dispatch import REST_SECONDS
from sparrow.coordinator.storage.store import Store

from .fakes import CALM, DIGITS, FakeDevice, House, answering, playing


@pytest.fixture
def house(open_house):
    return open_house()


# --- from waiting to finished ------------------------------------------------------------------------------------


def test_a_federation_waits_for_enough_devices(house):
    house.create(min_devices=2)
    assert not house.rounds.advance(), "nothing has happened"
    (one,) = house.enrol("one")
    assert not house.rounds.advance()
    assert house.info().status == FederationStatus.waiting
    assert one.ask() is None
    (two,) = house.enrol("two")
    assert house.rounds.advance()
    assert house.info().status == FederationStatus.running
    assert [device.ask().kind for device in (one, two)] == ["train", "train"]
    assert house.record(1).cohort == ("one", "two")
    assert house.record(1).status == "open"
    assert not house.rounds.advance(), "the round waits for its devices"


def test_rounds_follow_each_other_until_the_last(house, play):
    house.create(rounds=3)
    devices = house.enrol("a", "b", "c")
    play(house, devices)
    info = house.info()
    assert (info.status, info.reason, info.round, info.model_version) == ("finished", "max_rounds", 3, 3)
    records = house.records.rounds("f")
    assert [record.round for record in records] == [1, 2, 3]
    assert all(record.status == "closed" and record.updates == 3 for record in records)
    assert all(record.num_examples == 30 and record.train_loss == 0.5 for record in records)
    assert records[-1].model_sha256 == info.model_sha256
    assert len({record.model_sha256 for record in records}) == 3
    with pytest.raises(Finished, match="finished after 3 rounds; nothing is left to do, your personal model stays"):
        devices[0].ask()
    assert not house.rounds.advance()


def test_the_global_model_is_the_weighted_mean_of_the_updates(house, answer, train):
    """The whole way, from assignment to checkpoint, for two devices that train everything: numpy's average."""
    house.create(rounds=1)
    first, second = house.enrol("a", "b")
    house.rounds.advance()
    asked = [answer(first, examples=10), answer(second, examples=30)]
    house.rounds.advance()
    tensors, _ = checkpoint.load(house.model())

    sent = [bundle.decode(train(DIGITS, assignment), DIGITS).values.astype(np.float64) for assignment in asked]
    wanted = np.average(sent, axis=0, weights=[10, 30])
    np.testing.assert_allclose(pack(DIGITS, tensors, None), wanted, rtol=2e-7, atol=1e-12)


def test_the_cohort_is_the_documented_draw(house, answer):
    house.create(cohort=2, min_devices=6, seed=7)
    names = [f"dev-{number}" for number in range(6)]
    devices = {device.name: device for device in house.enrol(*names)}
    for number in (1, 2, 3):
        house.rounds.advance()
        drawn = choose([Candidate(name) for name in names], 2, job="f:7", round_number=number)
        assert list(house.record(number).cohort) == drawn
        for name, device in devices.items():
            assert (answer(device) is not None) == (name in drawn)


def test_those_who_took_part_longest_ago_are_drawn_first_where_that_is_the_policy(house, answer):
    house.create(cohort=2, rounds=4, min_devices=4, cohort_policy="least_recently")
    devices = house.enrol(*"abcd")
    for _ in range(4):
        house.rounds.advance()
        for device in devices:
            answer(device)
    cohorts = [record.cohort for record in house.records.rounds("f")]
    assert sorted(name for cohort in cohorts[:2] for name in cohort) == list("abcd")
    assert sorted(name for cohort in cohorts[2:4] for name in cohort) == list("abcd")


def test_budgets_decide_who_is_drawn_where_that_is_the_policy(house, answer):
    house.create(cohort=1, rounds=4, min_devices=2, cohort_policy="budget")
    devices = house.enrol("weak", "strong", weak=0.1)
    known = [Candidate("weak", 0.1), Candidate("strong", 1.0)]
    for number in range(1, 5):
        house.rounds.advance()
        assert list(house.record(number).cohort) == choose(known, 1, job="f:0", round_number=number, policy="budget")
        for device in devices:
            answer(device)


def test_the_first_payload_is_the_whole_model_and_later_ones_only_the_mask(house, answer, play):
    house.create(rounds=3)
    small, large = house.enrol("a", "b", a=0.3, b=1.0)
    house.rounds.advance()
    whole = initial_values(DIGITS, 0)
    for device in (small, large):
        assignment = device.ask()
        body = device.payload(assignment)
        assert assignment.payload.bytes == len(body)
        received = bundle.decode(body, DIGITS)
        assert received.mask is None
        assert received.values.tolist() == pack(DIGITS, whole, None).tolist()
        answer(device)
    house.rounds.advance()
    tensors, _ = checkpoint.load(house.model())
    assignment = small.ask()
    assert (assignment.round, assignment.work.ratio, assignment.work.job) == (2, 0.3, "f:0")
    mask = draw_neurons(DIGITS, NeuronDraw("f:0", 2, "a", 0.3))
    received = bundle.decode(small.payload(assignment), DIGITS)
    assert len(received.values) == count_values(DIGITS, mask) < DIGITS.shared_values / 4
    assert received.values.tolist() == pack(DIGITS, tensors, mask).tolist()
    assert received.draw == NeuronDraw("f:0", 2, "a", 0.3)


def test_a_device_that_never_answered_is_sent_the_whole_model_again(house, clock, answer):
    house.create(rounds=3)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    one.hand_back(one.ask())
    clock.pass_seconds(REST_SECONDS)
    answer(two)
    house.rounds.advance()
    assert bundle.decode(one.payload(one.ask()), DIGITS).mask is None
    assert bundle.decode(two.payload(two.ask()), DIGITS).mask is not None


def test_a_device_that_lost_its_model_is_sent_it_again(house, answer):
    house.create(rounds=3)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    answer(one)
    answer(two)
    house.rounds.advance()
    assignment = one.ask()
    assert bundle.decode(one.payload(assignment), DIGITS).mask is not None
    house.devices.change(one.id, ChangeDevice(holds_model=False))
    again = one.ask()
    assert again.assignment_id == assignment.assignment_id
    assert bundle.decode(one.payload(again), DIGITS).mask is None
    assert again.payload.sha256 != assignment.payload.sha256
    answer(one)
    answer(two)
    house.rounds.advance()
    assert house.record(2).updates == 2


def test_a_new_budget_holds_from_the_next_round_on(house, answer):
    house.create()
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    house.devices.change(one.id, ChangeDevice(budget=0.25))
    assert one.ask().work.ratio == 1.0
    answer(one)
    answer(two)
    house.rounds.advance()
    assert one.ask().work.ratio == 0.25


def test_federations_do_not_disturb_each_other(house, play, answer):
    house.create("f", rounds=1)
    house.create("g", rounds=2, seed=1)
    ours = house.enrol("a", "b")
    theirs = house.enrol("a", "b", federation="g")
    play(house, theirs)
    assert (house.info("g").status, house.info("f").round) == ("finished", 0)
    play(house, ours)
    assert house.info("f").status == "finished"
    with pytest.raises(NameTaken, match="'f' exists; choose another name"):
        house.create("f")


# --- quorum, deadlines, and devices that cannot ------------------------------------------------------------------


def test_a_quorum_closes_the_round_and_late_updates_are_told_so(house, answer, train):
    house.create(quorum=0.5, min_devices=4)
    devices = house.enrol("a", "b", "c", "d")
    house.rounds.advance()
    late = devices[2].ask()
    answer(devices[3])
    house.rounds.advance()
    assert house.info().round == 0
    answer(devices[0])
    house.rounds.advance()
    record = house.record(1)
    assert (record.status, record.updates, record.expired) == ("closed", 2, 2)
    with pytest.raises(RoundClosed, match="round 1 does not take it any more; keep the personal model and ask"):
        devices[2].send(late, train(DIGITS, late))
    with pytest.raises(RoundClosed, match="ask for the next one"):
        devices[2].payload(late)
    assert house.record(1) == record
    assert house.record(2).cohort == ("a", "b", "c", "d"), "slower than the quorum is not away"


def test_binary_floats_cost_no_quorum(house, answer):
    """0.28 x 25 is 7.000000000000001 in binary; meant are 7 devices."""
    house.create(quorum=0.28, min_devices=25, cohort=25)
    devices = house.enrol(*(f"dev-{number:02}" for number in range(25)))
    house.rounds.advance()
    for device in devices[:7]:
        answer(device)
    house.rounds.advance()
    assert house.info().round == 1


def test_devices_that_miss_the_deadline_are_away_until_they_ask(house, clock, answer):
    house.create(deadline_seconds=100)
    here, gone = house.enrol("a", "b")
    house.rounds.advance()
    assert here.ask().deadline_seconds == 100
    clock.pass_seconds(60)
    assert here.ask().deadline_seconds == 40
    answer(here)
    assert not house.rounds.advance()
    clock.pass_seconds(40)
    house.rounds.advance()
    record = house.record(1)
    assert (record.status, record.updates, record.expired, record.seconds) == ("closed", 1, 1, 100)
    assert house.record(2).cohort == ("a",)
    assert gone.ask() is None, "it asks again, and is back for the round after this one"
    answer(here)
    house.rounds.advance()
    assert house.record(3).cohort == ("a", "b")


def test_a_round_without_updates_is_recorded_and_changes_nothing(house, clock):
    house.create(deadline_seconds=100)
    devices = house.enrol("a", "b")
    house.rounds.advance()
    before = house.model()
    clock.pass_seconds(100)
    house.rounds.advance()
    record = house.record(1)
    assert (record.status, record.updates, record.expired, record.train_loss) == ("closed", 0, 2, None)
    assert record.model_sha256 == house.info().model_sha256
    assert house.model() == before
    assert house.info().model_version == 0
    assert len(house.records.rounds("f")) == 1, "nobody is there: no round opens"
    assert devices[1].ask() is None
    house.rounds.advance()
    assert house.record(2).cohort == ("b",)


def test_handing_back_ends_the_waiting_for_this_device_and_rests_it(house, clock, answer):
    house.create()
    tired, busy = house.enrol("a", "b")
    house.rounds.advance()
    assignment = tired.ask()
    tired.hand_back(assignment)
    tired.hand_back(assignment)
    assert tired.ask() is None
    answer(busy)
    house.rounds.advance()
    record = house.record(1)
    assert (record.updates, record.handed_back, record.expired) == (1, 1, 0)
    assert house.record(2).cohort == ("b",)
    done = busy.ask()
    clock.pass_seconds(REST_SECONDS)
    answer(busy)
    house.rounds.advance()
    assert house.record(3).cohort == ("a", "b")
    with pytest.raises(RoundClosed, match="done already; nothing to hand back"):
        busy.hand_back(done)


def test_a_device_that_takes_its_leave_is_not_drawn_until_it_asks(house, answer):
    house.create()
    one, two = house.enrol("a", "b")
    house.devices.change(two.id, ChangeDevice(conditions=Conditions(available=False, reason="on battery")))
    house.rounds.advance()
    assert house.record(1).cohort == ("a",)
    two.ask()
    answer(one)
    house.rounds.advance()
    assert house.record(2).cohort == ("a", "b")


# --- stopping ----------------------------------------------------------------------------------------------------


def test_v5_pool_stopped_devices_are_never_drawn_again_and_the_last_one_ends_the_job(house, answer):
    """Card V5: C = {X, Z}, m = 10. X stops and is aggregated, C = {Z}; Z stops, C = {}: the job ends."""
    house.create(rounds=100, cohort=10)
    x, z = house.enrol("X", "Z")
    house.rounds.advance()
    assert house.record(1).cohort == ("X", "Z")
    answer(x, stopped=True)
    answer(z)
    house.rounds.advance()
    record = house.record(1)
    assert (record.updates, record.stopped) == (2, ("X",)), "the upload of the round in which it stops counts"
    for number in (2, 3):
        assert house.record(number).cohort == ("Z",)
        assert x.ask() is None
        answer(z)
        house.rounds.advance()
    assert house.record(4).cohort == ("Z",)
    answer(z, stopped=True)
    while house.rounds.advance():
        pass
    assert house.info().status == "running", "the last evaluation is still to be answered"
    assert [answer(device).kind for device in (x, z)] == ["evaluate", "evaluate"]
    house.rounds.advance()
    info = house.info()
    assert (info.status, info.reason, info.round, info.devices_stopped) == ("finished", "all_stopped", 4, 2)
    assert len(house.records.rounds("f")) == 4
    with pytest.raises(Finished):
        x.ask()


def test_evaluation_is_asked_of_all_who_are_there_stopped_or_not(house, answer):
    house.create(rounds=4, evaluation_interval=2, global_evaluation_interval=2)
    devices = a, b, c = house.enrol("a", "b", "c")
    house.rounds.advance()
    answer(a, stopped=True)
    answer(b)
    answer(c)
    house.rounds.advance()
    assert a.ask() is None, "no evaluation after round 1"
    answer(b)
    answer(c)
    house.rounds.advance()
    assert [device.ask().kind for device in devices] == ["evaluate"] * 3, "before the training of the next round"
    assert a.ask().payload is not None
    answer(a, accuracy=0.9)
    answer(b, accuracy=0.6)
    record = house.record(2)
    assert record.evaluated_devices == 2
    assert record.accuracy_personal == record.accuracy_global == pytest.approx(0.75)
    assert record.loss_personal == pytest.approx(0.25)
    answer(c, accuracy=0.3)
    assert house.record(2).accuracy_personal == pytest.approx(0.6), "a record that was looked at is renewed"
    assert house.record(2).updates == 2
    assert house.record(1).accuracy_personal is None


def test_the_last_round_is_evaluated_and_the_end_waits_for_that_but_not_for_ever(house, clock, answer):
    house.create(rounds=1, evaluation_interval=0, deadline_seconds=50)
    here, gone = house.enrol("a", "b")
    house.rounds.advance()
    answer(here)
    answer(gone)
    house.rounds.advance()
    assert house.info().status == "running"
    assert answer(here).kind == "evaluate"
    assert not house.rounds.advance()
    clock.pass_seconds(50)
    house.rounds.advance()
    assert house.info().status == "finished"
    assert house.record(1).evaluated_devices == 1


# --- the operator ------------------------------------------------------------------------------------------------


def test_pause_stops_the_clock_and_resume_gives_the_whole_deadline(house, clock, answer):
    house.create(deadline_seconds=100)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    clock.pass_seconds(90)
    answer(one)
    house.change(action="pause")
    clock.pass_seconds(1000)
    assert two.ask() is None
    assert not house.rounds.advance()
    assert house.change(action="resume").status in ("waiting", "running")
    assert two.ask().deadline_seconds == 100
    house.rounds.advance()
    assert house.record(1).status == "open"
    answer(two)
    house.rounds.advance()
    assert house.record(1).updates == 2


def test_an_update_sent_while_paused_counts(house, train, answer):
    house.create()
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    assignment = one.ask()
    house.change(action="pause")
    assert one.send(assignment, train(DIGITS, assignment))
    house.change(action="resume")
    answer(two)
    house.rounds.advance()
    assert house.record(1).updates == 2


def test_a_pause_in_the_first_round_loses_no_evaluation(house, answer):
    house.create(rounds=5, evaluation_interval=1)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    house.change(action="pause")
    house.change(action="resume")
    answer(one)
    answer(two)
    house.rounds.advance()
    assert one.ask().kind == "evaluate"


def test_stop_closes_the_open_round_with_what_has_come(house, answer):
    house.create()
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    answer(one)
    info = house.change(action="stop")
    assert (info.status, info.reason) == ("stopped", "operator")
    house.rounds.advance()
    record = house.record(1)
    assert (record.status, record.updates, record.expired) == ("closed", 1, 1)
    assert house.info().model_version == 1
    assert len(house.records.rounds("f")) == 1
    with pytest.raises(Finished, match="stopped after 1 rounds"):
        one.ask()
    assert two.ask().kind == "adapt", "it has no model yet"


def test_a_finished_federation_can_be_reopened_for_more_rounds(house, play):
    house.create(rounds=1)
    devices = house.enrol("a", "b")
    play(house, devices)
    assert house.info().status == "finished"
    info = house.change(action="reopen", rounds=3)
    assert (info.status, info.reason, info.rounds) == ("running", None, 3)
    play(house, devices)
    assert (house.info().status, house.info().round) == ("finished", 3)
    assert [record.updates for record in house.records.rounds("f")] == [2, 2, 2]


def test_changes_of_cohort_and_deadline_hold_from_the_next_round_on(house, clock, answer):
    house.create(deadline_seconds=100)
    devices = house.enrol("a", "b")
    house.rounds.advance()
    house.change(cohort=1, deadline_seconds=10)
    assert devices[0].ask().deadline_seconds == 100
    for device in devices:
        answer(device)
    house.rounds.advance()
    assert len(house.record(2).cohort) == 1
    (drawn,) = (device for device in devices if device.name in house.record(2).cohort)
    assert drawn.ask().deadline_seconds == 10


@pytest.mark.parametrize(
    ("before", "action"),
    [((), "resume"), ((), "reopen"), (("pause",), "pause"), (("stop",), "pause"), (("stop",), "stop")],
)
def test_what_the_status_forbids_is_said(house, before, action):
    house.create()
    for step in before:
        house.change(action=step)
    with pytest.raises(WrongState, match=r"f is (waiting|paused|stopped); this can be done while it is"):
        house.change(action=action)


def test_what_would_end_at_once_is_not_reopened(house, play):
    house.create(rounds=1)
    play(house, house.enrol("a", "b"))
    with pytest.raises(WrongState, match=r"would end again at once \(max_rounds\): give more rounds"):
        house.change(action="reopen")
    assert house.info().status == FederationStatus.finished
    assert house.change(action="reopen", rounds=2).status == FederationStatus.running


def test_one_broken_federation_does_not_stop_the_others(house, answer, caplog):
    house.create()
    broken = house.enrol("a", "b")
    house.rounds.advance()
    for device in broken:
        answer(device)
    for key in house.store.blobs.keys("1/updates"):
        house.store.blobs.delete(key)
    house.create("g")
    house.enrol("c", "d", federation="g")
    house.rounds.advance()
    assert house.info("g").status == FederationStatus.running
    assert house.info("f").round == 0
    house.rounds.advance()
    assert caplog.text.count("cannot move on") == 1, "said once a minute, not at every tick"


def test_a_lone_device_that_hands_back_does_not_use_up_the_rounds(house, clock):
    house.create(min_devices=1, rounds=30)
    (hot,) = house.enrol("a")
    for _ in range(10):
        house.rounds.advance()
        if (assignment := hot.ask()) is not None:
            hot.hand_back(assignment)
    assert house.info().round == 1
    assert "a device that still trains" in house.info().waiting_for
    clock.pass_seconds(REST_SECONDS)
    house.rounds.advance()
    assert house.info().waiting_for is None


def test_an_update_that_moved_too_far_is_refused_where_a_limit_is_set(house, train):
    house.create(update_norm_limit=1.0)
    one, _ = house.enrol("a", "b")
    house.rounds.advance()
    assignment = one.ask()
    with pytest.raises(BadContent, match=r"they moved by .* from what was sent .* the federation allows 1"):
        one.send(assignment, train(DIGITS, assignment))
    mask = draw_neurons(DIGITS, NeuronDraw(**assignment.work.model_dump()))
    still = pack(DIGITS, initial_values(DIGITS, CALM.get("seed", 0)), mask)
    report = UpdateReport(num_examples=1, steps=1, train_loss=1.0).model_dump_json()
    assert one.send(assignment, bundle.encode(DIGITS, still, mask, report=report))


# --- devices that come, come again, and must go ------------------------------------------------------------------


def test_a_device_that_comes_after_the_end_adapts_and_is_done(house, play, answer):
    house.create(rounds=1)
    play(house, house.enrol("a", "b"))
    (late,) = house.enrol("late")
    assignment = late.ask()
    assert assignment.kind == "adapt"
    assert late.ask().assignment_id == assignment.assignment_id
    received = bundle.decode(late.payload(assignment), DIGITS)
    assert received.mask is None
    tensors, _ = checkpoint.load(house.model())
    assert received.values.tolist() == pack(DIGITS, tensors, None).tolist()
    answer(late)
    with pytest.raises(Finished):
        late.ask()
    assert house.info().round == 1
    assert house.record(1).updates == 2


def test_enrolling_again_with_the_same_key_gives_a_new_token_and_the_same_id(house):
    house.create()
    (device,) = house.enrol("a")
    first, token = device.id, device.token
    device.enrol()
    assert device.id == first
    assert device.token != token
    assert house.devices.authenticate(device.token).device_id == first
    with pytest.raises(NotAuthenticated, match="unknown or revoked; enrol again"):
        house.devices.authenticate(token)
    assert house.info().devices == 1


def test_nobody_else_can_take_a_name(house):
    house.create()
    house.enrol("a")
    thief = FakeDevice(house, "a", "f", 1.0)
    thief.key = "t" * 32
    with pytest.raises(NameTaken, match="choose another --name, or, if it is this device"):
        thief.enrol()
    with pytest.raises(NotFound, match="no federation 'g'; GET /v1/federations lists"):
        house.enrol("b", federation="g")


def test_a_revoked_device_is_out_and_its_name_is_free(house, answer, train):
    house.create()
    bad, good, other = house.enrol("a", "b", "c")
    house.rounds.advance()
    assignment = bad.ask()
    house.devices.change(bad.id, ChangeDevice(revoked=True))
    with pytest.raises(NotAuthenticated):
        house.devices.authenticate(bad.token)
    with pytest.raises(RoundClosed):
        bad.send(assignment, train(DIGITS, assignment))
    answer(good)
    answer(other)
    house.rounds.advance()
    assert house.record(1).updates == 2
    assert house.record(2).cohort == ("b", "c")
    assert house.info().devices == 2
    again = FakeDevice(house, "a", "f", 1.0)
    again.key = "n" * 32
    again.enrol()
    assert again.id != bad.id
    assert house.devices.authenticate(again.token).device_id == again.id


# --- what is sent is checked -------------------------------------------------------------------------------------


def test_the_same_update_again_is_no_new_one_and_another_is_refused(house, train):
    house.create()
    one, _ = house.enrol("a", "b")
    house.rounds.advance()
    assignment = one.ask()
    body = train(DIGITS, assignment)
    assert one.send(assignment, body) is True
    assert one.send(assignment, body) is False
    with pytest.raises(DifferentUpdate, match="another update was accepted for this assignment"):
        one.send(assignment, train(DIGITS, assignment, salt="other"))
    assert house.record(1).updates == 1


def broken_updates(train, assignment):
    mask = draw_neurons(DIGITS, NeuronDraw("f:0", 1, "a", 0.5))
    values = np.zeros(count_values(DIGITS, mask), dtype=np.float32)
    report = UpdateReport(num_examples=1, steps=1, train_loss=0).model_dump_json()
    fewer = NeuronMask({group: neurons[:-1] for group, neurons in mask.active.items()})
    short = np.zeros(count_values(DIGITS, fewer), dtype=np.float32)
    return {
        "precision": bundle.encode(DIGITS, values, mask, precision="fp16", report=report),
        "mask: it is not the one of round 1 for a": bundle.encode(DIGITS, short, fewer, report=report),
        "not the one of round 1": bundle.encode(
            DIGITS, pack(DIGITS, initial_values(DIGITS, 0), None), None, report=report
        ),
        "num_examples": bundle.encode(DIGITS, values, mask, report='{"num_examples": 0, "steps": 1, "train_loss": 0}'),
        "body": bundle.encode(DIGITS, values, mask, report=""),
        "digest": train(DIGITS, assignment)[:-1] + b"\x01",
        "truncated": b"\x00\x01" + bytes(6),
    }


def test_what_breaks_the_contract_changes_nothing(house, train):
    house.create()
    one, two = house.enrol("a", "b", a=0.5)
    house.rounds.advance()
    assignment = one.ask()
    before = house.record(1), house.model()
    for said, body in broken_updates(train, assignment).items():
        with pytest.raises((BadContent, BundleError), match=said):
            one.send(assignment, body)
    with pytest.raises(NotAllowed, match="belongs to another device"):
        two.send(assignment, train(DIGITS, assignment))
    with pytest.raises(NotAllowed):
        two.payload(assignment)
    with pytest.raises(NotAllowed):
        two.hand_back(assignment)
    with pytest.raises(NotFound, match="no such assignment; ask for the next one"):
        house.acceptance.accept_update("0" * 32, one.id, b"")
    assert (house.record(1), house.model()) == before
    assert one.send(assignment, train(DIGITS, assignment)), "the right one is still welcome"


def test_a_restart_trusts_no_file_that_it_has_not_seen_come(open_house, tmp_path, answer, caplog):
    house = open_house()
    house.create()
    devices = house.enrol("a", "b")
    house.rounds.advance()
    assert all(answer(device) for device in devices)
    house = open_house()
    update = next(tmp_path.rglob("updates/*"))
    data = bytearray(update.read_bytes())
    data[-1] ^= 1  # a damaged value, and still a number
    update.write_bytes(data)
    house.rounds.advance()
    assert "digest does not match" in caplog.text
    assert house.info().round == 0


def test_the_first_word_about_an_upload_counts_and_a_strangers_none(house, answer):
    house.create(rounds=5)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    sent = answer(one)
    arrived = house.record(1).bytes_up
    assert arrived > 4 * DIGITS.shared_values
    cost = UploadCost(assignment_id=sent.assignment_id, upload=Phase(seconds=2, bytes_up=999))
    house.costs.note(two.id, cost)
    assert house.record(1).bytes_up == arrived
    answer(two)
    house.rounds.advance()
    assert house.record(1).bytes_up == 2 * arrived
    house.costs.note(one.id, cost)
    house.costs.note(one.id, cost.model_copy(update={"upload": Phase(bytes_up=1)}))
    record = house.record(1)
    assert record.bytes_up == arrived + 999
    assert (record.upload.seconds, record.upload.seconds_without_joules) == (2, 2)


class Interrupted(Store):
    """Lets something happen just before a write of one's own."""

    before_writing = None

    @contextmanager
    def writing(self):
        action, self.before_writing = self.before_writing, None
        if action:
            action()
        with super().writing() as session:
            yield session


def test_a_fact_that_comes_while_records_are_read_is_not_forgotten(open_house, answer):
    house = open_house(Interrupted)
    house.create(rounds=1)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    answer(one)
    answer(two)
    house.rounds.advance()
    house.store.before_writing = lambda: answer(one)
    house.records.rounds("f")
    assert house.record(1).evaluated_devices == 1


# --- restarts and crashes ----------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
BUDGETS = {"a": 0.3, "b": 1.0, "c": 0.6}


def start(house):
    house.create(rounds=3, min_devices=3, evaluation_interval=2)
    return house.enrol(*NAMES, **BUDGETS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, train):
    """The final model of a run that nothing disturbs."""
    house = House(tmp_path_factory.mktemp("undisturbed"), lambda: 1_700_000_000.0)
    try:
        playing(answering(train))(house, start(house))
        return house.model()
    finally:
        house.store.close()


def test_sums_that_broke_half_way_are_made_again(house, play, undisturbed, monkeypatch, caplog):
    """A fold that fails in the middle, out of memory say, must not count its first tensors twice.

    In the last round: what an earlier one got wrong, devices that answer from a seed would overwrite.
    """
    devices = start(house)
    whole = Block.add

    def add(self, tensor, block, scale=1.0):
        whole(self, tensor, block, scale)
        if house.info().round == 2 and "no room" not in caplog.text:
            raise MemoryError("no room")

    monkeypatch.setattr(Block, "add", add)
    play(house, devices)
    assert "no room" in caplog.text
    play(house, devices)
    assert house.model() == undisturbed
    assert [record.updates for record in house.records.rounds("f")] == [3, 3, 3]


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_the_order_in_which_updates_arrive_does_not_matter(house, play, undisturbed, order):
    devices = start(house)
    play(house, [devices[place] for place in order])
    assert house.model() == undisturbed


def test_advancing_after_every_update_or_only_once_gives_the_same_bits(house, answer, undisturbed):
    devices = start(house)
    while house.info().status != "finished":
        for device in reversed(devices):
            house.rounds.advance()
            if house.info().status != "finished":
                answer(device)
        house.rounds.advance()
    assert house.model() == undisturbed


def test_a_restart_after_every_step_changes_no_bit_and_counts_each_update_once(open_house, answer, undisturbed):
    house = open_house()
    devices = start(house)
    for _ in range(30):
        house.rounds.advance()
        if house.info().status == "finished":
            break
        for device in devices:
            house = open_house()
            house.rounds.resume_after_restart()
            device.house = house
            house.rounds.advance()
            answer(device)
    assert house.info().status == "finished"
    assert house.model() == undisturbed
    records = house.records.rounds("f")
    assert [record.updates for record in records] == [3, 3, 3]
    assert [record.num_examples for record in records] == [30, 30, 30]


def test_a_restart_gives_open_rounds_their_whole_deadline_again(open_house, clock, answer):
    house = open_house()
    house.create(deadline_seconds=100)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    clock.pass_seconds(5000)
    house = one.house = two.house = open_house()
    house.rounds.resume_after_restart()
    house.rounds.advance()
    assert house.record(1).status == "open"
    assert one.ask().deadline_seconds == 100


class PowerCut(Store):
    """Fails, when told to, at the very end of a transaction: what was written to files before it stays."""

    cut = False

    @contextmanager
    def writing(self):
        with super().writing() as session:
            yield session
            if self.cut:
                raise OSError("power cut")


@pytest.mark.parametrize("restart", [True, False])
def test_killed_between_the_models_file_and_the_records(open_house, answer, play, undisturbed, restart, caplog):
    """The new model is on disk, the round still open: it is closed again, from the same updates, to the same bits."""
    house = open_house(PowerCut)
    devices = start(house)
    house.rounds.advance()
    for device in devices:
        answer(device)
    house.store.cut = True
    house.rounds.advance()
    assert "power cut" in caplog.text
    assert any("000000001" in key for key in house.store.blobs.keys("1/models")), "the file was written"
    assert (house.info().round, house.info().model_version) == (0, 0)
    house.store.cut = False
    if restart:
        house = open_house()
        for device in devices:
            device.house = house
    play(house, devices)
    assert house.model() == undisturbed
    assert [record.updates for record in house.records.rounds("f")] == [3, 3, 3]


def test_an_update_whose_records_could_not_be_written_is_not_acknowledged(open_house, train, answer):
    house = open_house(PowerCut)
    house.create(rounds=1)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    assignment = one.ask()
    house.store.cut = True
    with pytest.raises(OSError, match="power cut"):
        one.send(assignment, train(DIGITS, assignment))
    house.store.cut = False
    assert house.record(1).updates == 0
    assert one.send(assignment, train(DIGITS, assignment)) is True
    answer(two)
    house.rounds.advance()
    assert house.record(1).updates == 2


def test_nothing_is_kept_that_nobody_needs(house, play):
    house.create(rounds=3)
    play(house, house.enrol("a", "b"))
    assert house.store.blobs.keys("1/updates") == []
    assert len(house.store.blobs.keys("1/models")) == 1


# --- budgets and policies --------------------------------------------------------------------------------------------


def test_what_a_device_leaves_open_when_it_goes_keeps_nobody_waiting(house, answer, train):
    house.create(cohort=2)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    answer(one)
    open_ = two.ask()
    house.devices.change(two.id, ChangeDevice(conditions=Conditions(available=False, reason=PauseReason.charging)))
    house.rounds.advance()
    record = house.record(1)
    assert (record.status, record.updates, record.handed_back) == ("closed", 1, 1)
    with pytest.raises(RoundClosed, match="returned"):
        two.send(open_, train(DIGITS, open_))


def test_a_word_of_the_set_keeps_a_device_away_until_it_asks_and_other_words_let_it_rest(house, clock):
    house.create()
    hot, clumsy = house.enrol("a", "b")
    house.rounds.advance()
    hot.hand_back(hot.ask(), PauseReason.heat)
    clumsy.hand_back(clumsy.ask(), "the loss is nan")
    paused = {device.name: (device.present, device.paused) for device in house.roster.list("f")[0]}
    assert paused == {"a": (False, "heat"), "b": (True, None)}
    clock.pass_seconds(REST_SECONDS)
    house.rounds.advance()
    house.rounds.advance()
    assert house.record(2).cohort == ("b",)
    hot.ask()
    assert [device.paused for device in house.roster.list("f")[0]] == [None, None]


def test_who_is_missing_is_said_by_their_words(house):
    house.create()
    devices = house.enrol("a", "b", "c")
    for device, reason in zip(devices, ("heat", "charging", "charging"), strict=True):
        conditions = Conditions(available=False, reason=reason)
        house.devices.change(device.id, ChangeDevice(conditions=conditions))
    house.rounds.advance()
    assert house.info().waiting_for == "a device whose policy lets it work (paused: 2 charging, 1 heat)"


@pytest.mark.parametrize(
    ("said", "kept"), [("heat", PauseReason.heat), ("interrupted by its user", "interrupted by its user")]
)
def test_a_reason_is_a_word_of_the_set_or_a_sentence(said, kept):
    assert Conditions(available=False, reason=said).reason == kept
    assert type(HandBack(reason=said).reason) is type(kept)


def test_a_budget_says_what_limits_it_and_the_next_one_what_limits_that(house):
    house.create()
    (device,) = house.enrol("a")

    def known():
        (found,) = house.roster.list("f")[0]
        return found.budget, found.limited_by

    assert known() == (1.0, None)
    house.devices.change(device.id, ChangeDevice(budget=0.4, limited_by=BudgetLimit.deadline))
    assert known() == (0.4, "deadline")
    house.devices.change(device.id, ChangeDevice(conditions=Conditions()))
    assert known() == (0.4, "deadline"), "what is not told of stays"
    house.devices.change(device.id, ChangeDevice(budget=1.0))
    assert known() == (1.0, None)


def test_a_budget_that_falls_below_the_methods_density_takes_a_device_out_until_it_rises(house, answer):
    house.create(method="fedsgc", rounds=4, method_settings={"density": 0.5})
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    first = [one.ask(), two.ask()]
    assert [each.round for each in first] == [1, 1]
    house.devices.change(two.id, ChangeDevice(budget=0.4, limited_by=BudgetLimit.memory))
    one.hand_back(first[0], PauseReason.load), two.hand_back(first[1], PauseReason.load)
    one.ask(), two.ask()
    house.rounds.advance()
    assert house.record(2).cohort == ("a",)
    house.devices.change(two.id, ChangeDevice(budget=0.5))
    one.hand_back(one.ask(), PauseReason.load)
    one.ask()
    house.rounds.advance()
    assert house.record(3).cohort == ("a", "b")


def test_heat_and_joules_of_a_round_are_told_apart_by_how_they_are_known(house, train):
    house.create(rounds=1)
    devices = house.enrol("a", "b", "c")
    house.rounds.advance()
    phases = (
        Phase(seconds=10, paused_seconds=2, throttled_seconds=1, celsius_peak=71, joules=30, quality="measured"),
        Phase(seconds=10, throttled_seconds=0, celsius_peak=64, joules=50, quality="estimated"),
        Phase(seconds=10),
    )
    for device, phase in zip(devices, phases, strict=True):
        assignment = device.ask()
        device.send(assignment, train(DIGITS, assignment, telemetry=Telemetry(train=phase)))
    house.rounds.advance()
    record = house.record(1)
    assert (record.train.paused_seconds, record.train.throttled_seconds, record.train.celsius_peak) == (2, 1, 71)
    assert (record.upload.throttled_seconds, record.upload.celsius_peak) == (None, None)
    per = record.per_update
    assert (per.joules_measured, per.measured_updates, per.joules_estimated, per.estimated_updates) == (30, 1, 50, 1)


def test_joules_per_point_are_those_since_the_last_evaluation(house):
    house.create()
    house.enrol("a", "b")
    house.rounds.advance()
    usual = house.record(1)

    def record(number, measured, estimated, accuracy):
        train = PhaseSum(joules_measured=measured, joules_estimated=estimated)
        return usual.model_copy(update={"round": number, "train": train, "accuracy_personal": accuracy})

    found = with_joules_per_point(
        [
            record(1, 9, 9, 0.5),
            record(2, 5, 0, None),
            record(3, 15, 8, 0.54),
            record(4, 3, 3, 0.53),
            record(5, 6, 0, 0.56),
        ]
    )
    assert [each.joules_per_point_measured for each in found] == [None, None, pytest.approx(5), None, pytest.approx(2)]
    assert [each.joules_per_point_estimated for each in found] == [None, None, pytest.approx(2), None, None]
