"""uvicorn's HTTP protocol with the limits that it lacks, so that no caller takes memory or descriptors without end.

    heads           bytes, number of headers, length of the URL (431), and the time in which a head must arrive;
                    trailers and chunk extensions count like headers
    connections     of one address and of all; a connection on which a device has shown its token is that device's
    answers         a caller that does not read its answer is disconnected, and one that goes on sending too slowly
                    after its answer

The application installs it in its server when it starts (``install``), whether that is ``sparrow serve`` or ``uvicorn
coordinator.main:app``. ``--timeout-keep-alive`` ends connections that are idle between requests.

uvicorn and asyncio have no settings for these limits, so this module reaches into their internals. A test of an attack
needs each of these hooks; docs/architecture.md, "Hooks into the server", has what they cost.

    LifespanOn.config               replaced protocol, also under plain uvicorn: test_plain_uvicorn_has_the_limits
    loop.create_server              connections count before their TLS handshake, and are refused before asyncio makes
                                    anything for them: test_connections_count_before_their_handshake
    the parser's callbacks          test_heads_without_end_are_refused, test_heads_that_dribble_are_closed
    _start_asgi_task, cycle         the answer that is being sent is not always that of the latest request:
                                    test_an_answer_to_one_of_many_requests_at_once_ends_with_its_connection
    timeout_keep_alive_task         a connection whose answer came before the end of its body ends as well:
                                    test_who_sends_on_what_was_answered_is_disconnected
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
"""From the connection, or a request's first byte, to the end of its headers."""
ACCEPTED = 64
"""Connections that are accepted in one turn of the event loop."""
HEAD_BYTES = 32 * 1024
"""All headers of a request, with its trailers."""
HEADERS = 100
URL_BYTES = 8 * 1024
PIPELINED = 1
"""Requests of one connection that may wait for the answer to the one before."""

PIECE_BYTES = 16 * 1024
"""What the parser is given of a head at a time: what it gathers between two looks at the limits."""

DEVICE_CONNECTIONS = 8
"""Connections that count for a device; its further ones count for their address."""

CONNECTIONS_PER_SECOND = 20.0
"""New connections of one address, of which 10 s' worth may come at once: a caller that does not wait for answers could
have others wait behind thousands that it has left."""

RESERVED_FILES = 192
"""Descriptors that are not for connections: records, models, parts of updates, threads at work."""
SPARE = 32
"""Connections beyond a limit that are kept for a moment: ``/healthz`` is answered on them, all else refused."""
SPARE_OF_ONE = 4
SPARE_SECONDS = 2.0
SPARE_PER_SECOND = SPARE_OF_ONE / SPARE_SECONDS
"""Of one address, however quickly they end: refusing one in words costs as much as ten that are closed."""

STATE = "place"
"""The key in a request's state under which the application finds its connection's place."""

TOO_LONG = (
    f"a request's head may have {HEAD_BYTES // 1024} KiB, {HEADERS} headers and a URL of {URL_BYTES // 1024} KiB; send "
    "fewer and shorter ones"
)
OTHER_LOOP = (
    "this server does not run on asyncio's own event loop: callers that connect again and again keep all others "
    "waiting for seconds. Run `sparrow serve`, or `uvicorn coordinator.main:app --loop asyncio`"
)
HOW_TO_RUN = (
    "this server does not limit heads, connections and slow readers (coordinator.api.connections): anybody can "
    "exhaust its memory. Run `sparrow serve`, or `uvicorn coordinator.main:app` without --http and --log-level trace"
)


