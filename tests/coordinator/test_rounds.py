"""The life of rounds over real records and files, without HTTP, torch or waiting: devices here answer from a seed."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest

from sparrow.coordinator.commands.backup import back_up
from sparrow.coordinator.commands.restore import bring_back
from sparrow.coordinator.draws import Candidate, choose, new_secret
from sparrow.coordinator.errors import (
    BadContent,
    DifferentUpdate,
    Finished,
    NameTaken,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    RoundClosed,
    Unavailable,
    WrongState,
)
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.reports import records
from sparrow.coordinator.reports.records import with_joules_per_point
from sparrow.coordinator.rounds.assignments import touch
from sparrow.coordinator.rounds.cleanup import clear_all
from sparrow.coordinator.rounds.dispatch import REST_SECONDS
from sparrow.coordinator.settings import Settings
from sparrow.coordinator.storage.blobs import FolderBlobs
from sparrow.coordinator.storage.store import Store
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.masks import Block, NeuronDraw, NeuronMask, count_values, draw_neurons, pack
from sparrow.protocol.messages import (
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
from sparrow.protocol.settings import FederationSettings

from .fakes import CALM, DIGITS, STOPS, FakeDevice, LocalCoordinator, answering, playing


@pytest.fixture
def coordinator(open_coordinator):
    return open_coordinator()


# --- from waiting to finished ------------------------------------------------------------------------------------


def test_a_federation_waits_for_enough_devices(coordinator):
    coordinator.create(min_devices=2)
    assert not coordinator.rounds.advance(), "nothing has happened"
    (one,) = coordinator.enrol("one")
    assert not coordinator.rounds.advance()
    assert coordinator.info().status == FederationStatus.waiting
    assert one.ask() is None
    (two,) = coordinator.enrol("two")
    assert coordinator.rounds.advance()
    assert coordinator.info().status == FederationStatus.running
    assert [device.ask().kind for device in (one, two)] == ["train", "train"]
    assert coordinator.record(1).cohort == ("one", "two")
    assert coordinator.record(1).status == "open"
    assert not coordinator.rounds.advance(), "the round waits for its devices"


def test_rounds_follow_each_other_until_the_last(coordinator, play):
    coordinator.create(rounds=3)
    devices = coordinator.enrol("a", "b", "c")
    play(coordinator, devices)
    info = coordinator.info()
    assert (info.status, info.reason, info.round, info.model_version) == ("finished", "max_rounds", 3, 3)
    records = coordinator.records.rounds("f")
    assert [record.round for record in records] == [1, 2, 3]
    assert all(record.status == "closed" and record.updates == 3 for record in records)
    assert all(record.num_examples == 30 and record.train_loss == 0.5 for record in records)
    assert records[-1].model_sha256 == info.model_sha256
    assert len({record.model_sha256 for record in records}) == 3
    with pytest.raises(Finished, match="3 rounds"):
        devices[0].ask()
    assert not coordinator.rounds.advance()


def test_the_global_model_is_the_weighted_mean_of_the_updates(coordinator, answer, train):
    """The whole way, from assignment to checkpoint, for two devices that train everything: numpy's average."""
    coordinator.create(rounds=1)
    first, second = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    asked = [answer(first, examples=10), answer(second, examples=30)]
    coordinator.rounds.advance()
    tensors, _ = checkpoint.load(coordinator.model())

    sent = [bundle.decode(train(DIGITS, assignment), DIGITS).values.astype(np.float64) for assignment in asked]
    wanted = np.average(sent, axis=0, weights=[10, 30])
    np.testing.assert_allclose(pack(DIGITS, tensors, None), wanted, rtol=2e-7, atol=1e-12)


def test_the_cohort_is_the_documented_draw(coordinator, answer):
    coordinator.create(cohort=2, min_devices=6, seed=7)
    names, secret = [f"dev-{number}" for number in range(6)], new_secret("f", FederationSettings(seed=7, draws="seed"))
    devices = {device.name: device for device in coordinator.enrol(*names)}
    for number in (1, 2, 3):
        coordinator.rounds.advance()
        drawn = choose([Candidate(name) for name in names], 2, secret=secret, round_number=number)
        assert list(coordinator.record(number).cohort) == drawn
        for name, device in devices.items():
            assert (answer(device) is not None) == (name in drawn)


def told(coordinator, devices, rounds=3):
    """The cohorts of some rounds, and the keys that its devices are told."""
    found = []
    for number in range(1, rounds + 1):
        coordinator.rounds.advance()
        asked = [device.ask() for device in devices]
        found.append((coordinator.record(number).cohort, [each and each.work.key for each in asked]))
        for device, each in zip(devices, asked, strict=True):
            if each:
                device.hand_back(each)
        coordinator.clock.pass_seconds(REST_SECONDS)
    return found


@pytest.mark.integration
def test_what_is_drawn_follows_from_nothing_that_a_device_knows(open_coordinator, tmp_path, clock):
    """Two federations of one name, one seed and the same devices draw as they like, unless the seed is to decide."""
    found = {}
    for draws in ("secret", "seed"):
        for place in ("one", "two"):
            coordinator = LocalCoordinator(tmp_path / draws / place, clock)
            with closing(coordinator.store):
                coordinator.create(cohort=4, rounds=3, min_devices=12, draws=draws)
                found[draws, place] = told(coordinator, coordinator.enrol(*"abcdefghijkl"))
    assert found["seed", "one"] == found["seed", "two"]
    mine, others = found["secret", "one"], found["secret", "two"]
    assert [cohort for cohort, _ in mine] != [cohort for cohort, _ in others]
    keys = [key for _, keys in (*mine, *others) for key in keys if key]
    assert len(keys) == len(set(keys)) == 24, "of one device and one round each"


def test_a_restarted_coordinator_and_one_from_a_backup_keep_the_secret_and_a_deletion_forgets_it(
    open_coordinator, tmp_path, clock
):
    coordinator = open_coordinator()
    coordinator.create(draws="secret", min_devices=1)
    (device,) = coordinator.enrol("a")
    coordinator.rounds.advance()
    key = device.ask().work.key
    back_up(Settings(data_dir=tmp_path / "data", default_task=""), tmp_path / "copy")
    bring_back(Settings(data_dir=tmp_path / "new", default_task=""), tmp_path / "copy")
    restored = LocalCoordinator(tmp_path / "new", clock)
    with closing(restored.store):
        device.coordinator = restored
        assert device.ask().work.key == key
    device.coordinator = coordinator = open_coordinator()
    assert device.ask().work.key == key
    coordinator.change(action="stop")
    coordinator.federations.delete("f")
    coordinator.create(draws="secret", min_devices=1)
    (device,) = coordinator.enrol("a")
    coordinator.rounds.advance()
    assert device.ask().work.key != key


