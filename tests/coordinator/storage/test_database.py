"""Tables appear as a whole or not at all, whenever the process dies."""

import sqlite3
from contextlib import closing

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, event, inspect, select, text
from sqlalchemy.orm import Session

from sparrow.coordinator.storage import database
from sparrow.coordinator.storage.tables import Assignment, Device, Federation, Round


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


def to_revision(path, revision, step=command.upgrade):
    """Bring the database at ``path`` to this revision."""
    config = Config()
    config.set_main_option("script_location", str(database.MIGRATIONS))
    config.set_main_option("path_separator", "os")
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        step(config, revision)
    engine.dispose()


FIRST_RELEASE = """
INSERT INTO federations (id, uid, name, task, method, settings, manifest, status, round, model_version, model_sha256,
    created_at) VALUES (1, 'u', 'f', 'digits', 'fedspu', '{"rounds": 3}', '{}', 'running', 1, 1, 'abc', 1.0);
INSERT INTO devices (id, federation_id, name, token_sha256, enrolment_key_sha256, profile, budget, status,
    stopped_round, present, rest_until, holds_model, enrolled_at, seen_at)
    VALUES ('d', 1, 'pi', x'01', x'02', '{}', 0.5, 'stopped', 1, 1, 0.0, 1, 1.0, 2.0);
INSERT INTO rounds (id, federation_id, number, status, opened_at, deadline_at, closed_at, model_sha256, summary, stale)
    VALUES (1, 1, 1, 'closed', 1.0, 9.0, 2.0, 'abc', '{"round": 1}', 0);
INSERT INTO assignments (id, federation_id, device_id, kind, round, position, status, model_version, "full", ratio,
    created_at, deadline_at, update_sha256, update_bytes, report)
    VALUES ('a', 1, 'd', 'train', 1, 0, 'done', 0, 1, 0.5, 1.0, 9.0, 'abc', 123, '{"steps": 3}');
"""
TABLES = ("federations", "devices", "rounds", "assignments")
ADDED = {
    *("limited_by", "paused", "mask", "model", "num_examples", "notes", "parts", "plan", "warning"),
    *("token_issued_at", "next_token_sha256"),
    *("rollback_version", "base_version", "model_version", "undone"),
    *("arrivals", "target", "extensions", "arrival", "counted_round"),
    *("hosted", "published", "published_bytes", "bytes_down", "bytes_up", "facts"),
}


@pytest.fixture
def from_0001(tmp_path):
    """A database as revision 0001 has it, with a row in every table."""
    path = tmp_path / "records.sqlite3"
    to_revision(path, "0001")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FIRST_RELEASE)
    return path


def rows(path, table):
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]


def test_records_of_before_are_kept_and_have_what_is_new(from_0001):
    before = {table: rows(from_0001, table) for table in TABLES}
    engine = database.open_database(from_0001)
    with Session(engine) as db:
        federation, device = db.get_one(Federation, 1), db.get_one(Device, "d")
        assert (federation.name, federation.settings, federation.warning) == ("f", {"rounds": 3}, None)
        assert (device.name, device.stopped_round, device.num_examples) == ("pi", 1, None)
        assert (device.mask, device.model) == (None, None)
        assert (device.token_issued_at, device.next_token_sha256) == (device.enrolled_at, None)
        current, assignment = db.get_one(Round, 1), db.get_one(Assignment, "a")
        assert (current.summary, current.stale, current.notes, current.parts) == ({"round": 1}, False, None, None)
        assert (assignment.report, assignment.ratio, assignment.plan) == ({"steps": 3}, 0.5, None)
        device.mask, device.num_examples, current.notes, assignment.plan = "0" * 64, 2**40, {"union": 1}, {"x": True}
        device.model = "f" * 64
        db.commit()
    engine.dispose()
    for table, (row,) in before.items():
        (kept,) = rows(from_0001, table)
        assert {name: value for name, value in kept.items() if name not in ADDED or name in row} == row


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


def test_a_new_database_has_the_tables_that_the_migrations_make(from_0001, tmp_path):
    migrated, made = database.open_database(from_0001), database.open_database(tmp_path / "new.sqlite3")
    assert described(made) == described(migrated)
    for engine in (migrated, made):
        with engine.connect() as connection:
            assert connection.scalar(select(database.REVISION.c.version_num)) == database.newest_revision()
        engine.dispose()
    assert ScriptDirectory(str(database.MIGRATIONS)).get_heads() == [database.newest_revision()]


def test_an_upgrade_can_be_taken_back(from_0001):
    before = {table: rows(from_0001, table) for table in TABLES}
    database.open_database(from_0001).dispose()
    to_revision(from_0001, "0001", command.downgrade)
    assert {table: rows(from_0001, table) for table in TABLES} == before
