"""Records and blobs of a coordinator, opened together: by one process, or by several on one PostgreSQL database."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar, cast

from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from ..errors import DataInUse, Unavailable, WrongBlobs
from .blobs import Blobs, FolderBlobs, make_folder, private
from .database import BUSY_SECONDS, WRITING, open_database, seal
from .failing import BLOBS, RECORDS, Troubles, advice
from .mounts import check_local
from .objects import ObjectBlobs

if TYPE_CHECKING:
    from .processes import SharedDatabase  # needs psycopg

log = logging.getLogger(__name__)

RECORDS_FILE = "coordinator.sqlite3"
OTHERS = stat.S_IRWXG | stat.S_IRWXO
SMALLEST_PROBE = 4096
MOST_SAID = 10
"""Damaged files that one answer of /readyz names."""
CLOSING_SECONDS = 60.0
"""How long closing waits for a write: longer than any statement may take."""

Result = TypeVar("Result")


@dataclass
class _Fact(Generic[Result]):
    """A fact that one caller records: work in a transaction, and the blobs that must be durable before it."""

    work: Callable[[Session], Result]
    keys: Sequence[str]
    settled: bool = False
    result: Result | None = None
    error: BaseException | None = None


class Turns:
    """Turns that threads take one after the other, in the order in which they came.

    They wait for as long as turns change. patience: how long a turn may take before those behind it give up, s.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._line: deque[threading.Event] = deque()  # whose turn it is, and those who wait
        self._began = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, patience: float | None = None) -> Iterator[None]:
        """Wait for a turn, and have it for as long as the block takes. Raises Unavailable."""
        self._wait(patience or self._patience)
        try:
            yield
        finally:
            with self._lock:
                self._line.popleft()
                self._began = time.monotonic()
                if self._line:
                    self._line[0].set()

    def _wait(self, patience: float) -> None:
        mine = threading.Event()
        with self._lock:
            came = time.monotonic()
            self._line.append(mine)
            if self._line[0] is mine:
                self._began = came
                return
        while True:
            if mine.wait(max(self._began, came) + patience - time.monotonic()):
                return
            with self._lock:
                if self._line[0] is mine:
                    return
                if time.monotonic() >= max(self._began, came) + patience:
                    self._line.remove(mine)
                    raise Unavailable("what is to be written waits for a write that takes long; try again in a while")


