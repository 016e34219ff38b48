"""Nothing stays on the disk that no record names, whenever the coordinator is killed and however late a call comes."""

from __future__ import annotations

import pytest

from sparrow.coordinator.errors import DifferentUpdate, RoundClosed
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.rounds.assignments import update_key
from sparrow.coordinator.rounds.cleanup import clear_all
from sparrow.coordinator.storage.blobs import FolderBlobs

from .fakes import DIGITS

TRAINING = {"rounds": 1, "min_devices": 2, "evaluation_interval": 0}


def updates(house):
    return house.store.blobs.keys("1/updates")


def kept_models(house):
    return [model.version for model in house.federations.models("f")], len(house.store.blobs.keys("1/models"))


def restart(open_house):
    house = open_house()
    clear_all(house.store, Models(house.store))
    return house


class Killed(BaseException):
    pass


def test_killed_when_a_round_has_closed_and_before_what_it_was_made_of_is_gone(open_house, answer, monkeypatch):
    house = open_house()
    house.create(**TRAINING)
    devices = house.enrol("a", "b")
    house.rounds.advance()
    for device in devices:
        answer(device)

    def die(self, key):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(FolderBlobs, "delete", die)
        with pytest.raises(Killed):
            house.rounds.advance()
    assert house.record(1).status == "closed"
    assert len(updates(house)) == 2
    house = restart(open_house)
    assert updates(house) == []
    assert kept_models(house) == ([1], 1)


def test_a_restart_keeps_what_the_open_round_needs(open_house, answer):
    house = open_house()
    house.create(**TRAINING)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    answer(one)
    house.store.blobs.put(update_key(1, "f" * 32, "0" * 64), b"written, and killed before it was recorded")
    assert len(updates(house)) == 2
    one.house = two.house = house = restart(open_house)
    assert len(updates(house)) == 1
    answer(two)
    house.rounds.advance()
    assert house.record(1).updates == 2
    assert house.record(1).status == "closed"


def overtaken(house, monkeypatch, meanwhile):
    """The next update to be written is overtaken by what ``meanwhile`` does."""
    write = FolderBlobs.write

    def late(self, key, data, file=None):
        monkeypatch.setattr(FolderBlobs, "write", write)
        meanwhile()
        write(self, key, data, file)

    monkeypatch.setattr(FolderBlobs, "write", late)


def test_the_same_update_that_is_written_again_after_its_round_has_closed(open_house, answer, train, monkeypatch):
    house = open_house()
    house.create(**TRAINING)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    answer(two)
    assignment = one.ask()
    body = train(DIGITS, assignment)

    def twice():
        assert one.send(assignment, body) is True
        house.rounds.advance()
        assert house.record(1).status == "closed"

    overtaken(house, monkeypatch, twice)
    assert one.send(assignment, body) is False
    assert updates(house) == []


def test_the_same_update_twice_at_once_stays_while_its_round_is_open(open_house, answer, train, monkeypatch):
    house = open_house()
    house.create(**TRAINING)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    assignment = one.ask()
    body = train(DIGITS, assignment)
    overtaken(house, monkeypatch, lambda: one.send(assignment, body))
    assert one.send(assignment, body) is False
    assert len(updates(house)) == 1
    answer(two)
    house.rounds.advance()
    assert house.record(1).updates == 2


def test_updates_that_are_refused_after_they_were_written(open_house, train, monkeypatch):
    house = open_house()
    house.create(**TRAINING)
    one, two = house.enrol("a", "b")
    house.rounds.advance()
    assignment = one.ask()
    overtaken(house, monkeypatch, lambda: one.send(assignment, train(DIGITS, assignment)))
    with pytest.raises(DifferentUpdate):
        one.send(assignment, train(DIGITS, assignment, examples=7))
    assert len(updates(house)) == 1, "the one that was accepted"
    assignment = two.ask()
    overtaken(house, monkeypatch, lambda: two.hand_back(assignment))
    with pytest.raises(RoundClosed):
        two.send(assignment, train(DIGITS, assignment))
    assert len(updates(house)) == 1


def test_a_federation_that_cannot_be_read_keeps_no_other_from_being_cleared(open_house, caplog, monkeypatch):
    house = open_house()
    for name in ("f", "g"):
        house.create(name, **TRAINING)
    house.store.blobs.put("2/updates/left", b"over")
    forget = Models.forget

    def broken(self, federation_id, *kept):
        if federation_id == 1:
            raise FileNotFoundError("a lost file")
        forget(self, federation_id, *kept)

    monkeypatch.setattr(Models, "forget", broken)
    house = restart(open_house)
    assert "what is left over of federation 1 could not be removed" in caplog.text
    assert house.store.blobs.keys("2/updates") == []
