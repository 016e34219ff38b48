"""Opens the records' database and brings its tables up to date."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, cast

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

from ..errors import BadStorage, DamagedRecords, NewerRecords
from .blobs import FILE_MODE, flush_folder, private
from .failing import is_damage
from .tables import Base, Federation

log = logging.getLogger(__name__)

BUSY_SECONDS = 5
"""How long a call waits for a lock that another program holds, such as somebody's sqlite3 or psql. Its thread and
connection serve nobody else meanwhile, and its caller comes again anyway."""
IDLE_SECONDS = 10
"""PostgreSQL ends a transaction whose process has been silent for so long: it may have been stopped in its turn to
write. Ours compute for milliseconds between two statements, and store nothing elsewhere."""
STATEMENT_SECONDS = 30
"""The longest that a statement may take in PostgreSQL, waiting for locks included."""
LARGEST_WAL = 16 * 1024 * 1024
CONNECTIONS = 10
"""Kept open between calls, the last used first: to make one takes longer than most calls need it."""
PIECE = 1024 * 1024
WRITING = {"writing": True}
"""Execution options of an engine whose transactions write."""

MIGRATIONS = Path(__file__).parent / "migrations"
REVISION = Table(
    *("alembic_version", MetaData(), Column("version_num", String(32), nullable=False)),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Alembic's own table, as it would make it."""

POSTGRESQL = ("postgresql", "postgresql+psycopg")


def open_database(where: Path | str) -> Engine:
    """Open the database at ``where``, set up not to lose a commit, and apply the migrations that are missing.

    where: the path of a SQLite file, or the URL of a PostgreSQL database. Raises BadStorage, DamagedRecords,
    NewerRecords.
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
    """Write down the SHA-256 of a SQLite file that nobody has open any more, so that damage is found when it is opened.

    SQLite itself finds damaged pages, and not a changed value in one."""
    if path.exists() and not _wal_of(path).exists():
        digest = _sha256(path)
        with open(_seal_of(path), "w", opener=private) as file:
            file.write(digest)


def check_sqlite(path: Path) -> None:
    """Make an empty database that nobody else may read, or check one. Raises DamagedRecords.

    Its pages are looked through, and, where it was sealed and not written since, it is compared with its digest."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))  # SQLite gives its other files the same mode
    sealed = _seal_of(path)
    if sealed.exists():
        if _wal_of(path).exists() or sealed.read_bytes() != _sha256(path).encode():
            raise DamagedRecords(
                f"{path} is damaged: it is not as the coordinator left it; move the data folder away, and restore a "
                f"backup (sparrow restore); if it was you who changed it, remove {sealed}"
            )
        sealed.unlink()
        flush_folder(path.parent)  # before anything is written that it does not know
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
    """Return an engine for the database at ``where``, as it is. Raises BadStorage."""
    return _sqlite(where) if isinstance(where, Path) else _postgresql(where)


def migrate(engine: Engine) -> None:
    """Migrate the tables to the newest revision: make them if there are none, else apply what is missing.

    Alembic, which takes 10 MB for as long as the process lives, is imported only for the latter.
    """
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":  # processes that start together take turns, and look only then
            connection = connection.execution_options(isolation_level="READ COMMITTED")
            # Who comes up may have much to do.
            connection.execute(text("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('sparrow tables'))"))
        known = inspect(connection).has_table(REVISION.name)
        revision = connection.scalar(select(REVISION.c.version_num)) if known else None
        if revision is None and not inspect(connection).has_table(Federation.__tablename__):
            Base.metadata.create_all(connection)
            REVISION.create(connection, checkfirst=True)
            connection.execute(REVISION.insert().values(version_num=newest_revision()))
            connection.commit()
        elif revision != newest_revision():
            check_revision(connection)
            _upgrade(connection)
        if engine.dialect.name == "postgresql" and connection.scalar(text("SHOW fsync")) == "off":
            log.warning("the PostgreSQL server runs with fsync=off: a power cut may lose what was acknowledged")


def check_revision(connection: Connection) -> None:
    """Raise NewerRecords where the tables are of a later revision than this code knows."""
    revision = str(connection.scalar(select(REVISION.c.version_num)) or "")
    if revision > newest_revision():
        raise NewerRecords(
            f"the records are of a newer version of Sparrow (tables {revision}, this one knows {newest_revision()}); "
            f"install that version, or restore a backup of before (sparrow restore)"
        )


def newest_revision() -> str:
    """Return the revision that the tables of this code have, from the name of its migration."""
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
    """Return the value of a JSON column; None for damaged text, which is a fault of its own row alone.

    PostgreSQL checks such columns itself."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _postgresql(address: str) -> Engine:
    try:
        url = make_url(address)
    except ArgumentError:
        url = None  # no word of it in the message: it may hold a password
    if url is None or url.drivername not in POSTGRESQL:
        raise BadStorage(
            "the database's URL is not PostgreSQL's; write postgresql://USER:PASSWORD@HOST/DATABASE, or leave it out "
            "to keep the records in SQLite in the data folder"
        )
    try:
        return create_engine(
            url.set(drivername="postgresql+psycopg"),
            # As with SQLite: a transaction sees the records as they were when it began.
            isolation_level="REPEATABLE READ",
            connect_args={
                # A commit that was acknowledged is on the disk, whatever the server's own default is.
                # Nobody waits for long: neither for a process that stands still in the middle of a transaction, nor for
                # somebody's lock on a table.
                "options": f"-c synchronous_commit=on -c idle_in_transaction_session_timeout={IDLE_SECONDS}s "
                f"-c lock_timeout={BUSY_SECONDS}s -c statement_timeout={STATEMENT_SECONDS}s",
                # Writers take turns: none may wait for minutes on a machine that has gone without a word.
                "connect_timeout": 5,
                "tcp_user_timeout": 10_000,
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
            },
            pool_size=CONNECTIONS,
            pool_timeout=BUSY_SECONDS,
            pool_use_lifo=True,
            pool_pre_ping=True,  # a connection that a restart of the server broke is replaced, not used
        )
    except ModuleNotFoundError as error:
        raise BadStorage("records in PostgreSQL need psycopg: pip install 'sparrow-fl[postgresql]'") from error


def _begin(connection: Connection) -> None:
    # IMMEDIATE: one that read first and then met another process's write could not be made to write any more.
    if connection.get_execution_options().get("writing"):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:  # takes no lock, so it cannot fail: SQLAlchemy would take longer to hand it on than for the query after it
        cast(sqlite3.Connection, connection.connection.driver_connection).execute("BEGIN")


def _prepare(connection: Any, _: object) -> None:
    # Python's driver would begin transactions itself, and not before CREATE TABLE: a migration that dies half way would
    # leave half its tables. With its own beginnings off and ours on, a migration is there as a whole or not at all.
    connection.isolation_level = None
    cursor = connection.cursor()
    # WAL: readers do not block writers, and a commit is one flush of one file.
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: in WAL mode the default, NORMAL, may lose the last commits in a power cut, and those were acknowledged.
    cursor.execute("PRAGMA synchronous=FULL")
    # A long look, such as a backup, makes the WAL grow: afterwards it is cut to this again, and the disk gets it back.
    cursor.execute(f"PRAGMA journal_size_limit={LARGEST_WAL}")
    # A page is looked at before it is used, so that a damaged one is an error.
    cursor.execute("PRAGMA cell_size_check=ON")
    # No mmap_size: through mapped pages a failing disk is a SIGBUS, which ends the process, and not an error.
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
