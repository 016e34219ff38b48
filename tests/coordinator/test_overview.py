"""What the page is shown: it agrees with the records, and stays small however large the fleet."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from sqlalchemy import event, select, text, update

from sparrow.coordinator.errors import NotFound, Unreadable
from sparrow.coordinator.reports.device_list import DeviceQuery
from sparrow.coordinator.reports.overview import MOST_POINTS, span_of
from sparrow.coordinator.reports.summary import bottom_decile
from sparrow.coordinator.storage.tables import Assignment, Device, Federation, Round
from sparrow.protocol import bundle
from sparrow.protocol.masks import NeuronDraw, count_values, draw_neurons
from sparrow.protocol.messages import (
    ChangeDevice,
    Conditions,
    DeviceProfile,
    Doing,
    Enrol,
    Kind,
    PauseReason,
    UpdateReport,
)

from .fakes import DIGITS, STOPS
from .grown import grow

pytestmark = pytest.mark.integration  # plays whole federations


@pytest.fixture
def coordinator(open_coordinator):
    return open_coordinator()


@pytest.fixture
def queries(coordinator):
    """The statements that the coordinator's store has made."""
    made = []
    event.listen(coordinator.store.engine, "before_cursor_execute", lambda c, cursor, sql, *_: made.append(sql))
    return made


def test_points_agree_with_the_records(coordinator, play):
    coordinator.create(rounds=3, evaluation_interval=2)
    play(coordinator, coordinator.enrol("a", "b"))
    overview, records = coordinator.overviews.look("f"), coordinator.records.rounds("f")
    assert (overview.span, overview.open_round, overview.federation.status) == (1, None, "finished")
    assert [point.round for point in overview.points] == [record.round for record in records] == [1, 2, 3]
    for point, record in zip(overview.points, records, strict=True):
        for name in ("updates", "accuracy_personal", "accuracy_personal_decile", "accuracy_global", "loss_personal"):
            assert getattr(point, name) == getattr(record, name)
        assert (point.bytes_up, point.bytes_down) == (record.bytes_up, record.bytes_down)
        assert point.train_seconds == record.train.seconds
        assert point.seconds == record.seconds
        assert point.whole_bytes == record.updates * 2 * 4 * DIGITS.shared_values
    assert [point.accuracy_personal for point in overview.points] == [None, 0.5, 0.5]


