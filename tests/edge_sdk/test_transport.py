"""HTTP against a broken network, without a network: patience, resumption, counted bytes."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import random
import re
import socket
import threading
import tracemalloc
from contextlib import ExitStack, suppress

import pytest

from edge_sdk.device.answers import LONGEST_PAUSE
from edge_sdk.device.connection import (
    FIRST_WAIT,
    LARGEST_ANSWER,
    LARGEST_LIST,
    LARGEST_REFUSAL,
    LONGEST_WAIT,
)
from edge_sdk.device.transport import Transport
from edge_sdk.errors import (
    BadArgument,
    BadContent,
    Blocked,
    Damaged,
    DifferentUpdate,
    FederationDeleted,
    FederationOver,
    NameTaken,
    NoCoordinator,
    NotAllowed,
    NotAuthenticated,
    OtherVersion,
    Refused,
    RoundOver,
    SdkError,
    TokenExpired,
    Unreachable,
    WrongState,
)
from sparrow.protocol.failures import Failure
from sparrow.protocol.manifest import MAX_GRAPH, MAX_MANIFEST
from sparrow.protocol.messages import (
    ASSIGNMENT_TYPE,
    ChangeDevice,
    Conditions,
    Enrol,
    PauseReason,
    Payload,
    Phase,
    UploadCost,
)
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.wire import WIRE, WIRE_HEADER
from sparrow.transport import connect, httpx

BODY = bytes(range(256)) * 40
PAYLOAD = Payload(bytes=len(BODY), sha256=hashlib.sha256(BODY).hexdigest())
ETAG = f'"{PAYLOAD.sha256}"'


class Pieces(httpx.SyncByteStream):
    """Gives bytes in pieces, as a socket does."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from (self.data[start : start + 1000] for start in range(0, len(self.data), 1000))


