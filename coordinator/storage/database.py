"""Opens the records' database and brings its tables up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event


def open_database(path: Path) -> Engine:
    """Open the SQLite database at ``path``, set up not to lose a commit, and apply the migrations that are missing."""
    engine = create_engine(f"sqlite:///{path.resolve()}", connect_args={"timeout": 30})
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    try:
        migrate(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


def migrate(engine: Engine) -> None:
    """Bring the tables to the newest revision."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _prepare(connection: Any, _: object) -> None:
    # Python's driver would begin transactions itself, and not before CREATE TABLE: a migration that dies half way would
    # leave half its tables. With its own beginnings off and ours on, a migration is there as a whole or not at all.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: in WAL mode the default, NORMAL, may lose the last commits in a power cut, and those were acknowledged.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