def test_a_round_that_closes_during_the_look_is_left_to_the_next_one(coordinator, play, monkeypatch):
    coordinator.create(rounds=2)
    look = coordinator.overviews.look
    federation_id = coordinator.records.refresh("f")
    play(coordinator, coordinator.enrol("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(coordinator.records, "refresh", lambda name: federation_id)  # it has looked before they closed
        assert look("f").points == ()
    assert [point.updates for point in look("f").points] == [2, 2]


def test_the_open_round_shows_who_is_being_waited_for(coordinator, answer):
    coordinator.create(deadline_seconds=100)
    one, two, three = coordinator.enrol("a", "b", "c")
    coordinator.rounds.advance()
    answer(one)
    two.hand_back(two.ask(), "too hot")
    running = coordinator.overviews.look("f").open_round
    assert (running.round, running.cohort, running.done, running.returned, running.expired) == (1, 3, 1, 1, 0)
    assert [each.device for each in running.waiting_for] == [three.name]


def test_a_buffered_round_shows_arrived_and_awaited_updates(coordinator, answer):
    coordinator.create(cohort=3, buffer=2, rounds=9)
    devices = {device.name: device for device in coordinator.enrol(*"abcd")}
    coordinator.rounds.advance()
    first, *others = [devices[name] for name in coordinator.record(1).cohort]
    answer(first)
    running = coordinator.overviews.look("f").open_round
    assert (running.round, running.target, running.done) == (1, 2, 1)
    answer(others[0])
    coordinator.rounds.advance()
    answer(others[1])  # which began in round 1
    running = coordinator.overviews.look("f").open_round
    assert (running.round, running.done) == (2, 1)
    coordinator.rounds.advance()
    running = coordinator.overviews.look("f").open_round
    assert (
        running.cohort
        == running.done + len(running.waiting_for)
        == 1 + coordinator.overviews.look("f").doing["training"]
    )


def test_every_device_has_its_work_or_a_reason(coordinator, answer):
    coordinator.create(cohort=3, rounds=5, evaluation_interval=1, **STOPS)
    one, two, away, paused, revoked, resting = coordinator.enrol(*"abcdef")
    coordinator.devices.change(away.id, ChangeDevice(conditions=Conditions(available=False)))
    reason = PauseReason.heat
    coordinator.devices.change(paused.id, ChangeDevice(conditions=Conditions(available=False, reason=reason)))
    coordinator.devices.change(revoked.id, ChangeDevice(revoked=True))

    def doing():
        found = {device.name: device.doing.value for device in coordinator.device_lists.list("f")[0]}
        counted = {what.value: count for what, count in coordinator.overviews.look("f").doing.items()}
        assert counted == Counter(found.values())
        return found

    usual = {"c": "away", "d": "paused", "e": "revoked"}
    assert doing() == {"a": "ready", "b": "ready", "f": "ready", **usual}
    coordinator.rounds.advance()
    resting.hand_back(resting.ask(), "the loss is nan")
    assert doing() == {"a": "training", "b": "training", "f": "resting", **usual}
    answer(one)
    assert doing()["a"] == "ready"
    answer(two, stopped=True)
    assert doing()["b"] == "stopped"
    coordinator.rounds.advance()
    assert coordinator.overviews.look("f").evaluating > 0
    assert doing()["a"] == "training", "which comes before evaluating"


def test_a_budget_that_is_too_small_is_said(coordinator):
    coordinator.create(method="fedsgc", rounds=30)
    coordinator.enrol("a", "b", a=0.19, b=0.2)
    assert [device.doing.value for device in coordinator.device_lists.list("f")[0]] == ["small_budget", "ready"]
    assert coordinator.overviews.look("f").smallest_budget == pytest.approx(0.2)


def test_notices_tell_what_an_operator_should_know(coordinator):
    coordinator.create()
    (device,) = coordinator.enrol("a")
    assert coordinator.overviews.look("f").notices == ()
    coordinator.devices.change(device.id, ChangeDevice(conditions=Conditions(available=False)))
    coordinator.metrics.left_out.labels("f").inc(3)
    coordinator.metrics.left_out.labels("another").inc(5)
    notices = {notice.kind: notice.text for notice in coordinator.overviews.look("f").notices}
    assert notices["left_out"].endswith(": 3")
    assert notices["lost"].endswith("silence or leaving: 1")


def test_no_federation_of_this_name(coordinator):
    with pytest.raises(NotFound, match="there is no federation 'none'"):
        coordinator.overviews.look("none")
    assert coordinator.summaries.only() is None
    assert coordinator.summaries.list() == []


@pytest.mark.parametrize(
    ("rounds", "span"), [(0, 1), (240, 1), (241, 2), (480, 2), (481, 4), (1000, 8), (100_000, 512)]
)
def test_many_rounds_become_few_points(rounds, span):
    assert span_of(rounds) == span
    assert -(-rounds // span) <= MOST_POINTS


def test_thinned_points_lose_no_sum_and_keep_the_last_accuracy(coordinator):
    coordinator.create()
    grow(coordinator.store, devices=20, rounds=500, cohort=4)
    overview = coordinator.overviews.look("f")
    assert overview.span == 4
    assert [(point.first, point.round) for point in overview.points[:2]] == [(1, 4), (5, 8)]
    assert sum(point.updates for point in overview.points) == 500 * 4
    assert sum(point.bytes_up for point in overview.points) == 500 * 4000
    assert sum(point.joules_estimated for point in overview.points) == pytest.approx(500 * 12)
    assert overview.points[0].accuracy_personal is None
    assert (overview.points[1].accuracy_personal, overview.points[1].accuracy_personal_decile) == (5 / 2000, 5 / 4000)
    assert overview.points[-1].train_loss == pytest.approx(1 / 500)
    later = coordinator.overviews.look("f", since=500)
    assert later.points == overview.points[-3:], "only the newest, but whole ones"


def test_a_large_fleet_takes_no_more_queries_and_few_bytes(coordinator, queries):
    coordinator.create()
    grow(coordinator.store, devices=30, rounds=3, cohort=4)

    def look(what):
        queries.clear()
        return what(), len(queries)

    look(lambda: coordinator.overviews.look("f"))  # how long devices may be silent is asked once for all federations
    _, few = look(lambda: coordinator.overviews.look("f"))
    _, few_devices = look(lambda: coordinator.device_lists.list("f", DeviceQuery(limit=50)))
    coordinator.create("large")
    grow(coordinator.store, devices=10_000, rounds=1000, cohort=2000, name="large")
    whole, many = look(lambda: coordinator.overviews.look("large"))
    update, again = look(lambda: coordinator.overviews.look("large", since=1000))
    (page, total), devices = look(lambda: coordinator.device_lists.list("large", DeviceQuery(limit=50)))
    assert few == many == again <= 16
    assert few_devices == devices <= 4
    assert len(whole.model_dump_json()) < 150_000
    assert len(update.model_dump_json()) < 20_000
    assert (len(page), total) == (50, 10_000)
    assert sum(len(device.model_dump_json()) for device in page) < 50_000
    assert sum(whole.doing.values()) == 10_000
    assert len(whole.open_round.waiting_for) == 25
    assert whole.open_round.cohort == 2000


def test_devices_are_found_by_name_board_and_what_they_do(coordinator):
    coordinator.create()
    grow(coordinator.store, devices=200, rounds=1, cohort=3)

    def names(**wanted):
        return [device.name for device in coordinator.device_lists.list("f", DeviceQuery(**wanted))[0]]

    assert names(search="00017") == ["device-00017"]
    assert names(search="PI 4", limit=3) == ["device-00001", "device-00004", "device-00007"]
    assert names(search="%") == [], "no wildcards"
    odd = Enrol(name="odd", enrolment_key="k" * 32, profile=DeviceProfile(board="Ödroid"))
    coordinator.devices.enrol("f", odd)
    assert names(search="Ödroid") == ["odd"]
    assert names(order="-seen", limit=2) == ["device-00199", "device-00198"]
    assert names(order="-budget", limit=2) == ["device-00004", "device-00009"]
    assert names(doing=Doing.stopped, offset=18) == ["device-00180", "device-00190"]
    assert coordinator.device_lists.list("f", DeviceQuery(doing=Doing.stopped, limit=1))[1] == 20
    assert names(order="stopped", limit=1) == ["device-00000"]


@pytest.mark.parametrize(
    ("values", "decile"),
    [([], None), ([None], None), ([0.5, None, 0.2], 0.2), (range(100), 9), (range(19), 0), (range(20), 1)],
)
def test_the_bottom_decile_is_the_tenth_worst_of_a_hundred(values, decile):
    assert bottom_decile(values) == decile


def test_missing_records_are_made_a_few_at_a_time(coordinator):
    coordinator.create()
    grow(coordinator.store, devices=3, rounds=25, cohort=1)
    with coordinator.store.writing() as db:
        db.execute(update(Round).values(stale=True))
    written = []
    coordinator.store.on_commit = written.append
    assert len(coordinator.records.rounds("f")) == 26
    assert len(written) == 3, "between them others write"
    coordinator.records.rounds("f")
    assert len(written) == 3


# --- what was stored can be read -------------------------------------------------------------------------------------


def spoil(coordinator, table, column, value, *those):
    """Have other things in the records than this version writes."""
    with coordinator.store.writing() as db:
        for item in db.scalars(select(table).where(*those)):
            stored = value(getattr(item, column)) if callable(value) else value
            setattr(item, column, stored)
        db.execute(update(Round).values(stale=True))


ENDLESS = {"seconds": 1.7e308, "quality": "unavailable"}


@pytest.mark.parametrize(
    "report",
    [
        lambda report: {**report, "telemetry": {"download": ENDLESS, "train": ENDLESS}},
        lambda report: {**report, "news": 1},
        lambda report: {**report, "train_loss": "rubbish"},
        {},
        [],
        "rubbish",
        None,
    ],
)
def test_a_report_that_cannot_be_read_hides_no_other(coordinator, play, report):
    coordinator.create(rounds=2, evaluation_interval=1)
    play(coordinator, coordinator.enrol("a", "b"))
    whole = coordinator.records.rounds("f")
    of_a = Assignment.device_id == select(Device.id).where(Device.name == "a").scalar_subquery()
    spoil(coordinator, Assignment, "report", report, of_a, Assignment.round == 1, Assignment.kind == "train")
    first, second = coordinator.records.rounds("f")
    assert (first.unreadable, first.updates, first.num_examples, second) == (("a",), 2, 10, whole[1])
    assert [each.device for each in coordinator.records.reports("f", 1) if each.kind is Kind.train] == ["b"]
    assert [point.updates for point in coordinator.overviews.look("f").points] == [2, 2]


def test_nor_does_anything_else_that_cannot_be_read(coordinator, play):
    coordinator.create(rounds=2, evaluation_interval=1)
    play(coordinator, coordinator.enrol("a", "b"))
    before = coordinator.records.rounds("f")
    of_a = Device.name == "a"
    spoil(coordinator, Device, "profile", {"cores": 0}, of_a)
    spoil(coordinator, Device, "paused", "moonlight", of_a)
    spoil(coordinator, Device, "limited_by", "moonlight", of_a)
    spoil(coordinator, Device, "bytes_up", 2**60, of_a)
    spoil(coordinator, Assignment, "upload_cost", {"seconds": -1}, Assignment.kind == "train")
    assert [each.name for each in coordinator.device_lists.list("f")[0]] == ["a", "b"]
    assert coordinator.device_lists.list("f")[0][0].profile.board == "unreadable"
    assert [record.updates for record in coordinator.records.rounds("f")] == [2, 2]
    with coordinator.store.writing() as db:  # what was made of the facts before
        db.execute(update(Round).values(summary={"round": 1, "status": "closed"}, stale=False))
    assert coordinator.records.rounds("f") == before


def test_damaged_text_in_a_record_hides_no_other(coordinator, play):
    """SQLite alone: PostgreSQL stores no text that is not JSON."""
    coordinator.create(rounds=2, evaluation_interval=1)
    play(coordinator, coordinator.enrol("a", "b"))
    if coordinator.store.engine.dialect.name != "sqlite":
        pytest.skip("a server checks it")
    with coordinator.store.writing() as db:
        db.execute(text("UPDATE assignments SET report = substr(report, 9) WHERE round = 1 AND kind = 'train'"))
        db.execute(text("UPDATE devices SET profile = '{' WHERE name = 'a'"))
        db.execute(text("UPDATE rounds SET stale = 1"))
    assert coordinator.records.rounds("f")[0].unreadable == ("a", "b")
    assert [info.profile.board for info in coordinator.device_lists.list("f")[0]] == ["unreadable", ""]
    assert [point.updates for point in coordinator.overviews.look("f").points] == [2, 2]


def test_settings_that_cannot_be_read_are_said_and_hide_no_other_federation(coordinator):
    coordinator.create()
    coordinator.create(name="other")
    spoil(coordinator, Federation, "settings", lambda settings: {**settings, "rounds": -1}, Federation.name == "f")
    assert [info.name for info in coordinator.federations.list()] == ["other"]
    with pytest.raises(Unreadable, match=r"'f'.*\brounds: "):
        coordinator.federations.get("f")
    assert not coordinator.rounds.advance(), "and the others go on"


def test_devices_counts_are_apart_from_the_coordinators_notes(coordinator, answer):
    """They choose the names: none of theirs is taken for the coordinator's own, and there are never many."""
    coordinator.create(rounds=1, cohort=3, min_devices=3, update_clip=1.0)
    devices = coordinator.enrol(*"abc")
    coordinator.rounds.advance()
    for device in devices[:2]:
        own = {f"{device.name}{number}": 1 for number in range(28)}
        counts = {"updates_clipped": 2**40, "updates_left_out": 7, "left_out": 1, "privacy": 1, **own}
        send_counts(device, counts)
    answer(devices[2])
    coordinator.rounds.advance()
    record = coordinator.record(1)
    assert (record.notes["updates_clipped"], record.left_out, record.privacy) == (3, {}, None)
    assert "updates_left_out" not in record.notes or record.notes["updates_left_out"] == 0
    assert record.counts["updates_clipped"] == 2**41
    assert len(record.counts) == 50


def send_counts(device, counts):
    assignment = device.ask()
    work = assignment.work
    draw = NeuronDraw(work.key, work.ratio)
    mask = draw_neurons(DIGITS, draw)
    values = np.ones(count_values(DIGITS, mask), np.float32)
    report = UpdateReport(num_examples=10, steps=1, train_loss=0.5, counts=counts).model_dump_json()
    assert device.send(assignment, bundle.encode(DIGITS, values, mask, draw=draw, report=report))
