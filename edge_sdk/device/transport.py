"""HTTP with the coordinator: patient, resumable, counted.

Whatever may pass by itself (no connection, a time-out, 408, 429, 5xx) is tried again, after a wait that doubles up to
``LONGEST_WAIT`` and is drawn at random below that, so that a fleet does not come back all at once; Retry-After is
waited for first. Everything else is an answer: a problem document, raised as the exception of its type (``PROBLEMS``).
A failed TLS handshake is not tried again. A download that breaks goes on where it broke, and so does a large upload.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from edge_sdk.errors import (
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
from edge_sdk.protocol import checkpoint, tls
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.messages import (
    Assignment,
    ChangeDevice,
    CompareFederation,
    DeviceInfo,
    Enrol,
    Enrolled,
    FederationInfo,
    HandBack,
    NewToken,
    OpenWork,
    PauseReason,
    Payload,
    RoundRecord,
    UpdateReceived,
    UploadCost,
)
from sparrow.command_line.nearest import nearest

UPLOAD_PART = 64 * 1024
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
    "UnknownMethod": NotInstalled,
    **dict.fromkeys(("BadContent", "InvalidRequest", "ProtocolError", "ManifestError", "BundleError"), BadContent),
    **dict.fromkeys(("SkeletonError", "LengthRequired", "TooLarge", "WrongMediaType"), BadContent),
    **dict.fromkeys(("WrongRange", "RangeNotSatisfiable"), BadContent),
    "TooManyRequests": TooManyRequests,
    "DiskFull": CoordinatorFull,
    **dict.fromkeys(("Unavailable", "NotReady", "InternalError"), Unreachable),
}
"""Type of a problem document, without ``PREFIX`` -> its exception. Problems of any other type are ``Refused``.

