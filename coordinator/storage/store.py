"""Records and blobs of one coordinator, opened together and held by one process at a time."""

from __future__ import annotations

import fcntl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from coordinator.errors import Unavailable
from coordinator.storage.blobs import Blobs, FolderBlobs, make_folder
from coordinator.storage.database import open_database
from coordinator.storage.failing import BLOBS, RECORDS, Troubles
from coordinator.storage.mounts import check_local
from coordinator.storage.objects import ObjectBlobs

TAKE = text("SELECT pg_try_advisory_lock(hashtext('sparrow coordinator'))")
RECORDS_FILE = "coordinator.sqlite3"
SMALLEST_PROBE = 4096
Result = TypeVar("Result")


class DataInUse(RuntimeError):
    """Another coordinator process works on the same data folder or database."""


class WrongBlobs(RuntimeError):
    """Records and blobs do not belong together; the text says what to do."""


@dataclass
class _Fact(Generic[Result]):
    """What one caller has to record: what to do in a transaction, and the blobs that must be durable before it."""

    work: Callable[[Session], Result]
    keys: Sequence[str]
    settled: bool = False
    result: Result | None = None
    error: BaseException | None = None


class Store:
    """The coordinator's memory.

    Transactions that write take turns: rounds move in steps that read, decide and write, and no other write may fall
    between. Facts that many callers bring at once go into one of them together (``record``). A lock on the data folder,
    and one in PostgreSQL, keep a second process out, which would fold the same updates again.
    """

    def __init__(self, data_dir: Path, database_url: str | None = None, blobs: str | None = None) -> None:
        """``database_url``: PostgreSQL, ``blobs``: s3://BUCKET/PREFIX; without, they are in ``data_dir``."""
        make_folder(data_dir)
        if database_url is None or blobs is None:
            check_local(data_dir)
        self._lock_file = lock_folder(data_dir)
        self.troubles = Troubles()
        try:
            self.blobs = open_blobs(data_dir, blobs, self.troubles)
            self.blobs.clean()
            self._engine = open_database(database_url or data_dir / RECORDS_FILE)
            self._shared = database_url is not None
            self._hold: Connection | None = None
            try:
                self._hold = _take(self._engine) if self._shared else None
                self._check_blobs()
            except BaseException:
                self._let_go()
                raise
        except BaseException:
            self._lock_file.close()
            raise
        self._sessions = sessionmaker(self._engine, expire_on_commit=False)
        self._turn = threading.Lock()
        self._closed = False
        self._facts: deque[_Fact[Any]] = deque()
        self._gathering = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session to look with; what it changes is not kept. Raises Unavailable."""
        self._check_open()
        with self.troubles.of_records(writes=False), self._sessions() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction: committed, durably, when the block ends, undone when it raises. Raises Unavailable."""
        with self._turn, self.troubles.of_records(writes=True):
            self._check_open()
            self._keep_hold()
            with self._sessions.begin() as session:
                yield session

    def record(self, work: Callable[[Session], Result], keys: Sequence[str] = ()) -> Result:
        """Do ``work`` in a transaction that many callers may share; durable when this returns. Raises what it raises.

        keys: blobs that were written for it, and are made durable first. One caller at a time has the pen, and writes
        down for all who wait by then: alone it waits for nobody, and of a crowd each pays a share of one commit and of
        one flush per folder. ``work`` may be called twice, the first time to be undone, where another's has failed.
        """
        fact = _Fact(work, keys)
        self._facts.append(fact)
        with self._gathering:
            if not fact.settled:
                self._write_down([self._facts.popleft() for _ in range(len(self._facts))])
        if fact.error is not None:
            raise fact.error
        return cast(Result, fact.result)

    def _write_down(self, facts: Sequence[_Fact[Any]]) -> None:
        try:
            keys = [key for fact in facts for key in fact.keys]
            if keys:
                self.blobs.settle(keys)
            with self.writing() as db:
                results = [fact.work(db) for fact in facts]
        except BaseException as error:
            if len(facts) > 1 and isinstance(error, Exception) and not isinstance(error, Unavailable):
                for fact in facts:  # one of them cannot be recorded; the others must not suffer
                    self._write_down([fact])
                return
            for fact in facts:
                fact.settled, fact.error = True, error
        else:
            for fact, result in zip(facts, results, strict=True):
                fact.settled, fact.result = True, result

    def check(self) -> None:
        """Raise Unavailable as long as something that has failed does: it is tried again here, as large as it was."""
        size = self.troubles.size(BLOBS)
        if size is not None:
            self.probe(size)
        if self.troubles.size(RECORDS) is not None:
            with self.writing() as db:  # changes nothing, and is written all the same
                db.execute(text("UPDATE alembic_version SET version_num = version_num"))

    def probe(self, size: int = SMALLEST_PROBE) -> None:
        """Write a blob of ``size`` bytes, and take it away. Raises Unavailable."""
        try:
            self.blobs.put("ready", bytes(max(size, SMALLEST_PROBE)))
        finally:
            self.blobs.delete("ready")

    def _check_blobs(self) -> None:
        """Raise WrongBlobs where records and blobs are not of one coordinator: its rounds would delete the other's."""
        with self._engine.connect() as connection:
            known = connection.scalars(text("SELECT id FROM federations ORDER BY id")).all()
        if known and not self.blobs.keys(f"{known[0]}/models"):
            raise WrongBlobs(
                "the records name models that are not among the blobs: set COORDINATOR_BLOBS and COORDINATOR_DATA_DIR "
                "to where they were, or bring both back from a backup with python -m coordinator.restore"
            )
        # A first model alone may be from a start that was cut off.
        if not known and not all("/000000000." in key for key in self.blobs.keys("1/models")):
            raise WrongBlobs(
                "the blobs are another coordinator's, of which the records know nothing: give an empty folder, or "
                "another prefix in COORDINATOR_BLOBS, or the database that belongs to them"
            )

    def close(self) -> None:
        """Let go of the database and the folder, when who writes has done so; later calls are refused."""
        with self._turn:
            self._closed = True
            self._let_go()
            self._lock_file.close()

    def _check_open(self) -> None:
        """Raise Unavailable once others may have the records."""
        if self._closed:
            raise Unavailable("the coordinator is stopping; come again when it has started anew")

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.close()
        self._engine.dispose()

    def _keep_hold(self) -> None:
        """Where the connection that keeps others out was lost, take it again before anything is written."""
        if not self._shared:
            return
        if self._hold is not None:
            try:
                self._hold.scalar(text("SELECT 1"))
                return
            except DBAPIError:
                lost, self._hold = self._hold, None
                lost.invalidate()
                lost.close()
        try:
            self._hold = _take(self._engine)
        except DataInUse as error:
            raise Unavailable(f"{error}; this coordinator writes nothing more until that one has gone") from None


def lock_folder(data_dir: Path) -> IO[str]:
    """An open file that keeps others out of the folder. Raises DataInUse."""
    lock_file = (data_dir / "lock").open("w")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.close()
        raise DataInUse(
            f"another coordinator works in {data_dir}; stop it, run uvicorn with one worker, or set "
            f"COORDINATOR_DATA_DIR to another folder"
        ) from None
    return lock_file


def open_blobs(data_dir: Path, address: str | None, troubles: Troubles | None = None) -> Blobs:
    """The blobs in object storage, where an address of one is given, or in the data folder. Raises BadObjectStore."""
    return FolderBlobs(data_dir / "blobs", troubles) if address is None else ObjectBlobs(address, troubles)


def _take(engine: Engine) -> Connection:
    """A connection that keeps other coordinators out of the database as long as it is open. Raises DataInUse."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    if connection.scalar(TAKE):
        return connection
    connection.close()
    raise DataInUse(
        "another coordinator works on this PostgreSQL database; stop it, or give each a database of its own"
    )
