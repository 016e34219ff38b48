"""HTTP with the coordinator: patient, resumable, counted.

Whatever may pass by itself (no connection, a time-out, 408, 429, 5xx) is tried again, after a wait that doubles up to
``LONGEST_WAIT`` and is drawn at random below that, so that a fleet does not come back all at once; Retry-After is
waited for first, up to ``LONGEST_PAUSE``. Everything else is an answer: a problem document, raised as the exception of
its type (``PROBLEMS``). A failed TLS handshake is not tried again. A download that breaks goes on where it broke, and
so does a large upload.

An answer is hostile until it was read: it is asked for unencoded, and may be no longer than its kind can be, and no
slower than ``SLOWEST``. One that is, or that cannot be read, counts as no answer.
"""

from __future__ import annotations

import hashlib
import http.cookiejar
import io
import json
import logging
import os
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeVar

import httpx
import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from sparrow.command_line.nearest import nearest
from sparrow.command_line.table import printable
from sparrow.protocol import checkpoint, tls, values
from sparrow.protocol.addresses import is_loopback
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import MAX_GRAPH, MAX_MANIFEST, GraphName, Manifest, Tensors, Values
from sparrow.protocol.messages import (
    ASSIGNMENT_TYPE,
    Assignment,
    ChangeDevice,
    ChangeFederation,
    CompareFederation,
    DeviceHistory,
    DeviceInfo,
    DeviceReport,
    Enrol,
    Enrolled,
    FederationInfo,
    HandBack,
    JoinLink,
    MakeJoinLink,
    ModelInfo,
    NewToken,
    OpenWork,
    PauseReason,
    Payload,
    RenewToken,
    RoundRecord,
    UpdateAccepted,
    UpdateReceived,
    UploadCost,
)
from sparrow.protocol.overview import Overview
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import MAX_STATEMENT, Published

from ..errors import (
    BadArgument,
    BadContent,
    CoordinatorFull,
    Damaged,
    DifferentFederation,
    DifferentUpdate,
    FederationDeleted,
    FederationOver,
    NameTaken,
    NoCoordinator,
    NoGlobalModel,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    NotInstalled,
    Refused,
    RoundOver,
    TokenExpired,
    TooManyRequests,
    Unreachable,
    WrongSettings,
    WrongState,
)

log = logging.getLogger(__name__)

UPLOAD_PART = 256 * 1024
RESUMED = 1024 * 1024
"""Updates of so many bytes go on where a connection broke; smaller ones are sent again."""
PROBLEMS: Mapping[str, type[Refused] | type[Unreachable]] = {
    "NotAuthenticated": NotAuthenticated,
    "TokenExpired": TokenExpired,
    "NotAllowed": NotAllowed,
    "CrossSite": NotAllowed,
    "WrongHost": NotAllowed,
    "NotFound": NotFound,
    "NoGlobalModel": NoGlobalModel,
    "NameTaken": NameTaken,
    "DifferentFederation": DifferentFederation,
    "WrongState": WrongState,
    "RoundClosed": RoundOver,
    "DifferentUpdate": DifferentUpdate,
    "Finished": FederationOver,
    "FederationDeleted": FederationDeleted,
    **dict.fromkeys(("NoSuchMethod", "NoSuchTask"), NotInstalled),
    **dict.fromkeys(("BadContent", "InvalidRequest", "LengthRequired", "TooLarge", "WrongMediaType"), BadContent),
    **dict.fromkeys(("WrongRange", "RangeNotSatisfiable", "RequestHeaderFieldsTooLarge"), BadContent),
    "TooManyRequests": TooManyRequests,
    "DiskFull": CoordinatorFull,
    **dict.fromkeys(("Unavailable", "NotReady", "Unreadable", "Damaged", "InternalError"), Unreachable),
}
"""Type of a problem document, without ``PREFIX`` -> its exception. Problems of any other type are ``Refused``.

An ``Unreachable`` may pass by itself: it is raised when the caller's patience has ended.
"""
PREFIX = "urn:sparrow:problem:"

FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
LONGEST_PAUSE = 900.0
"""The longest pause that a coordinator may ask for, s."""
LARGEST_ANSWER = 1024 * 1024
LARGEST_PUBLICATION = 2 * (MAX_MANIFEST + MAX_STATEMENT)
"""JSON within JSON: quotes take two bytes."""
MAX_FILE = 8 * 1024**3
"""Bytes of a model that an operator downloads."""
LARGEST_REFUSAL = 64 * 1024
"""Bytes of a refusal that are read."""
LARGEST_LIST = 64 * 1024 * 1024
"""Largest list accepted, such as that of all devices, in bytes."""
LONGEST_TEXT = 1000
"""Characters of a refusal that are shown."""
SLOWEST = 1024.0
"""Bytes per second, on average, below which the body of an answer counts as broken after ``SLOW_SECONDS``."""
SLOW_SECONDS = 60.0
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
HEARTBEAT_TIMEOUT = httpx.Timeout(10.0)

Message = TypeVar("Message", bound=BaseModel)
Found = TypeVar("Found")


@dataclass
class Traffic:
    """Bytes of HTTP bodies so far, repetitions included. Those of a payload that came with its assignment count when it
    is taken; ``earlier_seconds`` is how long such bodies took to arrive. ``frozen``: those of ``down`` that were values
    which nobody trains."""

    down: int = 0
    up: int = 0
    frozen: int = 0
    earlier_seconds: float = 0.0


@dataclass(frozen=True)
class _Brought:
    """A payload that came with its assignment, and the seconds that the answer's body took to arrive."""

    assignment_id: str
    body: bytes
    seconds: float


def connect(server: str, trust: tls.Tls | None = None) -> httpx.Client:
    """Return a client of the coordinator at this address, whose path, if any, a proxy removes.

    Raises BadArgument for an address that cannot be used, BadCertificate for such certificates.
    """
    if "@" in str(server):  # first, so that no message repeats it
        raise bad_address("The address", "holds a name or password, but tokens are given as SPARROW_..._TOKEN")
    named = f"The address {server}"
    try:
        url = httpx.URL(server)
    except (httpx.InvalidURL, TypeError) as error:
        raise bad_address(named, f"cannot be read ({error})") from error
    if url.scheme not in ("http", "https"):
        raise bad_address(named, "has no scheme")
    if not url.host:
        raise bad_address(named, "names no host")
    if url.port is not None and not 0 < url.port < 65536:
        raise bad_address(named, f"has the port {url.port}, but ports go from 1 to 65535")
    if url.query or url.fragment:
        raise bad_address(named, "continues after its path")
    verify: ssl.SSLContext | bool = True
    if trust is not None and trust != tls.Tls():
        verify = trust.context()
    elif url.scheme == "http":
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody, and need not read the public authorities
    no_cookies = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=()))
    return httpx.Client(
        base_url=server,
        timeout=TIMEOUT,
        verify=verify,
        cookies=no_cookies,  # else they would be kept for as long as the client, however many
        event_hooks={"request": [_warn_of_plain_http(url)]},
    )


def _warn_of_plain_http(url: httpx.URL) -> Callable[[httpx.Request], None]:
    """Return a hook that warns once if a token is sent unencrypted over a network."""
    plain = url.scheme == "http" and not is_loopback(url.host)

    def warn(request: httpx.Request) -> None:
        nonlocal plain
        if plain and "Authorization" in request.headers:
            plain = False
            log.warning(
                "tokens go to %s over plain http: whoever can listen on the network can take them; use https://, and "
                "--ca FILE where its certificate is of an authority of your own",
                url.host,
            )

    return warn


def token_of(*kinds: Literal["admin", "observer", "enrolment"]) -> str | None:
    """Return the first token of these kinds that the environment holds, as SPARROW_ADMIN_TOKEN and so on."""
    return next(filter(None, (os.environ.get(f"SPARROW_{kind.upper()}_TOKEN") for kind in kinds)), None)


def bad_address(named: str, fault: str) -> BadArgument:
    """Return the error of an address that cannot be called. named: its beginning, ``The address ...``."""
    return BadArgument(f"{named} {fault}; give http://HOST:PORT or https://HOST")


