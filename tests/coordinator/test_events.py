"""The timeline: each event once, from the transaction that causes it."""

from __future__ import annotations

from contextlib import closing

import pytest

from sparrow.coordinator.reports.timeline import EventQuery
from sparrow.coordinator.storage import events
from sparrow.protocol.events import EventKind
from sparrow.protocol.messages import ChangeDevice, Conditions, PauseReason

from .fakes import LocalCoordinator


@pytest.fixture
def coordinator(tmp_path, clock):
    coordinator = LocalCoordinator(tmp_path / "data", clock)
    with closing(coordinator.store):
        yield coordinator


def kinds(coordinator, device=None):
    """The kinds of events, oldest first: of a device, or of the federation itself."""
    found = coordinator.timeline.look("f", EventQuery(device)).events
    return [each.kind.value for each in reversed(found) if each.device == device]


def texts(coordinator, **query):
    return [each.text for each in coordinator.timeline.look("f", EventQuery(**query)).events]


def test_a_federation_tells_its_life(coordinator, play):
    coordinator.create(rounds=4, cohort=2)
    play(coordinator, coordinator.enrol("a", "b"))
    coordinator.change(rounds=5, cohort=2)
    coordinator.change(action="rollback", model_version=4)
    coordinator.change(action="reopen")
    coordinator.change(action="pause")
    coordinator.change(action="resume")
    coordinator.change(action="stop")
    own = ["created", "started", "finished", "settings_changed", "rolled_back", "reopened", "paused", "resumed"]
    assert kinds(coordinator) == [*own, "stopped"]
    assert kinds(coordinator, "a") == ["joined"]
    (changed,) = texts(coordinator, kinds=(EventKind.settings_changed,))
    assert changed == "settings changed: rounds: 4 to 5"
    coordinator.change(operator="Clinic of Ulm", purpose="")
    consent = texts(coordinator, kinds=(EventKind.settings_changed,))[0]
    assert consent == "settings changed: operator: none to Clinic of Ulm"
    assert texts(coordinator, kinds=(EventKind.finished,)) == ["finished: all rounds done"]
    ended = next(each for each in coordinator.timeline.look("f").events if each.kind == "finished")
    assert ended.round == 4


def test_a_failure_that_lasts_is_one_event_and_its_end_another(coordinator, clock, answer):
    coordinator.create(rounds=9, cohort=1, min_devices=1)
    (device,) = coordinator.enrol("a")
    for _ in range(2):
        coordinator.rounds.advance()
        device.hand_back(device.ask(), "out-of-memory")
        clock.now += 120
    assert kinds(coordinator, "a") == ["joined", "failed"]
    coordinator.rounds.advance()
    answer(device)
    assert kinds(coordinator, "a") == ["joined", "failed", "recovered"]


def test_a_pause_is_one_event_however_often_it_is_reported(coordinator):
    coordinator.create()
    (device,) = coordinator.enrol("a")

    def report(available, reason=""):
        conditions = Conditions(available=available, reason=reason)
        coordinator.devices.change(device.id, ChangeDevice(conditions=conditions))

    report(False, PauseReason.heat)
    report(False, PauseReason.heat)
    report(False, PauseReason.battery)
    report(True)
    report(True)
    report(False, PauseReason.heat)
    device.ask()
    assert kinds(coordinator, "a") == ["joined", "paused", "paused", "resumed", "paused", "resumed"]
    coordinator.devices.change(device.id, ChangeDevice(revoked=True))
    coordinator.devices.change(device.id, ChangeDevice(revoked=True))
    assert kinds(coordinator, "a")[-1] == "removed"
    assert kinds(coordinator, "a").count("removed") == 1


def test_old_device_events_do_not_displace_federation_events(coordinator, monkeypatch):
    monkeypatch.setattr(events, "MOST_EVENTS", 10)
    coordinator.create()
    with coordinator.store.writing() as db:
        for number in range(2 * events.PRUNE_EVERY):
            events.record(db, 1, EventKind.paused, float(number), device="a")
    assert kinds(coordinator) == ["created"]
    assert len(kinds(coordinator, "a")) <= 10 + events.PRUNE_EVERY
    page = coordinator.timeline.look("f", EventQuery(limit=4))
    assert page.total > len(page.events) == 4
    older = coordinator.timeline.look("f", EventQuery(before=page.events[-1].id, limit=1))
    newer = coordinator.timeline.look("f", EventQuery(after=older.events[0].id)).events
    assert newer == page.events