def test_a_promise_that_draws_of_the_seed_cannot_keep_is_told(coordinator):
    usual = {"cohort": 10, "robust": "median"}
    coordinator.create("one", **usual)
    assert "draws to secret" in coordinator.info("one").warning
    coordinator.create("two", **usual, draws="secret")
    assert coordinator.info("two").warning is None


def test_the_policy_least_recently_draws_the_longest_absent_first(coordinator, answer):
    coordinator.create(cohort=2, rounds=4, min_devices=4, cohort_policy="least_recently")
    devices = coordinator.enrol(*"abcd")
    for _ in range(4):
        coordinator.rounds.advance()
        for device in devices:
            answer(device)
    cohorts = [record.cohort for record in coordinator.records.rounds("f")]
    assert sorted(name for cohort in cohorts[:2] for name in cohort) == list("abcd")
    assert sorted(name for cohort in cohorts[2:4] for name in cohort) == list("abcd")


def test_budgets_decide_who_is_drawn_where_that_is_the_policy(coordinator, answer):
    coordinator.create(cohort=1, rounds=4, min_devices=2, cohort_policy="budget")
    devices = coordinator.enrol("weak", "strong", weak=0.1)
    known = [Candidate("weak", 0.1), Candidate("strong", 1.0)]
    secret = new_secret("f", FederationSettings(draws="seed"))
    for number in range(1, 5):
        coordinator.rounds.advance()
        assert list(coordinator.record(number).cohort) == choose(
            known, 1, secret=secret, round_number=number, policy="budget"
        )
        for device in devices:
            answer(device)


def test_the_first_payload_is_the_whole_model_and_later_ones_only_the_mask(coordinator, answer, play):
    coordinator.create(rounds=3)
    small, large = coordinator.enrol("a", "b", a=0.3, b=1.0)
    coordinator.rounds.advance()
    whole = initial_values(DIGITS, 0)
    for device in (small, large):
        assignment = device.ask()
        body = device.payload(assignment)
        assert assignment.payload.bytes == len(body)
        received = bundle.decode(body, DIGITS)
        assert received.mask is None
        assert received.values.tolist() == pack(DIGITS, whole, None).tolist()
        answer(device)
    coordinator.rounds.advance()
    tensors, _ = checkpoint.load(coordinator.model())
    assignment = small.ask()
    assert (assignment.round, assignment.work.ratio) == (2, 0.3)
    mask = draw_neurons(DIGITS, NeuronDraw(assignment.work.key, 0.3))
    received = bundle.decode(small.payload(assignment), DIGITS)
    assert len(received.values) == count_values(DIGITS, mask) < DIGITS.shared_values / 4
    assert received.values.tolist() == pack(DIGITS, tensors, mask).tolist()
    assert received.draw == NeuronDraw(assignment.work.key, 0.3)


def test_a_device_that_never_answered_is_sent_the_whole_model_again(coordinator, clock, answer):
    coordinator.create(rounds=3)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    one.hand_back(one.ask())
    clock.pass_seconds(REST_SECONDS)
    answer(two)
    coordinator.rounds.advance()
    assert bundle.decode(one.payload(one.ask()), DIGITS).mask is None
    assert bundle.decode(two.payload(two.ask()), DIGITS).mask is not None


def test_a_device_that_lost_its_model_is_sent_it_again(coordinator, answer):
    coordinator.create(rounds=3)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(one)
    answer(two)
    coordinator.rounds.advance()
    assignment = one.ask()
    assert bundle.decode(one.payload(assignment), DIGITS).mask is not None
    coordinator.devices.change(one.id, ChangeDevice(holds_model=False))
    again = one.ask()
    assert again.assignment_id == assignment.assignment_id
    assert bundle.decode(one.payload(again), DIGITS).mask is None
    assert again.payload.sha256 != assignment.payload.sha256
    answer(one)
    answer(two)
    coordinator.rounds.advance()
    assert coordinator.record(2).updates == 2


def test_a_new_budget_holds_from_the_next_round_on(coordinator, answer):
    coordinator.create()
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    coordinator.devices.change(one.id, ChangeDevice(budget=0.25))
    assert one.ask().work.ratio == 1.0
    answer(one)
    answer(two)
    coordinator.rounds.advance()
    assert one.ask().work.ratio == 0.25


def test_federations_do_not_disturb_each_other(coordinator, play, answer):
    coordinator.create("f", rounds=1)
    coordinator.create("g", rounds=2, seed=1)
    ours = coordinator.enrol("a", "b")
    theirs = coordinator.enrol("a", "b", federation="g")
    play(coordinator, theirs)
    assert (coordinator.info("g").status, coordinator.info("f").round) == ("finished", 0)
    play(coordinator, ours)
    assert coordinator.info("f").status == "finished"
    with pytest.raises(NameTaken, match="'f' exists; choose another name"):
        coordinator.create("f")


# --- quorum, deadlines, and devices that cannot ------------------------------------------------------------------


def test_a_quorum_closes_the_round_and_late_updates_are_told_so(coordinator, answer, train):
    coordinator.create(quorum=0.5, min_devices=4)
    devices = coordinator.enrol("a", "b", "c", "d")
    coordinator.rounds.advance()
    late = devices[2].ask()
    answer(devices[3])
    coordinator.rounds.advance()
    assert coordinator.info().round == 0
    answer(devices[0])
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired) == ("closed", 2, 2)
    with pytest.raises(RoundClosed, match=r"round 1\b"):
        devices[2].send(late, train(DIGITS, late))
    with pytest.raises(RoundClosed, match="ask for the next one"):
        devices[2].payload(late)
    assert coordinator.record(1) == record
    assert coordinator.record(2).cohort == ("a", "b", "c", "d"), "slower than the quorum is not away"


def test_binary_floats_cost_no_quorum(coordinator, answer):
    """0.28 x 25 is 7.000000000000001 in binary; meant are 7 devices."""
    coordinator.create(quorum=0.28, min_devices=25, cohort=25)
    devices = coordinator.enrol(*(f"dev-{number:02}" for number in range(25)))
    coordinator.rounds.advance()
    for device in devices[:7]:
        answer(device)
    coordinator.rounds.advance()
    assert coordinator.info().round == 1


def test_devices_that_miss_the_deadline_are_away_until_they_ask(coordinator, clock, answer):
    coordinator.create(deadline_seconds=100)
    here, gone = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assert here.ask().deadline_seconds == 100
    clock.pass_seconds(60)
    assert here.ask().deadline_seconds == 40
    answer(here)
    assert not coordinator.rounds.advance()
    clock.pass_seconds(40)
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired, record.seconds) == ("closed", 1, 1, 100)
    assert coordinator.record(2).cohort == ("a",)
    assert gone.ask() is None, "it asks again, and is back for the round after this one"
    answer(here)
    coordinator.rounds.advance()
    assert coordinator.record(3).cohort == ("a", "b")


