"""Tables appear as a whole or not at all, whenever the process dies."""

import hashlib
import sqlite3
from contextlib import closing

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, event, text

from sparrow.coordinator.errors import DamagedRecords, NewerRecords
from sparrow.coordinator.storage import database
from sparrow.coordinator.storage.store import RECORDS_FILE
from sparrow.coordinator.storage.tables import Base

from ..fakes import LocalCoordinator


def tables(path):
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def test_a_migration_that_dies_half_way_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "records.sqlite3"
    statements = 0

    def dying(url, **options):
        engine = create_engine(url, **options)

        @event.listens_for(engine, "before_cursor_execute")
        def count(connection, cursor, statement, *_):
            nonlocal statements
            statements += statement.lstrip().startswith("CREATE TABLE")
            if statements == 4:
                raise RuntimeError("killed")

        return engine

    with monkeypatch.context() as patch:
        patch.setattr(database, "create_engine", dying)
        with pytest.raises(RuntimeError, match="killed"):
            database.open_database(path)
    assert tables(path) == set()
    database.open_database(path).dispose()
    assert {"federations", "devices", "rounds", "assignments", "alembic_version"} <= tables(path)


@pytest.mark.usefixtures("synced")
def test_opening_again_changes_nothing_and_commits_survive_a_power_cut(tmp_path):
    path = tmp_path / "records.sqlite3"
    database.open_database(path).dispose()
    before = tables(path)
    engine = database.open_database(path)
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2, "FULL"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
    engine.dispose()
    assert tables(path) == before


TABLES = {"0007": "4aede264eb2ccb2a"}
"""The digest of the tables of the newest revision. Changed tables need a revision of their own that alters old ones."""


def described():
    columns = [
        f"{table.name}.{column.name} {column.type} {column.nullable} {column.primary_key}"
        for table in Base.metadata.tables.values()
        for column in table.columns
    ]
    indexes = [
        f"{table.name} {each.name} {[column.name for column in each.columns]} {each.unique}"
        for table in Base.metadata.tables.values()
        for each in table.indexes
    ]
    return hashlib.sha256("\n".join(sorted(columns + indexes)).encode()).hexdigest()[:16]


def test_changed_tables_have_a_migration():
    assert {database.newest_revision(): described()} == TABLES
    assert ScriptDirectory(str(database.MIGRATIONS)).get_heads() == [database.newest_revision()]


def test_the_first_tables_become_the_newest_ones(tmp_path, clock, play):
    coordinator = LocalCoordinator(tmp_path, clock, keep_models=3)
    with closing(coordinator.store):
        coordinator.create(rounds=3, cohort=2)
        play(coordinator, coordinator.enrol("a", "b"))
        coordinator.change(action="rollback", model_version=2)
        models = coordinator.served.models("f")
    path = tmp_path / RECORDS_FILE
    newest = tables(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE events")
        connection.execute("DROP TABLE delivered")
        for column in ("round", "undone", "accuracy", "loss", "devices", "pinned_until"):
            connection.execute(f"ALTER TABLE models DROP COLUMN {column}")
        for column in ("accuracy_alone", "exported", "removed", "start", "own_tags", "set_tags", "tags"):
            connection.execute(f"ALTER TABLE devices DROP COLUMN {column}")
        for column in ("made_by", '"where"'):
            connection.execute(f"ALTER TABLE tokens DROP COLUMN {column}")
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    # The seal names the file as the coordinator left it.
    path.with_name(f"{path.name}.sha256").unlink()
    coordinator = LocalCoordinator(tmp_path, clock, keep_models=3)
    with closing(coordinator.store):
        assert tables(path) == newest
        assert coordinator.timeline.look("f").total == 0
        assert [(each.round, each.undone) for each in models] == [(1, False), (2, False), (3, True)]
        assert coordinator.served.models("f") == models


# --- what cannot be used -----------------------------------------------------------------------------------------


def test_records_of_a_newer_version_are_said_in_a_line(tmp_path):
    path = tmp_path / "records.sqlite3"
    database.open_database(path).dispose()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(NewerRecords, match="tables 9999"):
        database.open_database(path)


@pytest.mark.parametrize(("at", "said"), [(0, "not a database"), (4096, "malformed|ok|page|btree"), (60, ".")])
def test_damaged_pages_are_said_in_a_line(tmp_path, at, said):
    path = tmp_path / "records.sqlite3"
    database.open_database(path).dispose()
    data = bytearray(path.read_bytes())
    data[at : at + 30] = b"\xff" * 30
    path.write_bytes(data)
    with pytest.raises(DamagedRecords, match=rf"records\.sqlite3 is damaged \(.*({said})"):
        database.open_database(path)


def test_a_value_that_changed_since_the_coordinator_stopped_is_found(tmp_path):
    """SQLite itself checks no value."""
    path = tmp_path / "records.sqlite3"
    database.open_database(path).dispose()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO deleted_federations VALUES (1, 'weather', 1.0)")
    database.seal(path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"weather", b"wEather"))
    with pytest.raises(
        DamagedRecords, match=r"it has changed since the coordinator stopped; .*if you changed it yourself, remove"
    ):
        database.open_database(path)
    path.write_bytes(whole)
    database.open_database(path).dispose()
    database.open_database(path).dispose()  # the seal is of before the first write, and gone
