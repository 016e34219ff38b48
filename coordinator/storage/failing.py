"""Failures of storage, distinguished from programming errors and logged once.

Callers get an error that asks them to retry (``errors.Unavailable``, ``errors.DiskFull``), and the coordinator
continues. The log has one line at the beginning and one at the end of a failure.
"""

from __future__ import annotations

import errno
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from ..errors import Damaged, DiskFull, Unavailable

log = logging.getLogger(__name__)

RECORDS = "records"
BLOBS = "blobs"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_STATE = "53100"
"""PostgreSQL's SQLSTATE disk_full."""
LOCKED_STATE = "55P03"
"""PostgreSQL's SQLSTATE lock_not_available."""
DAMAGE_STATES = ("XX001", "XX002")
"""PostgreSQL's SQLSTATEs data_corrupted and index_corrupted."""
SQLITE_DAMAGE = ("database disk image is malformed", "file is not a database")
DAMAGED_RECORDS = "the coordinator's records are damaged; retry after its operator has restored them"
SQLITE_NEEDS = 64 * 1024
"""Free bytes below which SQLite cannot begin to write, and reports an I/O error instead of a full disk."""


class Troubles:
    """Current failures of ``records`` and ``blobs``, and damaged files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[Unavailable, int]] = {}
        self._damaged: dict[str, str] = {}

    def begin(self, what: str, error: Unavailable, size: int, cause: BaseException) -> None:
        """Note a failed call that had ``size`` bytes to write."""
        with self._lock:
            known = self._found.get(what)
            largest = max(size, known[1]) if known else size
            self._found[what] = (error, largest)
        if known is None or type(known[0]) is not type(error):
            log.error("%s: %s (%s: %s)", what, error, type(cause).__name__, cause)

    def end(self, what: str, size: int) -> None:
        """Record a successful write, unless it is smaller than the failed one."""
        # The usual case needs no lock.
        if what not in self._found:
            return
        with self._lock:
            if what not in self._found or size < self._found[what][1]:
                return
            del self._found[what]
        log.warning("%s: writing works again", what)

    def check(self) -> None:
        """Raise the error of a lasting failure, without a new attempt."""
        for error, _ in list(self._found.values()):
            raise error

    def size(self, what: str) -> int | None:
        """Return the largest size of a failed write, or None without a failure."""
        known = self._found.get(what)
        return None if known is None else known[1]

    def damaged(self, key: str, how: str) -> Damaged:
        """Note ``how`` a blob or the ``records`` are damaged; return the error to raise."""
        with self._lock:
            known = key in self._damaged
            self._damaged[key] = how
        if not known:
            log.error("storage: %s", advice(key, how))
        return Damaged(key)

    def whole(self, key: str) -> None:
        """Record that a blob is intact."""
        if key in self._damaged:
            self._damaged.pop(key, None)
            log.warning("storage: %s is intact again", key)

    def forget(self, keys: Iterable[str]) -> None:
        """Record that these blobs are no longer needed."""
        for key in list(keys):
            self._damaged.pop(key, None)

    def damages(self) -> dict[str, str]:
        """Return the kind of damage by key, or by ``records``."""
        return dict(self._damaged)

    @contextmanager
    def of_records(self, *, writes: bool) -> Iterator[None]:
        """Context manager: translate the errors of a transaction."""
        try:
            yield
        except (DBAPIError, NoConnectionLeft) as error:
            if is_damage(error):
                self.damaged(RECORDS, f"damaged ({getattr(error, 'orig', None)})")
                raise Unavailable(DAMAGED_RECORDS) from error
            ended = isinstance(error, DBAPIError) and error.connection_invalidated
            if not ended and not isinstance(error, (OperationalError, InterfaceError, NoConnectionLeft)):
                # A wrong statement is a programming error.
                raise
            unavailable = of_database(error)
            self.begin(RECORDS, unavailable, 0, getattr(error, "orig", None) or error)
            raise unavailable from error
        if writes:
            self.end(RECORDS, 0)

    @contextmanager
    def of_blobs(self, size: int | None = None) -> Iterator[None]:
        """Context manager: translate errors of file operations, except FileNotFoundError. size: bytes to write."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            unavailable = _of_disk(error)
            self.begin(BLOBS, unavailable, size or 0, error)
            raise unavailable from error
        if size is not None:
            self.end(BLOBS, size)


def _of_disk(error: OSError) -> Unavailable:
    if error.errno in NO_ROOM:
        return DiskFull("the coordinator's disk is full; retry when its operator has freed some space")
    return Unavailable("the coordinator cannot use its data folder at the moment; retry, or ask its operator")


def advice(key: str, how: str) -> str:
    """Return the operator's advice for a damaged or missing blob, or for damaged records."""
    if key == RECORDS:
        return (
            f"the records are {how}; stop the coordinator, move its data away, and restore a backup (sparrow restore)"
        )
    return f"{key} is {how}; restore this file from a backup"


def is_damage(error: BaseException) -> bool:
    """Return True if a database reports damaged files, which is a permanent failure."""
    cause = getattr(error, "orig", None) or error
    return str(cause).startswith(SQLITE_DAMAGE) or getattr(cause, "sqlstate", None) in DAMAGE_STATES


def of_database(error: SQLAlchemyError | sqlite3.Error) -> Unavailable:
    """Return the callers' error for a failed database: DiskFull or Unavailable."""
    cause = getattr(error, "orig", None) or error
    full = "database or disk is full" in str(cause) or getattr(cause, "sqlstate", None) == DISK_FULL_STATE
    if full:
        return DiskFull("the disk of the coordinator's records is full; retry when its operator has freed some space")
    if "database is locked" in str(cause) or getattr(cause, "sqlstate", None) == LOCKED_STATE:
        return Unavailable("another program keeps the coordinator's records locked; retry later")
    return Unavailable("the coordinator cannot reach its records at the moment; retry later")


@contextmanager
def database_errors(folder: Path) -> Iterator[None]:
    """Context manager for commands: translate database errors, with the server's text. Raises DiskFull, Unavailable."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        trouble = of_database(error)
        if isinstance(trouble, DiskFull) or (folder.is_dir() and shutil.disk_usage(folder).free < SQLITE_NEEDS):
            raise DiskFull(f"the disk of {folder}, or of the database, is full; free some space") from error
        said = " ".join(str(getattr(error, "orig", None) or error).split())[:300]
        raise Unavailable(f"the database failed: {said}; check that it is running, and its address") from error