def test_a_round_without_updates_is_recorded_and_changes_nothing(coordinator, clock):
    coordinator.create(deadline_seconds=100)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    before = coordinator.model()
    clock.pass_seconds(100)
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired, record.train_loss) == ("closed", 0, 2, None)
    assert record.model_sha256 == coordinator.info().model_sha256
    assert coordinator.model() == before
    assert coordinator.info().model_version == 0
    assert len(coordinator.records.rounds("f")) == 1, "nobody is there: no round opens"
    assert devices[1].ask() is None
    coordinator.rounds.advance()
    assert coordinator.record(2).cohort == ("b",)


def test_handing_back_ends_the_waiting_for_this_device_and_rests_it(coordinator, clock, answer):
    coordinator.create()
    tired, busy = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = tired.ask()
    tired.hand_back(assignment)
    tired.hand_back(assignment)
    assert tired.ask() is None
    answer(busy)
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.updates, record.handed_back, record.expired) == (1, 1, 0)
    assert coordinator.record(2).cohort == ("b",)
    done = busy.ask()
    clock.pass_seconds(REST_SECONDS)
    answer(busy)
    coordinator.rounds.advance()
    assert coordinator.record(3).cohort == ("a", "b")
    with pytest.raises(RoundClosed, match="already done; ask for the next one"):
        busy.hand_back(done)


def test_a_device_that_takes_its_leave_is_not_drawn_until_it_asks(coordinator, answer):
    coordinator.create()
    one, two = coordinator.enrol("a", "b")
    coordinator.devices.change(two.id, ChangeDevice(conditions=Conditions(available=False, reason="on battery")))
    coordinator.rounds.advance()
    assert coordinator.record(1).cohort == ("a",)
    two.ask()
    answer(one)
    coordinator.rounds.advance()
    assert coordinator.record(2).cohort == ("a", "b")


# --- stopping ----------------------------------------------------------------------------------------------------


def test_v5_pool_stopped_devices_are_never_drawn_again_and_the_last_one_ends_the_job(coordinator, answer):
    """C = {X, Z}, m = 10. X stops and is aggregated, C = {Z}; Z stops, C = {}: the job ends."""
    coordinator.create(rounds=100, cohort=10, **STOPS)
    x, z = coordinator.enrol("X", "Z")
    coordinator.rounds.advance()
    assert coordinator.record(1).cohort == ("X", "Z")
    answer(x, stopped=True)
    answer(z)
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.updates, record.stopped) == (2, ("X",)), "the upload of the round in which it stops counts"
    for number in (2, 3):
        assert coordinator.record(number).cohort == ("Z",)
        assert x.ask() is None
        answer(z)
        coordinator.rounds.advance()
    assert coordinator.record(4).cohort == ("Z",)
    answer(z, stopped=True)
    while coordinator.rounds.advance():
        pass
    assert coordinator.info().status == "running", "the last evaluation is still to be answered"
    assert [answer(device).kind for device in (x, z)] == ["evaluate", "evaluate"]
    coordinator.rounds.advance()
    info = coordinator.info()
    assert (info.status, info.reason, info.round, info.devices_stopped) == ("finished", "all_stopped", 4, 2)
    assert len(coordinator.records.rounds("f")) == 4
    with pytest.raises(Finished):
        x.ask()


@pytest.mark.integration
def test_evaluation_is_asked_of_all_who_are_there_stopped_or_not(coordinator, answer):
    coordinator.create(rounds=4, evaluation_interval=2, global_evaluation_interval=2, **STOPS)
    devices = a, b, c = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    answer(a, stopped=True)
    answer(b)
    answer(c)
    coordinator.rounds.advance()
    assert a.ask() is None, "no evaluation after round 1"
    answer(b)
    answer(c)
    coordinator.rounds.advance()
    assert [device.ask().kind for device in devices] == ["evaluate"] * 3, "before the training of the next round"
    assert a.ask().payload is not None
    answer(a, accuracy=0.9)
    answer(b, accuracy=0.6)
    record = coordinator.record(2)
    assert record.evaluated_devices == 2
    assert record.accuracy_personal == record.accuracy_global == pytest.approx(0.75)
    assert record.loss_personal == pytest.approx(0.25)
    answer(c, accuracy=0.3)
    assert coordinator.record(2).accuracy_personal == pytest.approx(0.6), "a record that was looked at is renewed"
    assert coordinator.record(2).updates == 2
    assert coordinator.record(1).accuracy_personal is None


def test_the_end_waits_for_the_last_evaluation_with_a_deadline(coordinator, clock, answer):
    coordinator.create(rounds=1, evaluation_interval=0, deadline_seconds=50)
    here, gone = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(here)
    answer(gone)
    coordinator.rounds.advance()
    assert coordinator.info().status == "running"
    assert answer(here).kind == "evaluate"
    assert not coordinator.rounds.advance()
    clock.pass_seconds(50)
    coordinator.rounds.advance()
    assert coordinator.info().status == "finished"
    assert coordinator.record(1).evaluated_devices == 1


# --- the operator ------------------------------------------------------------------------------------------------


def test_pause_stops_the_clock_and_resume_gives_the_whole_deadline(coordinator, clock, answer):
    coordinator.create(deadline_seconds=100)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    clock.pass_seconds(90)
    answer(one)
    coordinator.change(action="pause")
    clock.pass_seconds(1000)
    assert two.ask() is None
    assert not coordinator.rounds.advance()
    assert coordinator.change(action="resume").status in ("waiting", "running")
    assert two.ask().deadline_seconds == 100
    coordinator.rounds.advance()
    assert coordinator.record(1).status == "open"
    answer(two)
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 2


def test_an_update_sent_while_paused_counts(coordinator, train, answer):
    coordinator.create()
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = one.ask()
    coordinator.change(action="pause")
    assert one.send(assignment, train(DIGITS, assignment))
    coordinator.change(action="resume")
    answer(two)
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 2


def test_a_pause_in_the_first_round_loses_no_evaluation(coordinator, answer):
    coordinator.create(rounds=5, evaluation_interval=1)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    coordinator.change(action="pause")
    coordinator.change(action="resume")
    answer(one)
    answer(two)
    coordinator.rounds.advance()
    assert one.ask().kind == "evaluate"


def test_stop_closes_the_open_round_with_what_has_come(coordinator, answer):
    coordinator.create()
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(one)
    info = coordinator.change(action="stop")
    assert (info.status, info.reason) == ("stopped", "operator")
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired) == ("closed", 1, 1)
    assert coordinator.info().model_version == 1
    assert len(coordinator.records.rounds("f")) == 1
    with pytest.raises(Finished, match="stopped after 1 rounds"):
        one.ask()
    assert two.ask().kind == "adapt", "it has no model yet"


