"""Open the records' database, and migrate its tables."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    create_engine,
    event,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from ..errors import BadStorage, DamagedRecords, NewerRecords
from .blobs import FILE_MODE, flush_folder, private
from .failing import is_damage
from .tables import Base, Federation

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)

BUSY_SECONDS = 5
"""Longest wait for a lock of another program, such as sqlite3 or psql, in seconds. Short, because the wait blocks a
thread and a connection, and callers retry anyway."""
IDLE_SECONDS = 10
"""Idle time after which PostgreSQL ends a transaction, whose process may be stopped in its turn to write. The
coordinator computes only for milliseconds between two statements."""
STATEMENT_SECONDS = 30
"""Time limit of a statement in PostgreSQL, including waits for locks."""
LARGEST_WAL = 16 * 1024 * 1024
CONNECTIONS = 10
"""Number of connections kept open, last used first, because opening one takes longer than most calls."""
PIECE = 1024 * 1024
WRITING = {"writing": True}
"""Execution options of an engine for write transactions."""

MIGRATIONS = Path(__file__).parent / "migrations"
REVISION = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Alembic's table, as Alembic creates it."""

POSTGRESQL = ("postgresql", "postgresql+psycopg")
_POOLED = "pooled"


def open_database(where: Path | str) -> Engine:
    """Open the database, configured to lose no commit, and apply missing migrations.

    where: path of a SQLite file, or URL of a PostgreSQL database. Raises BadStorage, DamagedRecords, NewerRecords.
    """
    if isinstance(where, Path):
        check_sqlite(where)
    engine = connect(where)
    try:
        migrate(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


def seal(path: Path) -> None:
    """Store the SHA-256 of a closed SQLite file."""
    # SQLite detects damaged pages, but not a changed value.
    if path.exists() and not _wal_of(path).exists():
        digest = _sha256(path)
        with open(_seal_of(path), "w", opener=private) as file:
            file.write(digest)


def check_sqlite(path: Path) -> None:
    """Create an empty private database, or check an existing one. Raises DamagedRecords.

    Its pages are checked; if it was sealed, it is also compared with its digest.
    """
    # SQLite gives its other files the same mode.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))
    sealed = _seal_of(path)
    if sealed.exists():
        if _wal_of(path).exists() or sealed.read_bytes() != _sha256(path).encode():
            raise DamagedRecords(
                f"{path} is damaged: it has changed since the coordinator stopped; move the data folder away, and "
                f"restore a backup (sparrow restore); if you changed it yourself, remove {sealed}"
            )
        sealed.unlink()
        # The seal must be gone before anything is written.
        flush_folder(path.parent)
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA cell_size_check=ON")
            found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        found = [str(error)]
    if found != ["ok"]:
        said = " ".join(str(found[0]).split())
        raise DamagedRecords(
            f"{path} is damaged ({said}); move the data folder away, and restore a backup (sparrow restore)"
        )


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
    return found.hexdigest()


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _wal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def connect(where: Path | str) -> Engine:
    """Return an engine for the database, without migrations. Raises BadStorage."""
    return _sqlite(where) if isinstance(where, Path) else _postgresql(where)


def migrate(engine: Engine) -> None:
    """Create the tables, or migrate them to the newest revision."""
    # Alembic takes 10 MB of memory for good, so it is imported only for migrations.
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # Processes that start together take turns, and must see the former one's changes.
            connection = connection.execution_options(isolation_level="READ COMMITTED")
            # A migration may take long.
            connection.execute(text("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('sparrow tables'))"))
        known = inspect(connection).has_table(REVISION.name)
        revision = connection.scalar(select(REVISION.c.version_num)) if known else None
        if revision is None and not inspect(connection).has_table(Federation.__tablename__):
            create_tables(connection)
            connection.commit()
        elif revision != newest_revision():
            check_revision(connection)
            _upgrade(connection)
        if engine.dialect.name == "postgresql" and connection.scalar(text("SHOW fsync")) == "off":
            log.warning("the PostgreSQL server runs with fsync=off: a power cut may lose acknowledged updates")


def create_tables(connection: Connection) -> None:
    """Create the tables of the newest revision; the caller commits."""
    Base.metadata.create_all(connection)
    REVISION.create(connection, checkfirst=True)
    connection.execute(REVISION.insert().values(version_num=newest_revision()))


def check_revision(connection: Connection) -> None:
    """Raise NewerRecords if the tables are of a later revision than this code knows."""
    revision = str(connection.scalar(select(REVISION.c.version_num)) or "")
    if revision > newest_revision():
        raise NewerRecords(
            f"the records were written by a newer version of Sparrow (tables {revision}, this version supports "
            f"{newest_revision()}); install that version, or restore an earlier backup (sparrow restore)"
        )


def newest_revision() -> str:
    """Return the revision of this code's tables, from the name of the last migration."""
    return max(path.name for path in (MIGRATIONS / "versions").glob("[0-9]*_*.py")).partition("_")[0]


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    connection.commit()


def _sqlite(path: Path) -> Engine:
    engine = create_engine(
        f"sqlite:///{path.resolve()}",
        connect_args={"timeout": BUSY_SECONDS},
        pool_size=CONNECTIONS,
        pool_timeout=BUSY_SECONDS,
        pool_use_lifo=True,
        json_deserializer=_read_json,
    )
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _read_json(text: str) -> Any:
    """Return the value of a JSON column, or None for damaged text, so that damage is limited to its row."""
    # PostgreSQL checks such columns itself.
    try:
        return json.loads(text)
    except ValueError:
        return None


def _postgresql(address: str) -> Engine:
    try:
        url = make_url(address)
    except ArgumentError:
        # The message must not quote the URL, which may contain a password.
        url = None
    if url is None or url.drivername not in POSTGRESQL:
        raise BadStorage(
            "COORDINATOR_DATABASE_URL is not a PostgreSQL URL; set postgresql://USER:PASSWORD@HOST/DATABASE, or unset "
            "it to keep the records in SQLite"
        )
    try:
        engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            # As with SQLite, a transaction sees the records as of its beginning.
            isolation_level="REPEATABLE READ",
            # Writers take turns, so none may wait for minutes for a machine that disappeared.
            connect_args={
                "connect_timeout": 5,
                "tcp_user_timeout": 10_000,
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
            },
            pool_size=CONNECTIONS,
            pool_timeout=BUSY_SECONDS,
            pool_use_lifo=True,
            # Replace connections that a restart of the server broke.
            pool_pre_ping=True,
        )
    except ModuleNotFoundError as error:
        raise BadStorage("records in PostgreSQL need psycopg: pip install 'sparrow-fl[postgresql]'") from error
    event.listen(engine, "connect", _prepare_postgresql)
    event.listen(engine, "begin", _begin_postgresql)
    return engine


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Return True if a pooler, such as PgBouncer, is in between."""
    # A pooler announces a number of its own, not that of a server's process.
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    return row is None or row[0] != connection.info.backend_pid


def _prepare_postgresql(connection: psycopg.Connection[Any], record: ConnectionPoolEntry) -> None:
    # Not as options of the connection, which poolers refuse.
    record.info[_POOLED] = is_pooled(connection)
    if record.info[_POOLED]:
        # A statement is prepared in one session, and the next transaction may be in another one.
        connection.prepare_threshold = None
    else:
        connection.execute(_settings("SET"))
    connection.commit()


def _begin_postgresql(connection: Connection) -> None:
    if connection.info.get(_POOLED):
        # Not a query, which would take the transaction's snapshot.
        connection.exec_driver_sql(_settings("SET LOCAL"))


def _settings(command: str) -> str:
    # An acknowledged commit is on the disk, whatever the server's default is. The limits end waits for a stopped
    # process's transaction and for other programs' locks.
    settings = (
        "synchronous_commit = on",
        f"idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'",
        f"lock_timeout = '{BUSY_SECONDS}s'",
        f"statement_timeout = '{STATEMENT_SECONDS}s'",
    )
    return "; ".join(f"{command} {setting}" for setting in settings)


def _begin(connection: Connection) -> None:
    # IMMEDIATE: a transaction that reads first can no longer write after another process's write.
    if connection.get_execution_options().get("writing"):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        # It takes no lock and cannot fail; through SQLAlchemy it would take longer than the following query.
        cast(sqlite3.Connection, connection.connection.driver_connection).execute("BEGIN")


def _prepare(connection: Any, _: object) -> None:
    # Python's driver begins transactions itself, but not before CREATE TABLE, so an interrupted migration would leave
    # half of its tables. With explicit BEGIN, a migration is applied as a whole or not at all.
    connection.isolation_level = None
    cursor = connection.cursor()
    # With WAL, readers do not block writers, and a commit is one flush of one file.
    cursor.execute("PRAGMA journal_mode=WAL")
    # In WAL mode NORMAL may lose the last commits in a power cut, although they were acknowledged.
    cursor.execute("PRAGMA synchronous=FULL")
    # A long read, such as a backup, makes the WAL grow; this truncates it afterwards.
    cursor.execute(f"PRAGMA journal_size_limit={LARGEST_WAL}")
    # Check each page before use, so that damage raises an error.
    cursor.execute("PRAGMA cell_size_check=ON")
    # mmap_size stays unset: a failing disk under mapped pages ends the process with SIGBUS.
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
