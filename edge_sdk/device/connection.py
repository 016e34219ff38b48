"""HTTP with the coordinator: retries, resumed transfers, counted bytes.

Temporary errors (no connection, time-out, 408, 429, 5xx) are retried after Retry-After plus a random wait, whose bound
doubles, so that a fleet's calls are spread. Other refusals are raised by their problem type (``PROBLEMS``). Failed TLS
handshakes are not retried.

Answers are untrusted: they must be unencoded, bounded in size and faster than ``SLOWEST``.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeVar

from sparrow.command_line.table import printable
from sparrow.protocol.messages import UpdateReceived
from sparrow.protocol.wire import WIRE, WIRE_HEADER
from sparrow.transport import Client, httpx, tls
from sparrow.transport.clients import bad_address

from ..errors import Blocked, NoCoordinator, Refused, Unreachable
from .answers import (
    BY_PROXIES,
    PROBLEMS,
    REMEDIES,
    Message,
    check_version,
    continued,
    detail_of,
    is_problem,
    message_of,
    passes,
    pause_of,
    problem_type,
    read_all,
    refusal_of,
)
from .uploads import SMALLEST_PART, Upload

log = logging.getLogger(__name__)

# Bytes that are counted as sent at a time.
UPLOAD_PART = 256 * 1024
# Seconds.
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0

# Bytes read of an answer, of a refusal, and of a list (such as all devices).
LARGEST_ANSWER = 1024 * 1024
LARGEST_REFUSAL = 64 * 1024
LARGEST_LIST = 64 * 1024 * 1024

# After SLOW_SECONDS, an answer slower than this average (bytes/s) counts as interrupted.
SLOWEST = 1024.0
SLOW_SECONDS = 60.0
Found = TypeVar("Found")


@dataclass
class Traffic:
    """Bytes of HTTP bodies so far, including repetitions.

    ``earlier_seconds``: transfer times of payloads sent with their assignments.
    """

    down: int = 0
    up: int = 0
    # The part of ``down`` that was frozen values.
    frozen: int = 0
    earlier_seconds: float = 0.0


def token_of(*kinds: Literal["admin", "observer", "enrolment"]) -> str | None:
    """Return the first of these tokens that the environment sets."""
    return next(filter(None, (os.environ.get(f"SPARROW_{kind.upper()}_TOKEN") for kind in kinds)), None)


class Connection:
    """Calls to one coordinator, the base URL of ``client``.

    patience_seconds: wait for an answer before Unreachable is raised; None: no limit. first_seconds: the same until the
    first answer; None: patience_seconds. on_wait: called with (reason, seconds) before each wait. on_answer: called
    when an answer has come after waits.
    """

    def __init__(
        self,
        client: httpx.Client,
        *,
        patience_seconds: float | None = None,
        first_seconds: float | None = None,
        on_wait: Callable[[str, float], None] = lambda reason, seconds: None,
        on_answer: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
        chance: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._through = client.through if isinstance(client, Client) else None
        self.patience_seconds = patience_seconds
        self._first_seconds = first_seconds
        self._on_wait = on_wait
        self._on_answer = on_answer
        self._sleep = sleep
        self._chance = chance or random.Random()
        self._clock = clock
        self.token: str | None = None
        # Identifier of this start, sent with each call.
        self.start: str | None = None
        # Registers this start again; called if the coordinator knows another one.
        self.register: Callable[[], None] | None = None
        # Whether a coordinator has answered at this address.
        self._known = False
        # Longest body that the proxies of this connection accept, as far as known.
        self._part: int | None = None
        # Transfer time of the last answer's body.
        self.body_seconds = 0.0
        self.traffic = Traffic()

    def ask(self, kind: type[Message], method: str, path: str, **arguments: Any) -> Message:
        """Call and return the answer's message."""
        return self.call(method, path, read=lambda answer: message_of(kind, answer), **arguments)

    def ask_all(self, kind: type[Message], path: str) -> list[Message]:
        """Return all messages of a list."""
        return self.call("GET", path, read=lambda answer: read_all(kind, answer), most=LARGEST_LIST)

    def call(
        self,
        method: str,
        path: str,
        *,
        read: Callable[[httpx.Response], Found] = lambda answer: answer,  # type: ignore[assignment, return-value]
        content: bytes = b"",
        **arguments: Any,
    ) -> Found:
        """Call until an answer comes, and return ``read(answer)``."""
        if content:
            arguments["headers"] = {**arguments["headers"], "Content-Length": str(len(content))}

        def attempt() -> httpx.Response:
            return self.exchange(method, path, content=self._counted(content) if content else None, **arguments)

        return self._patiently(attempt, read)

    def exchange(self, method: str, path: str, *, most: int = LARGEST_ANSWER, **arguments: Any) -> httpx.Response:
        """Call once. Raises NoCoordinator if the answer's body exceeds ``most`` bytes."""
        with self._client.stream(method, path, follow_redirects=False, **self._with_token(arguments)) as answer:
            return self._whole(answer, most)

    def _whole(self, answer: httpx.Response, most: int) -> httpx.Response:
        check_version(answer)
        limit = most if answer.is_success else LARGEST_REFUSAL
        body = bytearray()
        for part in self._parts(answer):
            body += part[: limit + 1 - len(body)]
            # The caller's block closes the connection.
            if len(body) > limit:
                break
        if answer.is_success and len(body) > limit:
            raise NoCoordinator(answer.status_code, f"its answer is longer than {limit:,} bytes")
        return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(body), request=answer.request)

    def _parts(self, answer: httpx.Response) -> Iterator[bytes]:
        """Yield and count a body's parts. Raises NoCoordinator if it is encoded, httpx.ReadTimeout if too slow."""
        encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise NoCoordinator(
                answer.status_code, f"its answer is encoded ({printable(encoding)[:40]}); have no proxy compress it"
            )
        begin = self._clock()
        arrived = 0
        for part in answer.iter_bytes():
            arrived += len(part)
            self.traffic.down += len(part)
            yield part
            if self._clock() - begin > SLOW_SECONDS + arrived / SLOWEST:
                raise httpx.ReadTimeout(f"only {arrived} bytes arrived in {self._clock() - begin:.0f} s")
        self.body_seconds = self._clock() - begin

    def upload(
        self,
        kind: Upload,
        path: str,
        body: bytes,
        headers: dict[str, str],
        read: Callable[[httpx.Response], Found],
        **arguments: Any,
    ) -> Found:
        """Send ``body``; after an interruption, send only the missing part.

        If a proxy refuses its length (413), send this and later bodies in parts of half the length.
        """
        digest = hashlib.sha256(body).hexdigest()
        size = len(body)
        first = 0
        begun = False

        def attempt() -> httpx.Response:
            nonlocal first, begun
            if begun and kind.resumes(size):
                answer = self.exchange("GET", path, params={"sha256": digest})
                if not answer.is_success:
                    return answer
                first = min(message_of(UpdateReceived, answer).received, size)
            begun = True
            while True:
                part = body[first : first + (self._part or size)]
                sent = {**headers, "Content-Length": str(len(part))}
                if len(part) < size or kind.resumes(size):
                    last = first + len(part) - 1
                    sent["Content-Range"] = f"bytes {first}-{last}/{size}" if part else f"bytes */{size}"
                    sent[kind.digest_header] = digest
                answer = self.exchange(kind.method, path, content=self._counted(part), headers=sent, **arguments)
                if answer.status_code == 202:
                    first = continued(answer, first, size)
                elif answer.status_code == 413 and not is_problem(answer) and len(part) > SMALLEST_PART:
                    self._part = max(len(part) // 2, SMALLEST_PART)
                # The received part has changed in the meantime: ask again.
                elif answer.status_code == 416:
                    first = 0
                    raise httpx.RemoteProtocolError(detail_of(answer))
                else:
                    return answer

        return self._patiently(attempt, read)

    def _counted(self, content: bytes) -> Iterator[bytes]:
        """Yield ``content`` in parts, and count each as it is sent."""
        for start in range(0, len(content), UPLOAD_PART):
            part = content[start : start + UPLOAD_PART]
            self.traffic.up += len(part)
            yield part

    def download(self, path: str, size: int, into: BinaryIO, etag: str = "") -> None:
        """Write ``size`` bytes to ``into``, resuming after bytes that it already holds.

        etag: the ETag of the file to which those bytes belong.
        """

        def attempt() -> httpx.Response:
            nonlocal etag
            held = into.seek(0, io.SEEK_END)
            headers = {"Range": f"bytes={held}-", "If-Range": etag} if 0 < held < size else {}
            with self._client.stream(
                "GET", path, follow_redirects=False, **self._with_token({"headers": headers})
            ) as answer:
                if answer.status_code not in (200, 206):
                    return self._whole(answer, LARGEST_REFUSAL)
                check_version(answer)
                if answer.status_code == 200:
                    into.seek(0)
                    into.truncate()
                etag = answer.headers.get("ETag", "")
                for part in self._parts(answer):
                    into.write(part)
                    # More than announced: stop, the digest will not match.
                    if into.tell() > size:
                        break
                return answer

        self._patiently(attempt)

    def _with_token(self, arguments: dict[str, Any]) -> dict[str, Any]:
        headers = {**arguments.get("headers", {}), "Accept-Encoding": "identity", WIRE_HEADER: str(WIRE)}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        if self.start:
            headers["Sparrow-Start"] = self.start
        return {**arguments, "headers": headers}

    def _patiently(
        self,
        attempt: Callable[[], httpx.Response],
        read: Callable[[httpx.Response], Found] = lambda answer: answer,  # type: ignore[assignment, return-value]
    ) -> Found:
        waited = 0.0
        longest = FIRST_WAIT
        registered = False
        while True:
            pause = 0.0
            kind = Unreachable
            try:
                answer = attempt()
                if answer.is_success or answer.status_code == 304:
                    found = read(answer)
                    self._known = True
                    if waited:
                        self._on_answer()
                    return found
                if problem_type(answer) == "OtherStart" and self.register is not None and not registered:
                    registered = True
                    self.register()
                    continue
                if not passes(answer) and (is_problem(answer) or not self._known or self._blocked(answer)):
                    raise self._refusal(answer)
                passing = PROBLEMS.get(problem_type(answer), Unreachable)
                kind = passing if issubclass(passing, Unreachable) else Unreachable
                reason = f"HTTP {answer.status_code}: {detail_of(answer)}"
                pause = pause_of(answer, 0.0)
            except NoCoordinator as error:
                if not self._known:
                    raise
                reason = error.detail
            except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL) as error:
                raise bad_address(f"The address {self._client.base_url}", f"cannot be called ({error})") from error
            except (httpx.TransportError, httpx.DecodingError) as error:
                reason = self._reason(error)
                untrusted = tls.explain(error)
                if untrusted is not None and not self._known:
                    through = "" if self._through is None else f" through the proxy {self._through}"
                    raise Unreachable(f"{self._client.base_url} cannot be used{through}: {untrusted}") from error
            # Add a random wait to the requested one: other devices received the same request.
            seconds = pause + self._chance.uniform(0, max(longest, pause / 4))
            first = None if self._known else self._first_seconds
            patience = self.patience_seconds if first is None else first
            if patience is not None and waited + seconds > patience:
                if kind is not Unreachable:
                    raise kind(f"{self._client.base_url} cannot handle this call at the moment ({reason})")
                raise self.silent(reason)
            self._on_wait(reason, seconds)
            self._sleep(seconds)
            waited += seconds
            longest = min(2 * longest, LONGEST_WAIT)

    def _refusal(self, answer: httpx.Response) -> Refused:
        """Return the error for an answer that refuses the call permanently."""
        if is_problem(answer):
            kind = PROBLEMS.get(problem_type(answer), Refused)
            return (kind if issubclass(kind, Refused) else Refused)(answer.status_code, refusal_of(answer))
        detail = detail_of(answer)
        if self._known or answer.status_code in BY_PROXIES:
            what = f"{answer.request.method} {answer.url.path}"
            remedy = REMEDIES.get(answer.status_code, "let it pass")
            by = "a proxy or firewall" if self._through is None else f"the proxy {self._through} or a firewall"
            length = int(answer.request.headers.get("Content-Length", 0))
            sized = f" with a body of {length:,} bytes" if answer.status_code == 413 else ""
            return Blocked(
                answer.status_code,
                f"{by} before {self._client.base_url} refuses {what}{sized} with HTTP {answer.status_code}; {remedy}",
            )
        if self._through is not None:
            detail = f"{detail}, and the proxy {self._through}"
        # nginx, Caddy and Apache answer so.
        elif answer.status_code == 400 and answer.url.scheme == "http" and tls.speaks_tls(answer.url):
            detail = f"{detail}; {tls.USE_HTTPS}"
        return NoCoordinator(answer.status_code, detail)

    def _blocked(self, answer: httpx.Response) -> bool:
        """Return True if a server in between refuses this call, although the coordinator can be reached."""
        if is_problem(answer) or answer.status_code < 400:
            return False
        try:
            health = self.exchange("GET", "/healthz")
            return health.is_success and health.json() == {"status": "ok"}
        except (httpx.HTTPError, NoCoordinator, ValueError, RecursionError):
            return False

    def _reason(self, error: Exception) -> str:
        """Return the reason why a call was not answered."""
        if self._known or self._through is not None:
            return tls.explain(error) or str(error) or type(error).__name__
        return tls.explain(error) or tls.hint(error, str(self._client.base_url))

    def silent(self, reason: str) -> Unreachable:
        """Return the error for a coordinator that does not answer, naming the proxy, if any."""
        server = self._client.base_url
        if self._through is None:
            return Unreachable(
                f"{server} does not answer ({reason}); check the address, and that a coordinator runs there"
            )
        return Unreachable(
            f"{server} does not answer through the proxy {self._through} ({reason}); check the address and the "
            f"proxy, or {self._through.remedy}"
        )
