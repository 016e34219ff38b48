"""Several coordinator processes on one PostgreSQL database: presence, writes, and the lease to advance rounds.

    presence  a shared advisory lock for the lifetime of a process. The first process briefly holds it exclusively and
              cleans up after killed processes; the others wait for it.
    writing   one transaction at a time in all processes: each locks a table before it reads, so it sees all earlier
              writes.
    moving    one process opens, folds and closes rounds: the holder of the lease (``tables.Lease``), renewed every
              ``BEAT_SECONDS``. If it is killed, its advisory lock is released, and another process takes over at once.
              If it hangs, the lease expires.
    waking    LISTEN and NOTIFY: facts are sent to the process that advances rounds, and changes of rounds to all
              waiting calls. Behind a pooler, waiting calls poll every
              ``POOLED_SECONDS``.

Locks belong to one open transaction, not to a session, which a pooler may reassign. It reads no table, so it delays
neither vacuum nor migrations.

Each takeover starts a new epoch of the lease, which every transaction that advances rounds checks, so a replaced
process cannot make changes. The server ends the transaction of a process that hangs (``database.IDLE_SECONDS``).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import psycopg
from sqlalchemy import Connection, Engine, NestedTransaction, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.orm import Session

from ..errors import Unavailable
from .database import is_pooled

log = logging.getLogger(__name__)

CHANNEL = "sparrow"
FACT = "fact"
MOVED = "moved"

# Not an advisory lock: its query would take the transaction's snapshot before the process has its turn.
_TURN = text("LOCK TABLE alembic_version IN EXCLUSIVE MODE")
_SAY = text("SELECT pg_notify(:channel, :what)")
_THERE = "hashtext('sparrow coordinator')"
_MOVING = "hashtext('sparrow moves rounds')"
_COME = text(f"SELECT pg_try_advisory_xact_lock_shared({_THERE})")
_COME_ALONE = text(f"SELECT pg_try_advisory_xact_lock({_THERE})")
_ENTER = text("SELECT pg_try_advisory_xact_lock(hashtext('sparrow coordinator comes'))")
_MOVE = text(f"SELECT pg_try_advisory_xact_lock({_MOVING}, :epoch)")
# transaction_timeout exists from PostgreSQL 17 on.
_UNLIMITED = text(
    "SELECT set_config(name, '0', true) FROM pg_settings "
    "WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
)
_ALIVE = text("SELECT 1")
_COME_SECONDS = 0.1
_LISTEN_SECONDS = 1.0
POOLED_SECONDS = 5.0
"""Interval at which waiting calls look for changes of rounds behind a pooler."""

LEASE_SECONDS = 10.0
"""Lifetime of the lease: longer than usual pauses of a busy machine or network, shorter than devices' retries."""
BEAT_SECONDS = 2.5
"""Interval of renewals; two of four may be lost."""

_NOW = "extract(epoch FROM clock_timestamp())"
_LOOK = text(f"SELECT epoch, expires_at - {_NOW} FROM lease WHERE id = 1")
_MAKE = text("INSERT INTO lease (id) VALUES (1) ON CONFLICT DO NOTHING")
_TAKE = text(f"UPDATE lease SET epoch = epoch + 1, expires_at = {_NOW} + {LEASE_SECONDS} WHERE id = 1 RETURNING epoch")
_RENEW = text(f"UPDATE lease SET expires_at = {_NOW} + {LEASE_SECONDS} WHERE id = 1 AND epoch = :epoch")
_EPOCH = text("SELECT epoch FROM lease WHERE id = 1")


