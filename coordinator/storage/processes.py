"""Several coordinator processes on one PostgreSQL database: their presence, their writes, and the moving of rounds.

    there     a shared advisory lock, for as long as a process lives. The first one, which gets it exclusively for a
              moment, cleans up after killed processes; the others wait for that.
    writing   one transaction at a time in all processes: each locks a table before it looks at anything, so it sees
              all that was written before it.
    moving    one process opens, folds and closes rounds: the holder of an advisory lock that ends with its
              connection. Killed, or cut off from the database, it loses the lock, and another one goes on.
    waking    LISTEN and NOTIFY: facts are announced to the process that moves rounds, moves to all that wait.

Two movers at a time, between the loss of a lock and its notice, are harmless: rounds are moved by
transactions that look again at what they change, and updates are summed in one order, so both write the same model.
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
from sqlalchemy.orm import Session

log = logging.getLogger(__name__)

CHANNEL = "sparrow"
FACT, MOVED = "fact", "moved"

# Not a lock by function: a query would fix what the transaction sees before it has waited for its turn.
_TURN = text("LOCK TABLE alembic_version IN EXCLUSIVE MODE")
_SAY = text("SELECT pg_notify(:channel, :what)")
_THERE, _MOVING = "hashtext('sparrow coordinator')", "hashtext('sparrow moves rounds')"
_LISTEN_SECONDS = 1.0


class SharedDatabase:
    """This process's part in a database that several coordinator processes share.

    first: whether no other process was there when this one came; ``settled`` lets the others in.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._name = secrets.token_hex(8)
        self._connection: Connection | None = None
        self._moving = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener: threading.Thread | None = None
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
        if not self._moving:
            session.execute(_SAY, {"channel": CHANNEL, "what": f"{FACT} {self._name}"})

    def say_moved(self) -> None:
        """Tell all who wait that something moved."""
        with self._engine.connect() as connection:
            connection.execute(_SAY, {"channel": CHANNEL, "what": f"{MOVED} {self._name}"})
            connection.commit()

    def moves(self) -> tuple[bool, bool]:
        """Return whether this process may move rounds now, and whether it could not before. Raises DBAPIError."""
        with self._lock:
            before = self._moving
            try:
                self._moving = self._may_move()
            except DBAPIError:
                self._lose()  # it may be but this connection that is broken, after a restart of the database
                before, self._moving = False, self._may_move()
        if self._moving and not before:
            log.info("this process moves rounds on from now on")
        return self._moving, self._moving and not before

    def _may_move(self) -> bool:
        if self._connection is None:
            self._come(exclusively=False)
        assert self._connection is not None
        if self._moving:
            self._connection.scalar(text("SELECT 1"))
            return True
        return bool(self._connection.scalar(text(f"SELECT pg_try_advisory_lock({_MOVING})")))

    def _lose(self) -> None:
        lost, self._connection, self._moving = self._connection, None, False
        if lost is not None:
            lost.invalidate()
            lost.close()

    def listen(self, heard: Callable[[bool], None]) -> None:
        """Call ``heard`` for every message of other processes, in a thread of its own.

        Its argument is True where rounds have moved, False where a fact was written. It is called with True first, and
        again after every gap: earlier messages are lost, so look anew.
        """
        self._listener = threading.Thread(target=self._listen, args=(heard,), name="listener", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Release all locks, so that another process may move rounds at once."""
        self._closing.set()
        if self._listener is not None:
            self._listener.join(timeout=5)
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
            connection.execute(text(f"SELECT pg_advisory_lock_shared({_THERE})"))
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