class Store:
    """The coordinator's records and blobs.

    Transactions that write take turns: rounds move in steps that read, decide and write, and no other write may fall
    between. Facts that many callers bring at once go into one of them together (``record_all``). ``on_commit`` gets the
    seconds that each commit took.

    With SQLite a lock on the data folder keeps a second process out. With PostgreSQL there may be several, over the
    same blobs; ``processes`` describes how they take turns.
    """

    def __init__(self, data_dir: Path, database_url: str | None = None, blobs: str | None = None) -> None:
        """Open both. database_url: PostgreSQL; blobs: s3://BUCKET/PREFIX; without, they are in ``data_dir``."""
        make_folder(data_dir)
        keep_private(data_dir)
        self.folder = data_dir
        if database_url is None or blobs is None:
            check_local(data_dir)
        shared = database_url is not None
        self._lock_file = lock_folder(data_dir, shared=shared)
        self.troubles = Troubles()
        try:
            self.blobs = open_blobs(data_dir, blobs, self.troubles)
            self.engine = open_database(database_url or data_dir / RECORDS_FILE)
            self.shared: SharedDatabase | None = None
            try:
                self.shared = self._share() if shared else None
                self._check_blobs()
                if self.is_first:
                    self.blobs.clean()
            except BaseException:
                self._let_go()
                raise
        except BaseException:
            self._lock_file.close()
            raise
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)
        self._writers = sessionmaker(self.engine.execution_options(**WRITING), expire_on_commit=False)
        self.on_commit: Callable[[float], None] = lambda seconds: None
        self._turns = Turns(BUSY_SECONDS)
        self._closed = False
        self._facts: deque[_Fact[Any]] = deque()
        self._gathering = Turns(BUSY_SECONDS)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a session to read; its changes are not kept. Raises Unavailable."""
        self._check_open()
        with self.troubles.of_records(writes=False), self._sessions() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Open a transaction: committed durably when the block ends, undone if it raises. Raises Unavailable.

        All others that write wait for it, in all processes: within it, nothing is computed that takes long, and no blob
        is written or read."""
        with self._turns.turn(), self.troubles.of_records(writes=True):
            self._check_open()
            with self._writers.begin() as session:
                if self.shared is not None:
                    self.shared.take_turn(session)
                yield session
                if self.shared is not None:
                    self.shared.say_fact(session)
                began = time.perf_counter()
            self.on_commit(time.perf_counter() - began)

    @contextmanager
    def moving(self) -> Iterator[Session]:
        """Open a transaction of the process that moves rounds. Raises Unavailable, also where another does by now."""
        with self.writing() as session:
            if self.shared is not None:
                self.shared.check_moves(session)
            yield session

    def record_all(
        self, works: Sequence[tuple[Callable[[Session], Result], Sequence[str]]]
    ) -> list[Result | BaseException]:
        """Do each of ``works`` in a transaction that many callers may share; return what each gave, or its error.

        Durable when this returns; the blobs under a work's keys are made durable first. One caller at a time writes,
        for all who wait by then: a single caller waits for nobody, and many share one commit and one flush per folder.
        A work may be done twice, the first time to be undone, where another's has failed.
        """
        facts = [_Fact(work, keys) for work, keys in works]
        self._facts.extend(facts)
        try:
            with self._gathering.turn():
                if not all(fact.settled for fact in facts):
                    self._write_down([self._facts.popleft() for _ in range(len(self._facts))])
        except Unavailable as error:  # they did not come to their turn, though another may have written for them
            for fact in facts:
                with suppress(ValueError):
                    self._facts.remove(fact)
                if not fact.settled:
                    fact.error = error
        return [fact.error if fact.error is not None else cast(Result, fact.result) for fact in facts]

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

    def check_whole(self) -> None:
        """Raise Unavailable, for an operator, as long as records or blobs are damaged: blobs are looked at again."""
        for key in self.troubles.damages():
            if key != RECORDS:
                with suppress(Unavailable):
                    self.blobs.load(key)
        damages = self.troubles.damages()
        if damages:
            raise Unavailable("; ".join(advice(*each) for each in sorted(damages.items())[:MOST_SAID]))

    def check_turn(self) -> None:
        """Wait for a turn to write, and write nothing. Raises Unavailable."""
        with self._turns.turn(), self.troubles.of_records(writes=False), self._writers.begin() as session:
            self._check_open()
            session.connection()  # SQLAlchemy begins when it must
            if self.shared is not None:
                self.shared.take_turn(session)

    def probe(self, size: int = SMALLEST_PROBE) -> None:
        """Write a blob of ``size`` bytes, and take it away. Raises Unavailable."""
        try:
            self.blobs.put("ready", bytes(max(size, SMALLEST_PROBE)))
        finally:
            self.blobs.delete("ready")

    @property
    def is_first(self) -> bool:
        """Return whether no other process works with these records and blobs, nor begins to before ``settled``."""
        return self.shared is None or self.shared.first

    def settled(self) -> None:
        """Let other processes in, since this one has cleaned up."""
        if self.shared is not None:
            self.shared.settled()

    def moves(self) -> tuple[bool, bool]:
        """Return whether this process may move rounds now, and whether it could not before. Raises Unavailable."""
        if self.shared is None:
            return True, False
        with self.troubles.of_records(writes=False):
            return self.shared.moves()

    @property
    def moves_now(self) -> bool:
        """Return whether this process moves rounds, as it last knew."""
        return self.shared is None or self.shared.moves_now

    def say_moved(self) -> None:
        """Tell other processes, if there are any, that something moved. Raises Unavailable."""
        if self.shared is not None:
            with self.troubles.of_records(writes=False):
                self.shared.say_moved()

    def listen(self, heard: Callable[[bool], None]) -> None:
        """Call ``heard`` for every message of other processes, if there are any, in a thread of its own.

        Its argument is True where rounds have moved, False where a fact was written.
        """
        if self.shared is not None:
            self.shared.listen(heard)

    def keep_lease(self, is_alive: Callable[[], bool]) -> None:
        """Renew the lease of the process that moves rounds, if there are several, for as long as ``is_alive``."""
        if self.shared is not None:
            self.shared.keep_lease(is_alive)

    def check_lease(self) -> None:
        """Raise Unavailable where no process moves rounds."""
        if self.shared is not None:
            with self.troubles.of_records(writes=False):
                self.shared.check_lease()

    def _check_blobs(self) -> None:
        """Raise WrongBlobs where records and blobs are not of one coordinator: its rounds would delete the other's."""
        with self.engine.connect() as connection:
            known = connection.scalars(text("SELECT id FROM federations ORDER BY id")).all()
            before = connection.scalar(text("SELECT count(*) FROM deleted_federations"))
        if known and not self.blobs.keys(f"{known[0]}/models"):
            raise WrongBlobs(
                "the records name models that are not among the blobs: set COORDINATOR_BLOBS and COORDINATOR_DATA_DIR "
                "to where they were, or bring both back from a backup with sparrow restore"
            )
        # A first model alone may be from a start that was cut off.
        if not known and not before and not all("/000000000." in key for key in self.blobs.keys("1/models")):
            raise WrongBlobs(
                "the blobs are another coordinator's, and the records do not name them: give an empty folder, or "
                "another prefix in COORDINATOR_BLOBS, or the database that belongs to them"
            )

    def close(self) -> None:
        """Close the database and release the folder after the current write; later calls are refused."""
        with self._turns.turn(CLOSING_SECONDS):
            self._closed = True
            self._let_go()
            if self.shared is None and RECORDS not in self.troubles.damages():
                with suppress(OSError):  # a full disk: then it is not compared when it is opened again
                    seal(self.folder / RECORDS_FILE)
            self._lock_file.close()

    def _check_open(self) -> None:
        """Raise Unavailable once others may have the records."""
        if self._closed:
            raise Unavailable("the coordinator is stopping; come again when it has started anew")

    def _let_go(self) -> None:
        if self.shared is not None:
            self.shared.close()
        self.engine.dispose()

    def _share(self) -> SharedDatabase:
        from .processes import SharedDatabase

        return SharedDatabase(self.engine)