class SharedDatabase:
    """This process's part in a shared database.

    first: whether it is the first process, until ``settled`` admits the others.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._name = secrets.token_hex(8)
        # With the open transaction that holds the locks.
        self._connection: Connection | None = None
        # While this process is the first: the part of that transaction that holds the lock exclusively.
        self._alone: NestedTransaction | None = None
        # Epoch of the lease while this process holds it.
        self._epoch: int | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.first = self._come(may_be_first=True)

    def settled(self) -> None:
        """Admit other processes after this one has cleaned up."""
        with self._lock:
            if self._alone is not None and self._connection is not None:
                self._alone.rollback()
                if self._epoch is not None:
                    self._connection.execute(_MOVE, {"epoch": self._epoch})
            self._alone = None
            self.first = False

    def take_turn(self, session: Session) -> None:
        """At the beginning of a write transaction, wait for the end of all others."""
        session.execute(_TURN)

    def say_fact(self, session: Session) -> None:
        """Notify the process that advances rounds when this transaction commits."""
        if self._epoch is None:
            session.execute(_SAY, {"channel": CHANNEL, "what": f"{FACT} {self._name}"})

    def say_moved(self) -> None:
        """Notify all waiting calls of a change of rounds."""
        with self._engine.connect() as connection:
            connection.execute(_SAY, {"channel": CHANNEL, "what": f"{MOVED} {self._name}"})
            connection.commit()

    def moves(self) -> tuple[bool, bool]:
        """Return (may this process advance rounds, has this changed). Raises DBAPIError."""
        with self._lock:
            before = self._epoch
            try:
                self._epoch = self._held_epoch()
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                # After a restart of the database a new connection may work.
                self._lose()
                self._epoch = self._held_epoch()
        newly = self._epoch is not None and self._epoch != before
        if newly:
            log.info("this process now moves rounds")
        elif self._epoch is None and before is not None:
            log.warning("another process now runs the rounds: this one was stopped for too long")
        return self._epoch is not None, newly

    @property
    def moves_now(self) -> bool:
        """Return the last known result of ``moves``."""
        return self._epoch is not None

    def check_moves(self, session: Session) -> None:
        """Raise Unavailable if this process was replaced."""
        if self._epoch is None or session.scalar(_EPOCH) != self._epoch:
            raise Unavailable("another process now runs the rounds")

    def check_lease(self) -> None:
        """Raise Unavailable if the lease has expired. Raises DBAPIError."""
        with self._engine.connect() as connection:
            row = connection.execute(_LOOK).first()
        if row is None or row[1] < -LEASE_SECONDS:
            raise Unavailable("no process runs the rounds: the lease has expired, and none could take it over")

    def _held_epoch(self) -> int | None:
        """Return the epoch of the lease if this process holds it or can take it over now."""
        if self._connection is None:
            self._come(may_be_first=False)
        assert self._connection is not None
        self._connection.execute(_ALIVE)
        with self._engine.connect() as connection:
            row = connection.execute(_LOOK).first()
        if self._epoch is not None:
            return self._epoch if row is not None and row[0] == self._epoch else None
        return self._take_over(None if row is None else row[0]) if row is None or self._is_free(*row) else None

    def _is_free(self, epoch: int, seconds_left: float) -> bool:
        """Return True if the lease has expired or its holder's connection has ended."""
        assert self._connection is not None
        if seconds_left < 0:
            return True
        trial = self._connection.begin_nested()
        free = bool(self._connection.scalar(_MOVE, {"epoch": epoch}))
        # It releases the lock.
        trial.rollback()
        return free

    def _take_over(self, former: int | None) -> int | None:
        """Begin a new epoch in this process's turn to write; return None if another process was faster."""
        assert self._connection is not None
        with self._engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            connection.execute(_TURN)
            if former is None:
                connection.execute(_MAKE)
            row = connection.execute(_LOOK).one()
            if row[0] != (former or 0) or not self._is_free(*row):
                return None
            epoch: int = connection.execute(_TAKE).scalar_one()
            # Before others see the epoch: they would take a free lock for that of a dead holder.
            self._connection.execute(_MOVE, {"epoch": epoch})
            connection.commit()
        return epoch

    def keep_lease(self, is_alive: Callable[[], bool]) -> None:
        """Renew the lease in a thread, while this process holds it and ``is_alive`` returns True."""
        self._start(self._beat, is_alive, name="lease")

    def _beat(self, is_alive: Callable[[], bool]) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            epoch = self._epoch
            if epoch is None or not is_alive():
                continue
            try:
                with self._engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
                    connection.execute(_RENEW, {"epoch": epoch})
                    connection.commit()
            except (DBAPIError, NoConnectionLeft) as error:
                # The rounds thread reports the failure.
                log.debug("the lease could not be renewed: %s", error)

    def _lose(self) -> None:
        lost = self._connection
        self._connection = None
        self._alone = None
        self._epoch = None
        if lost is not None:
            lost.invalidate()
            lost.close()

    def listen(self, heard: Callable[[bool], None]) -> None:
        """Call ``heard`` in a thread for each message of other processes; True: a change of rounds, False: a fact.

        It is called with True first and after every gap.
        """
        self._start(self._listen, heard, name="listener")

    def _start(self, target: Callable[..., None], argument: object, *, name: str) -> None:
        thread = threading.Thread(target=target, args=(argument,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Release all locks, so that another process may advance rounds at once."""
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=5)
        with self._lock:
            if self._connection is not None:
                # Without a connection the locks are already released.
                with contextlib.suppress(DBAPIError):
                    # Closing the connection would release them with a delay.
                    self._connection.rollback()
                self._connection.close()
                self._connection = None

    def _come(self, *, may_be_first: bool) -> bool:
        """Take the lock of a present process; return True if this is the first."""
        connection = self._engine.connect().execution_options(isolation_level="READ COMMITTED")
        # In the pool the transaction would end.
        connection.detach()
        try:
            # Not a lock that waits: behind a pooler, waiting processes would occupy the sessions that the first needs.
            while not (self._enter(connection) if may_be_first else self._is_there(connection)):
                connection.rollback()
                time.sleep(_COME_SECONDS)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return self._alone is not None

    def _enter(self, connection: Connection) -> bool:
        """Take the lock, exclusively if it is free; return False while another process cleans up."""
        with self._engine.connect() as door:
            if not door.scalar(_ENTER) or not self._is_there(connection):
                return False
            alone = connection.begin_nested()
            if connection.scalar(_COME_ALONE):
                self._alone = alone
            else:
                alone.rollback()
        return True

    def _is_there(self, connection: Connection) -> bool:
        connection.execute(_UNLIMITED)
        return bool(connection.scalar(_COME))

    def _listen(self, heard: Callable[[bool], None]) -> None:
        address = self._engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        while not self._closing.is_set():
            try:
                for kind in self._messages(address):
                    heard(kind == MOVED)
            except psycopg.Error:
                # The next write reports a lost database.
                self._closing.wait(_LISTEN_SECONDS)

    def _messages(self, address: str) -> Iterator[str]:
        with contextlib.closing(psycopg.connect(address, autocommit=True)) as connection:
            if is_pooled(connection):
                while not self._closing.is_set():
                    yield MOVED
                    self._closing.wait(POOLED_SECONDS)
                return
            connection.execute(f"LISTEN {CHANNEL}")
            yield MOVED
            while not self._closing.is_set():
                for notice in connection.notifies(timeout=_LISTEN_SECONDS):
                    kind, _, name = notice.payload.partition(" ")
                    if name != self._name:
                        yield kind
