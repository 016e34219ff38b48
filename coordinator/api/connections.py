"""Limits of memory and descriptors per caller, added to uvicorn's HTTP protocol.

    heads           size, number of headers, length of the URL (431), and the time until a head is complete; trailers
                    and chunk extensions count like headers
    connections     per address and in total; a connection on which a device has sent its token counts for the device
    answers         a caller that does not read its answer, or that sends too slowly after it, is disconnected

uvicorn and asyncio have no such settings, so this module hooks into their internals. Each hook has a test of an attack;
docs/architecture.md, "Hooks into the server", has the costs.

    LifespanOn.config               replaced protocol, also under plain uvicorn: test_plain_uvicorn_has_the_limits
    loop.create_server              connections count before their TLS handshake:
                                    test_connections_count_before_their_handshake
    the parser's callbacks          test_heads_without_end_are_refused, test_heads_that_dribble_are_closed
    _start_asgi_task, cycle         test_an_answer_to_one_of_many_requests_at_once_ends_with_its_connection
    timeout_keep_alive_task         test_who_sends_on_what_was_answered_is_disconnected
    timeout_keep_alive_handler      test_a_request_that_came_while_the_coordinator_stood_still_is_answered
    ws_protocol_class               an upgrade would leave the limits: test_heads_without_end_are_refused
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import resource
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..calls.buckets import RateLimit, address_key
from ..calls.problems import problem
from ..errors import TooLarge
from ..settings import Settings
from .headers import below_root

log = logging.getLogger(__name__)

HEAD_SECONDS = 20.0
"""Limit from the connection, or a request's first byte, to the end of its headers."""
ACCEPTED = 64
"""Connections accepted per turn of the event loop."""
HEAD_BYTES = 32 * 1024
"""All headers and trailers of a request."""
HEADERS = 100
URL_BYTES = 8 * 1024
LAST_LOOK_SECONDS = 0.001
"""Delay of the close of an idle connection, seconds: one turn of the event loop, in which arrived data are read."""
PIPELINED = 1
"""Number of a connection's requests that may wait for an earlier answer."""

PIECE_BYTES = 16 * 1024
"""Bytes of a head that the parser receives at a time; the limits are checked in between."""

DEVICE_CONNECTIONS = 8
"""Number of connections that count for a device; further ones count for their address."""

CONNECTIONS_PER_SECOND = 20.0
"""New connections of one address; 10 s' worth may come at once. Without this limit, a caller that abandons thousands of
connections delays all others."""

RESERVED_FILES = 192
"""File descriptors reserved for records, models, parts of updates and threads."""
SPARE = 32
"""Connections beyond a limit that are kept briefly, to answer ``/healthz`` and refuse everything else."""
SPARE_OF_ONE = 4
SPARE_SECONDS = 2.0
SPARE_PER_SECOND = SPARE_OF_ONE / SPARE_SECONDS
"""Spare connections of one address: a worded refusal costs as much as closing ten connections."""

STATE = "place"
"""Key of the connection's ``Place`` in a request's state."""

TOO_LONG = (
    f"the request's head exceeds {HEAD_BYTES // 1024} KiB, {HEADERS} headers or a URL of {URL_BYTES // 1024} KiB; send "
    "fewer and shorter headers"
)
OTHER_LOOP = (
    "the server does not run on asyncio's own event loop, so callers that reconnect all the time delay others by "
    "seconds. Run `sparrow serve`, or `uvicorn coordinator.main:app --loop asyncio`"
)
HOW_TO_RUN = (
    "the server does not limit heads, connections and slow readers, so any caller can exhaust its memory. Run "
    "`sparrow serve`, or `uvicorn coordinator.main:app` without --http and --log-level trace"
)


