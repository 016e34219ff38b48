"""Records in PostgreSQL: the same federation as with SQLite, over restarts, and several processes at a time."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import tempfile
import time
from concurrent import futures
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from sqlalchemy import inspect, make_url, text
from sqlalchemy.exc import DBAPIError

from sparrow import tokens
from sparrow.coordinator.errors import BadStorage, NotAuthenticated, Unavailable
from sparrow.coordinator.reports.metrics import Metrics
from sparrow.coordinator.storage import database, processes
from sparrow.coordinator.storage.failing import database_errors
from sparrow.coordinator.storage.store import Store
from sparrow.coordinator.storage.tables import Base
from sparrow.protocol.messages import Enrol

from ..postgresql import USER
from ..sessions import CoordinatorWithDevices


def become(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "in vain"
        time.sleep(0.02)


@pytest.fixture
def url(postgresql):
    return postgresql.new_database()


@pytest.fixture
def pooler(postgresql):
    """The address of an empty database through PgBouncer in transaction mode, with few sessions."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("PgBouncer is not installed")
    direct = make_url(postgresql.new_database())
    # A socket's path is short.
    with tempfile.TemporaryDirectory(prefix="sparrow-pooler-", dir="/tmp") as name:
        folder = Path(name)
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host={direct.query['host']} user={USER}\n[pgbouncer]\nunix_socket_dir = {folder}\n"
            "auth_type = any\npool_mode = transaction\ndefault_pool_size = 4\n"
        )
        user = USER if os.geteuid() == 0 else None
        if user is not None:
            shutil.chown(folder, user)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([program, settings], user=user, stdout=log, stderr=log)
        try:
            become((folder / ".s.PGSQL.6432").exists)
            yield f"postgresql://{USER}@/{direct.database}?host={folder}&port=6432"
        finally:
            process.kill()
            process.wait()


def test_a_federation_is_the_same_through_a_pooler(tmp_path, clock, pooler):
    info, rounds = federation(tmp_path / "pooler", clock, pooler)
    wanted, _ = federation(tmp_path / "sqlite", clock)
    assert (info.status, info.model_sha256) == ("finished", wanted.model_sha256)
    assert [each.updates for each in rounds] == [2, 2, 2]


def test_processes_take_over_and_hear_of_moves_through_a_pooler(tmp_path, pooler, monkeypatch):
    monkeypatch.setattr(processes, "POOLED_SECONDS", 0.1)
    heard = queue.Queue()
    with closing(Store(tmp_path, pooler)) as first, futures.ThreadPoolExecutor() as pool:
        coming = [pool.submit(Store, tmp_path, pooler) for _ in range(2)]
        with pytest.raises(futures.TimeoutError):
            coming[0].result(0.3)
        first.settled()
        with closing(coming[0].result(10)) as second, closing(coming[1].result(10)) as third:
            assert [each.is_first for each in (second, third)] == [False, False]
            assert first.shared.moves() == (True, True)
            assert second.shared.moves() == (False, False)
            second.shared.listen(heard.put)
            assert [heard.get(timeout=30) for _ in range(3)] == [True] * 3
            first.close()
            assert second.shared.moves() == (True, True)
            assert third.shared.moves() == (False, False)


def test_transactions_through_a_pooler_have_their_limits_and_are_durable(pooler):
    engine = database.open_database(pooler)
    for _ in range(8):
        with engine.connect() as connection:
            assert connection.scalar(text("SHOW synchronous_commit")) == "on"
            assert connection.scalar(text("SHOW lock_timeout")) == "5s"
            assert connection.scalar(text("SHOW transaction_isolation")) == "repeatable read"
    engine.dispose()


def test_a_command_names_what_the_database_said(tmp_path, url):
    with pytest.raises(Unavailable, match='database "nowhere" does not exist'), database_errors(tmp_path):
        database.open_database(make_url(url).set(database="nowhere").render_as_string(hide_password=False))


def federation(folder, clock, url=None):
    """Two devices through a federation of FedSPU, everybody killed and started anew after the first round."""
    coordinator = CoordinatorWithDevices(folder, clock, database_url=url)
    coordinator.create("fedspu", rounds=3, evaluation_interval=2, min_devices=2)
    pair = [coordinator.open_device("a", budget=0.4, of=2), coordinator.open_device("b", of=2)]
    while coordinator.info().round < 1:
        coordinator.rounds.advance()
        for session in pair:
            session.step()
    coordinator.close()
    coordinator = CoordinatorWithDevices(folder, clock, database_url=url)
    coordinator.rounds.resume_after_restart()
    try:
        coordinator.play(coordinator.open_device("a", budget=0.4, of=2), coordinator.open_device("b", of=2))
        return coordinator.info(), coordinator.records.rounds("f")
    finally:
        coordinator.close()