class Transport:
    """One device's calls. ``client`` has the coordinator as its base URL.

    patience_seconds: how long one call may go unanswered before Unreachable is raised; None waits for ever.
    on_wait: called with (reason, seconds) before each wait. sleep, chance and clock are injected by tests.
    """

    def __init__(
        self,
        client: httpx.Client,
        *,
        patience_seconds: float | None = None,
        on_wait: Callable[[str, float], None] = lambda reason, seconds: None,
        sleep: Callable[[float], None] = time.sleep,
        chance: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self.patience_seconds = patience_seconds
        self._on_wait = on_wait
        self._sleep = sleep
        self._chance = chance or random.Random()
        self._clock = clock
        self.token: str | None = None
        self.renewal_due = False  # whether the coordinator asks this device to take a new token
        self._known = False  # whether a coordinator has answered at this address
        self._brought: _Brought | None = None
        self._body_seconds = 0.0  # how long the last answer's body took
        self.traffic = Traffic()

    # --- calls ---------------------------------------------------------------------------------------------------

    def federation(self, name: str) -> FederationInfo:
        """Return the state of a federation. Raises NotFound, naming those that this caller may see."""
        try:
            return self._ask(FederationInfo, "GET", f"/v1/federations/{name}")
        except NotFound as refusal:
            try:
                there = sorted(info.name for info in self.federations())
            except Refused:  # this caller may not see them
                raise refusal from None
        said = f"there are {', '.join(there)}{nearest(name, there)}" if there else "there is none yet; publish one"
        raise NotFound(404, f"there is no federation {name!r}; {said}")

    def federations(self) -> list[FederationInfo]:
        """Return every federation of the coordinator."""
        return self._ask_all(FederationInfo, "/v1/federations")

    def overview(self, name: str) -> Overview:
        """Return how a federation stands: what its page shows."""
        return self._ask(Overview, "GET", f"/v1/federations/{name}/overview")

    def rounds(self, name: str) -> list[RoundRecord]:
        """Return a record per round, the open one last."""
        return self._ask_all(RoundRecord, f"/v1/federations/{name}/rounds")

    def reports(self, name: str, number: int) -> list[DeviceReport]:
        """Return what each device reported in a round and in the evaluation after it."""
        return self._ask_all(DeviceReport, f"/v1/federations/{name}/rounds/{number}/reports")

    def devices(self, name: str) -> list[DeviceInfo]:
        """Return the devices of a federation."""
        return self._ask_all(DeviceInfo, f"/v1/federations/{name}/devices")

    def device(self, device_id: str) -> DeviceHistory:
        """Return a device and what it did. Raises NotFound."""
        return self._ask(DeviceHistory, "GET", f"/v1/devices/{device_id}")

    def models(self, name: str) -> list[ModelInfo]:
        """Return the global models of a federation that the coordinator keeps."""
        return self._ask_all(ModelInfo, f"/v1/federations/{name}/models")

    def model_file(self, name: str, path: Literal["model", "model.onnx"]) -> bytes:
        """Return the newest global model as a file. Raises NoGlobalModel."""
        return self._call("GET", f"/v1/federations/{name}/{path}", most=MAX_FILE).content

    def trouble(self) -> str | None:
        """Return the reason why the coordinator is not ready; None if it is. Asks once."""
        try:
            answer = self._exchange("GET", "/readyz")
        except httpx.TransportError as error:
            raise Unreachable(f"{self._client.base_url} does not answer ({error})") from error
        return None if answer.is_success else _detail(answer)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a federation's model."""
        return self._ask(Manifest, "GET", f"/v1/federations/{name}/manifest", most=MAX_MANIFEST)

    def publication(self, name: str) -> Published:
        """Return a federation's publication, as it came: the caller checks its signature."""
        return self._ask(Published, "GET", f"/v1/federations/{name}/publication", most=LARGEST_PUBLICATION)

    def completed(self, settings: FederationSettings) -> FederationSettings:
        """Return settings with all of the method's own ones, as a federation would have them. Raises WrongSettings."""
        try:
            return self._ask(FederationSettings, "POST", "/v1/settings", **_json(settings))
        except NotInstalled:
            raise
        except BadContent as refused:
            raise WrongSettings(refused.detail) from refused

    def graph(self, name: str, graph: GraphName) -> bytes:
        """Return an ONNX graph of a federation's model, as it came: the caller compares it with the manifest."""
        return self._call("GET", f"/v1/federations/{name}/{graph}.onnx", most=MAX_GRAPH).content

    def values(self, name: str, manifest: Manifest, which: Values, into: BinaryIO) -> None:
        """Write a file of values of a federation's model to ``into``, which may have its beginning from a download
        before: the rest is asked for. The caller compares it with the manifest."""
        begin, path = self.traffic.down, f"/v1/federations/{name}/{which}"
        try:
            self._download(path, values.size(manifest, which), into, etag=f'"{manifest.files[which]}"')
        finally:
            self.traffic.frozen += (self.traffic.down - begin) * (which == "frozen")

    def create_federation(self, body: bytes, media_type: str) -> FederationInfo:
        """Create a federation. Raises WrongSettings, NotInstalled, NameTaken."""
        path = "/v1/federations/from-model" if media_type == checkpoint.MEDIA_TYPE else "/v1/federations"
        try:
            return self._ask(FederationInfo, "POST", path, content=body, headers={"Content-Type": media_type})
        except NotInstalled:
            raise
        except BadContent as refused:
            raise WrongSettings(refused.detail) from refused

    def replace_model(self, name: str, body: bytes) -> FederationInfo:
        """Give a federation's model new graphs. Raises DifferentFederation where its values are others."""
        headers = {"Content-Type": checkpoint.MEDIA_TYPE}
        return self._ask(FederationInfo, "PATCH", f"/v1/federations/{name}/model", content=body, headers=headers)

    def compare_federation(self, name: str, wanted: CompareFederation) -> FederationInfo | None:
        """Return the federation of this name if it is as ``wanted``; None if there is none. Raises DifferentFederation,
        which names the differences."""
        try:
            # Without what nobody has given, as in ``CreateFederation.as_given``.
            body = _json(wanted, exclude_unset=True)
            return self._ask(FederationInfo, "POST", f"/v1/federations/{name}/comparison", **body)
        except NotFound:
            return None

    def change_federation(self, name: str, change: ChangeFederation) -> FederationInfo:
        """Change or steer a federation."""
        return self._ask(FederationInfo, "PATCH", f"/v1/federations/{name}", **_json(change))

    def delete_federation(self, name: str) -> None:
        """Delete a federation for good."""
        self._call("DELETE", f"/v1/federations/{name}")

    def join_link(self, name: str, wanted: MakeJoinLink) -> JoinLink:
        """Return the link with which a browser becomes a device of a federation. Raises NotFound where none can,
        NotAllowed for the link's token."""
        return self._ask(JoinLink, "POST", f"/v1/federations/{name}/join-link", **_json(wanted))

    def enrol(self, federation: str, request: Enrol) -> Enrolled:
        """Enrol this device."""
        return self._ask(Enrolled, "POST", f"/v1/federations/{federation}/devices", **_json(request))

    def assignment(
        self,
        federation: str,
        wait_seconds: float,
        cost: UploadCost | None,
        mask: str | None = None,
        model: str | None = None,
    ) -> tuple[Assignment | None, float]:
        """Ask for work, waiting up to ``wait_seconds``. Returns it, or None and the pause asked for in seconds.

        cost: what the last upload cost. mask: the digest of the mask that this device holds; model: that of the global
        model that it can rebuild. Raises FederationOver when nothing is left to do.
        """

        def read(answer: httpx.Response) -> tuple[Assignment | None, float]:
            self.renewal_due = "Sparrow-Renew-Token" in answer.headers
            if answer.status_code == 204:
                return None, _pause(answer, 1.0)
            found, payload = self._read_with_payload(Assignment, answer)
            self._keep_brought(found, payload)
            return found, 0.0

        return self._call(
            "GET",
            f"/v1/federations/{federation}/assignment",
            read=read,
            params={"wait": wait_seconds, **_holding(mask, model)},
            headers={"Accept": ASSIGNMENT_TYPE, **_costing(cost)},
            timeout=httpx.Timeout(wait_seconds + 30.0, connect=10.0),
        )

    def open_work(self, federation: str, wait_seconds: float, etag: str) -> tuple[OpenWork | None, str]:
        """Return the open assignments, and the answer's ETag; None where that stays as at ``etag`` for
        ``wait_seconds``.
        """

        def read(answer: httpx.Response) -> tuple[OpenWork | None, str]:
            if answer.status_code == 304:
                return None, etag
            return _read(OpenWork, answer), answer.headers.get("ETag", "")

        return self._call(
            "GET",
            f"/v1/federations/{federation}/assignments",
            read=read,
            most=LARGEST_LIST,
            params={"wait": wait_seconds},
            headers={"If-None-Match": etag} if etag else {},
            timeout=httpx.Timeout(wait_seconds + 30.0, connect=10.0),
        )

    def model(self, federation: str, manifest: Manifest) -> Tensors:
        """Return the global model by name. Raises NoGlobalModel where the method has none that can be used alone."""
        most = checkpoint.MAX_HEADER + sum(spec.size * np.dtype(spec.dtype).itemsize for spec in manifest.whole)
        tensors, _ = checkpoint.load(self._call("GET", f"/v1/federations/{federation}/model", most=most).content)
        return tensors

    def hand_back(self, assignment_id: str, reason: PauseReason | Failure) -> None:
        """Hand an assignment back."""
        self._call("DELETE", f"/v1/assignments/{assignment_id}", **_json(HandBack(reason=_listed(reason))))

    def heartbeat(self, assignment_id: str) -> bool:
        """Say once, without waiting for who does not answer, that this device works on an assignment. False where that
        need not be said again: nobody waits for it. May be called from another thread."""
        try:
            answer = self._exchange("POST", f"/v1/assignments/{assignment_id}/heartbeat", timeout=HEARTBEAT_TIMEOUT)
        except (httpx.HTTPError, NoCoordinator, RuntimeError):  # the last: the client was closed meanwhile
            return True
        return _passes(answer) or answer.is_success or not _is_problem(answer)

    def change_device(self, device_id: str, change: ChangeDevice) -> None:
        """Report a new budget or changed conditions."""
        if change.conditions is not None and change.conditions.reason:
            _listed(change.conditions.reason)
        self._call("PATCH", f"/v1/devices/{device_id}", **_json(change))

    def new_token(self, device_id: str, enrolment_key: str) -> str:
        """Return a new token for this device. The old one is good until this one is used: keep it before that."""
        request = RenewToken(enrolment_key=enrolment_key)
        return self._ask(NewToken, "POST", f"/v1/devices/{device_id}/token", **_json(request)).token

    def update(
        self,
        assignment_id: str,
        body: bytes,
        media_type: str,
        cost: UploadCost | None = None,
        mask: str | None = None,
        model: str | None = None,
        *,
        goes_on: bool = False,
    ) -> Assignment | None:
        """Send an update; sending the same again does no harm. Raises RoundOver when it comes too late.

        goes_on: return the next assignment, if there is one already, for a device that holds ``mask`` and ``model``, as
        in ``assignment``. cost: what the upload before cost.
        """
        headers = {"Content-Type": media_type, **_costing(cost)}

        def read(answer: httpx.Response) -> Assignment | None:
            if not goes_on:
                return None
            self.renewal_due = "Sparrow-Renew-Token" in answer.headers
            accepted, payload = self._read_with_payload(UpdateAccepted, answer)
            self._keep_brought(accepted.next, payload)
            return accepted.next

        path, params = f"/v1/assignments/{assignment_id}/update", {}
        if goes_on:
            headers["Accept"] = ASSIGNMENT_TYPE
            params = _holding(mask, model)
        if len(body) < RESUMED:
            return self._call("PUT", path, read=read, content=body, headers=headers, params=params)
        return self._upload(path, body, headers, params, read)

    def payload(self, assignment_id: str, payload: Payload) -> bytes:
        """Return an assignment's bundle: what came with the assignment, or else a download, which goes on where a
        connection broke. Raises Damaged."""
        brought = self._take_brought()
        if brought is not None and brought.assignment_id == assignment_id and _is(payload, brought.body):
            return brought.body
        path = f"/v1/assignments/{assignment_id}/payload"
        for _ in range(3):
            into = io.BytesIO()
            self._download(path, payload.bytes, into)
            body = into.getvalue()
            if _is(payload, body):
                return body
        raise Damaged(
            "the payload was downloaded three times and never matched its digest; look at proxies between this device "
            "and the coordinator"
        )

    def _read_with_payload(self, kind: type[Message], answer: httpx.Response) -> tuple[Message, bytes | None]:
        """Return the message of an answer, and the payload that it brings along."""
        if answer.headers.get("Content-Type") != ASSIGNMENT_TYPE:
            return _read(kind, answer), None
        line, _, payload = answer.content.partition(b"\n")
        try:
            return kind.model_validate_json(line), payload or None
        except ValidationError:
            raise NoCoordinator(answer.status_code, "its assignment cannot be read") from None

    def _keep_brought(self, assignment: Assignment | None, payload: bytes | None) -> None:
        """Keep a payload for who takes it; its bytes count then."""
        self._take_brought()
        if assignment is not None and payload is not None:
            self.traffic.down -= len(payload)
            self._brought = _Brought(assignment.assignment_id, payload, self._body_seconds)

    def _take_brought(self) -> _Brought | None:
        """Return the payload that was kept, if any, and count it: it is part of what is going on now."""
        brought, self._brought = self._brought, None
        if brought is not None:
            self.traffic.down += len(brought.body)
            self.traffic.earlier_seconds += brought.seconds
        return brought

    # --- how -----------------------------------------------------------------------------------------------------

    def _ask(self, kind: type[Message], method: str, path: str, **arguments: Any) -> Message:
        """Return the message that answers a call."""
        return self._call(method, path, read=lambda answer: _read(kind, answer), **arguments)

    def _ask_all(self, kind: type[Message], path: str) -> list[Message]:
        """Return the messages of a list."""
        return self._call("GET", path, read=lambda answer: _read_all(kind, answer), most=LARGEST_LIST)

    def _call(
        self,
        method: str,
        path: str,
        *,
        read: Callable[[httpx.Response], Found] = lambda answer: answer,  # type: ignore[assignment, return-value]
        content: bytes = b"",
        **arguments: Any,
    ) -> Found:
        """Call until there is an answer; return what ``read`` makes of it."""
        if content:
            arguments["headers"] = {**arguments["headers"], "Content-Length": str(len(content))}

        def attempt() -> httpx.Response:
            return self._exchange(method, path, content=self._counted(content) if content else None, **arguments)

        return self._patiently(attempt, read)

    def _exchange(self, method: str, path: str, *, most: int = LARGEST_ANSWER, **arguments: Any) -> httpx.Response:
        """Call once and return the answer, read whole. One of more than ``most`` bytes is none."""
        with self._client.stream(method, path, follow_redirects=False, **self._with_token(arguments)) as answer:
            return self._whole(answer, most)

    def _whole(self, answer: httpx.Response, most: int) -> httpx.Response:
        """Return the answer with its body; of a refusal at most ``LARGEST_REFUSAL`` bytes are read."""
        limit = most if answer.is_success else LARGEST_REFUSAL
        body = bytearray()
        for part in self._parts(answer):
            body += part[: limit + 1 - len(body)]
            if len(body) > limit:
                break  # leaving the caller's block closes the connection
        if answer.is_success and len(body) > limit:
            raise NoCoordinator(answer.status_code, f"its answer is longer than {limit:,} bytes")
        return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(body), request=answer.request)

    def _parts(self, answer: httpx.Response) -> Iterator[bytes]:
        """Yield a body as it comes, counted. Raises NoCoordinator where it is encoded, httpx.ReadTimeout where it comes
        too slowly."""
        encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise NoCoordinator(
                answer.status_code, f"its answer is encoded ({printable(encoding)[:40]}); have no proxy compress it"
            )
        begin, arrived = self._clock(), 0
        for part in answer.iter_bytes():
            arrived += len(part)
            self.traffic.down += len(part)
            yield part
            if self._clock() - begin > SLOW_SECONDS + arrived / SLOWEST:
                raise httpx.ReadTimeout(f"{arrived} bytes came in {self._clock() - begin:.0f} s")
        self._body_seconds = self._clock() - begin

    def _upload(
        self,
        path: str,
        body: bytes,
        headers: dict[str, str],
        params: dict[str, str],
        read: Callable[[httpx.Response], Found],
    ) -> Found:
        """Send ``body``; after a break, only what has not arrived."""
        digest, size, begun = hashlib.sha256(body).hexdigest(), len(body), False
        headers = {**headers, "Sparrow-Update-SHA256": digest}

        def attempt() -> httpx.Response:
            nonlocal begun
            first = 0
            if begun:
                answer = self._exchange("GET", path, params={"sha256": digest})
                if not answer.is_success:
                    return answer
                first = min(_read(UpdateReceived, answer).received, size)
            begun = True
            length = str(size - first)
            of = {"Content-Range": f"bytes {first}-{size - 1}/{size}" if first < size else f"bytes */{size}"}
            of |= {"Content-Length": length}
            content = self._counted(body[first:])
            answer = self._exchange("PUT", path, content=content, headers={**headers, **of}, params=params)
            if answer.status_code == 416:  # what is there has changed meanwhile: ask again
                raise httpx.RemoteProtocolError(_detail(answer))
            return answer

        return self._patiently(attempt, read)

    def _counted(self, content: bytes) -> Iterator[bytes]:
        """``content`` in parts, counted as they are handed to the connection: what never left is no traffic."""
        for start in range(0, len(content), UPLOAD_PART):
            part = content[start : start + UPLOAD_PART]
            self.traffic.up += len(part)
            yield part

    def _download(self, path: str, size: int, into: BinaryIO, etag: str = "") -> None:
        """Write ``size`` bytes to ``into``; what arrived before a break is kept, and only the rest asked for. etag: of
        what is there already."""

        def attempt() -> httpx.Response:
            nonlocal etag
            held = into.seek(0, io.SEEK_END)
            headers = {"Range": f"bytes={held}-", "If-Range": etag} if 0 < held < size else {}
            with self._client.stream(
                "GET", path, follow_redirects=False, **self._with_token({"headers": headers})
            ) as answer:
                if answer.status_code not in (200, 206):
                    return self._whole(answer, LARGEST_REFUSAL)
                if answer.status_code == 200:
                    into.seek(0)
                    into.truncate()
                etag = answer.headers.get("ETag", "")
                for part in self._parts(answer):
                    into.write(part)
                    if into.tell() > size:
                        break  # more than announced: the digest will not match, and memory is not theirs to take
                return answer

        self._patiently(attempt)

    def _with_token(self, arguments: dict[str, Any]) -> dict[str, Any]:
        headers = {**arguments.get("headers", {}), "Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        return {**arguments, "headers": headers}

    def _patiently(
        self,
        attempt: Callable[[], httpx.Response],
        read: Callable[[httpx.Response], Found] = lambda answer: answer,  # type: ignore[assignment, return-value]
    ) -> Found:
        waited, longest = 0.0, FIRST_WAIT
        while True:
            pause, kind = 0.0, Unreachable
            try:
                answer = attempt()
                if answer.is_success or answer.status_code == 304:
                    found = read(answer)
                    self._known = True
                    return found
                # After a coordinator has answered, refusals of another server (captive portal, proxy) will pass, too.
                if not _passes(answer) and (_is_problem(answer) or not self._known):
                    raise _refusal(answer)
                passing = PROBLEMS.get(_type(answer), Unreachable)
                kind = passing if issubclass(passing, Unreachable) else Unreachable
                reason = f"HTTP {answer.status_code}: {_detail(answer)}"
                pause = _pause(answer, 0.0)
            except NoCoordinator as error:
                if not self._known:
                    raise
                reason = error.detail
            except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL) as error:
                raise bad_address(f"The address {self._client.base_url}", f"cannot be called ({error})") from error
            except (httpx.TransportError, httpx.DecodingError) as error:
                reason = str(error) or type(error).__name__
                if not self._known:
                    reason = tls.hint(error, str(self._client.base_url))
                untrusted = tls.explain(error)
                if untrusted is not None and not self._known:  # else another server is in between, for a while
                    raise Unreachable(f"{self._client.base_url} cannot be used: {untrusted}") from error
            # What was asked for is waited for, and then some, drawn at random: others were asked for the same.
            seconds = pause + self._chance.uniform(0, max(longest, pause / 4))
            if self.patience_seconds is not None and waited + seconds > self.patience_seconds:
                if kind is not Unreachable:
                    raise kind(f"{self._client.base_url} cannot take this now ({reason})")
                raise Unreachable(
                    f"{self._client.base_url} does not answer ({reason}); check the address, and that a coordinator "
                    f"runs there"
                )
            self._on_wait(reason, seconds)
            self._sleep(seconds)
            waited += seconds
            longest = min(2 * longest, LONGEST_WAIT)


