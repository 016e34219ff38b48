"""A TCP proxy between one device and the coordinator: it counts HTTP bodies, and breaks exchanges where a test says so.

It reads HTTP/1.1 for itself, and only what our two halves send each other: one request at a time per connection, bodies
with a ``Content-Length``. Anything chunked is noted in ``chunked`` and refused. Every exchange goes to the coordinator
on a connection of its own, so that a coordinator that was killed and started again is found.

What is broken is said beforehand (``Proxy.fault``), or decided at each exchange by a ``Trouble``.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import BinaryIO

from sparrow.protocol.messages import ASSIGNMENT_TYPE

PIECE = 16 * 1024
SMALL = 64 * 1024


@dataclass
class Exchange:
    """One request and its answer: bytes of bodies that were passed on, up and down.

    ``sent`` is the request as it was, head and body, where the proxy keeps them. ``produced`` is the status that the
    coordinator answered with, and ``answer`` its JSON, whether or not they were passed on; ``status`` only what was.
    ``copy``: the proxy sent a request once more, for itself. ``over``: nothing more happens to it, ``complete`` or not.
    """

    method: str
    path: str
    media_type: str = ""
    copy: bool = False
    produced: int = 0
    status: int = 0
    up: int = 0
    down: int = 0
    sent: bytes = b""
    answer: bytes = b""  # of JSON that is not large
    brought: bytes = b""  # the payload that came with an assignment
    complete: bool = False
    over: bool = False

    @property
    def payload(self) -> int:
        """The bytes of the payload that came down with it."""
        return self.down if self.path.endswith("/payload") else len(self.brought)


@dataclass
class Fault:
    """Breaks the next exchange that fits, once.

    In the ``request`` or the ``answer``, ``after`` so many bytes of its body (None: before anything of it, head
    included, is passed on; an answer was read whole by then), or after that ``share`` of them. ``reached`` is set
    there; the connection is closed when ``ended`` is. Or in a ``copy``: the exchange is left in peace, and when
    ``ended`` is set its request is sent once more, whose answer nobody gets.
    """

    method: str
    ending: str
    where: str
    after: int | None = None
    share: float | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def fits(self, exchange: Exchange) -> bool:
        return exchange.method == self.method and exchange.path.split("?")[0].endswith(self.ending)

    def place(self, length: int) -> int | None:
        """After how many bytes of a body of this length it strikes; None: before all."""
        return self.after if self.share is None else int(self.share * length)

    def strike(self) -> None:
        self.reached.set()
        self.ended.wait()
        raise ConnectionAbortedError("broken as the test wanted it")


class Trouble:
    """What befalls exchanges of itself: nothing, unless a subclass has it otherwise. Called by many threads."""

    def befalls(self, exchange: Exchange) -> Fault | None:
        """What breaks this exchange, or copies it; asked as it begins."""

    def reached(self, exchange: Exchange, point: str) -> None:
        """It has ``begun``, was ``sent`` on whole, or is ``answered`` and the answer not yet passed on.

        It stays there until this returns.
        """


class Proxy:
    """Listens on a port of its own (``url``) and passes on to ``port`` on this machine. Close it.

    port: or what gives one for each exchange, as a load balancer does; where it raises ConnectionError nobody is there.
    keeps: whether exchanges have what was sent, for tests of what is on the wire. trouble: what befalls exchanges.
    plain: no payload comes with its assignment, so that it is asked for: what a caller accepts is left out.
    """

    def __init__(
        self,
        port: int | Callable[[], int],
        *,
        keeps: bool = False,
        trouble: Trouble | None = None,
        plain: bool = False,
    ) -> None:
        self._plain = plain
        self._port: Callable[[], int] = port if callable(port) else lambda: port
        self._keeps = keeps
        self._trouble = trouble or Trouble()
        self._changed = threading.Condition()
        self._exchanges: list[Exchange] = []
        self._faults: list[Fault] = []
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.chunked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    @property
    def exchanges(self) -> list[Exchange]:
        """Those that have begun, oldest first."""
        with self._changed:
            return list(self._exchanges)

    def wait_for(self, wanted: Callable[[Exchange], bool], *, since: int = 0, timeout: float = 30.0) -> Exchange:
        """The first exchange from number ``since`` on that is as wanted. Raises TimeoutError."""
        until = time.monotonic() + timeout
        with self._changed:
            while True:
                for exchange in self._exchanges[since:]:
                    if wanted(exchange):
                        return exchange
                if not self._changed.wait(until - time.monotonic()):
                    seen = [(each.method, each.path, each.status) for each in self._exchanges[since:]]
                    raise TimeoutError(f"no exchange as wanted in {timeout} s; there were {seen}")

    def wait_until_over(self, timeout: float = 30.0) -> None:
        """Until nothing more happens to any exchange, copies included. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(each.over for each in self._exchanges), timeout):
                left = [(each.method, each.path, each.copy) for each in self._exchanges if not each.over]
                raise TimeoutError(f"exchanges go on after {timeout} s: {left}")

    def fault(self, method: str, ending: str, where: str, after: int | None = None, *, hold: bool = True) -> Fault:
        """Break the next exchange of ``method`` whose path ends so; ``hold`` False: without waiting for ``ended``."""
        fault = Fault(method, ending, where, after)
        if not hold:
            fault.ended.set()
        with self._changed:
            self._faults.append(fault)
        return fault

    def cut(self) -> None:
        """Break what is running, as a load balancer does whose target does not answer; later calls are passed on."""
        with self._changed:
            sockets = [*self._sockets]
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break what is running, and wait for every thread."""
        with self._changed:
            self._closing = True
            for fault in self._faults:
                fault.ended.set()
            sockets = [*self._sockets, self._listener]
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=10)

    # --- how -----------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client, self._known(client), client.makefile("rb") as requests, suppress(OSError):
            while self._exchange(client, requests):
                pass

    def _known(self, connection: socket.socket) -> _Known:
        return _Known(self, connection)

    def _exchange(self, client: socket.socket, requests: BinaryIO) -> bool:
        """One request passed on and answered; False when the client has gone."""
        head = _read_head(requests)
        if not head:
            return False
        exchange = _exchange_of(head)
        fault = self._begin(exchange)
        with self._until_over(exchange):
            self._trouble.reached(exchange, "begun")
            if fault is not None and fault.where == "copy":
                body = requests.read(self._length(exchange, head))
                requests, again = BytesIO(body), replace(exchange, copy=True)
                with self._changed:
                    self._exchanges.append(again)
                self._start(self._send_again, again, fault, head, body)
            with self._connected() as server, server.makefile("rb") as answers:
                self._pass_request(exchange, fault, head, requests, server)
                self._trouble.reached(exchange, "sent")
                self._pass_answer(exchange, fault, answers, client)
            exchange.complete = True
        return True

    def _send_again(self, exchange: Exchange, fault: Fault, head: bytes, body: bytes) -> None:
        """A request that was copied, when its time has come."""
        fault.reached.set()
        fault.ended.wait()
        with suppress(OSError), self._until_over(exchange), self._connected() as server:
            self._pass_request(exchange, None, head, BytesIO(body), server)
            self._trouble.reached(exchange, "sent")
            with server.makefile("rb") as answers:
                self._pass_answer(exchange, None, answers, None)

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self._port()), timeout=5) as server, self._known(server):
            server.settimeout(None)
            yield server

    @contextmanager
    def _until_over(self, exchange: Exchange) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                exchange.over = True
                self._changed.notify_all()

    def _begin(self, exchange: Exchange) -> Fault | None:
        fault = self._trouble.befalls(exchange)
        with self._changed:
            self._exchanges.append(exchange)
            self._changed.notify_all()
            if fault is not None:
                self._faults.append(fault)
                if self._closing:
                    fault.ended.set()
                return fault
            for fault in self._faults:
                if not fault.reached.is_set() and fault.fits(exchange):
                    return fault
        return None

    def _pass_request(
        self, exchange: Exchange, fault: Fault | None, head: bytes, requests: BinaryIO, server: socket.socket
    ) -> None:
        mine = fault if fault and fault.where == "request" else None
        length = self._length(exchange, head)
        if mine and mine.place(length) is None:
            mine.strike()
        server.sendall(re.sub(rb"(?i)\r\naccept: [^\r]*", b"", head) if self._plain else head)
        kept = [head]
        try:
            for piece in _pieces(requests, length, mine):
                server.sendall(piece)
                exchange.up += len(piece)
                kept.append(piece)
        finally:
            if self._keeps:
                exchange.sent = b"".join(kept)

    def _pass_answer(
        self, exchange: Exchange, fault: Fault | None, answers: BinaryIO, client: socket.socket | None
    ) -> None:
        head = _read_head(answers)
        if not head:
            raise ConnectionAbortedError("the coordinator has gone")
        status = int(head.split(b" ", 2)[1])
        length = 0 if status in (204, 304) else self._length(exchange, head)
        mine = fault if fault and fault.where == "answer" else None
        exchange.produced = status
        media_type = (_header(head, b"content-type") or b"").decode()
        if media_type == ASSIGNMENT_TYPE or (length <= SMALL and media_type == "application/json"):
            body = answers.read(length)
            exchange.answer, _, exchange.brought = body.partition(b"\n")
            answers = BytesIO(body)
        self._trouble.reached(exchange, "answered")
        if client is None:
            answers.read(length)
            return
        if mine and mine.place(length) is None:
            answers.read(length)
            mine.strike()
        client.sendall(head)
        for piece in _pieces(answers, length, mine):
            client.sendall(piece)
            exchange.down += len(piece)
        exchange.status = status

    def _length(self, exchange: Exchange, head: bytes) -> int:
        if _header(head, b"transfer-encoding") is not None:
            self.chunked.append(f"{exchange.method} {exchange.path}")
            raise ConnectionAbortedError("chunked")
        return int(_header(head, b"content-length") or 0)


class _Known:
    """Keeps a connection in the list of those that ``close`` breaks."""

    def __init__(self, proxy: Proxy, connection: socket.socket) -> None:
        self._proxy, self._connection = proxy, connection

    def __enter__(self) -> None:
        with self._proxy._changed:
            if self._proxy._closing:
                raise ConnectionAbortedError("closing")
            self._proxy._sockets.add(self._connection)

    def __exit__(self, *error: object) -> None:
        with self._proxy._changed:
            self._proxy._sockets.discard(self._connection)


def _exchange_of(head: bytes) -> Exchange:
    method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
    return Exchange(method, path, (_header(head, b"content-type") or b"").decode())


def _read_head(stream: BinaryIO) -> bytes:
    """Start line and headers, empty line included; nothing when the other side has closed."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            return b""
        head += line
    return head


def _header(head: bytes, name: bytes) -> bytes | None:
    found = re.search(rb"\r\n" + name + rb":[ \t]*([^\r\n]*)", head, re.IGNORECASE)
    return None if found is None else found[1]


def _pieces(stream: BinaryIO, length: int, fault: Fault | None):  # type: ignore[no-untyped-def]
    """The body, piece by piece; the fault strikes after exactly its number of bytes."""
    done, place = 0, None if fault is None else fault.place(length)
    while True:
        if fault is not None and done == place:
            fault.strike()
        if done == length:
            return
        size = min(PIECE, length - done)
        if place is not None and done < place:
            size = min(size, place - done)
        piece = stream.read1(size)  # type: ignore[attr-defined]
        if not piece:
            raise ConnectionAbortedError("the sender has gone")
        yield piece
        done += len(piece)