def test_a_finished_federation_can_be_reopened_for_more_rounds(coordinator, play):
    coordinator.create(rounds=1)
    devices = coordinator.enrol("a", "b")
    play(coordinator, devices)
    assert coordinator.info().status == "finished"
    info = coordinator.change(action="reopen", rounds=3)
    assert (info.status, info.reason, info.rounds) == ("waiting", None, 3)
    play(coordinator, devices)
    assert (coordinator.info().status, coordinator.info().round) == ("finished", 3)
    assert [record.updates for record in coordinator.records.rounds("f")] == [2, 2, 2]


def test_a_reopened_federation_waits_until_its_devices_are_back(coordinator, play):
    coordinator.create(rounds=1, min_devices=2)
    devices = coordinator.enrol("a", "b", "c")
    play(coordinator, devices)
    info = coordinator.change(action="reopen", rounds=3)
    assert (info.status, info.waiting_for) == ("waiting", "its devices to be back")
    devices[0].ask()
    coordinator.rounds.advance()
    assert coordinator.info().status == "waiting"
    devices[1].ask()
    coordinator.rounds.advance()
    assert coordinator.info().status == "running"
    assert coordinator.record(2).cohort == ("a", "b")


def test_devices_that_stopped_early_train_again_after_reopening_or_with_new_data(coordinator, answer):
    coordinator.create(rounds=9, **STOPS)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    for device in devices:
        answer(device, stopped=True)
    while coordinator.rounds.advance():
        pass
    for device in devices:
        answer(device)
    coordinator.rounds.advance()
    assert (coordinator.info().status, coordinator.info().devices_stopped) == ("finished", 2)
    coordinator.devices.change(devices[0].id, ChangeDevice(continues=True))
    assert coordinator.info().devices_stopped == 1
    info = coordinator.change(action="reopen")
    assert (info.status, info.devices_stopped) == ("waiting", 0)


def test_changes_of_cohort_and_deadline_hold_from_the_next_round_on(coordinator, clock, answer):
    coordinator.create(deadline_seconds=100)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    coordinator.change(cohort=1, deadline_seconds=10)
    assert devices[0].ask().deadline_seconds == 100
    for device in devices:
        answer(device)
    coordinator.rounds.advance()
    assert len(coordinator.record(2).cohort) == 1
    (drawn,) = (device for device in devices if device.name in coordinator.record(2).cohort)
    assert drawn.ask().deadline_seconds == 10


@pytest.mark.parametrize(
    ("before", "action"),
    [((), "resume"), ((), "reopen"), (("pause",), "pause"), (("stop",), "pause"), (("stop",), "stop")],
)
def test_what_the_status_forbids_is_said(coordinator, before, action):
    coordinator.create()
    for step in before:
        coordinator.change(action=step)
    with pytest.raises(WrongState, match=r"f is (waiting|paused|stopped)"):
        coordinator.change(action=action)


def test_what_would_end_at_once_is_not_reopened(coordinator, play):
    coordinator.create(rounds=1)
    play(coordinator, coordinator.enrol("a", "b"))
    with pytest.raises(WrongState, match="rounds"):
        coordinator.change(action="reopen")
    assert coordinator.info().status == FederationStatus.finished
    assert coordinator.change(action="reopen", rounds=2).status == FederationStatus.waiting


def test_no_fewer_rounds_than_have_closed(coordinator, play):
    coordinator.create(rounds=2)
    play(coordinator, coordinator.enrol("a", "b"))
    with pytest.raises(BadContent, match="rounds: 2 rounds have closed"):
        coordinator.change(rounds=1)
    assert coordinator.info().rounds == 2


def test_one_broken_federation_does_not_stop_the_others(coordinator, answer, caplog, tmp_path):
    coordinator.create()
    broken = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    for device in broken:
        answer(device)
    (model,) = tmp_path.rglob("models/*")
    model.rename(tmp_path / "lost")
    coordinator.models.drop(1)  # as after a restart
    coordinator.create("g")
    coordinator.enrol("c", "d", federation="g")
    coordinator.rounds.advance()
    assert coordinator.info("g").status == FederationStatus.running
    assert coordinator.info("f").round == 0
    coordinator.rounds.advance()
    assert caplog.text.count("is missing; restore this file") == 1, "said once, not at every tick"
    with pytest.raises(Unavailable, match=f"1/models/{model.name} is missing"):
        asyncio.run(coordinator.check_ready())
    (tmp_path / "lost").rename(model)
    asyncio.run(coordinator.check_ready())
    coordinator.rounds.advance()
    assert coordinator.info("f").round == 1


def test_a_lone_device_that_hands_back_does_not_use_up_the_rounds(coordinator, clock):
    coordinator.create(min_devices=1, rounds=30)
    (hot,) = coordinator.enrol("a")
    for _ in range(10):
        coordinator.rounds.advance()
        if (assignment := hot.ask()) is not None:
            hot.hand_back(assignment)
    assert coordinator.info().round == 1
    assert "an available device that still trains" in coordinator.info().waiting_for
    clock.pass_seconds(REST_SECONDS)
    coordinator.rounds.advance()
    assert coordinator.info().waiting_for is None


def test_an_update_that_moved_too_far_is_refused_where_a_limit_is_set(coordinator, train):
    coordinator.create(update_norm_limit=1.0)
    one, _ = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = one.ask()
    with pytest.raises(BadContent, match=r"moved by .*\b1\b"):
        one.send(assignment, train(DIGITS, assignment))
    mask = draw_neurons(DIGITS, NeuronDraw(**assignment.work.model_dump()))
    still = pack(DIGITS, initial_values(DIGITS, CALM.get("seed", 0)), mask)
    report = UpdateReport(num_examples=1, steps=1, train_loss=1.0).model_dump_json()
    assert one.send(assignment, bundle.encode(DIGITS, still, mask, report=report))


def refused_bodies(train, assignment):
    """One of each kind that is refused: no update, values that no model can hold, and values that moved too far."""
    mask = draw_neurons(DIGITS, NeuronDraw(**assignment.work.model_dump()))
    values = np.full(count_values(DIGITS, mask), -1, np.float32)
    report = UpdateReport(num_examples=1, steps=1, train_loss=1.0).model_dump_json()
    return [b"not an update", bundle.encode(DIGITS, values, mask, report=report), train(DIGITS, assignment)]


