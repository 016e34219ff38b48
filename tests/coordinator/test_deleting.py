"""Federations that are deleted, and that are published again."""

from __future__ import annotations

import pytest
from sqlalchemy import func, inspect, select

from sparrow.coordinator.errors import DifferentFederation, FederationDeleted, NotFound, WrongState
from sparrow.coordinator.fleet import issuing
from sparrow.coordinator.fleet.access import digest_of
from sparrow.coordinator.models.global_models import Models
from sparrow.coordinator.rounds.cleanup import clear_all
from sparrow.coordinator.storage.blobs import FolderBlobs
from sparrow.coordinator.storage.tables import Base, DeletedDevice, DeletedFederation, Lease, Token
from sparrow.protocol.messages import ChangeFederation, CompareFederation, CreateToken
from sparrow.protocol.settings import FederationSettings

from .fakes import CALM, DIGITS

STAYS = {DeletedDevice, DeletedFederation, Token, Lease}


@pytest.fixture
def coordinator(open_coordinator):
    return open_coordinator()


def rows(coordinator):
    with coordinator.store.reading() as db:
        return {
            each.class_.__tablename__: db.scalar(select(func.count()).select_from(each.class_))
            for each in Base.registry.mappers
            if each.class_ not in STAYS
        }


def blobs(coordinator):
    root = coordinator.store.folder / "blobs"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# --- deleting --------------------------------------------------------------------------------------------------------


def test_nothing_of_a_deleted_federation_stays_and_others_do(coordinator, answer, play, train):
    coordinator.create(name="other")
    before, files = rows(coordinator), blobs(coordinator)
    coordinator.create(rounds=2, evaluation_interval=1)
    devices = coordinator.enrol("a", "b")
    play(coordinator, devices)
    with coordinator.store.writing() as db:
        token_id = issuing.create(db, CreateToken(kind="enrolment", federation="f"), 0.0).id
    coordinator.federations.delete("f")
    assert rows(coordinator) == before
    assert blobs(coordinator) == files
    with pytest.raises(NotFound):
        coordinator.info()
    with pytest.raises(FederationDeleted, match="deleted"):
        devices[0].ask()
    with pytest.raises(FederationDeleted):
        coordinator.devices.authenticate(devices[1].token)
    with coordinator.store.reading() as db:
        kept = db.get_one(Token, token_id)
        assert kept.revoked_at is not None, "and is there: enrolling stays shut"
    assert not coordinator.rounds.advance()


def test_one_that_is_at_work_is_stopped_first(coordinator, answer):
    coordinator.create()
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    asked = devices[0].ask()
    for action in ("running", "paused"):
        with pytest.raises(WrongState, match=f"f is {action}"):
            coordinator.federations.delete("f")
        coordinator.change(action="pause") if action == "running" else coordinator.change(action="stop")
    coordinator.federations.delete("f")
    with pytest.raises(NotFound):
        devices[0].beat(asked)
    assert not coordinator.rounds.advance()


def deleting_first(coordinator, monkeypatch, owner, name):
    """A method before which the federation is deleted."""
    usual = getattr(owner, name)

    def late(*args, **named):
        monkeypatch.setattr(owner, name, usual)
        coordinator.federations.delete("f")
        return usual(*args, **named)

    monkeypatch.setattr(owner, name, late)