def _is(payload: Payload, body: bytes) -> bool:
    """Return whether this body is the payload that was announced."""
    return len(body) == payload.bytes and hashlib.sha256(body).hexdigest() == payload.sha256


def _holding(mask: str | None, model: str | None) -> dict[str, str]:
    """Return the query that says what a device holds."""
    return {**({"mask": mask} if mask else {}), **({"model": model} if model else {})}


def _costing(cost: UploadCost | None) -> dict[str, str]:
    """Return the header that says what the last upload cost."""
    return {"Sparrow-Upload-Cost": json.dumps(cost.model_dump(mode="json"))} if cost else {}


def _listed(reason: PauseReason | str) -> PauseReason | Failure:
    """Return a reason that may be sent. Raises ValueError for other text, which may hold names of files or data."""
    return reason if isinstance(reason, PauseReason) else Failure(reason)


def _json(message: BaseModel, *, exclude_unset: bool = False) -> dict[str, Any]:
    body = message.model_dump_json(exclude_unset=exclude_unset).encode()
    return {"content": body, "headers": {"Content-Type": "application/json"}}


def _read(kind: type[Message], answer: httpx.Response) -> Message:
    """Return the message of the answer; a page of another server (a captive portal, a proxy) is none."""
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError:
        raise NoCoordinator(answer.status_code, _detail(answer)) from None