def send_still(device, assignment):
    """Send an update that moves nothing."""
    mask = draw_neurons(DIGITS, NeuronDraw(**assignment.work.model_dump()))
    report = UpdateReport(num_examples=1, steps=1, train_loss=1.0).model_dump_json()
    values = pack(DIGITS, initial_values(DIGITS, 0), mask)
    assert device.send(assignment, bundle.encode(DIGITS, values, mask, report=report))


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_device_that_is_refused_three_times_in_a_row_rests_whatever_it_says(coordinator, train, clock, caplog, kind):
    coordinator.create(update_norm_limit=1.0, rounds=9, min_devices=1)
    hostile, honest = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = hostile.ask()
    body = refused_bodies(train, assignment)[kind]
    for _ in range(2):
        with pytest.raises(BadContent):
            hostile.send(assignment, body)
    assert coordinator.record(1).handed_back == 0
    with pytest.raises(BadContent, match=r"\b3 updates\b.*\b10 minutes"):
        hostile.send(assignment, body)
    assert "3 updates of a" in caplog.text
    with pytest.raises(RoundClosed):
        hostile.send(assignment, body)
    coordinator.devices.change(hostile.id, ChangeDevice(conditions=Conditions()))
    send_still(honest, honest.ask())
    for _ in range(2):
        coordinator.rounds.advance()
        assert hostile.ask() is None
        send_still(honest, honest.ask())
    assert (coordinator.record(1).handed_back, coordinator.record(2).cohort) == (1, ("b",))
    clock.pass_seconds(600)
    coordinator.rounds.advance()
    assignment = hostile.ask()
    assert assignment is not None
    with pytest.raises(BadContent, match="4 updates in a row were refused"):
        hostile.send(assignment, body)
    coordinator.rounds.advance()
    assert hostile.ask() is None


def test_an_accepted_update_ends_the_count_of_refusals(coordinator):
    coordinator.create(rounds=9, min_devices=1)
    (device,) = coordinator.enrol("a")
    for _ in range(3):
        coordinator.rounds.advance()
        assignment = device.ask()
        for _ in range(2):
            with pytest.raises(BadContent):
                device.send(assignment, b"not an update")
        send_still(device, assignment)
    coordinator.rounds.advance()
    assert device.ask() is not None


# --- devices that come, come again, and must go ------------------------------------------------------------------


def test_a_device_that_comes_after_the_end_adapts_and_is_done(coordinator, play, answer):
    coordinator.create(rounds=1)
    play(coordinator, coordinator.enrol("a", "b"))
    (late,) = coordinator.enrol("late")
    assignment = late.ask()
    assert assignment.kind == "adapt"
    assert late.ask().assignment_id == assignment.assignment_id
    received = bundle.decode(late.payload(assignment), DIGITS)
    assert received.mask is None
    tensors, _ = checkpoint.load(coordinator.model())
    assert received.values.tolist() == pack(DIGITS, tensors, None).tolist()
    answer(late)
    with pytest.raises(Finished):
        late.ask()
    assert coordinator.info().round == 1
    assert coordinator.record(1).updates == 2


def test_enrolling_again_with_the_same_key_gives_a_new_token_and_the_same_id(coordinator):
    coordinator.create()
    (device,) = coordinator.enrol("a")
    first, token = device.id, device.token
    device.enrol()
    assert device.id == first
    assert device.token != token
    assert coordinator.devices.authenticate(device.token).device_id == first
    with pytest.raises(NotAuthenticated, match="revoked"):
        coordinator.devices.authenticate(token)
    assert coordinator.info().devices == 1


def test_nobody_else_can_take_a_name(coordinator):
    coordinator.create()
    coordinator.enrol("a")
    thief = FakeDevice(coordinator, "a", "f", 1.0)
    thief.key = "t" * 32
    with pytest.raises(NameTaken, match="--device-name"):
        thief.enrol()
    with pytest.raises(NotFound, match="'g'"):
        coordinator.enrol("b", federation="g")


def test_a_revoked_device_is_out_and_its_name_is_free(coordinator, answer, train):
    coordinator.create()
    bad, good, other = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    assignment = bad.ask()
    coordinator.devices.change(bad.id, ChangeDevice(revoked=True))
    with pytest.raises(NotAuthenticated):
        coordinator.devices.authenticate(bad.token)
    with pytest.raises(RoundClosed):
        bad.send(assignment, train(DIGITS, assignment))
    answer(good)
    answer(other)
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 2
    assert coordinator.record(2).cohort == ("b", "c")
    assert coordinator.info().devices == 2
    again = FakeDevice(coordinator, "a", "f", 1.0)
    again.key = "n" * 32
    again.enrol()
    assert again.id != bad.id
    assert coordinator.devices.authenticate(again.token).device_id == again.id


# --- what is sent is checked -------------------------------------------------------------------------------------


def test_the_same_update_again_is_no_new_one_and_another_is_refused(coordinator, train):
    coordinator.create()
    one, _ = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = one.ask()
    body = train(DIGITS, assignment)
    assert one.send(assignment, body) is True
    assert one.send(assignment, body) is False
    with pytest.raises(DifferentUpdate, match="another update"):
        one.send(assignment, train(DIGITS, assignment, salt="other"))
    assert coordinator.record(1).updates == 1


def broken_updates(train, assignment):
    mask = draw_neurons(DIGITS, NeuronDraw(assignment.work.key, 0.5))
    values = np.zeros(count_values(DIGITS, mask), dtype=np.float32)
    report = UpdateReport(num_examples=1, steps=1, train_loss=0).model_dump_json()
    fewer = NeuronMask({group: neurons[:-1] for group, neurons in mask.active.items()})
    short = np.zeros(count_values(DIGITS, fewer), dtype=np.float32)
    return {
        "precision": bundle.encode(DIGITS, values, mask, precision="fp16", report=report),
        "mask: it differs from the mask of ": bundle.encode(DIGITS, short, fewer, report=report),
        "it differs from the mask of": bundle.encode(
            DIGITS, pack(DIGITS, initial_values(DIGITS, 0), None), None, report=report
        ),
        "num_examples": bundle.encode(DIGITS, values, mask, report='{"num_examples": 0, "steps": 1, "train_loss": 0}'),
        "body": bundle.encode(DIGITS, values, mask, report=""),
        "digest": train(DIGITS, assignment)[:-1] + b"\x01",
        "truncated": b"\x00\x01" + bytes(6),
    }


