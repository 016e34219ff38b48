"""Tables appear as a whole or not at all, whenever the process dies."""

import sqlite3
from contextlib import closing

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, event, inspect, select, text

from sparrow.coordinator.errors import DamagedRecords, NewerRecords
from sparrow.coordinator.storage import database


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


def described(engine):
    """All that SQLAlchemy can tell of a database's tables."""
    looked, found = inspect(engine), {}
    for table in sorted(looked.get_table_names()):
        indexes = looked.get_indexes(table)
        where = {index["name"]: str(index["dialect_options"].pop("sqlite_where", None)) for index in indexes}
        columns = [{**column, "type": str(column["type"])} for column in looked.get_columns(table)]
        found[table] = (
            {column["name"]: column for column in columns},
            (sorted(map(str, indexes)), where),
            sorted(map(str, looked.get_unique_constraints(table))),
            sorted(map(str, looked.get_foreign_keys(table))),
            looked.get_pk_constraint(table),
        )
    return found


def migrate(path):
    """Make all tables as an upgrade does, and return the database."""
    config = Config()
    config.set_main_option("script_location", str(database.MIGRATIONS))
    config.set_main_option("path_separator", "os")
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return engine


def test_a_new_database_has_the_tables_that_the_migrations_make(tmp_path):
    migrated, made = migrate(tmp_path / "migrated.sqlite3"), database.open_database(tmp_path / "new.sqlite3")
    assert described(made) == described(migrated)
    for engine in (migrated, made):
        with engine.connect() as connection:
            assert connection.scalar(select(database.REVISION.c.version_num)) == database.newest_revision()
        engine.dispose()
    assert ScriptDirectory(str(database.MIGRATIONS)).get_heads() == [database.newest_revision()]


# --- what cannot be used -----------------------------------------------------------------------------------------


def test_records_of_a_newer_version_are_said_in_a_line(tmp_path):
    path = tmp_path / "records.sqlite3"
    database.open_database(path).dispose()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(
        NewerRecords, match=r"newer version of Sparrow \(tables 9999, .*install that version, or restore"
    ):
        database.open_database(path)


@pytest.mark.parametrize(("at", "said"), [(0, "not a database"), (4096, "malformed|ok|page|btree"), (60, ".")])
def test_damaged_pages_are_said_in_a_line(tmp_path, at, said):
    path = tmp_path / "records.sqlite3"
    database.open_database(path).dispose()
    data = bytearray(path.read_bytes())
    data[at : at + 30] = b"\xff" * 30
    path.write_bytes(data)
    with pytest.raises(DamagedRecords, match=rf"records.sqlite3 is damaged \(.*({said}).*\); move .* restore a backup"):
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
        DamagedRecords, match=r"it is not as the coordinator left it; .*if it was you who changed it, remove"
    ):
        database.open_database(path)
    path.write_bytes(whole)
    database.open_database(path).dispose()
    database.open_database(path).dispose()  # the seal is of before the first write, and gone
