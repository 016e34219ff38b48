"""A page and a hostile coordinator: it reads no more than it should, calls nobody else, and goes on when all is well.

The page's files come from a server that passes calls on to a real coordinator, unless a ``Fault`` answers in its place.
The page waits shorter than usual (``HURRIED``).
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_sdk.device.answers import REMEDIES
from edge_sdk.publish import publish
from edge_sdk.publishing.signing import Publisher
from edge_sdk.tasks.digits import load_images
from sparrow.coordinator.web import runtime
from sparrow.protocol.messages import ASSIGNMENT_TYPE
from sparrow.protocol.publication import Terms
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.signatures import Published
from sparrow.protocol.wire import WIRE, WIRE_HEADER

from ..system import browsers
from ..system.browsers import PageDevice
from ..system.conftest import OF_COORDINATORS, Child, Coordinator, Forked, Nursery, wait_until
from .conftest import STATIC, Files

pytestmark = pytest.mark.integration
browser = browsers.browser

MIB = 1024 * 1024
CHUNK = 2 * MIB
"""Bytes that a browser may hand over at once, beyond the limit that they break."""
ENOUGH = 64 * MIB
"""Bytes of a body without end at which the page should have hung up long ago."""
NAME = "lab"
HURRIED = {
    "transport.js": {
        "FIRST_WAIT = 0.5, LONGEST_WAIT = 30,": "FIRST_WAIT = 0.05, LONGEST_WAIT = 0.5,",
        "TIMEOUT = 30, SLOW_SECONDS = 60,": "TIMEOUT = 1, SLOW_SECONDS = 1,",
    },
    "session.js": {"FIRST_REST = 5,": "FIRST_REST = 0.1,"},
}


Answer = Callable[["Handler"], bool]
"""Answers a call, and returns whether it did anything wrong."""


class Handler(Files):
    """Answers one call, and closes the connection."""

    server: Between

    def do_GET(self) -> None:
        if self.path == "/":
            super().do_GET()
        elif self.path.startswith("/web/") and "runtime" not in self.path:
            self.give_file(self.path.removeprefix("/web/"))
        else:
            self.pass_on()

    def pass_on(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path))
        with suppress(OSError):  # it has hung up
            fault = self.server.fault
            if fault is None or not fault.fits(self.command, self.path):
                self.give(*self.forward())
            elif fault.answer(self):
                fault.met.append(len(self.server.asked))

    do_POST = do_PUT = do_PATCH = do_DELETE = pass_on  # noqa: N815

    def give_file(self, name: str) -> None:
        text = (STATIC / name).read_text()
        for old, new in HURRIED.get(name, {}).items():
            assert text.count(old) == 1, f"{name} has no {old} any more"
            text = text.replace(old, new)
        self.give(200, {"Content-Type": self.guess_type(name)}, text.encode())

    def forward(self) -> tuple[int, dict[str, str], bytes]:
        """The coordinator's answer. Work comes when it is asked for, not with the answer to an update."""
        left_out = {"host", "connection", *(["accept"] if self.command == "PUT" else [])}
        headers = {name: text for name, text in self.headers.items() if name.lower() not in left_out}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        connection.request(self.command, self.path, self.body, headers)
        answer = connection.getresponse()
        kept = {"content-type", "etag", "retry-after", "content-encoding", "content-range"}
        given = {name: text for name, text in answer.getheaders() if name.lower() in kept}
        body = answer.read()
        connection.close()
        return answer.status, given, body

    def give(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        """Answer. length: what is announced instead of the body's own."""
        self.begin(status, {**headers, **({} if status == 204 else {"Content-Length": str(length or len(body))})})
        self.wfile.write(body)

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()


@dataclass
class Fault:
    """What is wrong while it lasts: calls of ``method`` whose path has ``path`` in it get ``answer``.

    Both are regular expressions. ``met``: the calls that were answered wrongly, as numbers of all calls.
    """

    method: str
    path: str
    answer: Answer
    met: list[int] = field(default_factory=list)

    def fits(self, method: str, path: str) -> bool:
        return re.fullmatch(self.method, method) is not None and re.search(self.path, path) is not None


class Between(ThreadingHTTPServer):
    """Serves the page's files and passes calls on to ``port``. ``asked``: the calls so far; ``sent``: bytes of bodies
    without end."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = port
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str]] = []
        self.fault: Fault | None = None
        self.sent = 0
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing: a browser hangs up whenever it likes."""


# --- what is wrong -----------------------------------------------------------------------------------------------


def always(status: int, body: bytes, **headers: str) -> Answer:
    """The same answer to every call."""

    def answer(handler: Handler) -> bool:
        handler.give(status, {name.replace("_", "-"): text for name, text in headers.items()}, body)
        return True

    return answer


def endless(status: int = 200, **headers: str) -> Answer:
    """A body that goes on for as long as it is taken, up to ``ENOUGH``."""

    def answer(handler: Handler) -> bool:
        handler.begin(status, {name.replace("_", "-"): text for name, text in headers.items()})
        with suppress(OSError):
            while handler.server.sent < ENOUGH:
                handler.wfile.write(bytes(65536))
                handler.server.sent += 65536
        return True

    return answer


def dripping(handler: Handler) -> bool:
    """A body of which a byte comes now and then, as long as it is taken: each soon enough for a connection."""
    status, headers, body = handler.forward()
    if status == 204:
        handler.give(status, headers, body)
        return False
    handler.begin(status, {**headers, "Content-Length": str(len(body) + 1000)})
    with suppress(OSError):
        for _ in range(1000):
            handler.wfile.write(b" ")
            time.sleep(0.05)  # of the server, which nobody waits for
    return True


def silent(handler: Handler) -> bool:
    """No answer at all, until it hangs up."""
    handler.connection.settimeout(20)
    with suppress(OSError):
        handler.connection.recv(1)
    return True


def broken_off(handler: Handler) -> bool:
    """Half of a body."""
    status, headers, body = handler.forward()
    handler.give(status, headers, body[: len(body) // 2], length=len(body))
    return status != 204


def longer(handler: Handler) -> bool:
    """More than there is of it."""
    status, headers, body = handler.forward()
    handler.give(status, headers, body + b"x" * 1000)
    return True


def damaged(handler: Handler) -> bool:
    """The last byte is another one."""
    status, headers, body = handler.forward()
    if not body:
        handler.give(status, headers, body)
        return False
    handler.give(status, headers, body[:-1] + bytes([body[-1] ^ 1]))
    return True


def changed(change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> Answer:
    """Another message, or payload, than the coordinator gives."""

    def answer(handler: Handler) -> bool:
        status, headers, body = handler.forward()
        if not body or status >= 300:
            handler.give(status, headers, body)
            return False
        line, newline, payload = body.partition(b"\n")
        message, payload = change(json.loads(line), payload)
        handler.give(status, headers, json.dumps(message).encode() + newline + payload)
        return True

    return answer


def said(*way: str, value: Any) -> Answer:
    """A message with something else at a place."""

    def change(message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        parent = message
        for key in way[:-1]:
            parent = parent[key]
        parent[way[-1]] = value
        return message, payload

    return changed(change)


def problem(kind: str, status: int, **headers: str) -> Answer:
    body = json.dumps({"type": f"urn:sparrow:problem:{kind}", "detail": "a test"}).encode()
    return always(status, body, Content_Type="application/problem+json", **headers)


# --- its calls alone ---------------------------------------------------------------------------------------------

DIGEST = "ab" * 32
SETTINGS = FederationSettings().model_dump(mode="json")
WORK = {
    "assignment_id": "a", "kind": "train", "round": 1, "deadline_seconds": 9.5, "settings": SETTINGS,
    "payload": {"bytes": 9, "sha256": DIGEST}, "work": {"key": "0123456789abcdef" * 2, "ratio": 0.5},
    "plan": {}, "manifest_digest": DIGEST,
}  # fmt: skip
FEDERATION = {
    "uid": "u", "name": NAME, "method": "fedspu", "task": "digits", "device_kinds": ["page"], "settings": SETTINGS,
    "manifest_digest": DIGEST,
}  # fmt: skip
CALLS = {
    "federation": ("federation('lab')", MIB),
    "manifest": ("file('lab', 'manifest', 2 ** 24)", 16 * MIB),
    "a publication": ("publication('lab')", 40 * MIB),
    "step": ("step('lab', 0.5, 2 ** 24)", 16 * MIB),
    "values": ("values('lab', 'first', 5000)", 5000),
    "enrolling": ("enrol('lab', { name: 'pi' })", MIB),
    "a change": ("changeDevice('d', { budget: 1 })", MIB),
    "a new token": ("newToken('d', 'k')", MIB),
    "work": ("assignment('lab', 0, null)", MIB),
    "a payload": ("payload('a', { bytes: 70_000, sha256: '00' })", 70_000),
    "an update": ("update('a', new Uint8Array(10), false, null)", MIB),
    "a large update": ("update('a', new Uint8Array(2 ** 21), false, null)", MIB),
    "a heartbeat": ("heartbeat('a')", MIB),
    "handing back": ("handBack('a', 'tired')", MIB),
}
"""Name -> a call of the page's ``Transport``, and the most bytes of its answer that may be read."""

CALLED = """async ([call, waits]) => {
  const { Transport } = await import("/web/transport.js");
  const met = [];
  const transport = new Transport((reason, seconds) => {
    met.push([reason, seconds]);
    if (met.length === waits) setTimeout(() => transport.interrupt());
  });
  transport.token = "secret";
  let outcome = "answered";
  try { const found = await new Function("transport", `return transport.${call}`)(transport); outcome = found ?? null; }
  catch (error) { outcome = `${error.constructor.name}: ${error.message}`; }
  return { outcome: typeof outcome === "object" ? "answered" : String(outcome), met, ...transport.traffic };
}"""


@pytest.fixture(scope="module")
def alone(browser: Any) -> Iterator[tuple[Between, Callable[..., SimpleNamespace]]]:
    """A server that only a fault answers for, and a way to make a call from a page of it.

    ``call("federation", waits=2)`` is interrupted at its second wait.
    """
    server = Between()
    context = browser.new_context(bypass_csp=True)  # so that calls can be given as text
    page = context.new_page()
    page.goto(server.url)

    def call(name: str, *, waits: int = 1) -> SimpleNamespace:
        server.sent = 0
        return SimpleNamespace(**page.evaluate(CALLED, [CALLS[name][0] if name in CALLS else name, waits]))

    yield server, call
    context.close()
    server.close()


def wrong(server: Between, answer: Answer, method: str = ".*", path: str = "/v1/") -> Fault:
    server.fault = Fault(method, path, answer)
    return server.fault


@pytest.mark.parametrize("name", CALLS)
def test_no_answer_is_read_beyond_what_its_kind_can_have(alone, name):
    server, call = alone
    wrong(server, endless())
    found = call(name)
    most = CALLS[name][1]
    assert most < found.down <= most + CHUNK
    assert server.sent < ENOUGH, "it hung up"
    if name == "a heartbeat":
        assert found.outcome == "true", "nothing depends on it"
    else:
        assert found.outcome.startswith("Stopped")
        assert found.met[0][0] in (f"the answer is longer than {most} bytes", "the answer is longer than announced")


@pytest.mark.parametrize("name", ["federation", "manifest", "a payload", "a large update"])
def test_of_a_refusal_no_more_is_read_than_can_be_shown(alone, name):
    server, call = alone
    wrong(server, endless(404, Content_Type="application/problem+json"))
    found = call(name)
    assert 65536 < found.down <= 65536 + CHUNK
    assert found.outcome.startswith("Stopped")


def test_what_is_packed_small_is_read_up_to_its_limit(alone):
    """Browsers unpack it whatever was asked for."""
    server, call = alone
    bomb = gzip.compress(bytes(256 * MIB), 1)
    assert len(bomb) < 2 * MIB
    wrong(server, always(200, bomb, Content_Encoding="gzip"))
    found = call("federation")
    assert MIB < found.down <= MIB + CHUNK
    assert found.met[0][0] == f"the answer is longer than {MIB} bytes"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(alone, status):
    server, call = alone
    elsewhere = Between()
    try:
        for host in ("127.0.0.1", "elsewhere.test"):
            there = f"http://{host}:{elsewhere.server_port}/v1/federations/lab"
            wrong(server, always(status, b"", Location=there, Access_Control_Allow_Origin="*"))
            for name in ("federation", "an update", "a payload", "handing back"):
                assert call(name).outcome.startswith("Stopped")
        assert elsewhere.asked == []
    finally:
        elsewhere.close()


@pytest.mark.parametrize("answer", [silent, dripping], ids=["silent", "dripping"])
@pytest.mark.parametrize("name", ["federation", "a payload"])
def test_missing_and_trickling_answers_are_retried(alone, coordinator_answer, answer, name):
    server, call = alone
    server.port = coordinator_answer
    wrong(server, answer)
    begin = time.monotonic()
    found = call(name)
    assert found.met[0][0] == "the coordinator does not answer"
    assert found.down < 1000
    assert time.monotonic() - begin < 10


@pytest.fixture(scope="module")
def coordinator_answer() -> Iterator[int]:
    """The port of a coordinator that answers any call in the same way."""
    server = Between()
    server.fault = Fault(".*", "", always(200, b"{" + b" " * 2000 + b"}"))
    yield server.server_port
    server.close()


NONSENSE = (b"", b"null", b"[]", b"7", b'"text"', b"{", b"\xff", b"[" * 100_000, b"{}", b'{"a":' * 50_000, b"<html>")


@pytest.mark.parametrize("name", ["federation", "enrolling", "a new token", "work", "an update"])
def test_an_answer_that_cannot_be_read_is_asked_for_again(alone, name):
    server, call = alone
    for body in NONSENSE:
        for kind in ("application/json", ASSIGNMENT_TYPE):
            wrong(server, always(200, body, Content_Type=kind))
            found = call(name, waits=2)
            assert found.outcome.startswith("Stopped"), body
            assert len(found.met) >= 2


WRONG_WORK = {
    "assignment_id": (None, 7, "", "../x", "a" * 65, ["a"]),
    "kind": ("Train", None, ["train"], "toString"),
    "round": ("1", -1, 1.5, 1e9, None),
    "deadline_seconds": ("soon", "9", -1, 1e9, None, [9]),
    "settings": (None, [], "fedspu", {}, 7),
    "payload": (
        [],
        "x",
        7,
        {"bytes": 9, "sha256": 5},
        *({"bytes": size, "sha256": DIGEST} for size in (-1, 2**60, "9")),
    ),
    "work": ("x", [], {"key": "k", "ratio": 0.5}, *({"key": "0" * 32, "ratio": each} for each in ("0.5", 0, 2, [0.5]))),
    "plan": ([], "finished", 7),
    "manifest_digest": (7, "latest", {"a": 1}, ["ab"]),
}
WRONG_SETTINGS = {
    **dict.fromkeys(("local_epochs", "batch_size"), ("5", 0, -1, 2.5, None, 1e9, [5])),
    "local_steps": ("5", 0, 1.5, 1e9),
    **dict.fromkeys(("learning_rate", "momentum", "weight_decay", "silence_seconds"), ("0.1", -1, 1e9, None)),
    "stop_weight": ("0.1", -1, 1.5, None),
    "logit_adjustment": ("1", -1, 11, None, [1]),
    **dict.fromkeys(("learning_rate_decay", "min_improvement"), ("0.1", -1, 2, None)),
    **dict.fromkeys(("clip", "finetune_learning_rate"), ("1", -1, 1e13, [1])),
    **dict.fromkeys(("optimizer", "precision", "early_stopping", "personal_model"), ("other", None, 7, ["sgd"])),
    **dict.fromkeys(("finetune_epochs", "min_participations"), ("1", -1, 1.5, None)),
    "patience": ("1", 0, 1.5),
    "seed": (-1, 1.5, "abc", None, "9" * 30),
    "method_settings": (None, [], "x", 7),
}


def test_work_with_wrong_types_is_asked_for_again(alone):
    server, call = alone
    right = json.dumps(WORK).encode()
    wrong(server, always(200, right, Content_Type=ASSIGNMENT_TYPE))
    assert call("work").outcome == "answered"
    cases = [{**WORK, name: value} for name, values in WRONG_WORK.items() for value in values]
    for name, values in WRONG_SETTINGS.items():
        cases += [{**WORK, "settings": {**SETTINGS, name: value}} for value in values]
    for case in cases:
        wrong(server, always(200, json.dumps(case).encode(), Content_Type=ASSIGNMENT_TYPE))
        found = call("work")
        assert found.outcome.startswith("Stopped"), case
        assert "cannot be read" in found.met[0][0]
        wrong(server, always(200, json.dumps({"new": True, "next": case}).encode(), Content_Type=ASSIGNMENT_TYPE))
        assert call("an update").outcome.startswith("Stopped"), case


def test_identities_and_federations_with_wrong_types_are_asked_for_again(alone):
    server, call = alone
    enrolled = {"device_id": "d", "token": "t", "notice": None}
    signed = {"statement": "{}", "publisher": DIGEST, "signature": DIGEST * 2}
    published = {"publication": signed, "manifest": None}
    no_publications = (None, 7, [], "x", *({**signed, key: each} for key in signed for each in (None, 7, {"a": 1})))
    for name, right, values in (
        ("federation", FEDERATION, dict.fromkeys(FEDERATION, (None, 7, {})) | {"publisher": (7, "ab", {})}),
        ("a publication", published, {"publication": no_publications, "manifest": (7, {}, [])}),
        ("enrolling", enrolled, {"device_id": (None, 7, "../x", ["d"]), "token": (None, 7, "", "a b", "é", ["t"])}),
        ("a new token", {"token": "t"}, {"token": (None, 7, "", "a\nb", {"a": 1})}),
    ):
        wrong(server, always(200, json.dumps(right).encode()))
        assert call(name).met == [], "what is right is taken"
        for key, each in values.items():
            for value in each:
                wrong(server, always(200, json.dumps({**right, key: value}).encode()))
                assert call(name).outcome.startswith("Stopped"), (key, value)


def test_a_seed_beyond_javascripts_numbers_is_kept_whole(alone):
    server, call = alone
    wrong(server, always(200, json.dumps({**FEDERATION, "settings": {**SETTINGS, "seed": 2**63 - 1}}).encode()))
    assert call("federation('lab').then(({ settings }) => settings.seed)").outcome == str(2**63 - 1)


def test_an_answer_of_another_version_ends_every_call(alone):
    server, call = alone
    assert f'const WIRE = {WIRE}, WIRE_HEADER = "{WIRE_HEADER}";' in (STATIC / "transport.js").read_text()
    for version, said in ((WIRE - 1, "newer"), (WIRE + 1, "older")):
        for status in (200, 404, 503):
            wrong(server, always(status, b"{}", Sparrow_Wire=str(version)))
            for name in ("federation", "a payload", "an update", "handing back"):
                outcome = f"OtherVersion: This page is {said} than the coordinator. Reload it."
                assert call(name).outcome == outcome
    for odd in ("", "x", "-1", "9" * 30):
        wrong(server, always(503, b"", Sparrow_Wire=odd))
        assert call("federation").outcome.startswith("Stopped")


@pytest.mark.parametrize("status", [403, 405, 411, 413, 414, 431])
def test_a_proxy_that_blocks_a_call_ends_it_with_status_and_remedy(alone, status):
    server, call = alone
    wrong(server, always(status, b"<html>blocked</html>", Content_Type="text/html"))
    for name in ("federation", "a payload", "an update", "a large update", "handing back"):
        outcome = call(name).outcome
        assert f"refuses a call with status {status}; use another network, or ask the operator to " in outcome, name
        assert outcome.endswith(REMEDIES[status])
    assert call("a heartbeat").outcome == "true"


def test_a_pause_that_is_asked_for_is_kept_and_has_an_end(alone):
    server, call = alone
    for asked, least, most in (("2", 2, 2.5), ("0", 0, 0.05), ("901", 900, 1125), ("999999999", 900, 1125)):
        for status in (429, 503):
            wrong(server, problem("TooManyRequests", status, Retry_After=asked))
            ((_, seconds),) = call("federation").met
            assert least <= seconds <= most
    for odd in ("Wed, 21 Oct 2026 07:28:00 GMT", "soon", "-5", "nan", "inf", "", "9" * 400):
        wrong(server, problem("Unavailable", 503, Retry_After=odd))
        ((_, seconds),) = call("federation").met
        assert seconds <= 0.05


# --- a device in a federation ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path, dataset = tmp_path_factory.mktemp("samples") / "some.npz", load_images()
    np.savez(path, x_train=dataset.inputs[:60], y_train=dataset.targets[:60], classes=10)
    return path


class Quick(Forked):
    """A coordinator that draws a device again as soon as it has handed its work back."""

    def _spawn(self, where: dict[str, str]) -> Child:
        return self._nursery.fork(
            "sparrow.coordinator.commands.serve",
            ["--port", str(self.port)],
            self.log,
            environment=where,
            constants={"sparrow.coordinator.rounds.dispatch.REST_SECONDS": 0.0},
        )


@dataclass
class Lab:
    """A federation without end, one page that takes part, and the server between them."""

    coordinator: Coordinator
    server: Between
    elsewhere: Between
    browser: Any
    images: Any
    page: PageDevice | None = None

    def create(self, name: str) -> None:
        self.coordinator.create(
            name, method="fedspu", rounds=100_000, cohort=1, min_devices=1, local_steps=2, evaluation_interval=0,
            early_stopping="off",
        )  # fmt: skip

    def rounds(self, name: str) -> int:
        """Return how many rounds have closed; each has an update, or was handed back."""
        return int(self.coordinator.info(name)["round"])

    def trained(self, fault: Fault) -> list[tuple[str, str]]:
        """The updates that were sent since a fault was met."""
        return [each for each in self.server.asked[fault.met[0] :] if each[0] == "PUT"]


@pytest.fixture(scope="module")
def lab(browser: Any, images: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ExitStack() as stack:
        nursery = Nursery(*OF_COORDINATORS)
        stack.callback(nursery.close)
        coordinator = Quick(nursery, tmp_path_factory.mktemp("lab"))
        stack.callback(coordinator.close)
        coordinator.start()
        server, elsewhere = Between(coordinator.port), Between()
        stack.callback(server.close)
        stack.callback(elsewhere.close)
        found = Lab(coordinator, server, elsewhere, browser, images)
        found.create(NAME)
        context = browser.new_context()
        stack.callback(context.close)
        found.page = PageDevice(context, server.url, NAME)
        found.page.take_part(images, "page", budget=0.5)
        yield found
        found.page.send(do="leave")
        found.page.wait_for("state.phase === 'left'")
        assert all(record["updates"] <= 1 for record in coordinator.rounds(NAME)), "each update counted once"
        assert elsewhere.asked == [], "nobody else was called"


def without_along(answer: Answer) -> Answer:
    """No payload that came along with its work is right, and downloads of it get this answer."""
    return lambda handler: answer(handler) if handler.path.endswith("/payload") else damaged(handler)


def with_nan(sign: Callable[..., bytes]) -> Answer:
    """A payload of the digest that is announced, sound but for its first value."""

    def change(message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        (length,) = struct.unpack("<Q", payload[:8])
        header, data = json.loads(payload[8 : 8 + length]), payload[8 + length :]
        payload = sign(header, struct.pack("<f", float("nan")) + data[4:])
        return with_payload(message, payload)

    return changed(change)


def with_payload(message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    announced = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    return {**message, "payload": announced}, payload


def elsewhere(lab: Lab) -> Answer:
    """A redirect of the same call to another server, which would answer."""

    def answer(handler: Handler) -> bool:
        there = f"{lab.elsewhere.url}{handler.path}"
        return always(307, b"", Location=there, Access_Control_Allow_Origin="*")(handler)

    return answer


ASKING, PAYLOAD, SENDING = r"/assignment\?", r"/payload$", r"/update$"
FAULTS: dict[str, tuple[str, str, Answer | None]] = {
    "work without end": ("GET", ASKING, endless()),
    "work that is cut off": ("GET", ASKING, broken_off),
    "work that drips": ("GET", ASKING, dripping),
    "work that is no JSON": ("GET", ASKING, always(200, b"{", Content_Type=ASSIGNMENT_TYPE)),
    "another server's page": ("GET", ASKING, always(200, b"<html>log in</html>", Content_Type="text/html")),
    "a page that is not there": ("GET", ASKING, always(404, b"<html>not found</html>", Content_Type="text/html")),
    "errors": ("GET|PUT|DELETE", "/v1/", problem("InternalError", 500)),
    "too many requests": ("GET", ASKING, problem("TooManyRequests", 429, Retry_After="1")),
    "work of another kind": ("GET", ASKING, said("kind", value="steal")),
    "half an epoch": ("GET", ASKING, said("settings", "local_steps", value=1.5)),
    "no settings of the method": ("GET", ASKING, said("settings", "method_settings", value=None)),
    "a work without neurons": ("GET", ASKING, said("work", value={"key": "0" * 32, "ratio": "0.5"})),
    "a payload larger than the model": ("GET", ASKING, said("payload", "bytes", value=2**40)),
    "a payload of another digest": ("GET", f"{ASKING}|{PAYLOAD}", damaged),
    "a payload that is none": ("GET", ASKING, changed(lambda message, _: with_payload(message, b"x" * 5000))),
    "a payload with NaN": ("GET", ASKING, None),
    "a payload without end": ("GET", f"{ASKING}|{PAYLOAD}", without_along(endless())),
    "a payload that is longer": ("GET", f"{ASKING}|{PAYLOAD}", without_along(longer)),
    "a payload that is cut off": ("GET", f"{ASKING}|{PAYLOAD}", without_along(broken_off)),
    "another model": ("GET", ASKING, said("manifest_digest", value=DIGEST)),
    "an answer to the update that is none": ("PUT", SENDING, always(200, b"null")),
    "an answer to the update that drips": ("PUT", SENDING, dripping),
}
"""What goes wrong -> the calls whose answers are wrong, and how. Of a wrong GET nothing can be trained on."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_device_outlives_its_coordinators_faults(lab, sign, name):
    """It neither ends nor trains on what is wrong, and goes on as soon as all is well."""
    method, path, answer = FAULTS[name]
    go_on(lab, wrong(lab.server, answer or with_nan(sign), method, path))


def test_a_page_that_is_older_than_its_coordinator_stops(lab):
    wrong(lab.server, always(204, b"", Sparrow_Wire=str(WIRE + 1)))
    lab.page.wait_for("state.phase === 'failed'")
    assert lab.page.state["detail"] == "This page is older than the coordinator. Reload it."
    lab.server.fault = None
    rounds = lab.page.state["rounds"]
    lab.page.send(do="join", name="page", budget=0.5)
    lab.page.wait_for(f"state.rounds > {rounds}")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", ASKING, 403), ("PUT", SENDING, 405)])
def test_a_page_behind_a_proxy_that_blocks_stops_and_can_continue(lab, method, path, status):
    wrong(lab.server, always(status, b"<html>blocked</html>", Content_Type="text/html"), method, path)
    lab.page.wait_for("state.phase === 'failed'")
    assert f"refuses a call with status {status}; use another network" in lab.page.state["detail"]
    lab.server.fault = None
    rounds = lab.page.state["rounds"]
    lab.page.send(do="join", name="page", budget=0.5)
    lab.page.wait_for(f"state.rounds > {rounds}")


def test_work_that_cannot_be_used_is_handed_back(lab):
    """With the reason, so that nobody waits for it."""
    since = lab.coordinator.log_size()
    fault = wrong(lab.server, damaged, "GET", f"{ASKING}|{PAYLOAD}")
    lab.coordinator.wait_for_log("returned train: a download never matched its digest", since=since)
    go_on(lab, fault)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_no_call_of_a_device_goes_elsewhere(lab, method):
    there = elsewhere(lab)

    def answer(handler: Handler) -> bool:
        if handler.command == method:
            return there(handler)
        return handler.command == "GET" and damaged(handler) and False  # so that work is handed back

    paths = {"GET": ASKING, "PUT": SENDING, "DELETE": f"{ASKING}|{PAYLOAD}|/assignments/"}
    go_on(lab, wrong(lab.server, answer, "GET|DELETE" if method == "DELETE" else method, paths[method]))
    assert lab.elsewhere.asked == []


def meet_twice(lab: Lab, fault: Fault) -> None:
    lab.server.sent = 0
    wait_until(lambda: len(fault.met) >= 2, "the page to meet the fault twice", timeout=40)


def go_on(lab: Lab, fault: Fault) -> None:
    """Wait until the page has met a fault, end it, and see the page go on."""
    meet_twice(lab, fault)
    state, sent, trained = lab.page.state, lab.server.sent, lab.trained(fault)
    lab.server.fault = None
    assert state["phase"] not in ("failed", "finished", "left"), state["detail"]
    assert sent < ENOUGH
    if fault.method == "GET":
        assert trained == []
    before = lab.rounds(NAME)
    wait_until(lambda: lab.rounds(NAME) > before + 1, "the page to go on", timeout=40)
    assert lab.page.said == []


OPENING: dict[str, tuple[str, str, Answer]] = {
    "a federation that cannot be read": ("GET", "$", always(200, b'{"name": 7}')),
    "a manifest of another digest": ("GET", "/manifest$", damaged),
    "a manifest without end": ("GET", "/manifest$", endless()),
    "an enrolment that cannot be read": ("POST", "/devices$", always(201, b"{}", Content_Type="application/json")),
    "a step of another digest": ("GET", r"/fast-step\.onnx", damaged),
    "a step without end": ("GET", r"/fast-step\.onnx", endless()),
    "an evaluation of another digest": ("GET", r"/evaluation\.onnx$", damaged),
}
"""What goes wrong while a page opens, enrols and trains for the first time -> calls below its federation's address."""


@pytest.mark.parametrize("name", OPENING)
def test_a_page_that_opens_outlives_its_coordinators_faults(lab, browser, name):
    method, path, answer = OPENING[name]
    federation = f"opening-{[*OPENING].index(name)}"
    lab.create(federation)
    fault = wrong(lab.server, answer, method, f"/federations/{federation}{path}")
    context = browser.new_context()
    try:
        page = PageDevice(context, lab.server.url, federation)
        opens = "onnx" not in path and method == "GET"
        if not opens:
            page.take_part(lab.images, "page", budget=0.5)
        meet_twice(lab, fault)
        page.wait_for("state.phase !== 'failed'")
        lab.server.fault = None
        if opens:
            page.take_part(lab.images, "page", budget=0.5)
        page.wait_for("state.rounds > 1")
        assert page.said == []
        page.send(do="leave")
        page.wait_for("state.phase === 'left'")
    finally:
        lab.server.fault = None
        context.close()


# --- a signed federation -----------------------------------------------------------------------------------------

SIGNED = "signed"
needs_signatures = pytest.mark.skipif(
    not runtime.SIGNATURES.is_there(), reason="nothing that checks signatures for pages here: run sparrow web"
)


@pytest.fixture(scope="module")
def signed_page(lab: Lab, browser: Any) -> Iterator[PageDevice]:
    """A page that takes part in a signed federation, and has trained in it."""
    settings = FederationSettings(
        method="fedspu", rounds=100_000, cohort=1, min_devices=1, local_steps=2, evaluation_interval=0,
        early_stopping="off",
    )  # fmt: skip
    publish(lab.coordinator.url, SIGNED, "digits", **settings.model_dump(exclude_defaults=True))
    context = browser.new_context()
    page = PageDevice(context, lab.server.url, SIGNED)
    page.take_part(lab.images, "page", budget=0.5)
    page.wait_for("state.rounds > 0")
    yield page
    lab.server.fault = None
    context.close()


@needs_signatures
def test_a_round_outside_of_the_signed_ranges_is_handed_back(lab, signed_page):
    page = signed_page
    assert page.state["signed"] == f"signed by {Publisher.load().fingerprint}"
    since = lab.coordinator.log_size()
    why = "the publisher of the model did not sign this: local_steps is 1, allowed is local_steps>=2"
    wrong(lab.server, said("settings", "local_steps", value=1), "GET", f"/{SIGNED}/assignment")
    lab.coordinator.wait_for_log("returned train: its work is outside the ranges that the publisher", since=since)
    page.wait_for(f"state.detail.includes({json.dumps(why)})")
    rounds = page.state["rounds"]
    lab.server.fault = None
    page.wait_for(f"state.rounds > {rounds}")


@needs_signatures
def test_another_publisher_is_refused_when_the_page_is_opened_again(lab, signed_page):
    path = f"/v1/federations/{SIGNED}"
    published = Published.model_validate_json(lab.coordinator.get(f"{path}/publication").content)
    other = Publisher.new()
    signed = other.sign(Terms.of(published.publication))

    def another(handler: Handler) -> bool:
        status, headers, body = handler.forward()
        given = {name: text for name, text in headers.items() if name.lower() != "content-encoding"}
        if handler.path == path:
            plain = body if len(given) == len(headers) else gzip.decompress(body)
            changed = {**json.loads(plain), "publisher": other.public}
        else:
            changed = {"publication": signed.model_dump(), "manifest": published.manifest}
        handler.give(status, given, json.dumps(changed).encode())
        return True

    context = signed_page.page.context
    signed_page.page.close()
    wrong(lab.server, another, "GET", f"{path}(/publication)?$")
    page = PageDevice(context, lab.server.url, SIGNED)
    page.wait_for("state.phase === 'failed'")
    assert f"signed by another publisher: {other.fingerprint} instead of" in page.state["detail"]
    assert page.state["federation"] is None, "it takes no part"
    lab.server.fault = None
    page.send(do="open", federation=SIGNED, token=None)
    page.wait_for("state.rounds > 0")
    assert page.state["signed"] == f"signed by {published.publication.fingerprint}"
