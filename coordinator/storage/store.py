"""Records and blobs of one coordinator, opened together and held by one process at a time."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import open_database


class DataInUse(RuntimeError):
    """Another coordinator process works on the same data folder."""


class Store:
    """The coordinator's memory.

    Transactions that write take turns: rounds move in steps that read, decide and write, and no other write may fall
    between. A lock on the data folder keeps a second process out, which would fold the same updates again.
    """

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
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
            self._engine = open_database(data_dir / "coordinator.sqlite3")
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
        self._engine.dispose()
        self._lock_file.close()