def _read_all(kind: type[Message], answer: httpx.Response) -> list[Message]:
    """Return the messages of the answer, as ``_read`` returns one."""
    try:
        return TypeAdapter(list[kind]).validate_json(answer.content)  # type: ignore[valid-type]
    except ValidationError:
        raise NoCoordinator(answer.status_code, _detail(answer)) from None


def _pause(answer: httpx.Response, usual: float) -> float:
    """Return the seconds that Retry-After asks for, at most ``LONGEST_PAUSE``; its other form, a date, which proxies
    may send, is ignored: it would be off by as much as this device's clock."""
    text = answer.headers.get("Retry-After", "")
    sensible = text.isascii() and text.isdecimal() and len(text) < 10
    return min(float(text), LONGEST_PAUSE) if sensible else usual


def _refusal(answer: httpx.Response) -> Refused:
    """Return the exception of what was answered."""
    if not _is_problem(answer):
        return NoCoordinator(answer.status_code, _detail(answer))
    kind = PROBLEMS.get(_type(answer), Refused)
    return (kind if issubclass(kind, Refused) else Refused)(answer.status_code, _detail(answer))


def _passes(answer: httpx.Response) -> bool:
    """Return whether the answer may be another one later."""
    return answer.status_code in (408, 429) or answer.status_code >= 500


def _is_problem(answer: httpx.Response) -> bool:
    return str(answer.headers.get("Content-Type", "")).startswith("application/problem+json")


def _type(answer: httpx.Response) -> str:
    """Return the type of a problem document without ``PREFIX``; empty where the answer has none."""
    try:
        return str(answer.json()["type"]).removeprefix(PREFIX)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _detail(answer: httpx.Response) -> str:
    """Return what the answer says."""
    try:
        return printable(str(answer.json()["detail"])[:LONGEST_TEXT])[:LONGEST_TEXT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"The answer of {answer.url.host} is not one of a Sparrow coordinator; check the address"
