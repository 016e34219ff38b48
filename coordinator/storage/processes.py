"""Several coordinator processes on one PostgreSQL database: their presence, their writes, and the moving of rounds.

    there     a shared advisory lock, for as long as a process lives. The first one, which gets it exclusively for a
              moment, cleans up after killed processes; the others wait for that.
    writing   one transaction at a time in all processes: each locks a table before it looks at anything, so it sees
              all that was written before it.
    moving    one process opens, folds and closes rounds: the holder of the lease (``tables.Lease``), which it renews
              every ``BEAT_SECONDS``. Killed, or cut off from the database, it loses an advisory lock that goes with its
              connection, and another one goes on at once. Stopped, or hanging, it keeps that, but the lease expires.
    waking    LISTEN and NOTIFY: facts are announced to the process that moves rounds, moves to all that wait.

Who takes over does so in its turn to write, and begins a new epoch of the lease. Every transaction that moves rounds
looks at the epoch in its own turn, so a process that wakes up after it was replaced changes nothing. One that stands
still in its turn keeps all others from writing until the server ends its transaction (``database.IDLE_SECONDS``).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.orm import Session

from ..errors import Unavailable

log = logging.getLogger(__name__)

CHANNEL = "sparrow"
FACT, MOVED = "fact", "moved"

# Not a lock by function: a query would fix what the transaction sees before it has waited for its turn.
_TURN = text("LOCK TABLE alembic_version IN EXCLUSIVE MODE")
_SAY = text("SELECT pg_notify(:channel, :what)")
_THERE, _MOVING = "hashtext('sparrow coordinator')", "hashtext('sparrow moves rounds')"
_LISTEN_SECONDS = 1.0

LEASE_SECONDS = 10.0
"""How long a process may move rounds after it last renewed its lease: longer than a busy machine or network stands
still, and shorter than devices wait before they come again."""
BEAT_SECONDS = 2.5
"""The time between two renewals: of four, two may be lost."""

_NOW = "extract(epoch FROM clock_timestamp())"
_LOOK = text(f"SELECT epoch, expires_at - {_NOW} FROM lease WHERE id = 1")
_MAKE = text("INSERT INTO lease (id) VALUES (1) ON CONFLICT DO NOTHING")
_TAKE = text(f"UPDATE lease SET epoch = epoch + 1, expires_at = {_NOW} + {LEASE_SECONDS} WHERE id = 1 RETURNING epoch")
_RENEW = text(f"UPDATE lease SET expires_at = {_NOW} + {LEASE_SECONDS} WHERE id = 1 AND epoch = :epoch")
_EPOCH = text("SELECT epoch FROM lease WHERE id = 1")


class SharedDatabase:
    """This process's part in a database that several coordinator processes share.

    first: whether no other process was there when this one came; ``settled`` lets the others in.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._name = secrets.token_hex(8)
        self._connection: Connection | None = None
        self._epoch: int | None = None  # of the lease, while this process holds it
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.first = self._come(exclusively=True)
        if not self.first:
            self._come(exclusively=False)

    def settled(self) -> None:
        """Let the other processes in, since the first one has cleaned up."""
        with self._lock:
            if self.first and self._connection is not None:
                self._connection.execute(text(f"SELECT pg_advisory_lock_shared({_THERE})"))
                self._connection.execute(text(f"SELECT pg_advisory_unlock({_THERE})"))
            self.first = False

    def take_turn(self, session: Session) -> None:
        """Wait, at the beginning of a transaction that writes, until no other one does."""
        session.execute(_TURN)

    def say_fact(self, session: Session) -> None:
        """Tell the process that moves rounds about a fact, when this transaction is committed."""
        if self._epoch is None:
            session.execute(_SAY, {"channel": CHANNEL, "what": f"{FACT} {self._name}"})

    def say_moved(self) -> None:
        """Tell all who wait that something moved."""
        with self._engine.connect() as connection:
            connection.execute(_SAY, {"channel": CHANNEL, "what": f"{MOVED} {self._name}"})
            connection.commit()

    def moves(self) -> tuple[bool, bool]:
        """Return whether this process may move rounds now, and whether it could not before. Raises DBAPIError."""
        with self._lock:
            before = self._epoch
            try:
                self._epoch = self._held_epoch()
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                self._lose()  # it may be but this connection that is broken, after a restart of the database
                self._epoch = self._held_epoch()
        newly = self._epoch is not None and self._epoch != before
        if newly:
            log.info("this process moves rounds on from now on")
        elif self._epoch is None and before is not None:
            log.warning("another process moves rounds on from now on: this one has stood still for too long")
        return self._epoch is not None, newly

    @property
    def moves_now(self) -> bool:
        """Return whether this process moves rounds, as it last knew."""
        return self._epoch is not None

    def check_moves(self, session: Session) -> None:
        """Raise Unavailable in a transaction of a process that has been replaced; it must have taken its turn."""
        if self._epoch is None or session.scalar(_EPOCH) != self._epoch:
            raise Unavailable("another process moves rounds by now")

    def check_lease(self) -> None:
        """Raise Unavailable where the lease has expired, and no process has taken it over. Raises DBAPIError."""
        with self._engine.connect() as connection:
            row = connection.execute(_LOOK).first()
        if row is None or row[1] < -LEASE_SECONDS:
            raise Unavailable("no process moves rounds on: the lease has expired, and none could take it over")

    def _held_epoch(self) -> int | None:
        """Return the epoch of the lease if this process holds it: still, or from now on."""
        if self._connection is None:
            self._come(exclusively=False)
        assert self._connection is not None
        if self._epoch is not None:
            return self._epoch if self._connection.scalar(_EPOCH) == self._epoch else None
        row = self._connection.execute(_LOOK).first()
        return self._take_over(None if row is None else row[0]) if row is None or self._is_free(*row) else None

    def _is_free(self, epoch: int, seconds_left: float) -> bool:
        """Return whether the lease has expired, or its holder's connection has ended."""
        assert self._connection is not None
        if seconds_left < 0:
            return True
        locked = {"epoch": epoch}
        if not self._connection.scalar(text(f"SELECT pg_try_advisory_lock({_MOVING}, :epoch)"), locked):
            return False
        self._connection.execute(text(f"SELECT pg_advisory_unlock({_MOVING}, :epoch)"), locked)
        return True

    def _take_over(self, former: int | None) -> int | None:
        """Begin a new epoch, in this process's turn to write, unless another process was faster."""
        assert self._connection is not None
        with self._engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            connection.execute(_TURN)
            if former is None:
                connection.execute(_MAKE)
            row = connection.execute(_LOOK).one()
            if row[0] != (former or 0) or not self._is_free(*row):
                return None
            epoch: int = connection.execute(_TAKE).scalar_one()
            # Before others see the epoch: they would take a lock that is free for a dead holder's.
            self._connection.scalar(text(f"SELECT pg_try_advisory_lock({_MOVING}, :epoch)"), {"epoch": epoch})
            connection.commit()
        return epoch

    def keep_lease(self, is_alive: Callable[[], bool]) -> None:
        """Renew the lease, while this process holds it and ``is_alive`` says so, in a thread of its own."""
        self._start(self._beat, is_alive, name="lease")

    def _beat(self, is_alive: Callable[[], bool]) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            epoch = self._epoch
            if epoch is None or not is_alive():
                continue
            try:
                with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    connection.execute(_RENEW, {"epoch": epoch})
            except (DBAPIError, NoConnectionLeft) as error:  # the thread of the rounds reports it
                log.debug("the lease could not be renewed: %s", error)

    def _lose(self) -> None:
        lost, self._connection, self._epoch = self._connection, None, None
        if lost is not None:
            lost.invalidate()
            lost.close()

    def listen(self, heard: Callable[[bool], None]) -> None:
        """Call ``heard`` for every message of other processes, in a thread of its own.

        Its argument is True where rounds have moved, False where a fact was written. It is called with True first, and
        again after every gap: earlier messages are lost, so look anew.
        """
        self._start(self._listen, heard, name="listener")

    def _start(self, target: Callable[..., None], argument: object, *, name: str) -> None:
        thread = threading.Thread(target=target, args=(argument,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Release all locks, so that another process may move rounds at once."""
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=5)
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(DBAPIError):  # which is away, and the locks with it
                    # Closing alone lets go of them a moment later, when the server has noticed.
                    self._connection.execute(text("SELECT pg_advisory_unlock_all()"))
                self._connection.close()
                self._connection = None

    def _come(self, *, exclusively: bool) -> bool:
        """Take the lock of a present process; return whether it could. The shared form waits for a first process."""
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # its locks go with it: back in the pool they would live on
        if exclusively and not connection.scalar(text(f"SELECT pg_try_advisory_lock({_THERE})")):
            connection.close()
            return False
        if not exclusively:
            # The first one may have much to clean up.
            connection.execute(text("SET lock_timeout = 0; SET statement_timeout = 0"))
            connection.execute(text(f"SELECT pg_advisory_lock_shared({_THERE})"))
            connection.execute(text("RESET lock_timeout; RESET statement_timeout"))
        self._connection = connection
        return True

    def _listen(self, heard: Callable[[bool], None]) -> None:
        address = self._engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        while not self._closing.is_set():
            try:
                for what in self._said(address):
                    heard(what == MOVED)
            except psycopg.Error:  # the database is away; the next write reports it
                self._closing.wait(_LISTEN_SECONDS)

    def _said(self, address: str) -> Iterator[str]:
        with contextlib.closing(psycopg.connect(address, autocommit=True)) as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            yield MOVED
            while not self._closing.is_set():
                for notice in connection.notifies(timeout=_LISTEN_SECONDS):
                    what, _, name = notice.payload.partition(" ")
                    if name != self._name:
                        yield what