def test_what_breaks_the_contract_changes_nothing(coordinator, train):
    coordinator.create(cohort=20)
    one, two, *more = coordinator.enrol(*"abcdefghijklmnopqrst", **dict.fromkeys("acdefghijklmnopqrst", 0.5))
    coordinator.rounds.advance()
    assignment = one.ask()
    before = coordinator.record(1), coordinator.model()
    for said, device in zip(
        broken_updates(train, assignment), more, strict=False
    ):  # one each: three in a row would rest
        work = device.ask()
        with pytest.raises((BadContent, BundleError), match=said):
            device.send(work, broken_updates(train, work)[said])
    with pytest.raises(NotAllowed, match="belongs to another device"):
        two.send(assignment, train(DIGITS, assignment))
    with pytest.raises(NotAllowed):
        two.payload(assignment)
    with pytest.raises(NotAllowed):
        two.hand_back(assignment)
    with pytest.raises(NotFound, match="assignment"):
        coordinator.acceptance.accept_update("0" * 32, one.id, b"")
    assert (coordinator.record(1), coordinator.model()) == before
    assert one.send(assignment, train(DIGITS, assignment)), "the right one is still welcome"


def test_a_damaged_update_is_left_out_and_its_device_asked_again(open_coordinator, tmp_path, answer, caplog):
    coordinator = open_coordinator()
    coordinator.create()
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assert all(answer(device) for device in devices)
    coordinator = open_coordinator()
    update = next(tmp_path.rglob("updates/*"))
    data = bytearray(update.read_bytes())
    data[-1] ^= 1  # a damaged value, and still a number
    update.write_bytes(data)
    coordinator.rounds.advance()
    assert "SHA-256 is not the one in its name" in caplog.text
    assert coordinator.info().round == 0
    assert not update.exists()
    for device in devices:
        device.coordinator = coordinator
    assert [answer(device) is not None for device in devices].count(True) == 1
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.left_out) == ("closed", 2, {})
    asyncio.run(coordinator.check_ready())


def test_the_same_update_that_comes_again_at_once_is_kept(open_coordinator, tmp_path, train, monkeypatch, caplog):
    coordinator = open_coordinator()
    coordinator.create()
    (device,) = coordinator.enrol("a")
    coordinator.enrol("b")
    coordinator.rounds.advance()
    assignment = device.ask()
    body = train(DIGITS, assignment)
    assert device.send(assignment, body)
    coordinator = device.coordinator = open_coordinator()
    next(tmp_path.rglob("updates/*")).write_bytes(b"")
    delete, sent = coordinator.store.blobs.delete, []

    def meanwhile(key):
        monkeypatch.undo()
        sent.append(device.send(assignment, body))
        delete(key)

    monkeypatch.setattr(coordinator.store.blobs, "delete", meanwhile)
    coordinator.rounds.advance()
    sent.append(device.send(assignment, body))
    assert sorted(sent) == [False, True], "it was acknowledged once"
    coordinator = open_coordinator()  # which has nothing of it in memory
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 1
    assert caplog.text.count("the device is asked to train round 1 again") == 1


def test_who_does_not_send_it_again_in_time_is_left_out_in_the_record(open_coordinator, tmp_path, clock, answer):
    coordinator = open_coordinator()
    coordinator.create()
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assert all(answer(device) for device in devices)
    coordinator = open_coordinator()
    next(tmp_path.rglob("updates/*")).unlink()
    coordinator.rounds.advance()
    assert coordinator.record(1).left_out == {}, "it may come yet"
    clock.pass_seconds(101)
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.expired) == ("closed", 1, 1)
    assert list(record.left_out.values()) == ["its stored update was damaged, and it sent no other in time"]
    asyncio.run(coordinator.check_ready())


def test_the_first_word_about_an_upload_counts_and_a_other_devices_none(coordinator, answer):
    coordinator.create(rounds=5)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    sent = answer(one)
    arrived = coordinator.record(1).bytes_up
    assert arrived > 4 * DIGITS.shared_values
    cost = UploadCost(assignment_id=sent.assignment_id, upload=Phase(seconds=2, bytes_up=999))
    coordinator.costs.note(two.id, cost)
    assert coordinator.record(1).bytes_up == arrived
    answer(two)
    coordinator.rounds.advance()
    assert coordinator.record(1).bytes_up == 2 * arrived
    coordinator.costs.note(one.id, cost)
    coordinator.costs.note(one.id, cost.model_copy(update={"upload": Phase(bytes_up=1)}))
    record = coordinator.record(1)
    assert record.bytes_up == arrived + 999
    assert (record.upload.seconds, record.upload.seconds_without_joules) == (2, 2)


def test_upload_costs_of_a_device_take_bounded_memory(coordinator, answer):
    coordinator.create()
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    sent = answer(one)
    coordinator.costs.note(one.id, UploadCost(assignment_id=sent.assignment_id, upload=Phase(seconds=2)))
    tracemalloc.start()
    for number in range(10_000):
        other = UploadCost.model_construct(assignment_id=f"{number:064d}", upload=Phase.model_construct())
        coordinator.costs.note(two.id, other)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2**20
    assert coordinator.record(1).upload.seconds == 2


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


def test_a_fact_that_comes_while_records_are_read_is_not_forgotten(open_coordinator, answer):
    coordinator = open_coordinator(Interrupted)
    coordinator.create(rounds=1)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(one)
    answer(two)
    coordinator.rounds.advance()
    coordinator.store.before_writing = lambda: answer(one)
    coordinator.records.rounds("f")
    assert coordinator.record(1).evaluated_devices == 1


# --- restarts and crashes ----------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
BUDGETS = {"a": 0.3, "b": 1.0, "c": 0.6}


def start(coordinator):
    coordinator.create(rounds=3, min_devices=3, evaluation_interval=2)
    return coordinator.enrol(*NAMES, **BUDGETS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, train):
    """The final model of a run that nothing disturbs."""
    coordinator = LocalCoordinator(tmp_path_factory.mktemp("undisturbed"), lambda: 1_700_000_000.0)
    try:
        playing(answering(train))(coordinator, start(coordinator))
        return coordinator.model()
    finally:
        coordinator.store.close()


def test_sums_that_broke_half_way_are_made_again(coordinator, play, undisturbed, monkeypatch, caplog):
    """A fold that fails in the middle, out of memory say, must not count its first tensors twice.

    In the last round: what an earlier one got wrong, devices that answer from a seed would overwrite.
    """
    devices = start(coordinator)
    whole = Block.add

    def add(self, tensor, block, scale=1.0):
        whole(self, tensor, block, scale)
        if coordinator.info().round == 2 and "no room" not in caplog.text:
            raise MemoryError("no room")

    monkeypatch.setattr(Block, "add", add)
    play(coordinator, devices)
    assert "no room" in caplog.text
    play(coordinator, devices)
    assert coordinator.model() == undisturbed
    assert [record.updates for record in coordinator.records.rounds("f")] == [3, 3, 3]


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_the_order_in_which_updates_arrive_does_not_matter(coordinator, play, undisturbed, order):
    devices = start(coordinator)
    play(coordinator, [devices[place] for place in order])
    assert coordinator.model() == undisturbed