class Breaking(httpx.SyncByteStream):
    """Gives some bytes, then breaks."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield self.data
        raise httpx.ReadError("connection reset")


class Network:
    """Answers each call with the next of ``answers`` (a response, an exception, or a function of the request)."""

    def __init__(self, *answers, **how):
        self.answers = list(answers)
        self.requests = []
        self.slept = []
        self.waits = []
        client = httpx.Client(base_url="http://coordinator", transport=httpx.MockTransport(self.handle))
        self.transport = Transport(
            client,
            sleep=self.slept.append,
            chance=random.Random(0),
            on_wait=lambda reason, seconds: self.waits.append((reason, seconds)),
            **how,
        )

    def handle(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        if not answer.is_stream_consumed:
            return answer
        return httpx.Response(answer.status_code, headers=answer.headers, stream=Pieces(answer.content))


def problem(status, detail="do this", **headers):
    return httpx.Response(status, json={"detail": detail, "title": "t"}, headers=headers)


def typed(kind, status, detail="do this"):
    """A problem document of the coordinator."""
    headers = {"Content-Type": "application/problem+json"}
    body = {"type": f"urn:sparrow:problem:{kind}", "title": kind, "status": status, "detail": detail}
    return httpx.Response(status, json=body, headers=headers)


def fine(request=None):
    return httpx.Response(204)


CHANGE = ChangeDevice(budget=0.5)


def test_work_is_asked_for_again_without_a_wait():
    network = Network(httpx.ConnectError("refused"), fine)
    network.transport.assignment("f", 25, None)
    assert [request.url.params["wait"] for request in network.requests] == ["25", "0"]


def test_an_answer_after_an_outage_is_reported_once():
    back = []
    network = Network(
        httpx.ConnectError("refused"), httpx.ConnectError("refused"), fine, on_answer=lambda: back.append(1)
    )
    network.transport.change_device("1", CHANGE)
    network.transport.change_device("1", CHANGE)
    assert (len(network.waits), back) == (2, [1])


# --- patience ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        problem(503),
        problem(500),
        problem(502),
        problem(429),
        problem(408),
        httpx.Response(504, text="<html>gateway</html>"),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("cut"),
    ],
)
def test_what_may_pass_is_tried_again(trouble):
    network = Network(trouble, trouble, fine)
    network.transport.change_device("1", CHANGE)
    assert len(network.requests) == 3
    assert len(network.slept) == 2
    assert len({request.content for request in network.requests}) == 1, "the same call again"
    assert [seconds for _, seconds in network.waits] == network.slept


def test_waits_double_up_to_a_limit_and_are_drawn_at_random_below_it():
    network = Network(*[problem(503)] * 40, fine)
    network.transport.change_device("1", CHANGE)
    limits = [min(FIRST_WAIT * 2**number, LONGEST_WAIT) for number in range(40)]
    assert all(0 <= seconds <= limit for seconds, limit in zip(network.slept, limits, strict=True))
    assert max(network.slept[10:]) > LONGEST_WAIT / 2
    assert len(set(network.slept)) == 40
    again = Network(*[problem(503)] * 40, fine)
    again.transport.change_device("1", CHANGE)
    assert again.slept == network.slept, "chance is injected"


def test_patience_ends_with_advice():
    network = Network(httpx.ConnectError("connection refused"), patience_seconds=20)
    with pytest.raises(Unreachable) as given_up:
        network.transport.change_device("1", CHANGE)
    assert "http://coordinator does not answer" in str(given_up.value)
    assert 5 < sum(network.slept) <= 20


def test_no_patience_asks_once():
    network = Network(problem(503, "disk is full"), patience_seconds=0)
    with pytest.raises(Unreachable, match=r"HTTP 503: disk is full"):
        network.transport.change_device("1", CHANGE)
    assert len(network.requests) == 1
    assert network.slept == []


def test_retry_after_is_respected():
    network = Network(problem(503, **{"Retry-After": "17"}), problem(429, **{"Retry-After": "0"}), fine)
    network.transport.change_device("1", CHANGE)
    assert 17 < network.slept[0] <= 17 * 1.25, "and not all at once"
    assert network.slept[1] <= 2 * FIRST_WAIT


@pytest.mark.parametrize("odd", ["Wed, 21 Oct 2026 07:28:00 GMT", "soon", "-5", "nan", "inf", "", "9" * 400])
def test_a_retry_after_that_is_no_number_of_seconds_does_no_harm(odd):
    network = Network(problem(503, **{"Retry-After": odd}), fine)
    network.transport.change_device("1", CHANGE)
    assert network.slept[0] <= FIRST_WAIT
    network = Network(httpx.Response(204, headers={"Retry-After": odd}))
    assert network.transport.assignment("f", 5, None) == (None, 1.0)


@pytest.mark.parametrize(
    ("problem_type", "status", "kind"),
    [("NotAuthenticated", 401, NotAuthenticated), ("TokenExpired", 401, TokenExpired), ("NotAllowed", 403, NotAllowed),
     ("NameTaken", 409, NameTaken), ("WrongState", 409, WrongState), ("RoundClosed", 409, RoundOver),
     ("DifferentUpdate", 409, DifferentUpdate), ("Finished", 410, FederationOver),
     ("FederationDeleted", 410, FederationDeleted), ("BadContent", 422, BadContent), ("TooLarge", 413, BadContent),
     ("UnheardOf", 409, Refused), ("UnheardOf", 410, Refused)],
)  # fmt: skip
def test_an_answer_is_the_exception_of_its_type(problem_type, status, kind):
    network = Network(typed(problem_type, status, "fc.weight: not finite; do not send"))
    with pytest.raises(kind) as refused:
        network.transport.update("a", b"bundle", "application/x")
    assert type(refused.value) is kind
    assert (refused.value.status, refused.value.detail) == (status, "fc.weight: not finite; do not send")
    assert len(network.requests) == 1
    assert network.slept == []


@pytest.mark.parametrize("page", ["<html>log in to the hotel's network</html>", "[]", '"detail"', '{"no": "detail"}'])
def test_another_server_is_recognised(page):
    for status in (200, 302, 404):
        network = Network(httpx.Response(status, text=page))
        with pytest.raises(Refused, match=r"\bcoordinator\b.*\(HTTP \d+\)"):
            network.transport.federation("default")
    assert issubclass(Refused, SdkError)


# --- calls -------------------------------------------------------------------------------------------------------


def test_the_token_goes_along_once_there_is_one():
    network = Network(fine)
    network.transport.change_device("1", CHANGE)
    network.transport.token = "secret"
    network.transport.change_device("1", CHANGE)
    first, second = network.requests
    assert "authorization" not in first.headers
    assert second.headers["authorization"] == "Bearer secret"
    assert second.headers["content-type"] == "application/json"
    assert json.loads(second.content)["budget"] == 0.5


def test_enrolling_sends_the_request_and_reads_the_answer():
    network = Network(httpx.Response(201, json={"device_id": "d", "token": "t", "news": 1}))
    enrolled = network.transport.enrol("default", Enrol(name="pi", enrolment_key="k" * 32))
    assert (enrolled.device_id, enrolled.token) == ("d", "t")
    (request,) = network.requests
    assert (request.method, request.url.path) == ("POST", "/v1/federations/default/devices")


def test_asking_waits_and_tells_what_the_last_upload_cost():
    network = Network(httpx.Response(204, headers={"Retry-After": "4"}))
    cost = UploadCost(assignment_id="a", upload=Phase(seconds=1.5, bytes_up=10))
    assert network.transport.assignment("default", 25, cost) == (None, 4.0)
    (request,) = network.requests
    assert request.url.params["wait"] == "25"
    assert request.extensions["timeout"]["read"] > 25
    assert UploadCost.model_validate_json(request.headers["sparrow-upload-cost"]) == cost


WORK = {
    "assignment_id": "a",
    "kind": "train",
    "round": 1,
    "deadline_seconds": 60,
    "settings": FederationSettings().model_dump(mode="json"),
}


def with_payload(message, body):
    """An answer that brings a payload along."""
    content = json.dumps(message).encode() + b"\n" + body
    return httpx.Response(200, content=content, headers={"Content-Type": ASSIGNMENT_TYPE})


def test_a_payload_that_came_with_its_assignment_is_not_asked_for():
    announced = WORK | {"payload": {"bytes": PAYLOAD.bytes, "sha256": PAYLOAD.sha256}}
    network = Network(with_payload(announced, BODY))
    assignment, _ = network.transport.assignment("default", 25, None)
    told = len(json.dumps(announced)) + 1
    assert network.transport.traffic.down == told, "the payload's bytes are those of the phase that takes it"
    assert network.transport.payload(assignment.assignment_id, assignment.payload) == BODY
    assert network.transport.traffic.down == told + len(BODY)
    assert [request.headers["accept"] for request in network.requests] == [ASSIGNMENT_TYPE]


@pytest.mark.parametrize("brought", [BODY[:-1], b"x" * len(BODY)])
def test_a_payload_that_came_damaged_is_asked_for(brought):
    announced = WORK | {"payload": {"bytes": PAYLOAD.bytes, "sha256": PAYLOAD.sha256}}
    network = Network(with_payload(announced, brought), serve)
    assignment, _ = network.transport.assignment("default", 25, None)
    assert network.transport.payload(assignment.assignment_id, assignment.payload) == BODY
    assert network.requests[1].url.path == "/v1/assignments/a/payload"


def test_the_answer_to_an_update_may_bring_the_next_work():
    announced = WORK | {"payload": {"bytes": PAYLOAD.bytes, "sha256": PAYLOAD.sha256}}
    network = Network(with_payload({"new": True, "next": announced}, BODY), httpx.Response(201, json={"new": True}))
    cost = UploadCost(assignment_id="before", upload=Phase(seconds=1.5, bytes_up=10))
    following = network.transport.update("z", b"up", "x/y", cost, "m" * 64, None, goes_on=True)
    assert following.assignment_id == "a"
    assert network.transport.payload("a", following.payload) == BODY
    (request,) = network.requests
    assert dict(request.url.params) == {"mask": "m" * 64}
    assert UploadCost.model_validate_json(request.headers["sparrow-upload-cost"]) == cost
    assert network.transport.update("a", b"up", "x/y", goes_on=True) is None


def test_work_that_cannot_be_read_is_no_answer():
    network = Network(with_payload({"nonsense": 1}, BODY), fine)
    with pytest.raises(NoCoordinator):
        network.transport.assignment("default", 25, None)


@pytest.mark.parametrize(("version", "older"), [(WIRE + 1, "this installation"), (WIRE - 1, "the coordinator")])
@pytest.mark.parametrize("status", [200, 404, 503])
def test_an_answer_of_another_version_names_the_side_to_upgrade(version, older, status):
    network = Network(httpx.Response(status, headers={WIRE_HEADER: str(version)}, json={"wire": 1}))
    with pytest.raises(OtherVersion, match=f"upgrade Sparrow in {older}"):
        network.transport.federation("default")
    assert network.requests[0].headers[WIRE_HEADER] == str(WIRE)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({WIRE_HEADER: str(WIRE)}, "upgrade the older one"),
        ({WIRE_HEADER: "x"}, "upgrade the older one"),
        ({"X-Request-Id": "a"}, "older Sparrow than this installation .*; upgrade it there"),
        ({}, "check the address"),
    ],
)
def test_an_unreadable_answer_says_whether_a_coordinator_sent_it(headers, message):
    network = Network(httpx.Response(200, headers=headers, json={"other": 1}))
    with pytest.raises(NoCoordinator, match=message):
        network.transport.federation("default")


@pytest.mark.parametrize(
    ("reason", "sent"), [(PauseReason.heat, "heat"), (Failure("bad-payload/size"), "bad-payload/size")]
)
def test_a_reason_of_the_contract_is_sent(reason, sent):
    network = Network(fine)
    network.transport.hand_back("a", reason)
    network.transport.change_device("d", ChangeDevice(conditions=Conditions(available=False, reason=reason)))
    back, change = [json.loads(request.content) for request in network.requests]
    assert back == {"reason": sent}
    assert change["conditions"]["reason"] == sent


@pytest.mark.parametrize("text", ["/home/ann/secret.csv", "ValueError: 3.7", ""])
def test_text_of_the_device_is_never_sent_as_a_reason(text):
    network = Network(fine)
    with pytest.raises(ValueError, match="reports only failures of"):
        network.transport.hand_back("a", text)
    if text:
        with pytest.raises(ValueError, match="reports only failures of"):
            network.transport.change_device("d", ChangeDevice(conditions=Conditions(available=False, reason=text)))
    assert not network.requests


# --- downloads ---------------------------------------------------------------------------------------------------


def serve(request):
    """A server of BODY that knows ranges."""
    headers = {"ETag": ETAG}
    asked = request.headers.get("range")
    if asked is None or request.headers.get("if-range") != ETAG:
        return httpx.Response(200, content=BODY, headers=headers)
    first = int(asked.removeprefix("bytes=").removesuffix("-"))
    if first >= len(BODY):
        return httpx.Response(416, headers=headers)
    return httpx.Response(206, content=BODY[first:], headers=headers)


def broken(data, status=200, **headers):
    return lambda request: httpx.Response(status, stream=Breaking(data), headers={"ETag": ETAG, **headers})


def test_a_download_goes_on_where_it_broke():
    network = Network(broken(BODY[:3000]), broken(BODY[3000:5000], status=206), problem(503), serve)
    assert network.transport.payload("a", PAYLOAD) == BODY
    asked = [(request.headers.get("range"), request.headers.get("if-range")) for request in network.requests]
    assert asked == [(None, None), ("bytes=3000-", ETAG), ("bytes=5000-", ETAG), ("bytes=5000-", ETAG)]
    assert network.transport.traffic.down == len(BODY) + len(problem(503).content), "no byte came twice"


def test_a_changed_file_is_downloaded_from_its_beginning():
    network = Network(broken(b"old" * 50, ETag='"old"'), serve)
    assert network.transport.payload("a", PAYLOAD) == BODY
    assert network.requests[1].headers["if-range"] == '"old"'
    assert network.transport.traffic.down == len(BODY) + 150


def test_a_break_after_the_last_byte_is_no_dead_end():
    """A proxy may cut the connection after everything has come: there is nothing left to ask a range of."""
    network = Network(broken(BODY), serve)
    assert network.transport.payload("a", PAYLOAD) == BODY


def test_a_damaged_download_is_repeated_from_its_beginning():
    damaged = bytes([BODY[0] ^ 1]) + BODY[1:]
    network = Network(httpx.Response(200, content=damaged, headers={"ETag": ETAG}), serve)
    assert network.transport.payload("a", PAYLOAD) == BODY
    assert "range" not in network.requests[1].headers
    assert network.transport.traffic.down == 2 * len(BODY)


@pytest.mark.parametrize("wrong", [BODY[:-1], BODY + b"x", b"", BODY[::-1]])
def test_a_download_that_never_matches_is_reported_with_advice(wrong):
    network = Network(lambda request: httpx.Response(200, content=wrong, headers={"ETag": ETAG}))
    with pytest.raises(Damaged, match="digest"):
        network.transport.payload("a", PAYLOAD)
    assert len(network.requests) == 3


def test_a_server_cannot_fill_the_memory():
    def endless():
        while True:
            yield b"x" * 4096

    class Endless(httpx.SyncByteStream):
        def __iter__(self):
            return endless()

    network = Network(lambda request: httpx.Response(200, stream=Endless()))
    with pytest.raises(Damaged):
        network.transport.payload("a", PAYLOAD)
    assert network.transport.traffic.down < 3 * (len(BODY) + 4097)


def test_a_refused_download_says_why():
    network = Network(typed("RoundClosed", 409, "the assignment is expired; ask for the next one"))
    with pytest.raises(RoundOver, match="ask for the next one"):
        network.transport.payload("a", PAYLOAD)


def test_traffic_counts_bodies_both_ways_repetitions_included():
    network = Network(problem(503), httpx.ConnectError("x"), httpx.Response(201, json={"new": True}))
    network.transport.update("a", b"u" * 1000, "application/x")
    assert network.transport.traffic.up == 3000
    answers = len(problem(503).content) + len(httpx.Response(201, json={"new": True}).content)
    assert network.transport.traffic.down == answers


def test_bytes_that_never_left_are_no_traffic():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{closed}") as client:
        transport = Transport(client, patience_seconds=0)
        with pytest.raises(Unreachable):
            transport.update("a", BODY, "application/x")
    assert transport.traffic.up == 0


def test_an_update_declares_its_length():
    network = Network(fine())
    network.transport.update("a", BODY, "application/x")
    assert network.requests[0].headers["Content-Length"] == str(len(BODY))
    assert "Transfer-Encoding" not in network.requests[0].headers
    assert network.transport.traffic.up == len(BODY)


def test_another_server_in_between_is_waited_out_but_not_at_first():
    portal = httpx.Response(403, text="<html>please log in</html>")
    with pytest.raises(Refused, match=r"\bcoordinator\b.*\(HTTP \d+\)"):
        Network(portal).transport.change_device("d", CHANGE)
    # Each refusal is followed by a look at /healthz.
    network = Network(fine(), portal, portal, portal, portal, fine())
    network.transport.change_device("d", CHANGE)
    network.transport.change_device("d", CHANGE)
    assert len(network.slept) == 2


@pytest.mark.parametrize("status", [400, 403, 404, 405, 407, 411, 414, 431, 451])
def test_a_server_in_between_that_refuses_one_call_ends_it(status):
    def proxy(request):
        if request.url.path == "/healthz":
            return httpx.Response(200, json={"status": "ok"})
        return fine() if request.method == "GET" else httpx.Response(status, text="<html>no</html>")

    network = Network(proxy)
    network.transport.call("GET", "/v1/anything", headers={})
    with pytest.raises(Blocked, match=rf"refuses PATCH /v1/devices/d with HTTP {status}; "):
        network.transport.change_device("d", CHANGE)
    assert network.slept == []


@pytest.mark.parametrize("status", [407, 411, 413, 414, 431])
def test_statuses_of_proxies_are_known_at_the_first_call(status):
    with pytest.raises(Blocked, match="a proxy or firewall before http://coordinator refuses GET"):
        Network(httpx.Response(status, text="<html>no</html>")).transport.federations()


class Limiting:
    """A proxy that refuses bodies beyond a limit, before a server that collects parts."""

    def __init__(self, limit):
        self.limit, self.received, self.refused = limit, b"", 0

    def __call__(self, request):
        if len(request.read()) > self.limit:
            self.refused += 1
            return httpx.Response(413, text="<html>too large</html>")
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", request.headers.get("Content-Range", ""))
        if span is None:
            self.received = request.content
            return fine()
        first, last, total = map(int, span.groups())
        assert len(request.content) == last + 1 - first
        self.received = self.received[:first] + request.content
        return httpx.Response(202, json={"received": last + 1}) if last + 1 < total else fine()


@pytest.mark.parametrize("size", [20_000, 100_000, 1_100_000])
@pytest.mark.parametrize("limit", [16_384, 17_000, 2_000_000])
def test_a_body_beyond_a_limit_is_sent_in_parts(size, limit):
    body = random.Random(0).randbytes(size)
    proxy = Limiting(limit)
    transport = Network(proxy).transport
    transport.update("a", body, "application/x")
    assert proxy.received == body
    refused = proxy.refused
    transport.update("a", body, "application/x")
    assert proxy.received == body
    assert proxy.refused == refused, "later bodies begin with the length that was accepted"


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ("http://here:80000", "has the port 80000, but ports go from 1 to 65535"),
        ("http://here:0", "has the port 0, "),
        ("http://me:secret@here", "holds a name or password, but tokens are given as SPARROW_..._TOKEN"),
        ("http://here/?federation=f", "continues after its path"),
        ("http://here/#f", "continues after its path"),
    ],
)
def test_an_address_that_cannot_be_is_refused(server, why):
    with pytest.raises(BadArgument, match="; give http://HOST:PORT or https://HOST") as refused:
        connect(server)
    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


def test_an_address_may_have_a_path_that_a_proxy_takes_away():
    with connect("https://here/lab") as client:
        assert str(client.build_request("GET", "/v1/federations").url) == "https://here/lab/v1/federations"


@pytest.mark.parametrize("server", ["127.0.0.1:8000", "ftp://here"])
def test_what_is_no_address_is_said_at_once(server):
    slept = []
    transport = Transport(httpx.Client(base_url=server), sleep=slept.append)
    with pytest.raises(SdkError, match="give http://HOST:PORT"):
        transport.federation("f")
    assert slept == []


# --- a hostile coordinator --------------------------------------------------------------------------------------------

MIB = 1024 * 1024


class Hostile:
    """A server that answers each call with a head and as much of a body as is taken, up to ``most`` bytes."""

    def __init__(self, status="200 OK", head="", part=b"x" * 65536, most=80 * MIB, whole=None):
        self.head = f"HTTP/1.1 {status}\r\nConnection: close\r\n{head}\r\n".encode()
        self.part, self.most, self.whole = part, most, whole
        self.asked, self.sent = [], 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += connection.recv(65536)
                length = re.search(rb"content-length: (\d+)", asked, re.IGNORECASE)
                while length and len(asked.partition(b"\r\n\r\n")[2]) < int(length[1]):
                    asked += connection.recv(65536)  # what is not read when it hangs up resets the connection
                self.asked.append(asked.decode())
                try:
                    connection.sendall(self.head + (self.whole or b""))
                    while self.whole is None and self.sent < self.most:
                        connection.sendall(self.part)
                        self.sent += len(self.part)
                except OSError:
                    pass  # it has hung up

    def close(self):
        self._socket.close()


@pytest.fixture
def hostile():
    with ExitStack() as stack:

        def start(*arguments, **named):
            server = Hostile(*arguments, **named)
            stack.callback(server.close)
            return server

        yield start


def peak_of(call):
    """Return the most bytes that Python holds during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