@pytest.mark.parametrize("when", ["before a step", "before the model is read", "before a file is read"])
def test_a_round_that_moves_while_its_federation_goes_does_no_harm(open_coordinator, answer, monkeypatch, caplog, when):
    coordinator = open_coordinator()
    coordinator.create(rounds=1)
    devices = coordinator.enrol("a", "b")
    coordinator.rounds.advance()
    answer(devices[0])
    coordinator.rounds.advance()
    coordinator.change(action="stop")
    coordinator = open_coordinator()  # which has no model in memory
    owner, name = {
        "before a step": (coordinator.rounds, "step"),
        "before the model is read": (coordinator.models, "model"),
        "before a file is read": (coordinator.store.blobs, "get"),
    }[when]
    deleting_first(coordinator, monkeypatch, owner, name)
    coordinator.rounds.advance()
    with pytest.raises(NotFound):
        coordinator.info()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_new_federation_never_sees_leftover_blobs(open_coordinator, play, monkeypatch):
    class Killed(BaseException):
        pass

    def die(self, key):
        raise Killed

    coordinator = open_coordinator()
    coordinator.create(rounds=3)
    play(coordinator, coordinator.enrol("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(FolderBlobs, "delete", die)
        with pytest.raises(Killed):
            coordinator.federations.delete("f")
    assert blobs(coordinator)
    coordinator = open_coordinator()  # the blobs of a coordinator without records would be another's
    coordinator.create()
    assert coordinator.info().model_version == 0
    mine = [path for path in blobs(coordinator) if path.startswith("2/")]
    clear_all(coordinator.store, Models(coordinator.store))
    assert blobs(coordinator) == mine
    assert coordinator.served.models("f")[0].version == 0


def test_the_first_federation_is_not_made_again_once_it_was_deleted(coordinator):
    coordinator.publisher.ensure_default("digits", FederationSettings())
    coordinator.federations.delete("default")
    coordinator.publisher.ensure_default("digits", FederationSettings())
    assert coordinator.federations.list() == []


def test_on_postgresql_too(postgresql, tmp_path, clock, play):
    from .fakes import LocalCoordinator

    url = postgresql.new_database()
    coordinator = LocalCoordinator(tmp_path / "data", clock, database_url=url)
    try:
        coordinator.create(rounds=1)
        devices = coordinator.enrol("a", "b")
        play(coordinator, devices)
        coordinator.federations.delete("f")
        assert set(rows(coordinator).values()) == {0}
        coordinator.create()
        with coordinator.store.reading() as db:
            assert db.get(DeletedDevice, digest_of(devices[0].token)).federation_id == 1
            assert "deleted_devices" in inspect(db.connection()).get_table_names()
        assert coordinator.info().round == 0
    finally:
        coordinator.store.close()


# --- publishing again ------------------------------------------------------------------------------------------------


def wanted(task="digits", model=None, **settings):
    return CompareFederation(
        task=task, model_digest=model, settings=FederationSettings(**{**CALM, "draws": "seed", **settings})
    )


def test_the_same_federation_is_found(coordinator):
    coordinator.create(method="fedprox", rounds=50, method_settings={"proximal_weight": 0.01})
    for same in (wanted(method="fedprox", rounds=50), wanted(method="fedprox", rounds=50, model=DIGITS.model_digest)):
        assert coordinator.publisher.compare("f", same).name == "f", "a default that is filled in is no difference"
    with pytest.raises(NotFound):
        coordinator.publisher.compare("g", wanted())


def test_each_difference_is_named(coordinator):
    coordinator.create(method="fedprox", rounds=2, method_settings={"proximal_weight": 1.0})
    with pytest.raises(DifferentFederation) as refused:
        coordinator.publisher.compare("f", wanted(task="har", model="0" * 64, method="fedavg", rounds=50))
    assert str(refused.value) == (
        "a different federation 'f' exists: method: asked for fedavg, it has fedprox; rounds: asked for 50, it "
        "has 2; task: asked for har, it has digits. Choose another name, use its settings and model, or delete it "
        "first (sparrow federation delete f)"
    )
    with pytest.raises(DifferentFederation, match=r"proximal_weight: .*0\.01.*1\.0"):
        coordinator.publisher.compare("f", wanted(method="fedprox", rounds=2))
    settings = {"method": "fedprox", "rounds": 2, "method_settings": {"proximal_weight": 1}}
    with pytest.raises(DifferentFederation, match="model: its layers, shapes"):
        coordinator.publisher.compare("f", wanted(model="0" * 64, **settings))


def test_what_an_operator_changed_since_is_no_difference(coordinator):
    coordinator.create(rounds=2)
    coordinator.federations.change("f", ChangeFederation(rounds=9, cohort=3, deadline_seconds=7, silence_seconds=9))
    assert coordinator.publisher.compare("f", wanted(rounds=2)).rounds == 9
    with pytest.raises(DifferentFederation, match="rounds: asked for 9, it has 2"):
        coordinator.publisher.compare("f", wanted(rounds=9))