An ``Unreachable`` may pass by itself: it is raised when the caller's patience has ended.
"""
PREFIX = "urn:sparrow:problem:"

FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
HEARTBEAT_TIMEOUT = httpx.Timeout(10.0)

Message = TypeVar("Message", bound=BaseModel)


@dataclass
class Traffic:
    """Bytes of HTTP bodies so far, repetitions included."""

    down: int = 0
    up: int = 0


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
    if trust in (None, tls.Tls()):
        return httpx.Client(base_url=server, timeout=TIMEOUT)
    assert trust is not None
    return httpx.Client(base_url=server, timeout=TIMEOUT, verify=trust.context())


def token_of(*kinds: Literal["admin", "observer", "enrolment"]) -> str | None:
    """Return the first token of these kinds that the environment holds, as SPARROW_ADMIN_TOKEN and so on."""
    return next(filter(None, (os.environ.get(f"SPARROW_{kind.upper()}_TOKEN") for kind in kinds)), None)


def bad_address(named: str, fault: str) -> BadArgument:
    """Return the error of an address that cannot be called. named: its beginning, ``The address ...``."""
    return BadArgument(f"{named} {fault}; give http://HOST:PORT or https://HOST")


class Transport:
    """One device's calls. ``client`` has the coordinator as its base URL.

    patience_seconds: how long one call may go unanswered before Unreachable is raised; None waits for ever.
    on_wait: called with (reason, seconds) before each wait. sleep and chance are injected by tests.
    """

    def __init__(
        self,
        client: httpx.Client,
        *,
        patience_seconds: float | None = None,
        on_wait: Callable[[str, float], None] = lambda reason, seconds: None,
        sleep: Callable[[float], None] = time.sleep,
        chance: random.Random | None = None,
    ) -> None:
        self._client = client
        self.patience_seconds = patience_seconds
        self._on_wait = on_wait
        self._sleep = sleep
        self._chance = chance or random.Random()
        self.token: str | None = None
        self.renewal_due = False  # whether the coordinator asks this device to take a new token
        self._known = False  # whether a coordinator has answered at this address
        self.traffic = Traffic()

    # --- calls ---------------------------------------------------------------------------------------------------

    def federation(self, name: str) -> FederationInfo:
        """Return the state of a federation. Raises NotFound, naming those that this caller may see."""
        try:
            return _read(FederationInfo, self._call("GET", f"/v1/federations/{name}"))
        except NotFound as refusal:
            try:
                there = sorted(info.name for info in self.federations())
            except Refused:  # this caller may not see them
                raise refusal from None
        said = f"there are {', '.join(there)}{nearest(name, there)}" if there else "there is none yet; publish one"
        raise NotFound(404, f"there is no federation {name!r}; {said}")

    def federations(self) -> list[FederationInfo]:
        """Return every federation of the coordinator."""
        return _read_all(FederationInfo, self._call("GET", "/v1/federations"))

    def rounds(self, name: str) -> list[RoundRecord]:
        """Return a record per round, the open one last."""
        return _read_all(RoundRecord, self._call("GET", f"/v1/federations/{name}/rounds"))

    def devices(self, name: str) -> list[DeviceInfo]:
        """Return the devices of a federation."""
        return _read_all(DeviceInfo, self._call("GET", f"/v1/federations/{name}/devices"))

    def trouble(self) -> str | None:
        """Return the reason why the coordinator is not ready; None if it is. Asks once."""
        try:
            answer = self._client.request("GET", "/readyz", **self._with_token({}))
        except httpx.TransportError as error:
            raise Unreachable(f"{self._client.base_url} does not answer ({error})") from error
        return None if answer.is_success else _detail(answer)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a federation's model."""
        return _read(Manifest, self._call("GET", f"/v1/federations/{name}/manifest"))

    def skeleton(self, name: str) -> bytes:
        """Return the ONNX skeleton of a federation's model."""
        return self._call("GET", f"/v1/federations/{name}/skeleton.onnx").content

    def create_federation(self, body: bytes, media_type: str) -> FederationInfo:
        """Create a federation. Raises WrongSettings, NotInstalled, NameTaken."""
        try:
            answer = self._call("POST", "/v1/federations", content=body, headers={"Content-Type": media_type})
        except NotInstalled:
            raise
        except BadContent as refused:
            raise WrongSettings(refused.detail) from refused
        return _read(FederationInfo, answer)

    def compare_federation(self, name: str, wanted: CompareFederation) -> FederationInfo | None:
        """Return the federation of this name if it is as ``wanted``; None if there is none. Raises DifferentFederation,
        which names the differences."""
        try:
            return _read(FederationInfo, self._call("POST", f"/v1/federations/{name}/comparison", **_json(wanted)))
        except NotFound:
            return None

    def delete_federation(self, name: str) -> None:
        """Delete a federation for good."""
        self._call("DELETE", f"/v1/federations/{name}")

    def enrol(self, federation: str, request: Enrol) -> Enrolled:
        """Enrol this device."""
        answer = self._call("POST", f"/v1/federations/{federation}/devices", **_json(request))
        return _read(Enrolled, answer)

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
        headers = {"Sparrow-Upload-Cost": json.dumps(cost.model_dump(mode="json"))} if cost else {}
        answer = self._call(
            "GET",
            f"/v1/federations/{federation}/assignment",
            params={"wait": wait_seconds, **({"mask": mask} if mask else {}), **({"model": model} if model else {})},
            headers=headers,
            timeout=httpx.Timeout(wait_seconds + 30.0, connect=10.0),
        )
        self.renewal_due = "Sparrow-Renew-Token" in answer.headers
        if answer.status_code == 204:
            return None, _pause(answer, 1.0)
        return _read(Assignment, answer), 0.0

    def open_work(self, federation: str, wait_seconds: float, etag: str) -> tuple[OpenWork | None, str]:
        """Return the open assignments, and the answer's ETag; None where that stays as at ``etag`` for
        ``wait_seconds``.
        """
        answer = self._call(
            "GET",
            f"/v1/federations/{federation}/assignments",
            params={"wait": wait_seconds},
            headers={"If-None-Match": etag} if etag else {},
            timeout=httpx.Timeout(wait_seconds + 30.0, connect=10.0),
        )
        if answer.status_code == 304:
            return None, etag
        return _read(OpenWork, answer), answer.headers.get("ETag", "")

    def model(self, federation: str) -> Tensors:
        """Return the global model by name. Raises NoGlobalModel where the method has none that can be used alone."""
        tensors, _ = checkpoint.load(self._call("GET", f"/v1/federations/{federation}/model").content)
        return tensors

    def hand_back(self, assignment_id: str, reason: PauseReason | str) -> None:
        """Hand an assignment back."""
        said = reason if isinstance(reason, PauseReason) else reason[:500]
        self._call("DELETE", f"/v1/assignments/{assignment_id}", **_json(HandBack(reason=said)))

    def heartbeat(self, assignment_id: str) -> bool:
        """Say once, without waiting for who does not answer, that this device works on an assignment. False where that
        need not be said again: nobody waits for it. May be called from another thread."""
        try:
            answer = self._client.post(
                f"/v1/assignments/{assignment_id}/heartbeat", **self._with_token({}), timeout=HEARTBEAT_TIMEOUT
            )
        except (httpx.HTTPError, RuntimeError):  # the latter: the client was closed meanwhile
            return True
        return _passes(answer) or answer.is_success or not _is_problem(answer)

    def change_device(self, device_id: str, change: ChangeDevice) -> None:
        """Tell of a new budget or changed conditions."""
        self._call("PATCH", f"/v1/devices/{device_id}", **_json(change))

    def new_token(self, device_id: str) -> str:
        """Return a new token for this device. The old one is good until this one is used: keep it before that."""
        return _read(NewToken, self._call("POST", f"/v1/devices/{device_id}/token")).token

    def update(self, assignment_id: str, body: bytes, media_type: str) -> None:
        """Send an update; sending the same again does no harm. Raises RoundOver when it comes too late."""
        path, headers = f"/v1/assignments/{assignment_id}/update", {"Content-Type": media_type}
        if len(body) < RESUMED:
            self._call("PUT", path, content=body, headers=headers)
        else:
            self._upload(path, body, headers)

    def payload(self, assignment_id: str, payload: Payload) -> bytes:
        """Download an assignment's bundle, resuming where a connection broke. Raises Damaged."""
        path = f"/v1/assignments/{assignment_id}/payload"
        for _ in range(3):
            body = self._download(path, payload.bytes)
            if hashlib.sha256(body).hexdigest() == payload.sha256:
                return body
        raise Damaged(
            "the payload was downloaded three times and never matched its digest; look at proxies between this device "
            "and the coordinator"
        )

    # --- how -----------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        content = arguments.pop("content", b"")
        if content:
            arguments["headers"] = {**arguments["headers"], "Content-Length": str(len(content))}

        def attempt() -> httpx.Response:
            body = self._counted(content) if content else None
            answer = self._client.request(method, path, content=body, **self._with_token(arguments))
            self.traffic.down += answer.num_bytes_downloaded
            return answer

        return self._patiently(attempt)

    def _upload(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        """Send ``body``; after a break, only what has not arrived."""
        digest, size, begun = hashlib.sha256(body).hexdigest(), len(body), False
        headers = {**headers, "Sparrow-Update-SHA256": digest}

        def attempt() -> httpx.Response:
            nonlocal begun
            first = 0
            if begun:
                answer = self._client.request("GET", path, params={"sha256": digest}, **self._with_token({}))
                self.traffic.down += answer.num_bytes_downloaded
                if not answer.is_success:
                    return answer
                first = _read(UpdateReceived, answer).received
            begun = True
            length = str(size - first)
            of = {"Content-Range": f"bytes {first}-{size - 1}/{size}" if first < size else f"bytes */{size}"}
            arguments = self._with_token({"headers": {**headers, **of, "Content-Length": length}})
            answer = self._client.request("PUT", path, content=self._counted(body[first:]), **arguments)
            self.traffic.down += answer.num_bytes_downloaded
            if answer.status_code == 416:  # what is there has changed meanwhile: ask again
                raise httpx.RemoteProtocolError(_detail(answer))
            return answer

        self._patiently(attempt)

    def _counted(self, content: bytes) -> Iterator[bytes]:
        """``content`` in parts, counted as they are handed to the connection: what never left is no traffic."""
        for start in range(0, len(content), UPLOAD_PART):
            part = content[start : start + UPLOAD_PART]
            self.traffic.up += len(part)
            yield part

    def _download(self, path: str, size: int) -> bytes:
        """``size`` bytes; what arrived before a break is kept, and only the rest asked for."""
        body = bytearray()
        etag = ""

        def attempt() -> httpx.Response:
            nonlocal etag
            headers = {"Range": f"bytes={len(body)}-", "If-Range": etag} if 0 < len(body) < size else {}
            with self._client.stream("GET", path, **self._with_token({"headers": headers})) as answer:
                if answer.status_code == 200:
                    body.clear()
                if answer.status_code not in (200, 206):
                    answer.read()
                    return answer
                etag = answer.headers.get("ETag", "")
                for part in answer.iter_raw():
                    self.traffic.down += len(part)
                    body.extend(part)
                    if len(body) > size:
                        break  # more than announced: the digest will not match, and memory is not theirs to take
                return answer

        self._patiently(attempt)
        return bytes(body)

    def _with_token(self, arguments: dict[str, Any]) -> dict[str, Any]:
        headers = dict(arguments.get("headers", {}))
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        return {**arguments, "headers": headers}

    def _patiently(self, attempt: Callable[[], httpx.Response]) -> httpx.Response:
        waited, longest = 0.0, FIRST_WAIT
        while True:
            pause, kind = 0.0, Unreachable
            try:
                answer = attempt()
                if answer.is_success or answer.status_code == 304:
                    self._known = True
                    return answer
                # After a coordinator has answered, refusals of another server (captive portal, proxy) will pass, too.
                if not _passes(answer) and (_is_problem(answer) or not self._known):
                    raise _refusal(answer)
                passing = PROBLEMS.get(_type(answer), Unreachable)
                kind = passing if issubclass(passing, Unreachable) else Unreachable
                reason = f"HTTP {answer.status_code}: {_detail(answer)}"
                pause = _pause(answer, 0.0)
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


def _json(message: BaseModel) -> dict[str, Any]:
    return {"content": message.model_dump_json().encode(), "headers": {"Content-Type": "application/json"}}


def _read(kind: type[Message], answer: httpx.Response) -> Message:
    """Return the message of the answer; a page of another server (a captive portal, a proxy) is refused."""
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
    """Return the seconds that Retry-After asks for; its other form, a date, which proxies may send, is ignored."""
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() and len(text) < 6 else usual


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
    except (ValueError, KeyError, TypeError):
        return ""


def _detail(answer: httpx.Response) -> str:
    """Return what the answer says."""
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"The answer of {answer.url.host} is not one of a Sparrow coordinator; check the address"