def keep_private(folder: Path) -> None:
    """Take the rights of other users from a coordinator's folder and what is in it; log a warning where it may not.

    Somebody who shares the folder (a sticky bit), or keeps other things in it, decides himself who looks into it.
    """
    inside = list(folder.iterdir())
    ours = [path for path in inside if path.name in ("blobs", "uploads", "lock") or path.name.startswith(RECORDS_FILE)]
    others = bool(folder.stat().st_mode & stat.S_ISVTX) or (bool(inside) and not ours)
    for path in [folder, *ours]:
        with suppress(FileNotFoundError):  # SQLite's own, of a process that just ends
            found = path.stat()
            if not found.st_mode & OTHERS:
                continue
            if found.st_uid != os.geteuid() or (path == folder and others):
                log.warning("%s is open to other users of this machine; close it: chmod go= %s", path, path)
            else:
                path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
                log.warning("%s was open to other users of this machine, and is closed to them", path)


def lock_folder(data_dir: Path, *, shared: bool = False) -> IO[str]:
    """Return an open file that locks the folder; with ``shared`` only against exclusive use. Raises DataInUse."""
    lock_file = os.fdopen(private(data_dir / "lock", os.O_RDWR | os.O_CREAT), "w")
    try:
        fcntl.flock(lock_file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.close()
        raise DataInUse(
            f"another coordinator works in {data_dir}; stop it, run uvicorn with one worker, keep the records in "
            f"PostgreSQL, where there may be several, or set COORDINATOR_DATA_DIR to another folder"
        ) from None
    return lock_file


def open_blobs(data_dir: Path, address: str | None, troubles: Troubles | None = None) -> Blobs:
    """Return the blobs: in object storage, if its address is given, or in the data folder. Raises BadStorage."""
    return FolderBlobs(data_dir / "blobs", troubles) if address is None else ObjectBlobs(address, troubles)