def test_advancing_after_every_update_or_only_once_gives_the_same_bits(coordinator, answer, undisturbed):
    devices = start(coordinator)
    while coordinator.info().status != "finished":
        for device in reversed(devices):
            coordinator.rounds.advance()
            if coordinator.info().status != "finished":
                answer(device)
        coordinator.rounds.advance()
    assert coordinator.model() == undisturbed


@pytest.mark.integration
def test_a_restart_after_every_step_changes_no_bit_and_counts_each_update_once(open_coordinator, answer, undisturbed):
    coordinator = open_coordinator()
    devices = start(coordinator)
    for _ in range(30):
        coordinator.rounds.advance()
        if coordinator.info().status == "finished":
            break
        for device in devices:
            coordinator = open_coordinator()
            coordinator.rounds.resume_after_restart()
            device.coordinator = coordinator
            coordinator.rounds.advance()
            answer(device)
    assert coordinator.info().status == "finished"
    assert coordinator.model() == undisturbed
    records = coordinator.records.rounds("f")
    assert [record.updates for record in records] == [3, 3, 3]
    assert [record.num_examples for record in records] == [30, 30, 30]


def test_a_restart_gives_open_rounds_their_whole_deadline_again(open_coordinator, clock, answer):
    coordinator = open_coordinator()
    coordinator.create(deadline_seconds=100)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    clock.pass_seconds(5000)
    coordinator = one.coordinator = two.coordinator = open_coordinator()
    coordinator.rounds.resume_after_restart()
    coordinator.rounds.advance()
    assert coordinator.record(1).status == "open"
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
def test_killed_between_the_models_file_and_the_records(open_coordinator, answer, play, undisturbed, restart, caplog):
    """The new model is on disk, the round still open: it is closed again, from the same updates, to the same bits."""
    coordinator = open_coordinator(PowerCut)
    devices = start(coordinator)
    coordinator.rounds.advance()
    for device in devices:
        answer(device)
    coordinator.store.cut = True
    coordinator.rounds.advance()
    assert "power cut" in caplog.text
    assert any("000000001" in key for key in coordinator.store.blobs.keys("1/models")), "the file was written"
    assert (coordinator.info().round, coordinator.info().model_version) == (0, 0)
    coordinator.store.cut = False
    if restart:
        coordinator = open_coordinator()
        for device in devices:
            device.coordinator = coordinator
    play(coordinator, devices)
    assert coordinator.model() == undisturbed
    assert [record.updates for record in coordinator.records.rounds("f")] == [3, 3, 3]


def test_a_model_of_a_failed_transaction_is_served_only_after_its_retry(open_coordinator, answer, undisturbed, play):
    coordinator = open_coordinator(PowerCut)
    devices = start(coordinator)
    coordinator.rounds.advance()
    for device in devices:
        answer(device)
    coordinator.store.cut = True
    coordinator.rounds.advance()
    (written,) = (key for key in coordinator.store.blobs.keys("1/models") if "000000001" in key)
    with pytest.raises(NotFound, match="model 1 of f is not kept"):
        coordinator.served.model("f", 1)
    assert [model.version for model in coordinator.served.models("f")] == [0]
    body = coordinator.store.blobs.get(written)
    coordinator.store.blobs.put("1/models/000000001." + 64 * "f" + ".safetensors", b"another process's, that is late")
    coordinator.store.cut = False
    coordinator.rounds.advance()
    assert coordinator.served.model("f", 1) == coordinator.model() == body
    assert coordinator.store.blobs.keys("1/models") == [written], "and of others nothing stays"
    play(coordinator, devices)
    assert coordinator.model() == undisturbed


