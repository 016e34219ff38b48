"""Records and blobs of a coordinator, for one process, or for several on one PostgreSQL database."""

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
"""Largest number of damaged files in an answer of /readyz."""
CLOSING_SECONDS = 60.0
"""Longest wait for a write at closing, longer than any statement."""

Result = TypeVar("Result")


@dataclass
class _Fact(Generic[Result]):
    """A fact to record: work in a transaction, and the blobs that must be durable before it."""

    work: Callable[[Session], Result]
    keys: Sequence[str]
    settled: bool = False
    result: Result | None = None
    error: BaseException | None = None


class Turns:
    """First-come, first-served turns of threads.

    patience: seconds that a turn may take before waiting threads give up.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        # The current turn, and waiting threads.
        self._line: deque[threading.Event] = deque()
        self._began = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, patience: float | None = None) -> Iterator[None]:
        """Context manager: wait for a turn, and hold it during the block. Raises Unavailable."""
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
                    raise Unavailable("a slow write blocks this one; retry later")


class Store:
    """Records and blobs of a coordinator.

    Write transactions take turns, because a step of a round reads, decides and writes without other writes in between.
    ``on_commit`` gets the duration of each commit in seconds.

    With SQLite a lock on the data folder excludes a second process. With PostgreSQL several may share the blobs;
    ``processes`` describes their turns.
    """

    def __init__(self, data_dir: Path, database_url: str | None = None, blobs: str | None = None) -> None:
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
        """Context manager: a session for reading. Raises Unavailable."""
        self._check_open()
        with self.troubles.of_records(writes=False), self._sessions() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Context manager: a durable transaction, rolled back on errors. Raises Unavailable.

        All other writers in all processes wait, so the block must not compute for long, nor read or write blobs.
        """
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
        """Context manager: a transaction that advances rounds. Raises Unavailable, also after a takeover."""
        with self.writing() as session:
            if self.shared is not None:
                self.shared.check_moves(session)
            yield session

    def record_all(
        self, works: Sequence[tuple[Callable[[Session], Result], Sequence[str]]]
    ) -> list[Result | BaseException]:
        """Do each of ``works`` in a transaction shared with other callers; return the result or error of each.

        The facts, and the blobs under a work's keys, are durable on return. If one work fails, the others are rolled
        back and done again.
        """
        facts = [_Fact(work, keys) for work, keys in works]
        self._facts.extend(facts)
        try:
            with self._gathering.turn():
                if not all(fact.settled for fact in facts):
                    self._write_down([self._facts.popleft() for _ in range(len(self._facts))])
        except Unavailable as error:
            # Another caller may have written some of them.
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
                # One fact cannot be recorded; the others can.
                for fact in facts:
                    self._write_down([fact])
                return
            for fact in facts:
                fact.settled = True
                fact.error = error
        else:
            for fact, result in zip(facts, results, strict=True):
                fact.settled = True
                fact.result = result

    def check(self) -> None:
        """Retry failed writes, with the largest failed size; raise Unavailable while they fail."""
        size = self.troubles.size(BLOBS)
        if size is not None:
            self.probe(size)
        if self.troubles.size(RECORDS) is not None:
            # This changes no value, but is written.
            with self.writing() as db:
                db.execute(text("UPDATE alembic_version SET version_num = version_num"))

    def check_whole(self) -> None:
        """Raise Unavailable, with the operator's advice, while records or blobs are damaged."""
        for key in self.troubles.damages():
            if key != RECORDS:
                with suppress(Unavailable):
                    self.blobs.load(key)
        damages = self.troubles.damages()
        if damages:
            raise Unavailable("; ".join(advice(*each) for each in sorted(damages.items())[:MOST_SAID]))

    def check_turn(self) -> None:
        """Wait for a turn to write, without writing. Raises Unavailable."""
        with self._turns.turn(), self.troubles.of_records(writes=False), self._writers.begin() as session:
            self._check_open()
            # SQLAlchemy begins the transaction only here.
            session.connection()
            if self.shared is not None:
                self.shared.take_turn(session)

    def probe(self, size: int = SMALLEST_PROBE) -> None:
        """Write and remove a blob of ``size`` bytes. Raises Unavailable."""
        try:
            self.blobs.put("ready", bytes(max(size, SMALLEST_PROBE)))
        finally:
            self.blobs.delete("ready")

    @property
    def is_first(self) -> bool:
        """Return True if this process has exclusive use of records and blobs until ``settled``."""
        return self.shared is None or self.shared.first

    def settled(self) -> None:
        """Admit other processes after this one has cleaned up."""
        if self.shared is not None:
            self.shared.settled()

    def moves(self) -> tuple[bool, bool]:
        """Return (may this process advance rounds, has this changed). Raises Unavailable."""
        if self.shared is None:
            return True, False
        with self.troubles.of_records(writes=False):
            return self.shared.moves()

    @property
    def moves_now(self) -> bool:
        """Return the last known result of ``moves``."""
        return self.shared is None or self.shared.moves_now

    def say_moved(self) -> None:
        """Notify other processes of a change of rounds. Raises Unavailable."""
        if self.shared is not None:
            with self.troubles.of_records(writes=False):
                self.shared.say_moved()

    def listen(self, heard: Callable[[bool], None]) -> None:
        """Call ``heard`` for each message of other processes, as ``SharedDatabase.listen``."""
        if self.shared is not None:
            self.shared.listen(heard)

    def keep_lease(self, is_alive: Callable[[], bool]) -> None:
        """Renew the lease to advance rounds while ``is_alive`` returns True."""
        if self.shared is not None:
            self.shared.keep_lease(is_alive)

    def check_lease(self) -> None:
        """Raise Unavailable if no process runs the rounds."""
        if self.shared is not None:
            with self.troubles.of_records(writes=False):
                self.shared.check_lease()

    def _check_blobs(self) -> None:
        """Raise WrongBlobs if records and blobs belong to different coordinators, since rounds would delete the others'
        blobs.
        """
        with self.engine.connect() as connection:
            known = connection.scalars(text("SELECT id FROM federations ORDER BY id")).all()
            before = connection.scalar(text("SELECT count(*) FROM deleted_federations"))
        if known and not self.blobs.keys(f"{known[0]}/models"):
            raise WrongBlobs(
                "the blobs lack models that the records name: set COORDINATOR_BLOBS and COORDINATOR_DATA_DIR as "
                "before, or restore both from a backup (sparrow restore)"
            )
        # An initial model may be left from an interrupted start.
        if not known and not before and not all("/000000000." in key for key in self.blobs.keys("1/models")):
            raise WrongBlobs(
                "the blobs belong to another coordinator: set COORDINATOR_DATA_DIR to an empty folder, another prefix "
                "in COORDINATOR_BLOBS, or COORDINATOR_DATABASE_URL to the matching database"
            )

    def close(self) -> None:
        """Close the database and release the folder after the current write."""
        with self._turns.turn(CLOSING_SECONDS):
            self._closed = True
            self._let_go()
            if self.shared is None and RECORDS not in self.troubles.damages():
                # Without a seal (full disk), opening skips the comparison.
                with suppress(OSError):
                    seal(self.folder / RECORDS_FILE)
            self._lock_file.close()

    def _check_open(self) -> None:
        """Raise Unavailable after ``close``."""
        if self._closed:
            raise Unavailable("the coordinator is stopping; retry after its restart")

    def _let_go(self) -> None:
        if self.shared is not None:
            self.shared.close()
        self.engine.dispose()

    def _share(self) -> SharedDatabase:
        from .processes import SharedDatabase

        return SharedDatabase(self.engine)


