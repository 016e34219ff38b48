"""Federations that are deleted, and that are published again."""

from __future__ import annotations

import pytest
from sqlalchemy import func, inspect, select

from edge_sdk.protocol.messages import ChangeFederation, CompareFederation, FederationSettings
from sparrow.coordinator.commands.tokens import create as create_token
from sparrow.coordinator.errors import DifferentFederation, FederationDeleted, NotFound, WrongState
from sparrow.coordinator.fleet.access import digest_of
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.rounds.cleanup import clear_all
from sparrow.coordinator.storage.blobs import FolderBlobs
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Base, DeletedDevice, DeletedFederation, Token

from .fakes import CALM, DIGITS

STAYS = {DeletedDevice, DeletedFederation, Token}


@pytest.fixture
def house(open_house):
    return open_house()


def rows(house):
    with house.store.reading() as db:
        return {
            each.class_.__tablename__: db.scalar(select(func.count()).select_from(each.class_))
            for each in Base.registry.mappers
            if each.class_ not in STAYS
        }


def blobs(house):
    root = house.store.folder / "blobs"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# --- deleting --------------------------------------------------------------------------------------------------------


def test_nothing_of_a_deleted_federation_stays_and_others_do(house, answer, play, train):
    house.create(name="other")
    before, files = rows(house), blobs(house)
    house.create(rounds=2, evaluation_interval=1)
    devices = house.enrol("a", "b")
    play(house, devices)
    with house.store.writing() as db:
        token, _ = create_token(db, "enrolment", 0, note="", uses=None, seconds=None, federation="f")
        token_id = token.id
    house.federations.delete("f")
    assert rows(house) == before
    assert blobs(house) == files
    with pytest.raises(NotFound):
        house.info()
    with pytest.raises(
        FederationDeleted, match="was deleted by its operator, so there is nothing left to do; its personal"
    ):
        devices[0].ask()
    with pytest.raises(FederationDeleted):
        house.devices.authenticate(devices[1].token)
    with house.store.reading() as db:
        kept = db.get_one(Token, token_id)
        assert kept.revoked_at is not None, "and is there: enrolling stays shut"
    assert not house.rounds.advance()


def test_one_that_is_at_work_is_stopped_first(house, answer):
    house.create()
    devices = house.enrol("a", "b")
    house.rounds.advance()
    asked = devices[0].ask()
    for action in ("running", "paused"):
        with pytest.raises(WrongState, match=f"f is {action}: its devices would lose their work\\. Stop it first"):
            house.federations.delete("f")
        house.change(action="pause") if action == "running" else house.change(action="stop")
    house.federations.delete("f")
    with pytest.raises(NotFound):
        devices[0].beat(asked)
    assert not house.rounds.advance()


def test_a_round_that_moves_while_its_federation_goes_does_no_harm(house, answer, monkeypatch, caplog):
    house.create(rounds=1)
    devices = house.enrol("a", "b")
    house.rounds.advance()
    answer(devices[0])
    house.rounds.advance()
    house.change(action="stop")
    step = house.rounds._step

    def late(federation_id):
        house.federations.delete("f")
        return step(federation_id)

    monkeypatch.setattr(house.rounds, "_step", late)
    assert not house.rounds.advance()
    assert not [record for record in caplog.records if record.exc_info]


def test_the_next_federation_gets_nothing_of_it_though_a_kill_left_all_its_blobs(open_house, play, monkeypatch):
    class Killed(BaseException):
        pass

    def die(self, key):
        raise Killed

    house = open_house()
    house.create(rounds=3)
    play(house, house.enrol("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(FolderBlobs, "delete", die)
        with pytest.raises(Killed):
            house.federations.delete("f")
    assert blobs(house)
    house = open_house()  # the blobs of a coordinator without records would be another's
    house.create()
    assert house.info().model_version == 0
    mine = [path for path in blobs(house) if path.startswith("2/")]
    clear_all(house.store, Models(house.store))
    assert blobs(house) == mine
    assert house.federations.models("f")[0].version == 0


def test_the_first_federation_is_not_made_again_once_it_was_deleted(house):
    house.federations.ensure_default("digits", FederationSettings())
    house.federations.delete("default")
    house.federations.ensure_default("digits", FederationSettings())
    assert house.federations.list() == []


def test_on_postgresql_too(postgresql, tmp_path, clock, play):
    from .fakes import House

    url = postgresql.new_database()
    house = House(tmp_path / "data", clock, lambda folder: Store(folder, url))
    try:
        house.create(rounds=1)
        devices = house.enrol("a", "b")
        play(house, devices)
        house.federations.delete("f")
        assert set(rows(house).values()) == {0}
        house.create()
        with house.store.reading() as db:
            assert db.get(DeletedDevice, digest_of(devices[0].token)).federation_id == 1
            assert "deleted_devices" in inspect(db.connection()).get_table_names()
        assert house.info().round == 0
    finally:
        house.store.close()


# --- publishing again ------------------------------------------------------------------------------------------------


def wanted(task="digits", model=None, **settings):
    return CompareFederation(task=task, model_digest=model, settings=FederationSettings(**{**CALM, **settings}))


def test_the_same_federation_is_found(house):
    house.create(method="fedprox", rounds=50, method_settings={"proximal_weight": 0.01})
    for same in (wanted(method="fedprox", rounds=50), wanted(method="fedprox", rounds=50, model=DIGITS.model_digest)):
        assert house.federations.compare("f", same).name == "f", "a default that is filled in is no difference"
    with pytest.raises(NotFound):
        house.federations.compare("g", wanted())


def test_each_difference_is_named(house):
    house.create(method="fedprox", rounds=2, method_settings={"proximal_weight": 1.0})
    with pytest.raises(DifferentFederation) as refused:
        house.federations.compare("f", wanted(task="har", model="0" * 64, method="fedavg", rounds=50))
    assert str(refused.value) == (
        "a federation 'f' exists and is another: method: asked for fedavg, it has fedprox; rounds: asked for 50, it "
        "has 2; task: asked for har, it has digits. Choose another name, ask for what it has, or delete it first "
        "(sparrow delete SERVER f)"
    )
    with pytest.raises(DifferentFederation, match=r"proximal_weight: asked for 0\.01, it has 1\.0"):
        house.federations.compare("f", wanted(method="fedprox", rounds=2))
    settings = {"method": "fedprox", "rounds": 2, "method_settings": {"proximal_weight": 1}}
    with pytest.raises(DifferentFederation, match="model: its layers, their shapes"):
        house.federations.compare("f", wanted(model="0" * 64, **settings))


def test_what_an_operator_changed_since_is_no_difference(house):
    house.create(rounds=2)
    house.federations.change("f", ChangeFederation(rounds=9, cohort=3, deadline_seconds=7, silence_seconds=9))
    assert house.federations.compare("f", wanted(rounds=2)).rounds == 9
    with pytest.raises(DifferentFederation, match="rounds: asked for 9, it has 2"):
        house.federations.compare("f", wanted(rounds=9))