class Limits:
    """Connections of one process, counted per caller.

    proxies: uvicorn's ``forwarded_allow_ips``; their connections have no limit per address.
    """

    def __init__(self, settings: Settings, proxies: str | Sequence[str] | None = None) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = max(files - RESERVED_FILES, files // 2)
        # One address may never take all connections.
        self.of_address = min(settings.address_connections, self.most // 2) or self.most
        self.patience = settings.body_patience_seconds
        self.rate = settings.body_bytes_per_second
        self.open = 0
        self.spare: Counter[str] = Counter()
        self.by_caller: Counter[str] = Counter()
        self._new = RateLimit(CONNECTIONS_PER_SECOND, time.monotonic) if settings.address_connections else None
        self._spare_rate = RateLimit(SPARE_PER_SECOND, time.monotonic)
        self._limit_loopback = settings.limit_loopback
        self._proxies = _Networks(proxies)

    def key(self, host: str | None) -> str | None:
        """Return the key that an address is counted under; None for proxies, and for loopback unless it is limited."""
        address = address_key(host)
        if address is None:
            return "loopback" if self._limit_loopback else None
        return None if host in self._proxies else address

    def admit(self, peer: object) -> Place | None:
        """Return the place of a new connection, or None if it must be closed.

        peer: (address, port, ...), or a string on a unix socket.
        """
        address = self.key(peer[0] if isinstance(peer, tuple) else None)
        full = self.open >= self.most
        if not full and not self._has_enough(address):
            return Place(self, address, None)
        return Place(self, address, _refusal(full)) if self._may_spare(address or "") else None

    def _has_enough(self, address: str | None) -> bool:
        """Count a new connection; return whether the address has too many or makes them too often."""
        if address is None:
            return False
        often = self._new is not None and self._new.take(address) > 0
        return often or self.by_caller[address] >= self.of_address

    def _may_spare(self, address: str) -> bool:
        """Return True if a connection beyond a limit may be kept briefly, and count it for its rate."""
        enough = self.spare.total() >= SPARE or self.spare[address] >= SPARE_OF_ONE
        return not enough and (not address or self._spare_rate.take(address) == 0)


class Place:
    """An admitted connection, which counts towards the limits until ``leave``.

    address: None if the address has no limit. refusal: the answer to every call except ``/healthz``; None within the
    limits.
    """

    def __init__(self, limits: Limits, address: str | None, refusal: Response | None) -> None:
        self._limits = limits
        self._address = address
        self.refusal = refusal
        self._counts_for: str | None = None
        limits.open += 1
        if refusal is None:
            self._count(address)
        else:
            limits.spare[address or ""] += 1

    def belongs_to(self, device_id: str) -> None:
        """Count the connection for a device that has sent its token: many devices may share an address."""
        if self._counts_for is not None and self._counts_for == self._address:
            key = f"device {device_id}"
            if self._limits.by_caller[key] < DEVICE_CONNECTIONS:
                self._count(key)

    def leave(self) -> None:
        """Remove the connection from the count."""
        self._limits.open -= 1
        if self.refusal is not None:
            _less(self._limits.spare, self._address or "")
        self._count(None)

    def _count(self, key: str | None) -> None:
        if self._counts_for is not None:
            _less(self._limits.by_caller, self._counts_for)
        self._counts_for = key
        if key is not None:
            self._limits.by_caller[key] += 1


class _Networks:
    """Addresses and networks in uvicorn's notation."""

    def __init__(self, text: str | Sequence[str] | None) -> None:
        items = text.split(",") if isinstance(text, str) else text or ()
        self._any = "*" in items
        self._networks = []
        for item in items:
            # The name of a unix socket has no address.
            with suppress(ValueError):
                self._networks.append(ipaddress.ip_network(item.strip(), strict=False))

    def __contains__(self, host: str | None) -> bool:
        if self._any:
            return True
        try:
            address = ipaddress.ip_address(host or "")
        except ValueError:
            return False
        return any(address in network for network in self._networks)


class Acceptor:
    """Accept up to ``ACCEPTED`` connections per turn of the event loop, and close those beyond a limit at once.

    asyncio accepts all waiting connections in one turn, and makes a task and a transport for each (0.2 ms); closing one
    here takes a tenth.
    """

    def __init__(self, limits: Limits, make: Callable[[], asyncio.Protocol], **secured: Any) -> None:
        self._limits = limits
        self._make = make
        self._secured = secured
        self._loop = asyncio.get_running_loop()
        self._let_in = set[asyncio.Task[None]]()

    def start(self, server: asyncio.Server, backlog: int) -> None:
        """Accept on a server's sockets until it is closed."""
        for each in server.sockets:
            with _borrowed(each) as listener:
                listener.listen(backlog)
            self._go_on(each)

    def _go_on(self, bound: Any) -> None:
        is_open = bound.fileno() >= 0
        if is_open:
            self._loop.add_reader(bound.fileno(), self._accept, bound)

    def _accept(self, bound: Any) -> None:
        with _borrowed(bound) as listener:
            for _ in range(ACCEPTED):
                try:
                    connection, peer = listener.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return
                except OSError as error:
                    log.error("connections cannot be accepted, retrying in a second: %s", error)
                    self._loop.remove_reader(bound.fileno())
                    self._loop.call_later(1.0, self._go_on, bound)
                    return
                place = self._limits.admit(peer)
                if place is None:
                    connection.close()
                    continue
                task = self._loop.create_task(self._connect(connection, place))
                self._let_in.add(task)
                task.add_done_callback(self._let_in.discard)

    async def _connect(self, connection: socket.socket, place: Place) -> None:
        new = self._make()
        assert isinstance(new, LimitedConnection), "install has made it uvicorn's protocol"
        new.place = place
        soon: dict[str, Any] = {"ssl_handshake_timeout": SPARE_SECONDS} if self._secured and place.refusal else {}
        try:
            await self._loop.connect_accepted_socket(lambda: new, connection, **self._secured, **soon)
        except OSError as error:
            # Only a TLS handshake can fail here.
            log.debug("a TLS handshake failed: %s", error)
            connection.close()
        finally:
            if new.transport is None:
                place.leave()


@contextmanager
def _borrowed(bound: Any) -> Iterator[socket.socket]:
    """Context manager: a socket object on asyncio's descriptor, detached on exit."""
    borrowed = socket.socket(bound.family, bound.type, bound.proto, fileno=bound.fileno())
    borrowed.setblocking(False)
    try:
        yield borrowed
    finally:
        borrowed.detach()


class LimitedConnection(HttpToolsProtocol):
    """One connection within ``limits``, which ``install`` sets.

    place: set by the ``Acceptor``, or on a unix socket by ``connection_made``.
    """

    limits: ClassVar[Limits]
    head_seconds = HEAD_SECONDS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # The web socket protocol has none of these limits.
        self.ws_protocol_class = None
        self.place: Place | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._ended = False
        self._head_bytes = 0
        self._header_count = 0
        self._unparsed = 0
        self._in_body = False
        self._answering: RequestResponseCycle | None = None
        self._received = 0
        self._received_before = 0
        self._unsent = 0
        self._resumed = False

    # --- connections ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Start the time limit of the first head; close a connection without a place."""
        self.place = self.place or self.limits.admit(transport.get_extra_info("peername"))
        if self.place is None:
            transport.abort()
            return
        super().connection_made(transport)
        if self.place.refusal is not None:
            self.app = _only_health(self.app, self.place.refusal)
            self.head_seconds = SPARE_SECONDS
        self._await_head()
        self._watch = self.loop.call_later(self.limits.patience, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the limits, leave the place, and discard the rest of the answer."""
        if self.place is None:
            return
        self._have_head()
        self._stop_answer()
        if self._watch is not None:
            self._watch.cancel()
        self.place.leave()
        super().connection_lost(exc)

    # --- heads ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feed the parser in pieces, and check the limits after each."""
        self._received += len(data)
        if self.timeout_keep_alive_task is not None and not self._in_body:
            # Empty lines may precede a request, and do not count as its first byte.
            self._await_head()
        size = len(data) if self._in_body else PIECE_BYTES
        for start in range(0, len(data), size):
            if self._ended or self.transport.is_closing():
                return
            piece = data[start : start + size]
            self._unparsed += len(piece)
            super().data_received(piece)
            # A single header or chunk extension may be endless.
            if self._unparsed > HEAD_BYTES and not self._ended:
                self._refuse()

    def send_400_response(self, msg: str) -> None:
        """Answer 431 if a limit of the head stopped the parser."""
        if self._ended:
            self._refuse()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Start the limits at a request's first byte."""
        super().on_message_begin()
        self.scope["state"][STATE] = self.place
        self._head_bytes = 0
        self._header_count = 0
        self._unparsed = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """Limit the URL."""
        super().on_url(url)
        self._unparsed = 0
        if len(self.url) > URL_BYTES:
            self._stop()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Limit headers and trailers."""
        self._unparsed = 0
        self._head_bytes += len(name) + len(value)
        self._header_count += 1
        if self._head_bytes > HEAD_BYTES or self._header_count > HEADERS:
            self._stop()
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Cancel the time limit of the head."""
        self._have_head()
        self._unparsed = 0
        if len(self.pipeline) >= PIPELINED:
            self._stop()
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note that the body continues."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the request; if it was answered, start the keep-alive timeout."""
        self._in_body = False
        self._unparsed = 0
        super().on_message_complete()
        answered_before = self.cycle.response_complete and not self.transport.is_closing()
        if answered_before and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless data has arrived on it."""
        # After a pause of the process or the machine, an event loop looks at its timers before it reads. A request
        # that arrived meanwhile would be answered by a reset.
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_SECONDS, close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Record the answered request: uvicorn's ``cycle`` is the latest one."""
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        self._have_head()
        self._limit = self.loop.call_later(self.head_seconds, self._give_up)

    def _have_head(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _give_up(self) -> None:
        log.info("connection from %s closed: no complete request head in time", self.client)
        self._ended = True
        self.transport.close()

    def _stop(self) -> None:
        """Make the parser stop and call ``send_400_response``."""
        self._ended = True
        raise TooLarge(TOO_LONG)

    def _refuse(self) -> None:
        """Answer 431, unless an earlier request is being answered, and close."""
        self._ended = True
        self._have_head()
        if self._stop_answer():
            self.transport.close()
            return
        answer = problem(431, "RequestHeaderFieldsTooLarge", TOO_LONG, {"Connection": "close"})
        lines = [b"HTTP/1.1 431 Request Header Fields Too Large", *(b": ".join(pair) for pair in answer.raw_headers)]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()

    # --- answers -------------------------------------------------------------------------------------------------

    def _stop_answer(self) -> bool:
        """Discard the rest of the current answer; return whether a part of it was sent."""
        answering = self._answering
        if answering is None or answering.response_complete:
            return False
        answering.disconnected = True
        answering.message_event.set()
        return answering.response_started

    def resume_writing(self) -> None:
        """Record that the caller reads."""
        self._resumed = True
        super().resume_writing()

    def _check_progress(self) -> None:
        """Disconnect a caller that reads its answer, or sends the body of an answered request, too slowly."""
        least = self.limits.patience * self.limits.rate
        buffered = self.transport.get_write_buffer_size()
        unsent = buffered + _unacknowledged(self.transport) if buffered and not self._resumed else 0
        reads = not unsent or not self._unsent or self._unsent - unsent >= least
        answered = self._in_body and self.cycle is not None and self.cycle.response_complete
        sends = not answered or self._received - self._received_before >= least
        if not reads or not sends:
            log.info("connection from %s closed: it neither reads nor sends", self.client)
            self.transport.abort()
            return
        self._unsent = unsent
        self._resumed = False
        self._received_before = self._received
        self._watch = self.loop.call_later(self.limits.patience, self._check_progress)


def _refusal(full: bool) -> Response:
    """Return the answer on a connection beyond a limit. full: the limit of all connections."""
    if full:
        refusal = problem(503, "Unavailable", "the coordinator has too many connections; try again later")
    else:
        refusal = problem(429, "TooManyRequests", "too many connections from this address; close some, or wait")
    refusal.headers.update({"Retry-After": "5", "Connection": "close"})
    return refusal


def _only_health(app: ASGIApp, refusal: Response) -> ASGIApp:
    """Return an application that answers ``/healthz`` and refuses every other call."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        known = below_root(scope)["path"] == "/healthz"
        await (app if known else refusal)(scope, receive, send)

    return answer


def install(receive: Receive, settings: Settings) -> None:
    """Make uvicorn use these limits; log a warning on another server, protocol or event loop.

    receive: a method of uvicorn's ``LifespanOn``.
    """
    # uvicorn reads the configuration of ``LifespanOn`` again for each connection.
    config = getattr(getattr(receive, "__self__", None), "config", None)
    if isinstance(config, uvicorn.Config) and config.http_protocol_class is HttpToolsProtocol:
        limits = Limits(settings, config.forwarded_allow_ips if config.proxy_headers else None)
        kind = type("LimitedConnection", (LimitedConnection,), {"limits": limits})
        config.http_protocol_class = kind
        _accept_within(limits)
    else:
        log.warning("%s", HOW_TO_RUN)


def _accept_within(limits: Limits) -> None:
    """Make this loop's servers use an ``Acceptor``; log a warning on other loops."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, asyncio.SelectorEventLoop):
        log.warning("%s", OTHER_LOOP)
        return
    create = loop.create_server

    async def create_server(
        make: Callable[[], asyncio.Protocol], *place: Any, backlog: int = 100, **named: Any
    ) -> asyncio.Server:
        secure = named.get("ssl")
        server = await create(make, *place, backlog=backlog, start_serving=False, **named)
        Acceptor(limits, make, **({"ssl": secure} if secure else {})).start(server, backlog)
        return server

    loop.create_server = create_server  # type: ignore[method-assign, assignment]


def _less(counter: Counter[str], key: str) -> None:
    """Decrement a counter; drop zeros, of which there would be one per caller."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Return the number of sent bytes that the peer has not acknowledged."""
    with suppress(OSError, AttributeError, TypeError):
        number = transport.get_extra_info("socket").fileno()
        found: int = struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4))[0]
        return found
    return 0