def test_a_federation_is_the_same_as_with_sqlite(tmp_path, clock, url):
    info, rounds = federation(tmp_path / "postgresql", clock, url)
    wanted, wanted_rounds = federation(tmp_path / "sqlite", clock)
    assert (info.status, info.round) == (wanted.status, wanted.round) == ("finished", 3)
    assert info.model_sha256 == wanted.model_sha256
    assert [each.updates for each in rounds] == [each.updates for each in wanted_rounds] == [2, 2, 2]
    assert not (tmp_path / "postgresql" / "data" / "coordinator.sqlite3").exists()


def test_a_second_process_comes_in_when_the_first_has_cleared_up(tmp_path, url):
    left = tmp_path / "blobs" / "half.partial"
    left.parent.mkdir()
    left.touch()
    with closing(Store(tmp_path, url)) as first, futures.ThreadPoolExecutor() as pool:
        assert (first.is_first, left.exists()) == (True, False)
        coming = pool.submit(Store, tmp_path, url)
        with pytest.raises(futures.TimeoutError):
            coming.result(0.3)
        left.touch()  # as the first writes it
        first.settled()
        with closing(coming.result(10)) as second:
            assert (second.is_first, left.exists()) == (False, True)


def test_one_process_moves_rounds_and_another_takes_over(tmp_path, url):
    with closing(Store(tmp_path, url)) as first:
        first.settled()
        with closing(Store(tmp_path, url)) as second:
            assert first.shared.moves() == (True, True)
            assert first.shared.moves() == (True, False)
            assert second.shared.moves() == (False, False)
            first.close()
            assert second.shared.moves() == (True, True)


EXPIRED = text("UPDATE lease SET expires_at = 0")
"""As it is when its holder has renewed it for the last time ten seconds ago."""


def test_who_was_replaced_after_it_stood_still_writes_nothing_more(tmp_path, url):
    with closing(Store(tmp_path, url)) as first:
        first.settled()
        with closing(Store(tmp_path, url)) as second:
            assert first.moves() == (True, True)
            with first.moving() as db:
                db.execute(EXPIRED)
            with first.moving():  # nobody has taken over
                pass
            assert second.moves() == (True, True)
            for _ in range(2):
                with pytest.raises(Unavailable, match="another process now runs the rounds"), first.moving() as db:
                    db.execute(text("DELETE FROM lease"))
            with first.writing() as db:  # what devices bring is taken all the same
                assert db.scalar(text("SELECT epoch FROM lease")) == 2
            with second.moving():
                pass
            assert first.moves() == (False, False)
            assert second.moves() == (True, False)


def test_a_lease_is_taken_over_between_two_transactions_of_its_holder(tmp_path, url):
    with closing(Store(tmp_path, url)) as first, futures.ThreadPoolExecutor() as pool:
        first.settled()
        with closing(Store(tmp_path, url)) as second:
            assert first.moves()[0]
            with first.writing() as db:
                db.execute(EXPIRED)
            with first.moving() as db:
                taking = pool.submit(second.moves)
                with pytest.raises(futures.TimeoutError):
                    taking.result(0.3)
                db.execute(text("CREATE TABLE written (value integer)"))
            assert taking.result(10) == (True, True)
            with second.reading() as db:
                assert db.scalar(text("SELECT count(*) FROM written")) == 0


def test_of_many_that_want_an_expired_lease_one_gets_it(tmp_path, url):
    with closing(Store(tmp_path, url)) as first, ExitStack() as stack, futures.ThreadPoolExecutor() as pool:
        first.settled()
        others = [stack.enter_context(closing(Store(tmp_path, url))) for _ in range(4)]
        assert first.moves()[0]
        for _ in range(5):
            with first.writing() as db:
                db.execute(EXPIRED)
            took = [each.result() for each in [pool.submit(store.moves) for store in [first, *others]]]
            assert sum(newly for _, newly in took) == 1
            assert [moves for moves, _ in (store.moves() for store in [first, *others])].count(True) == 1


def test_a_hanging_process_loses_its_lease_and_readiness_fails(tmp_path, url, monkeypatch):
    monkeypatch.setattr(processes, "BEAT_SECONDS", 0.02)
    alive = True
    with closing(Store(tmp_path, url)) as first:
        first.settled()
        with closing(Store(tmp_path, url)) as second:
            assert first.moves()[0]
            first.keep_lease(lambda: alive)

            def left():
                with first.reading() as db:
                    return db.scalar(text("SELECT expires_at - extract(epoch FROM clock_timestamp()) FROM lease"))

            def expire(seconds):
                with second.writing() as db:
                    db.execute(text("UPDATE lease SET expires_at = expires_at - :seconds"), {"seconds": seconds})

            expire(60)
            become(lambda: left() > 0)
            assert second.moves() == (False, False)
            first.check_lease()
            alive = False
            time.sleep(0.1)  # a beat that had begun
            expire(60)
            with pytest.raises(Unavailable, match="no process runs the rounds"):
                first.check_lease()
            assert second.moves() == (True, True)
            second.check_lease()


