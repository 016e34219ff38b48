"""Records in PostgreSQL: the same federation as with SQLite, over restarts, held by one coordinator at a time."""

from __future__ import annotations

import json

import pytest
from prometheus_client import generate_latest
from sqlalchemy import inspect, text

from coordinator import tokens
from coordinator.errors import NotAuthenticated
from coordinator.metrics import Metrics
from coordinator.storage import database
from coordinator.storage.store import DataInUse, Store
from coordinator.storage.tables import Base
from edge_sdk.protocol.messages import Enrol

from ..house import House
from ..postgresql import Missing, serving


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("psycopg", reason="needs sparrow-fl[postgresql]")
    try:
        with serving() as server:
            yield server
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def url(server):
    return server.new_database()


def federation(folder, clock, url=None):
    """Two devices through a federation of FedSPU, everybody killed and started anew after the first round."""
    house = House(folder, clock, url)
    house.create("fedspu", rounds=3, evaluation_interval=2, min_devices=2)
    pair = [house.open("a", budget=0.4, of=2), house.open("b", of=2)]
    while house.info().round < 1:
        house.rounds.advance()
        for session in pair:
            session.step()
    house.close()
    house = House(folder, clock, url)
    house.rounds.resume_after_restart()
    try:
        house.play(house.open("a", budget=0.4, of=2), house.open("b", of=2))
        return house.info(), house.records.rounds("f")
    finally:
        house.close()


def test_a_federation_is_the_same_as_with_sqlite(tmp_path, clock, url):
    info, rounds = federation(tmp_path / "postgresql", clock, url)
    wanted, wanted_rounds = federation(tmp_path / "sqlite", clock)
    assert (info.status, info.round) == (wanted.status, wanted.round) == ("finished", 3)
    assert info.model_sha256 == wanted.model_sha256
    assert [each.updates for each in rounds] == [each.updates for each in wanted_rounds] == [2, 2, 2]
    assert not (tmp_path / "postgresql" / "data" / "coordinator.sqlite3").exists()


def test_a_second_coordinator_is_kept_out_until_the_first_has_gone(tmp_path, url):
    first = Store(tmp_path / "first", url)
    with pytest.raises(DataInUse, match="another coordinator works on this PostgreSQL database"):
        Store(tmp_path / "second", url)
    first.close()
    Store(tmp_path / "second", url).close()


def test_the_migrations_make_the_tables_and_commits_are_durable(tmp_path, url):
    database.open_database(url).dispose()
    engine = database.open_database(url)  # again: nothing to do
    with engine.connect() as connection:
        assert set(Base.metadata.tables) <= set(inspect(connection).get_table_names())
        assert connection.scalar(text("SHOW synchronous_commit")) == "on"
        assert connection.scalar(text("SHOW transaction_isolation")) == "repeatable read"
    engine.dispose()


@pytest.mark.parametrize("address", ["mysql://u:secret@host/sparrow", "secret", "sqlite:///secret"])
def test_an_address_of_no_postgresql_is_refused_without_repeating_it(address):
    with pytest.raises(database.BadDatabase, match="postgresql://USER:PASSWORD@HOST/DATABASE") as refusal:
        database.open_database(address)
    assert "secret" not in str(refusal.value)


def test_tokens_are_made_beside_a_running_coordinator_and_their_uses_counted(tmp_path, clock, url, monkeypatch, capsys):
    house = House(tmp_path, clock, url)
    house.create("fedspu")
    monkeypatch.setenv("COORDINATOR_DATABASE_URL", url)
    assert tokens.main(["create", "enrolment", "--uses", "2", "--federation", "f", "--json"]) == 0
    token = json.loads(capsys.readouterr().out)
    for name in ("a", "b"):
        house.devices.enrol("f", Enrol(name=name, enrolment_key=name * 32), token["id"])
    with pytest.raises(NotAuthenticated, match="as often as it may be"):
        house.devices.enrol("f", Enrol(name="c", enrolment_key="c" * 32), token["id"])
    device = house.device("a").device_id
    for wanted in (token["id"], device):
        assert tokens.main(["revoke", wanted]) == 0
    assert tokens.main(["list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (listed["uses"], listed["status"], listed["federation"]) == (2, "revoked", "f")
    assert house.device("a").status == "revoked"
    metrics = Metrics()
    metrics.observe_records(house.store)
    assert b'sparrow_devices{federation="f",status="revoked"} 1.0' in generate_latest(metrics.registry)
    house.close()
