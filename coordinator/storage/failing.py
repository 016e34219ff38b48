"""Failures of storage: told apart from faults of our own, and logged once.

The disk is full, the database has gone, the object store does not answer: such a failure passes by itself or when an
operator mends it, so callers are told to come again (``errors.Unavailable``, ``errors.DiskFull``), and the coordinator
goes on. The log has one line when it begins and one when it is over, however many calls it met.
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

RECORDS, BLOBS = "records", "blobs"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_STATE, LOCKED_STATE = "53100", "55P03"  # PostgreSQL's SQLSTATEs
DAMAGE_STATES = ("XX001", "XX002")
"""PostgreSQL's SQLSTATEs data_corrupted and index_corrupted."""
SQLITE_DAMAGE = ("database disk image is malformed", "file is not a database")
DAMAGED_RECORDS = "the coordinator's records are damaged; try again when its operator has restored them"
SQLITE_NEEDS = 64 * 1024
"""Free bytes below which SQLite cannot even begin to write: then it calls its I/O broken, not the disk full."""


class Troubles:
    """The failures that last: of ``records`` and of ``blobs``, and which of them is damaged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[Unavailable, int]] = {}
        self._damaged: dict[str, str] = {}

    def begin(self, what: str, error: Unavailable, size: int, cause: BaseException) -> None:
        """Note that a call with ``size`` bytes to write has failed."""
        with self._lock:
            known = self._found.get(what)
            largest = max(size, known[1]) if known else size
            self._found[what] = (error, largest)
        if known is None or type(known[0]) is not type(error):
            log.error("%s: %s (%s: %s)", what, error, type(cause).__name__, cause)

    def end(self, what: str, size: int) -> None:
        """Note that a write of ``size`` bytes succeeded. A smaller one than has failed proves nothing: it may fit."""
        if what not in self._found:  # the usual case, without a lock
            return
        with self._lock:
            if what not in self._found or size < self._found[what][1]:
                return
            del self._found[what]
        log.warning("%s: written again; going on", what)

    def check(self) -> None:
        """Raise the Unavailable of a failure that lasts, without trying again."""
        for error, _ in list(self._found.values()):
            raise error

    def size(self, what: str) -> int | None:
        """Return the largest number of bytes whose writing failed; None if all is well."""
        known = self._found.get(what)
        return None if known is None else known[1]

    def damaged(self, key: str, how: str) -> Damaged:
        """Note ``how`` a blob, or the ``records``, is damaged, or that it is missing; return the error to raise."""
        with self._lock:
            known = key in self._damaged
            self._damaged[key] = how
        if not known:
            log.error("storage: %s", advice(key, how))
        return Damaged(key)

    def whole(self, key: str) -> None:
        """Note that a blob is what it should be."""
        if key in self._damaged:
            self._damaged.pop(key, None)
            log.warning("storage: %s is whole again; going on", key)

    def forget(self, keys: Iterable[str]) -> None:
        """Note that nobody needs these blobs any more."""
        for key in list(keys):
            self._damaged.pop(key, None)

    def damages(self) -> dict[str, str]:
        """Return what is damaged, by key, or by the name of the database, and how."""
        return dict(self._damaged)

    @contextmanager
    def of_records(self, *, writes: bool) -> Iterator[None]:
        """Translate the errors of a transaction."""
        try:
            yield
        except (DBAPIError, NoConnectionLeft) as error:
            if is_damage(error):
                self.damaged(RECORDS, f"damaged ({getattr(error, 'orig', None)})")
                raise Unavailable(DAMAGED_RECORDS) from error
            ended = isinstance(error, DBAPIError) and error.connection_invalidated
            if not ended and not isinstance(error, (OperationalError, InterfaceError, NoConnectionLeft)):
                raise  # a statement of ours is wrong
            unavailable = of_database(error)
            self.begin(RECORDS, unavailable, 0, getattr(error, "orig", None) or error)
            raise unavailable from error
        if writes:
            self.end(RECORDS, 0)

    @contextmanager
    def of_blobs(self, size: int | None = None) -> Iterator[None]:
        """Translate errors of work on files; ``size``: the bytes it writes. A missing file is no such failure."""
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
        return DiskFull("the coordinator's disk is full; it takes this again when its operator has made room")
    return Unavailable("the coordinator cannot use its data folder just now; try again, and show its operator the log")


def advice(key: str, how: str) -> str:
    """Return what an operator is told of a blob, or of the records, that is missing or damaged."""
    if key == RECORDS:
        return (
            f"the records are {how}; stop the coordinator, move its data away, and restore a backup (sparrow restore)"
        )
    return f"{key} is {how}; bring this file back from a backup"


def is_damage(error: BaseException) -> bool:
    """Return whether a database says that its files are damaged: it does not pass by itself."""
    cause = getattr(error, "orig", None) or error
    return str(cause).startswith(SQLITE_DAMAGE) or getattr(cause, "sqlstate", None) in DAMAGE_STATES


def of_database(error: SQLAlchemyError | sqlite3.Error) -> Unavailable:
    """Return the error that callers get of a database that failed: DiskFull, or Unavailable."""
    cause = getattr(error, "orig", None) or error
    full = "database or disk is full" in str(cause) or getattr(cause, "sqlstate", None) == DISK_FULL_STATE
    if full:
        return DiskFull("the disk of the coordinator's records is full; it goes on when its operator has made room")
    if "database is locked" in str(cause) or getattr(cause, "sqlstate", None) == LOCKED_STATE:
        return Unavailable("another program keeps the coordinator's records locked; try again in a while")
    return Unavailable("the coordinator cannot reach its records just now; try again in a while")


@contextmanager
def database_errors(folder: Path) -> Iterator[None]:
    """Translate the database's errors within, for the database's own words may hold its address.

    folder: where SQLite writes. Raises DiskFull, Unavailable.
    """
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        trouble = of_database(error)
        if isinstance(trouble, DiskFull) or (folder.is_dir() and shutil.disk_usage(folder).free < SQLITE_NEEDS):
            raise DiskFull(f"the disk of {folder}, or of the database, is full; make room") from error
        raise Unavailable(f"the database failed ({type(error).__name__}); is it running?") from error