def test_a_transaction_whose_process_is_stopped_is_ended(tmp_path, url, monkeypatch):
    monkeypatch.setattr(database, "IDLE_SECONDS", 1)
    with closing(Store(tmp_path, url)) as first:
        first.settled()
        with closing(Store(tmp_path, url)) as second:

            def stand_still():
                with first.writing() as db:
                    with second.writing() as other:  # its turn comes when the server has ended the first one's
                        other.execute(text("CREATE TABLE written (value integer)"))
                    db.execute(text("INSERT INTO written VALUES (1)"))

            with pytest.raises(Unavailable):
                stand_still()
            with first.writing() as db:
                db.execute(text("INSERT INTO written VALUES (1)"))


def test_readers_and_writers_do_not_wait_for_long_where_tables_are_locked(tmp_path, url, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 1)
    with closing(Store(tmp_path, url)) as store, store.engine.connect() as somebody:
        store.settled()
        store.moves()
        somebody.execute(text("LOCK TABLE federations, lease, alembic_version IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(Unavailable, match="keeps the coordinator's records locked"), store.reading() as db:
            db.execute(text("SELECT * FROM federations"))
        with pytest.raises(Unavailable, match="keeps the coordinator's records locked"), store.writing():
            pass
        with pytest.raises(Unavailable, match="keeps the coordinator's records locked"):
            store.moves()
        somebody.rollback()
        assert store.moves() == (True, False)


def test_writers_take_turns_over_processes_and_see_what_the_last_one_wrote(tmp_path, url):
    rounds, inside = 25, []
    with closing(Store(tmp_path, url)) as first:
        first.settled()
        with closing(Store(tmp_path, url)) as second, futures.ThreadPoolExecutor() as pool:

            def count(store):
                for _ in range(rounds):
                    with store.writing() as db:
                        inside.append(store)
                        assert len(inside) == 1
                        before = db.scalar(text("SELECT count(*) FROM counted"))
                        db.execute(text("INSERT INTO counted VALUES (:value)"), {"value": before})
                        inside.remove(store)

            with first.writing() as db:
                db.execute(text("CREATE TABLE counted (value integer UNIQUE)"))
            for each in [pool.submit(count, store) for store in (first, second, first, second)]:
                each.result()
            with first.reading() as db:
                assert db.scalar(text("SELECT max(value) FROM counted")) == 4 * rounds - 1


def test_a_process_hears_what_others_write_and_move_and_not_itself(tmp_path, url):
    heard = {"first": queue.Queue(), "second": queue.Queue()}
    with closing(Store(tmp_path, url)) as first:
        first.settled()
        with closing(Store(tmp_path, url)) as second:
            assert first.shared.moves()[0]
            for name, store in (("first", first), ("second", second)):
                store.shared.listen(heard[name].put)
            for each in heard.values():
                assert each.get(timeout=30) is True  # it listens now, and looks at what it may have missed
            with second.writing():
                pass
            assert heard["first"].get(timeout=30) is False
            first.shared.say_moved()
            assert heard["second"].get(timeout=30) is True
            with first.writing():  # who moves tells the others when it has moved, not at every step
                pass
            assert heard["second"].empty()


def test_who_lost_its_connection_moves_no_more_until_it_is_its_turn_again(postgresql, tmp_path, url):
    with closing(Store(tmp_path, url)) as first:
        first.settled()
        with closing(Store(tmp_path, url)) as second:
            assert first.shared.moves()[0]
            postgresql.stop()
            for store in (first, second):
                with pytest.raises(DBAPIError):
                    store.shared.moves()
            postgresql.start()
            assert second.shared.moves() == (True, True)
            assert first.shared.moves() == (False, False)


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
    with pytest.raises(BadStorage, match="postgresql://USER:PASSWORD@HOST/DATABASE") as refusal:
        database.open_database(address)
    assert "secret" not in str(refusal.value)


def test_tokens_are_made_beside_a_running_coordinator_and_their_uses_counted(tmp_path, clock, url, monkeypatch, capsys):
    coordinator = CoordinatorWithDevices(tmp_path, clock, database_url=url)
    coordinator.create("fedspu")
    monkeypatch.setenv("COORDINATOR_DATABASE_URL", url)
    assert tokens.main(["create", "enrolment", "--uses", "2", "--federation", "f", "--records", "--json"]) == 0
    token = json.loads(capsys.readouterr().out)
    for name in ("a", "b"):
        coordinator.devices.enrol("f", Enrol(name=name, enrolment_key=name * 32), token["id"])
    with pytest.raises(NotAuthenticated, match="is used up"):
        coordinator.devices.enrol("f", Enrol(name="c", enrolment_key="c" * 32), token["id"])
    device = coordinator.device("a").device_id
    for wanted in (token["id"], device):
        assert tokens.main(["revoke", wanted, "--yes", "--records"]) == 0
    assert tokens.main(["list", "--records", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (listed["uses"], listed["status"], listed["federation"]) == (2, "revoked", "f")
    assert coordinator.device("a").status == "revoked"
    metrics = Metrics()
    metrics.observe_records(coordinator.store, clock)
    assert b'sparrow_devices{federation="f",status="revoked"} 1.0' in generate_latest(metrics.registry)
    coordinator.close()