class Held(threading.Event):
    """Blobs of models whose writing takes until this is set; ``begun`` is set when one is being written."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.begun, write = threading.Event(), FolderBlobs.write

        def slow(blobs, key, *content):
            if "/models/" in key:
                self.begun.set()
                assert self.wait(60)
            write(blobs, key, *content)

        monkeypatch.setattr(FolderBlobs, "write", slow)


def test_storage_that_takes_its_time_for_a_model_keeps_nobody_from_writing(coordinator, answer, train, monkeypatch):
    coordinator.create(rounds=2)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(one)
    answer(two)
    slow = Held(monkeypatch)
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(coordinator.rounds.advance)
        assert slow.begun.wait(60)
        publishing = pool.submit(coordinator.create, "g")
        for name in ("c", "d"):
            (device,) = coordinator.enrol(name)
            assert device.ask() is None
        coordinator.change(rounds=3)
        assert [record.status for record in coordinator.records.rounds("f")] == ["open"]
        assert not closing.done()
        assert not publishing.done()
        slow.set()
        assert closing.result()
        publishing.result()
    assert coordinator.record(1).updates == 2
    assert {info.name for info in coordinator.federations.list()} == {"f", "g"}


def test_a_publication_that_was_killed_leaves_neither_a_federation_nor_files(open_coordinator, monkeypatch):
    coordinator = open_coordinator(PowerCut)
    with monkeypatch.context() as patch:
        patch.setattr(Models, "record", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            coordinator.create("g")
    assert coordinator.store.blobs.keys("1/models")
    assert coordinator.federations.list() == []
    coordinator = open_coordinator()
    clear_all(coordinator.store, coordinator.models)
    assert coordinator.store.blobs.keys("1/models") == []
    coordinator.publisher.ensure_default("digits", FederationSettings())
    assert [info.name for info in coordinator.federations.list()] == ["default"], "there never was any"


def test_records_are_made_outside_of_transactions_and_forget_no_fact(coordinator, answer, monkeypatch):
    coordinator.create(rounds=1)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(one)
    answer(two)
    coordinator.rounds.advance()
    made, summarise = [], records.summarise

    def meanwhile(item, rows):
        made.append(item.number)
        if looks == 1 and len(made) == 1:
            with coordinator.store.writing() as db:  # waits for nobody
                touch(db, 1, item.number)
        return summarise(item, rows)

    monkeypatch.setattr(records, "summarise", meanwhile)
    for looks, wanted in ((1, [1, 1]), (2, [1]), (3, [])):  # it is made again, once, and then remembered
        coordinator.records.rounds("f")
        assert made == wanted, looks
        made.clear()


def test_an_update_whose_records_could_not_be_written_is_not_acknowledged(open_coordinator, train, answer):
    coordinator = open_coordinator(PowerCut)
    coordinator.create(rounds=1)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = one.ask()
    coordinator.store.cut = True
    with pytest.raises(OSError, match="power cut"):
        one.send(assignment, train(DIGITS, assignment))
    coordinator.store.cut = False
    assert coordinator.record(1).updates == 0
    assert one.send(assignment, train(DIGITS, assignment)) is True
    answer(two)
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 2


def test_nothing_is_kept_that_nobody_needs(coordinator, play):
    coordinator.create(rounds=3)
    play(coordinator, coordinator.enrol("a", "b"))
    assert coordinator.store.blobs.keys("1/updates") == []
    assert len(coordinator.store.blobs.keys("1/models")) == 1


# --- budgets and policies --------------------------------------------------------------------------------------------


def test_open_work_of_a_leaving_device_is_closed(coordinator, answer, train):
    coordinator.create(cohort=2)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(one)
    open_ = two.ask()
    coordinator.devices.change(
        two.id, ChangeDevice(conditions=Conditions(available=False, reason=PauseReason.charging))
    )
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.status, record.updates, record.handed_back) == ("closed", 1, 1)
    with pytest.raises(RoundClosed, match="returned"):
        two.send(open_, train(DIGITS, open_))


def test_a_policys_reason_makes_a_device_absent_and_others_let_it_rest(coordinator, clock):
    coordinator.create()
    hot, clumsy = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    hot.hand_back(hot.ask(), PauseReason.heat)
    clumsy.hand_back(clumsy.ask(), "the loss is nan")
    paused = {device.name: (device.present, device.paused) for device in coordinator.device_lists.list("f")[0]}
    assert paused == {"a": (False, "heat"), "b": (True, None)}
    clock.pass_seconds(REST_SECONDS)
    coordinator.rounds.advance()
    coordinator.rounds.advance()
    assert coordinator.record(2).cohort == ("b",)
    hot.ask()
    assert [device.paused for device in coordinator.device_lists.list("f")[0]] == [None, None]


def test_who_is_missing_is_said_by_their_words(coordinator):
    coordinator.create()
    devices = coordinator.enrol("a", "b", "c")
    for device, reason in zip(devices, ("heat", "charging", "charging"), strict=True):
        conditions = Conditions(available=False, reason=reason)
        coordinator.devices.change(device.id, ChangeDevice(conditions=conditions))
    coordinator.rounds.advance()
    assert coordinator.info().waiting_for == "a device whose policy lets it work (paused: 2 charging, 1 heat)"


@pytest.mark.parametrize(
    ("said", "kept"), [("heat", PauseReason.heat), ("interrupted by its user", "interrupted by its user")]
)
def test_a_reason_is_a_word_of_the_set_or_a_sentence(said, kept):
    assert Conditions(available=False, reason=said).reason == kept
    assert type(HandBack(reason=said).reason) is type(kept)


def test_a_reported_budget_has_its_limit(coordinator):
    coordinator.create()
    (device,) = coordinator.enrol("a")

    def known():
        (found,) = coordinator.device_lists.list("f")[0]
        return found.budget, found.limited_by

    assert known() == (1.0, None)
    coordinator.devices.change(device.id, ChangeDevice(budget=0.4, limited_by=BudgetLimit.deadline))
    assert known() == (0.4, "deadline")
    coordinator.devices.change(device.id, ChangeDevice(conditions=Conditions()))
    assert known() == (0.4, "deadline"), "what is not told of stays"
    coordinator.devices.change(device.id, ChangeDevice(budget=1.0))
    assert known() == (1.0, None)


def test_a_budget_below_the_density_excludes_a_device(coordinator, answer):
    coordinator.create(method="fedsgc", rounds=4, method_settings={"density": 0.5})
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    first = [one.ask(), two.ask()]
    assert [each.round for each in first] == [1, 1]
    coordinator.devices.change(two.id, ChangeDevice(budget=0.4, limited_by=BudgetLimit.memory))
    one.hand_back(first[0], PauseReason.load), two.hand_back(first[1], PauseReason.load)
    one.ask(), two.ask()
    coordinator.rounds.advance()
    assert coordinator.record(2).cohort == ("a",)
    coordinator.devices.change(two.id, ChangeDevice(budget=0.5))
    one.hand_back(one.ask(), PauseReason.load)
    one.ask()
    coordinator.rounds.advance()
    assert coordinator.record(3).cohort == ("a", "b")


def test_measured_and_estimated_values_are_separate(coordinator, train):
    coordinator.create(rounds=1)
    devices = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    phases = (
        Phase(seconds=10, paused_seconds=2, throttled_seconds=1, celsius_peak=71, joules=30, quality="measured"),
        Phase(seconds=10, throttled_seconds=0, celsius_peak=64, joules=50, quality="estimated"),
        Phase(seconds=10),
    )
    for device, phase in zip(devices, phases, strict=True):
        assignment = device.ask()
        device.send(assignment, train(DIGITS, assignment, telemetry=Telemetry(train=phase)))
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.train.paused_seconds, record.train.throttled_seconds, record.train.celsius_peak) == (2, 1, 71)
    assert (record.upload.throttled_seconds, record.upload.celsius_peak) == (None, None)
    per = record.per_update
    assert (per.joules_measured, per.measured_updates, per.joules_estimated, per.estimated_updates) == (30, 1, 50, 1)


def test_joules_per_point_are_those_since_the_last_evaluation(coordinator):
    coordinator.create()
    coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    usual = coordinator.record(1)

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


# --- who may stop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"early_stopping": "off"}, "no device stops early here"),
        ({}, "asked to train 1 times, and stops at the earliest after 15 "),
        ({"min_participations": 1}, "asked to train 1 times, and stops at the earliest after 10 "),
        ({"early_stopping": "paper", "patience": 2}, "asked to train 1 times, and stops at the earliest after 2 "),
    ],
)
def test_no_device_ends_a_federation_before_its_rule_could(coordinator, answer, play, settings, said):
    coordinator.create(rounds=3, **settings)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    for device in devices:
        with pytest.raises(BadContent, match=said):
            answer(device, stopped=True)
    coordinator.rounds.advance()
    info = coordinator.info()
    assert (info.status, info.devices_stopped, info.round) == ("running", 0, 0)
    play(coordinator, devices)
    info = coordinator.info()
    assert (info.reason, info.round, coordinator.record(1).updates) == ("max_rounds", 3, 2)


def test_a_device_whose_joules_are_limited_may_stop_at_any_time(coordinator, answer):
    coordinator.create(rounds=5, early_stopping="off", joules_per_device=100.0)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    for device, stopped in zip(devices, (True, False), strict=True):
        answer(device, stopped=stopped)
    coordinator.rounds.advance()
    assert coordinator.record(1).stopped == ("a",)
    assert coordinator.record(2).cohort == ("b",)


def test_a_device_may_stop_once_its_rule_could(coordinator, answer):
    coordinator.create(rounds=5, early_stopping="paper", patience=2)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    for stopped in (False, True):
        for device in devices:
            answer(device, stopped=stopped)
        coordinator.rounds.advance()
    assert coordinator.record(2).stopped == ("a", "b")