class Limits:
    """The connections of one process, by whom they count for.

    proxies: uvicorn's ``forwarded_allow_ips``; their connections are other people's, and are not counted by address.
    """

    def __init__(self, settings: Settings, proxies: str | Sequence[str] | None = None) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = max(files - RESERVED_FILES, files // 2)
        # However few there are, one address may not take them all.
        self.of_address = min(settings.address_connections, self.most // 2) or self.most
        self.patience, self.rate = settings.body_patience_seconds, settings.body_bytes_per_second
        self.open = 0
        self.spare: Counter[str] = Counter()
        self.by_caller: Counter[str] = Counter()
        self._new = RateLimit(CONNECTIONS_PER_SECOND, time.monotonic) if settings.address_connections else None
        self._spare_rate = RateLimit(SPARE_PER_SECOND, time.monotonic)
        self._limit_loopback = settings.limit_loopback
        self._proxies = _Networks(proxies)

    def key(self, host: str | None) -> str | None:
        """Return what an address is counted under; None for this machine, unless it is limited, and for proxies."""
        address = address_key(host)
        if address is None:
            return "loopback" if self._limit_loopback else None
        return None if host in self._proxies else address

    def admit(self, peer: object) -> Place | None:
        """Return the place of a new connection; None: it is to be closed.

        peer: the address and port of its other end, or what a unix socket has in their place.
        """
        address = self.key(peer[0] if isinstance(peer, tuple) else None)
        full = self.open >= self.most
        if not full and not self._has_enough(address):
            return Place(self, address, None)
        return Place(self, address, _refusal(full)) if self._may_spare(address or "") else None

    def _has_enough(self, address: str | None) -> bool:
        """Return whether an address has as many connections as it may, or makes too many; counts one more made."""
        if address is None:
            return False
        often = self._new is not None and self._new.take(address) > 0
        return often or self.by_caller[address] >= self.of_address

    def _may_spare(self, address: str) -> bool:
        """Return whether a connection beyond a limit may be kept for a moment; counts it as one made."""
        enough = self.spare.total() >= SPARE or self.spare[address] >= SPARE_OF_ONE
        return not enough and (not address or self._spare_rate.take(address) == 0)


class Place:
    """What a connection counts for, from the moment it is accepted until it is left.

    address: None if it has no limit. refusal: the answer to all calls except ``/healthz`` on a connection beyond a
    limit, which is kept for a moment.
    """

    def __init__(self, limits: Limits, address: str | None, refusal: Response | None) -> None:
        self._limits, self._address, self.refusal = limits, address, refusal
        self._counts_for: str | None = None
        limits.open += 1
        if refusal is None:
            self._count(address)
        else:
            limits.spare[address or ""] += 1

    def belongs_to(self, device_id: str) -> None:
        """Count the connection for a device, whose token came with a call: many may share an address."""
        if self._counts_for is not None and self._counts_for == self._address:
            key = f"device {device_id}"
            if self._limits.by_caller[key] < DEVICE_CONNECTIONS:
                self._count(key)

    def leave(self) -> None:
        """Count the connection no more."""
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
    """Addresses and networks, as uvicorn takes them."""

    def __init__(self, text: str | Sequence[str] | None) -> None:
        items = text.split(",") if isinstance(text, str) else text or ()
        self._any = "*" in items
        self._networks = []
        for item in items:
            with suppress(ValueError):  # a name: of a unix socket, which has no address
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
    """Accepts connections, so many in a turn of the event loop, and closes those beyond a limit at once.

    A caller that connects again and again makes thousands a second. For each, asyncio makes a task, a transport and a
    protocol before anybody is asked, in 0.2 ms; to close it here takes a tenth of that. And asyncio accepts all that
    wait in one turn, uvloop one.
    """

    def __init__(self, limits: Limits, make: Callable[[], asyncio.Protocol], **secured: Any) -> None:
        self._limits, self._make, self._secured = limits, make, secured
        self._loop = asyncio.get_running_loop()
        self._let_in = set[asyncio.Task[None]]()

    def start(self, server: asyncio.Server, backlog: int) -> None:
        """Accept on the sockets of a server that does not, until it is closed."""
        for each in server.sockets:
            with _borrowed(each) as listener:
                listener.listen(backlog)
            self._go_on(each)

    def _go_on(self, bound: Any) -> None:
        if bound.fileno() >= 0:
            # It is not closed.
            self._loop.add_reader(bound.fileno(), self._accept, bound)

    def _accept(self, bound: Any) -> None:
        with _borrowed(bound) as listener:
            for _ in range(ACCEPTED):
                try:
                    connection, peer = listener.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return
                except OSError as error:
                    log.error("no connection can be accepted for a second: %s", error)
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
            # What breaks before it has begun is a TLS handshake.
            log.debug("a connection was not made: %s", error)
            connection.close()
        finally:
            if new.transport is None:
                place.leave()


@contextmanager
def _borrowed(bound: Any) -> Iterator[socket.socket]:
    """Give the socket of one that asyncio has, which is not closed with it."""
    borrowed = socket.socket(bound.family, bound.type, bound.proto, fileno=bound.fileno())
    borrowed.setblocking(False)
    try:
        yield borrowed
    finally:
        borrowed.detach()


class LimitedConnection(HttpToolsProtocol):
    """One connection within the limits. ``limits`` is set by ``install``.

    place: set by the ``Acceptor``; on a unix socket, where there is none, taken when the connection is made.
    """

    limits: ClassVar[Limits]
    head_seconds = HEAD_SECONDS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.ws_protocol_class = None  # there is no web socket here, and its protocol has none of these limits
        self.place: Place | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._ended = False
        self._head_bytes = self._header_count = self._unparsed = 0
        self._in_body = False
        self._answering: RequestResponseCycle | None = None
        self._received = self._received_before = 0
        self._unsent = 0
        self._resumed = False

    # --- connections ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Start the limit for the head of the first request; a connection without a place is closed."""
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
        """Cancel the limits, leave the place, and have an answer that is being sent go nowhere."""
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
        """Give the parser what has come, in pieces, and look at what it has gathered after each."""
        self._received += len(data)
        if self.timeout_keep_alive_task is not None and not self._in_body:
            self._await_head()  # empty lines may come before a request, and are no first byte
        size = len(data) if self._in_body else PIECE_BYTES
        for start in range(0, len(data), size):
            if self._ended or self.transport.is_closing():
                return
            piece = data[start : start + size]
            self._unparsed += len(piece)
            super().data_received(piece)
            if self._unparsed > HEAD_BYTES and not self._ended:  # one header, or chunk extension, without end
                self._refuse()

    def send_400_response(self, msg: str) -> None:
        """Answer 431 where that is the reason why the parser has stopped."""
        if self._ended:
            self._refuse()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Start the limits at a request's first byte; an idle connection has another limit."""
        super().on_message_begin()
        self.scope["state"][STATE] = self.place
        self._head_bytes = self._header_count = self._unparsed = 0
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
        """Cancel the limit of time, since the head has arrived."""
        self._have_head()
        self._unparsed = 0
        if len(self.pipeline) >= PIPELINED:
            self._stop()
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note that the body goes on."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is whole."""
        self._in_body = False
        self._unparsed = 0
        super().on_message_complete()
        answered_before = self.cycle.response_complete and not self.transport.is_closing()
        if answered_before and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Note which request is answered: uvicorn's ``cycle`` is the latest, which may wait behind it."""
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
        log.info("a connection from %s was closed: no whole request head in time", self.client)
        self._ended = True
        self.transport.close()

    def _stop(self) -> None:
        """Have the parser stop: it answers with ``send_400_response``."""
        self._ended = True
        raise TooLarge(TOO_LONG)

    def _refuse(self) -> None:
        """Answer 431 and close; where an earlier request is being answered, close."""
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
        """Have the answer that is being sent go nowhere from now on; return whether some of it was sent."""
        answering = self._answering
        if answering is None or answering.response_complete:
            return False
        answering.disconnected = True
        answering.message_event.set()
        return answering.response_started

    def resume_writing(self) -> None:
        """Note that the caller reads."""
        self._resumed = True
        super().resume_writing()

    def _check_progress(self) -> None:
        """Disconnect a caller that has read too little of its answer, or sent too little of a body that is answered."""
        least = self.limits.patience * self.limits.rate
        unsent = self.transport.get_write_buffer_size()
        unsent = unsent + _unacknowledged(self.transport) if unsent and not self._resumed else 0
        reads = not unsent or not self._unsent or self._unsent - unsent >= least
        answered = self._in_body and self.cycle is not None and self.cycle.response_complete
        sends = not answered or self._received - self._received_before >= least
        if not reads or not sends:
            log.info("a connection from %s was closed: it neither reads nor sends", self.client)
            self.transport.abort()
            return
        self._unsent, self._resumed, self._received_before = unsent, False, self._received
        self._watch = self.loop.call_later(self.limits.patience, self._check_progress)


def _refusal(full: bool) -> Response:
    """Return the answer on a connection beyond a limit. full: it is that of all connections, not of one address."""
    if full:
        refusal = problem(503, "Unavailable", "this coordinator has as many connections as it can; try again later")
    else:
        refusal = problem(429, "TooManyRequests", "too many connections from here; close some, or wait")
    refusal.headers.update({"Retry-After": "5", "Connection": "close"})
    return refusal


def _only_health(app: ASGIApp, refusal: Response) -> ASGIApp:
    """Return an application that answers ``/healthz`` and refuses all else."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        known = below_root(scope)["path"] == "/healthz"
        await (app if known else refusal)(scope, receive, send)

    return answer


def install(receive: Receive, settings: Settings) -> None:
    """Have uvicorn make connections with these limits; log a warning on another server, protocol or event loop.

    receive: the one that the server handed to the application for its lifespan.
    """
    # It is a method of uvicorn's ``LifespanOn``, whose configuration is read again for each connection.
    config = getattr(getattr(receive, "__self__", None), "config", None)
    if isinstance(config, uvicorn.Config) and config.http_protocol_class is HttpToolsProtocol:
        limits = Limits(settings, config.forwarded_allow_ips if config.proxy_headers else None)
        kind = type("LimitedConnection", (LimitedConnection,), {"limits": limits})
        config.http_protocol_class = kind
        _accept_within(limits)
    else:
        log.warning("%s", HOW_TO_RUN)


def _accept_within(limits: Limits) -> None:
    """Have this loop's servers accept connections by an ``Acceptor``; log a warning on a loop that could not."""
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
    """Count one less, and keep no zeros: there would be one for each caller ever."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Return the bytes that the kernel holds of what was sent: it takes some at a time, long before they are read."""
    with suppress(OSError, AttributeError, TypeError):
        number = transport.get_extra_info("socket").fileno()
        found: int = struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4))[0]
        return found
    return 0
