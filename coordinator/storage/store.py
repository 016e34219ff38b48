"""Records and blobs of one coordinator, opened together and held by one process at a time."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session, sessionmaker

from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import open_database

TAKE = text("SELECT pg_try_advisory_lock(hashtext('sparrow coordinator'))")


class DataInUse(RuntimeError):
    """Another coordinator process works on the same data folder or database."""


class Store:
    """The coordinator's memory.

    Transactions that write take turns: rounds move in steps that read, decide and write, and no other write may fall
    between. A lock on the data folder, and one in PostgreSQL, keep a second process out, which would fold the same
    updates again.
    """

    def __init__(self, data_dir: Path, database_url: str | None = None) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self.folder = data_dir
        self._lock_file = (data_dir / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock_file.close()
            raise DataInUse(
                f"another coordinator works in {data_dir}; stop it, run uvicorn with one worker, or set "
                f"COORDINATOR_DATA_DIR to another folder"
            ) from None
        try:
            self.blobs = BlobStore(data_dir / "blobs")
            self._engine = open_database(database_url or data_dir / "coordinator.sqlite3")
            self._hold = None if database_url is None else _take(self._engine)
        except BaseException:
            self._lock_file.close()
            raise
        self._sessions = sessionmaker(self._engine, expire_on_commit=False)
        self._turn = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session to look with; what it changes is not kept."""
        with self._sessions() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction: committed, durably, when the block ends, undone when it raises."""
        with self._turn, self._sessions.begin() as session:
            yield session

    def close(self) -> None:
        """Let go of the database and the folder."""
        if self._hold is not None:
            self._hold.close()
        self._engine.dispose()
        self._lock_file.close()


def _take(engine: Engine) -> Connection:
    """A connection that keeps other coordinators out of the database as long as it is open. Raises DataInUse."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    if connection.scalar(TAKE):
        return connection
    connection.close()
    engine.dispose()
    raise DataInUse(
        "another coordinator works on this PostgreSQL database; stop it, or give each a database of its own"
    )