def keep_private(folder: Path) -> None:
    """Remove other users' access to a coordinator's files, or log a warning."""
    # The owner of a shared folder (sticky bit), or of a folder with other files in it, decides about access.
    inside = list(folder.iterdir())
    ours = [path for path in inside if path.name in ("blobs", "uploads", "lock") or path.name.startswith(RECORDS_FILE)]
    others = bool(folder.stat().st_mode & stat.S_ISVTX) or (bool(inside) and not ours)
    for path in [folder, *ours]:
        # SQLite may remove its files meanwhile.
        with suppress(FileNotFoundError):
            found = path.stat()
            if not found.st_mode & OTHERS:
                continue
            if found.st_uid != os.geteuid() or (path == folder and others):
                log.warning("%s is open to other users of this machine; run chmod go= %s", path, path)
            else:
                path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
                log.warning("removed other users' access to %s", path)


def lock_folder(data_dir: Path, *, shared: bool = False) -> IO[str]:
    """Return an open file that locks the folder. Raises DataInUse."""
    lock_file = os.fdopen(private(data_dir / "lock", os.O_RDWR | os.O_CREAT), "w")
    try:
        fcntl.flock(lock_file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.close()
        raise DataInUse(
            f"another coordinator uses {data_dir}; stop it, run uvicorn with one worker, keep the records in "
            f"PostgreSQL for several workers, or set COORDINATOR_DATA_DIR to another folder"
        ) from None
    return lock_file


def open_blobs(data_dir: Path, address: str | None, troubles: Troubles | None = None) -> Blobs:
    """Return the blobs in object storage if ``address`` is given, otherwise in the data folder. Raises BadStorage."""
    return FolderBlobs(data_dir / "blobs", troubles) if address is None else ObjectBlobs(address, troubles)