CALLS = {
    "message": (lambda transport: transport.federation("f"), LARGEST_ANSWER),
    "manifest": (lambda transport: transport.manifest("f"), MAX_MANIFEST),
    "graph": (lambda transport: transport.graph("f", "step"), MAX_GRAPH),
    "list": (lambda transport: transport.devices("f"), LARGEST_LIST),
    "work": (lambda transport: transport.assignment("f", 0, None), LARGEST_ANSWER),
    "heartbeat": (lambda transport: transport.heartbeat("a"), LARGEST_ANSWER),
    "readiness": (lambda transport: transport.trouble(), LARGEST_ANSWER),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_answer_is_read_beyond_what_its_kind_can_have(hostile, name):
    call, most = CALLS[name]
    server = hostile()
    with connect(server.address) as client:
        transport = Transport(client, patience_seconds=0)
        with suppress(NoCoordinator):
            call(transport)
        assert most < transport.traffic.down <= most + 2 * 65536
    assert server.sent < server.most


def test_of_a_refusal_no_more_is_read_than_can_be_shown(hostile):
    server = hostile("404 Not Found", "Content-Type: application/problem+json\r\n")
    with connect(server.address) as client:
        transport = Transport(client, patience_seconds=0)
        with pytest.raises(Refused):
            transport.change_device("d", CHANGE)
        assert transport.traffic.down <= LARGEST_REFUSAL + 2 * 65536


def test_an_encoded_answer_is_not_asked_for_and_not_decoded(hostile):
    bomb = gzip.compress(bytes(64 * MIB))
    assert len(bomb) < MIB / 10
    for head in ("Content-Encoding: gzip", "Content-Encoding: identity, gzip", "Content-Encoding: br"):
        server = hostile(head=f"{head}\r\nContent-Length: {len(bomb)}\r\n", whole=bomb)
        with connect(server.address) as client:
            transport = Transport(client, patience_seconds=0, sleep=lambda seconds: None)

            def call(transport=transport):
                with pytest.raises(NoCoordinator, match="its answer is encoded"):
                    transport.graph("f", "skeleton")
                with pytest.raises((NoCoordinator, Unreachable)):
                    transport.payload("a", PAYLOAD)

            assert peak_of(call) < 8 * MIB
        assert "accept-encoding: identity" in server.asked[0].lower()


def test_no_redirect_is_followed_and_no_cookie_is_kept(hostile):
    elsewhere = hostile("204 No Content", whole=b"")
    there = f"Location: {elsewhere.address}/v1/devices/d\r\nSet-Cookie: a={'b' * 1000}; Path=/\r\n"
    server = hostile("307 Temporary Redirect", there, whole=b"")
    with connect(server.address) as client:
        client.follow_redirects = True  # as a caller's own client may
        transport = Transport(client, patience_seconds=0)
        transport.token = "secret"
        for _ in range(2):
            with pytest.raises(NoCoordinator):
                transport.change_device("d", CHANGE)
        assert len(client.cookies) == 0
    assert elsewhere.asked == []
    assert "authorization: bearer secret" in server.asked[1].lower()
    assert "cookie" not in server.asked[1].lower()


def test_a_pause_that_is_asked_for_has_an_end():
    for asked in ("99999", "901", "999999999"):
        network = Network(problem(503, **{"Retry-After": asked}), fine)
        network.transport.change_device("1", CHANGE)
        assert LONGEST_PAUSE <= network.slept[0] <= 1.25 * LONGEST_PAUSE
        network = Network(httpx.Response(204, headers={"Retry-After": asked}))
        assert network.transport.assignment("f", 0, None) == (None, LONGEST_PAUSE)


@pytest.mark.parametrize(
    "call", [lambda transport: transport.graph("f", "skeleton"), lambda t: t.payload("a", PAYLOAD)]
)
def test_a_body_that_drips_counts_as_broken(call):
    now = [0.0]

    class Dripping(httpx.SyncByteStream):
        given = 0

        def __iter__(self):
            while self.given < 1000:
                now[0] += 20  # each well within the time-out of a read
                Dripping.given += 1
                yield b"x"

    network = Network(
        lambda request: httpx.Response(200, stream=Dripping(), headers={"ETag": ETAG}),
        patience_seconds=0,
        clock=lambda: now[0],
    )
    with pytest.raises(Unreachable, match="bytes arrived in 80 s"):
        call(network.transport)
    assert Dripping.given <= 4


@pytest.mark.parametrize("wrong", [b"{}", b"[" * 100_000, b'{"assignment_id": 1}', b"\xff", b"null"])
def test_an_answer_that_cannot_be_read_is_asked_for_again_once_a_coordinator_is_known(wrong):
    odd = httpx.Response(200, content=wrong)
    with pytest.raises(NoCoordinator):
        Network(odd).transport.assignment("f", 0, None)
    network = Network(fine(), odd, odd, httpx.Response(204))
    network.transport.change_device("d", CHANGE)
    assert network.transport.assignment("f", 0, None) == (None, 1.0)
    assert len(network.slept) == 2


def test_no_code_for_a_terminal_comes_through_a_refusal():
    network = Network(typed("NotFound", 404, "gone\x1b[2J\r\n\x9bevil " + "x" * 10_000))
    with pytest.raises(Refused) as refused:
        network.transport.change_device("d", CHANGE)
    assert refused.value.detail.isprintable()
    assert len(refused.value.detail) <= 1000


@pytest.mark.parametrize(
    ("server", "warned"),
    [
        ("http://coordinator.example:8000", 1),
        ("http://192.168.1.7:8000", 1),
        ("http://127.0.0.1:8000", 0),
        ("http://localhost:8000", 0),
        ("http://[::1]:8000", 0),
        ("https://coordinator.example", 0),
    ],
)
def test_a_token_over_plain_http_is_warned_of_once(server, warned, monkeypatch, caplog):
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda transport, request: httpx.Response(204))
    with connect(server) as client:
        transport = Transport(client)
        with caplog.at_level(logging.WARNING):
            transport.change_device("d", CHANGE)
            assert caplog.records == [], "nothing secret was sent"
            transport.token = "secret"
            for _ in range(3):
                transport.change_device("d", CHANGE)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warned
    assert all("use https://" in text and "--ca FILE" in text and "secret" not in text for text in said)
