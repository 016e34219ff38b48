"""Nothing stays on the disk that no record names, whenever the coordinator is killed and however late a call comes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from sparrow.coordinator.errors import DifferentUpdate, RoundClosed
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.rounds.assignments import update_key
from sparrow.coordinator.rounds.cleanup import clear, clear_all
from sparrow.coordinator.storage.blobs import FolderBlobs

from .fakes import DIGITS

TRAINING = {"rounds": 1, "min_devices": 2, "evaluation_interval": 0}


def updates(coordinator):
    return coordinator.store.blobs.keys("1/updates")


def kept_models(coordinator):
    return [model.version for model in coordinator.served.models("f")], len(coordinator.store.blobs.keys("1/models"))


def restart(open_coordinator):
    coordinator = open_coordinator()
    clear_all(coordinator.store, Models(coordinator.store))
    return coordinator


class Killed(BaseException):
    pass


def test_a_kill_before_cleanup_leaves_no_blobs(open_coordinator, answer, monkeypatch):
    coordinator = open_coordinator()
    coordinator.create(**TRAINING)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    for device in devices:
        answer(device)

    def die(self, key):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(FolderBlobs, "delete", die)
        with pytest.raises(Killed):
            coordinator.rounds.advance()
    assert coordinator.record(1).status == "closed"
    assert len(updates(coordinator)) == 2
    coordinator = restart(open_coordinator)
    assert updates(coordinator) == []
    assert kept_models(coordinator) == ([1], 1)


def test_a_restart_keeps_what_the_open_round_needs(open_coordinator, answer):
    coordinator = open_coordinator()
    coordinator.create(**TRAINING)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(one)
    coordinator.store.blobs.put(update_key(1, "f" * 32, "0" * 64), b"written, and killed before it was recorded")
    assert len(updates(coordinator)) == 2
    one.coordinator = two.coordinator = coordinator = restart(open_coordinator)
    assert len(updates(coordinator)) == 1
    answer(two)
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 2
    assert coordinator.record(1).status == "closed"


def overtaken(coordinator, monkeypatch, meanwhile):
    """The next update to be written is overtaken by what ``meanwhile`` does."""
    write = FolderBlobs.write

    def late(self, key, data, file=None):
        monkeypatch.setattr(FolderBlobs, "write", write)
        meanwhile()
        write(self, key, data, file)

    monkeypatch.setattr(FolderBlobs, "write", late)


def test_the_same_update_that_is_written_again_after_its_round_has_closed(open_coordinator, answer, train, monkeypatch):
    coordinator = open_coordinator()
    coordinator.create(**TRAINING)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(two)
    assignment = one.ask()
    body = train(DIGITS, assignment)

    def twice():
        assert one.send(assignment, body) is True
        coordinator.rounds.advance()
        assert coordinator.record(1).status == "closed"

    overtaken(coordinator, monkeypatch, twice)
    assert one.send(assignment, body) is False
    assert updates(coordinator) == []


def test_the_same_update_twice_at_once_stays_while_its_round_is_open(open_coordinator, answer, train, monkeypatch):
    coordinator = open_coordinator()
    coordinator.create(**TRAINING)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = one.ask()
    body = train(DIGITS, assignment)
    overtaken(coordinator, monkeypatch, lambda: one.send(assignment, body))
    assert one.send(assignment, body) is False
    assert len(updates(coordinator)) == 1
    answer(two)
    coordinator.rounds.advance()
    assert coordinator.record(1).updates == 2


def test_updates_that_are_refused_after_they_were_written(open_coordinator, train, monkeypatch):
    coordinator = open_coordinator()
    coordinator.create(**TRAINING)
    one, two = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    assignment = one.ask()
    overtaken(coordinator, monkeypatch, lambda: one.send(assignment, train(DIGITS, assignment)))
    with pytest.raises(DifferentUpdate):
        one.send(assignment, train(DIGITS, assignment, examples=7))
    assert len(updates(coordinator)) == 1, "the one that was accepted"
    assignment = two.ask()
    overtaken(coordinator, monkeypatch, lambda: two.hand_back(assignment))
    with pytest.raises(RoundClosed):
        two.send(assignment, train(DIGITS, assignment))
    assert len(updates(coordinator)) == 1


def test_a_process_that_was_replaced_in_the_middle_removes_nothing_of_its_successor(
    open_coordinator, answer, monkeypatch
):
    """It has looked at the records, and stands still; what comes then, of rounds that it does not know, stays."""
    coordinator = open_coordinator()
    coordinator.create(rounds=3, min_devices=2, evaluation_interval=0)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    for device in devices:
        answer(device)
    model, uncommitted = f"1/models/000000002.{'a' * 64}.safetensors", f"1/models/000000003.{'b' * 64}.safetensors"
    reading, looks = coordinator.store.reading, []

    @contextmanager
    def overtaken():
        with reading() as db:
            yield db
        if not looks:
            looks.append("the one of the process that stands still then")
            coordinator.rounds.advance()
            for device in devices:
                answer(device)
            coordinator.store.blobs.put(model, b"of the round that the other one closes")

    coordinator.store.blobs.put(uncommitted, b"of a close that has begun")
    with monkeypatch.context() as patch:
        patch.setattr(coordinator.store, "reading", overtaken)
        clear(coordinator.store, coordinator.models, 1)
    assert len(updates(coordinator)) == 2
    assert {model, uncommitted} <= set(coordinator.store.blobs.keys("1/models"))


def test_a_federation_that_cannot_be_read_keeps_no_other_from_being_cleared(open_coordinator, caplog, monkeypatch):
    coordinator = open_coordinator()
    for name in ("f", "g"):
        coordinator.create(name, **TRAINING)
    coordinator.store.blobs.put("2/updates/left", b"over")
    needed = Models.needed

    def broken(db, federation_id, keys):
        if federation_id == 1:
            raise FileNotFoundError("a lost file")
        return needed(db, federation_id, keys)

    monkeypatch.setattr(Models, "needed", staticmethod(broken))
    coordinator = restart(open_coordinator)
    assert "federation 1" in caplog.text
    assert coordinator.store.blobs.keys("2/updates") == []
