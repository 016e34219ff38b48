"""Opens the records' database and brings its tables up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url


def open_database(url: str) -> Engine:
    """Connect to ``url`` and apply the migrations that are missing. SQLite is set up not to lose a commit."""
    if make_url(url).get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": 30})
        event.listen(engine, "connect", _prepare_sqlite)
    else:
        engine = create_engine(url, pool_pre_ping=True)
    migrate(engine)
    return engine


def migrate(engine: Engine) -> None:
    """Bring the tables to the newest revision."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _prepare_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: in WAL mode the default, NORMAL, may lose the last commits in a power cut, and those were acknowledged.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
