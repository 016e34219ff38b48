"""Tables appear as a whole or not at all, whenever the process dies."""

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import create_engine, event, text

from coordinator.storage import database


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
