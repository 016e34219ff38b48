"""Older global models: which are kept, and what going back to one means to rounds, records and devices."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from edge_sdk.protocol import bundle, checkpoint
from edge_sdk.protocol.messages import ChangeFederation
from sparrow.coordinator.errors import BadContent, NotFound, WrongState
from sparrow.coordinator.models.global_models import Models, Retention

from .fakes import House, furnish
from .house import House as RealHouse


def keeping(house, clock, last, every=0):
    """The same coordinator, with another rule for old models."""
    furnish(house, clock, Models(house.store, Retention(last, every)))
    return house


@pytest.fixture
def house(tmp_path, clock):
    house = keeping(House(tmp_path / "data", clock), clock, last=3, every=4)
    with closing(house.store):
        yield house


def versions(house):
    return [model.version for model in house.federations.models("f")]


def test_the_newest_are_kept_and_every_so_many(house, play):
    house.create(rounds=10)
    play(house, house.enrol("a", "b"))
    assert versions(house) == [0, 4, 8, 9, 10]
    models = house.federations.models("f")
    assert [model.round for model in models] == [0, 4, 8, 9, 10]
    assert [model.current for model in models] == [False] * 4 + [True]
    records = house.records.rounds("f")
    assert models[1].model_sha256 == records[3].model_sha256
    tensors, note = checkpoint.load(house.federations.model("f", 4))
    assert note == '{"version": 4}'
    assert tensors
    with pytest.raises(NotFound, match=r"model 5 of f is not kept; GET /v1/federations/f/models"):
        house.federations.model("f", 5)


def some_rounds(house, answer, count):
    """Play until ``count`` rounds have closed and the next is open; the devices."""
    house.create(rounds=20, cohort=2)
    devices = house.enrol("a", "b")
    house.rounds.advance()
    for _ in range(count):
        for device in devices:
            answer(device)
        house.rounds.advance()
    return devices


def test_the_next_round_begins_from_the_older_model(house, answer):
    devices = some_rounds(house, answer, 5)
    wanted = house.federations.model("f", 3)
    info = house.change(action="rollback", model_version=3)
    assert (info.model_version, info.rollback_version) == (5, 3), "its open round closes first"
    for device in devices:
        answer(device)
    house.rounds.advance()
    info = house.info()
    assert (info.round, info.model_version, info.rollback_version) == (6, 3, None)
    assert house.model() == wanted
    assert info.model_sha256 == house.record(3).model_sha256
    assignment = devices[0].ask()
    assert assignment.round == 7
    received = bundle.decode(devices[0].payload(assignment), house.federations.manifest("f"))
    tensors, _ = checkpoint.load(wanted)
    assert np.isin(received.values, np.concatenate([each.ravel() for each in tensors.values()])).all()
    for device in devices:
        answer(device)
    house.rounds.advance()
    records = house.records.rounds("f")
    assert [record.undone for record in records[:7]] == [False, False, False, True, True, True, False]
    assert [(record.base_version, record.model_version) for record in records[4:7]] == [(4, 5), (5, 6), (3, 7)]
    assert records[5].updates == 2, "what was acknowledged is in the records"
    assert house.info().model_version == 7, "no number is used twice"


def test_between_rounds_it_is_done_at_once_and_can_be_taken_back(house, play):
    house.create(rounds=5)
    devices = house.enrol("a", "b")
    play(house, devices)
    assert house.info().status == "finished"
    newest = house.model()
    assert house.change(action="rollback", model_version=3).model_version == 3
    assert [record.undone for record in house.records.rounds("f")] == [False, False, False, True, True]
    assert house.change(action="rollback", model_version=5).model_version == 5
    assert house.model() == newest
    assert not any(record.undone for record in house.records.rounds("f"))
    house.change(action="rollback", model_version=4)
    house.change(action="reopen", rounds=6)
    play(house, devices)
    assert (house.info().model_version, house.record(6).base_version) == (6, 4)


def test_what_cannot_be_gone_back_to_is_refused(house, play):
    house.create(rounds=6)
    play(house, house.enrol("a", "b"))
    with pytest.raises(NotFound, match="has no model 3 any more; it has 0, 4, 5, 6"):
        house.change(action="rollback", model_version=3)
    with pytest.raises(BadContent, match="with the action rollback"):
        house.change(action="rollback")
    with pytest.raises(BadContent, match="with the action rollback"):
        house.change(model_version=4)
    assert house.info().model_version == 6


def test_a_restart_with_a_rollback_pending(tmp_path, clock, answer):
    house = keeping(House(tmp_path / "again", clock), clock, last=3)
    devices = some_rounds(house, answer, 3)
    house.change(action="rollback", model_version=1)
    house.store.close()
    house = keeping(House(tmp_path / "again", clock), clock, last=3)
    with closing(house.store):
        for device in devices:
            device.house = house
            answer(device)
        house.rounds.advance()
        assert (house.info().round, house.info().model_version) == (4, 1)


# --- methods, with devices that train ----------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path, clock):
    house = keeping(RealHouse(tmp_path, clock), clock, last=5)
    with closing(house):
        yield house


SETTINGS = {
    "pfedgate": {"method_settings": {"smallest_budget": 0.5}},
    "fedsgc": {"method_settings": {"adjust_interval": 2, "device_interval": 1}},
}


@pytest.mark.parametrize("method", SETTINGS)
def test_devices_are_ahead_of_the_older_model_and_get_along(real, method):
    real.create(method, rounds=4, cohort=2, **SETTINGS[method])
    a, b = real.open("a"), real.open("b")
    real.play(a, b)
    held = {session: session.progress.model for session in (a, b)}
    wanted = real.federations.models("f")[2]
    real.federations.change("f", ChangeFederation(action="rollback", model_version=2))
    assert real.info().model_sha256 == wanted.model_sha256
    before = checkpoint.load(real.models.file(1, 2))[0]
    real.reopen(rounds=6)
    real.rounds.advance()
    for session in (a, b):
        wire = session._transport
        wire.received.clear()
        assignment, _ = wire.assignment("f", 0, None, None, held[session])
        received = bundle.decode(
            wire.payload(assignment.assignment_id, assignment.payload), real.federations.manifest("f")
        )
        if method == "pfedgate":
            assert received.mask is None or received.mask.on.all(), "what it holds was undone: it is sent the whole"
        assert np.isin(received.values, np.concatenate([each.ravel() for each in before.values()])).all()
    real.play(a, b)
    records = real.records.rounds("f")
    assert [record.updates for record in records] == [2] * 6
    assert [record.base_version for record in records] == [0, 1, 2, 3, 2, 5]
    assert real.info().status == "finished"


def test_dmpfl_goes_back_within_a_stage(real):
    real.create("dmpfl", rounds=8, cohort=2, method_settings={"iterations": 1})
    a, b = real.open("a"), real.open("b")
    while real.info().round < 3:
        real.rounds.advance()
        for session in (a, b):
            session.step()
    real.rounds.advance()  # round 5 is open, the first of the stage global (5 and 6)
    refusal = r"stages build on each other, and round 6 is of the stage global.*rounds 4 to 5, not from that of round 2"
    with pytest.raises(WrongState, match=refusal):
        real.federations.change("f", ChangeFederation(action="rollback", model_version=2))
    real.play(a, b)
    assert real.info().round == 8
    with pytest.raises(WrongState, match="is no more; it can begin from the models of round 8"):
        real.federations.change("f", ChangeFederation(action="rollback", model_version=5))
