"""``python -m benchmarks.coordinator.attacks``: the effect of attacks on other callers.

The attackers are callers without a token, an enrolled device, and the publisher of a model with the admin token.

Each attack has a new coordinator with the large model of the comparison and one honest device. It lasts ``SECONDS`` and
comes from this machine's network address, to which the limits apply. The honest device and a monitor of ``/healthz``
call from loopback. Two figures have bars:

    memory      the coordinator's peak of resident memory above that before the attack (Linux's VmHWM, reset before)
    delay       the longest call of the others; the least of ``--turns``, as other load on the machine only adds to it

It prints a table and exits with 1 if a figure is beyond its bar. ``--only WORD`` runs the attacks whose name has it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tqdm import tqdm

from benchmarks.coordinator.contest import Row
from benchmarks.coordinator.models import LARGE, task_of
from benchmarks.coordinator.processes import Side
from benchmarks.markdown import markdown_table
from edge_sdk.device.transport import Transport
from edge_sdk.publish import PublishOptions, publish
from sparrow.bench import server as ours
from sparrow.bench.server import free_port, machine
from sparrow.protocol import bundle, checkpoint
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import GraphName, Tensors
from sparrow.protocol.messages import CreateFederation, Enrol
from sparrow.protocol.settings import FederationSettings
from sparrow.transport import connect

MEMORY_BAR = 64e6
"""Bytes."""
DELAY_BAR = 0.2
"""Seconds."""
SECONDS = 6.0
FEDERATION = "attacked"
TOKENS = {"COORDINATOR_ADMIN_TOKEN": secrets.token_hex(32), "COORDINATOR_OBSERVER_TOKEN": secrets.token_hex(32)}
"""Enrolment stays open, or callers without a token could do less."""
TIMEOUT = 2.0
MB = 1e6


@dataclass(frozen=True)
class Target:
    """A coordinator under attack: its address for attackers, an enrolled device's token, and its open assignment.

    update: the bytes of that device's whole update."""

    host: str
    port: int
    token: str
    assignment: str
    update: int

    def head(self, method: str, path: str, *, device: bool = False, **headers: str) -> bytes:
        """Return the head of a request, of the device or of a caller without a token."""
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += [f"Authorization: Bearer {self.token}"] if device else []
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    @property
    def path(self) -> str:
        """Return the path of the device's update."""
        return f"/v1/assignments/{self.assignment}/update"


Attack = Callable[[Target, float], None]
"""Attacks until a moment of ``time.monotonic``."""


def keep(connections: int, of: Callable[[Target, int], Iterator[bytes]]) -> Attack:
    """Return an attack of ``count`` connections that send their data and stay open without reading."""

    def attack(target: Target, until: float) -> None:
        def one(number: int) -> None:
            with _connected(target) as connection:
                for piece in of(target, number):
                    connection.sendall(piece)
                    if time.monotonic() > until:
                        return
                time.sleep(max(0.0, until - time.monotonic()))

        with ThreadPoolExecutor(connections) as pool:
            list(pool.map(one, range(connections)))

    return attack


def repeat(connections: int, of: Callable[[Target], bytes], *, answers: bool = True) -> Attack:
    """Return an attack of connections that repeat a call. answers: whether they read the answers."""

    def attack(target: Target, until: float) -> None:
        def one(_: int) -> None:
            while time.monotonic() < until:
                with _connected(target) as connection:
                    while time.monotonic() < until:
                        connection.sendall(of(target))
                        if not answers:
                            break
                        if not connection.recv(65536):
                            break

        with ThreadPoolExecutor(connections) as pool:
            list(pool.map(one, range(connections)))

    return attack


@contextlib.contextmanager
def _connected(target: Target) -> Iterator[socket.socket]:
    """Connect from the machine's network address. Broken connections are expected: the coordinator ends attacks."""
    with contextlib.suppress(OSError), socket.socket() as connection:
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((target.host, target.port))
        yield connection
    time.sleep(0.001)


def _endless(piece: bytes, first: bytes) -> Iterator[bytes]:
    yield first
    yield from itertools.repeat(piece)


def _enrolment(target: Target, body: bytes, **headers: str) -> bytes:
    path = f"/v1/federations/{FEDERATION}/devices"
    named = {"Content_Type": "application/json", "Content_Length": str(len(body)), **headers}
    return target.head("POST", path, device=False, **named) + body


def _valid_enrolment(target: Target) -> bytes:
    named = {"name": secrets.token_hex(8), "enrolment_key": secrets.token_hex(32), "num_examples": 100}
    return _enrolment(target, json.dumps(named).encode())


def _upload(target: Target, *, ranged: bool, short: int) -> Iterator[bytes]:
    size = target.update
    more = {"Content_Type": bundle.MEDIA_TYPE, "Content_Length": str(size)}
    if ranged:
        more |= {"Content_Range": f"bytes 0-{size - 1}/{size}", "Sparrow_Update_SHA256": secrets.token_hex(32)}
    yield target.head("PUT", target.path, device=True, **more)
    left = size - short
    while left:
        piece = bytes(min(left, 256 * 1024))
        yield piece
        left -= len(piece)


def _get(path: str, *, device: bool = True, **headers: str) -> Callable[[Target], bytes]:
    return lambda target: target.head("GET", path.format(target.assignment), device=device, **headers)


def _once(of: Callable[[Target], bytes]) -> Callable[[Target, int], Iterator[bytes]]:
    return lambda target, number: iter([of(target)])


def _publication(step: bytes) -> Callable[[Target], bytes]:
    """Return a function that publishes the digits' model under a new name, with another training step."""
    known = load_builtin("digits")
    files: dict[GraphName, bytes] = {**known.graphs, "step": step}
    described = known.manifest.with_graphs(files).text.encode()
    parts: dict[str, bytes] = {"manifest": described, **{str(name): file for name, file in files.items()}}
    return _of_parts({f"sparrow.{name}": np.frombuffer(part, np.uint8) for name, part in parts.items()})


def _manifest(**fields: object) -> Callable[[Target], bytes]:
    """Return a function that publishes the digits' model with other fields in its manifest."""
    described: dict[str, object] = json.loads(load_builtin("digits").manifest.text)
    said = {**described, **fields}
    return _of_parts({"sparrow.manifest": np.frombuffer(json.dumps(said).encode(), np.uint8)})


def _of_parts(parts: Tensors) -> Callable[[Target], bytes]:
    def of(target: Target) -> bytes:
        name = f"a{secrets.token_hex(8)}"
        body = checkpoint.save(parts, CreateFederation(name=name, settings=FederationSettings()).model_dump_json())
        return _posted(target, "/v1/federations", body)

    return of


def _posted(target: Target, path: str, body: bytes) -> bytes:
    admin = f"Bearer {TOKENS['COORDINATOR_ADMIN_TOKEN']}"
    size = str(len(body))
    head = target.head("POST", path, Authorization=admin, Content_Type=checkpoint.MEDIA_TYPE, Content_Length=size)
    return head + body


def _slow_step() -> bytes:
    """Return the digits' step with a pool that takes minutes for a sample."""
    step = onnx.load_from_string(load_builtin("digits").graphs["step"])
    constant = numpy_helper.from_array(np.array([1, 1, 2000, 2000]), "attack.size")
    step.graph.initializer.append(constant)
    step.graph.node.append(helper.make_node("Expand", ["loss", "attack.size"], ["attack.wide"]))
    step.graph.node.append(helper.make_node("AveragePool", ["attack.wide"], ["attack"], kernel_shape=[900, 900]))
    return bytes(step.SerializeToString())


LINE = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 100) for number in range(500))
START = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = b"POST /v1/federations/x/devices HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
WIDE = b"[" + b"[]," * 340_000 + b"[]]"
GZIP = zlib.compress(bytes(10**7), wbits=31)
"""Made once: what an attack takes of this machine's cores, the coordinator lacks."""
MANY = 300
"""Connections of an attack that holds as many as it can."""
POLL = f"/v1/federations/{FEDERATION}/assignment?wait=50"
MODEL = f"/v1/federations/{FEDERATION}/model"
FAST_STEP = f"/v1/federations/{FEDERATION}/fast-step.onnx"
TEST_FILE = checkpoint.save({"inputs": np.zeros((1, 1), np.float32), "targets": np.zeros(1, np.int64)})

ANYBODY: dict[str, Attack] = {
    "header lines without end": keep(20, lambda target, number: _endless(LINE, START)),
    "one header without end": keep(20, lambda target, number: _endless(b"y" * 65536, START + b"X: ")),
    "a URL without end": keep(20, lambda target, number: _endless(b"y" * 65536, b"GET /")),
    "trailers without end": keep(20, lambda target, number: _endless(LINE, CHUNKED + b"0\r\n")),
    "a chunk's extension without end": keep(20, lambda target, number: _endless(b"y" * 65536, CHUNKED + b"1;")),
    "heads that stop": keep(MANY, lambda target, number: iter([START])),
    "connections without a byte": keep(MANY, lambda target, number: iter([])),
    "pipelined requests": keep(MANY, lambda target, number: _endless((START + b"\r\n") * 1000, b"")),
    "bodies held a byte short": keep(MANY, lambda target, number: iter([_enrolment(target, b" " * 2**20)[:-1]])),
    "small bodies held a byte short": keep(MANY, lambda target, number: iter([_enrolment(target, b" " * 60_000)[:-1]])),
    "deep JSON": repeat(32, lambda target: _enrolment(target, b"[" * 60_000)),
    "wide JSON": repeat(32, lambda target: _enrolment(target, b"[" + b"[]," * 20_000 + b"[]]")),
    "wide JSON of a MiB": repeat(32, lambda target: _enrolment(target, WIDE)),
    "gzip": repeat(32, lambda target: _enrolment(target, GZIP, Content_Encoding="gzip")),
    "wrong tokens": repeat(
        32, lambda target: target.head("GET", POLL, Authorization=f"Bearer sparrow_device_{secrets.token_hex(20)}")
    ),
    "enrolments": repeat(32, _valid_enrolment),
    "descriptions and manifests": repeat(32, _get(f"/v1/federations/{FEDERATION}/manifest", device=False)),
    "unread manifests": keep(MANY, _once(_get(f"/v1/federations/{FEDERATION}/manifest", device=False))),
    "long queries": repeat(32, _get(f"/v1/federations/{FEDERATION}/devices?search={'y' * 7000}", device=False)),
    "steps for pages": repeat(60, _get(f"{FAST_STEP}?ratio=0.5", device=False)),
    "steps for pages of budgets that nobody has": repeat(
        60, lambda target: _get(f"{FAST_STEP}?ratio={secrets.randbelow(10**9) / 10**9}", device=False)(target)
    ),
    "calls of nothing": repeat(32, _get("/v1/nothing", device=False)),
    "calls that are not waited for": repeat(32, _get(f"/v1/federations/{FEDERATION}", device=False), answers=False),
}

DEVICE: dict[str, Attack] = {
    "updates with a range held a byte short": keep(40, lambda target, number: _upload(target, ranged=True, short=1)),
    "updates held a byte short": keep(40, lambda target, number: _upload(target, ranged=False, short=1)),
    "small updates held a byte short": keep(
        40,
        lambda target, number: iter(
            [
                target.head("PUT", target.path, device=True, Content_Type=bundle.MEDIA_TYPE, Content_Length=str(2**20)),
                bytes(2**20 - 1),
            ]
        ),
    ),
    "whole updates that are wrong": repeat(16, lambda target: b"".join(_upload(target, ranged=False, short=0))),
    "updates begun again": repeat(
        16,
        lambda target: b"".join(itertools.islice(_upload(target, ranged=True, short=1), 2)),
        answers=False,
    ),
    "long polls": keep(MANY, _once(_get(POLL))),
    "long polls for another mask": keep(
        MANY, lambda target, number: iter([_get(f"{POLL}&mask={secrets.token_hex(32)}")(target)])
    ),
    "long polls that are left": repeat(16, _get(POLL), answers=False),
    "unread payloads": keep(40, _once(_get("/v1/assignments/{}/payload"))),
    "unread models": keep(40, _once(_get(MODEL))),
    "unread ONNX files": keep(40, _once(_get(f"{MODEL}.onnx"))),
    "payloads for masks that nobody knows": repeat(
        4,
        lambda target: (
            _get(f"{POLL.replace('50', '0')}&mask={secrets.token_hex(32)}")(target)
            + _get("/v1/assignments/{}/payload")(target)
        ),
        answers=False,
    ),
    "ranges of a payload": repeat(16, _get("/v1/assignments/{}/payload", Range="bytes=5-")),
    "heartbeats": repeat(
        16, lambda target: target.head("POST", f"/v1/assignments/{target.assignment}/heartbeat", device=True)
    ),
}


ADMIN: dict[str, Attack] = {
    "steps that are no graphs": repeat(8, _publication(b"\xff" * 1000)),
    "steps of minutes": repeat(8, _publication(_slow_step())),
    "manifests of gigabytes": repeat(
        8,
        _manifest(
            tensors=[
                {"name": f"t{number}", "shape": [2**30], "policy": "personal", "trainable": True}
                for number in range(16)
            ]
        ),
    ),
    "evaluations": repeat(8, lambda target: _posted(target, f"{MODEL}/evaluation", TEST_FILE)),
}


def prepare(folder: Path) -> tuple[str, str, str, str, int]:
    """Make the data of a coordinator with an open round for two devices.

    Returns the token and assignment of the device that attacks, and of the other one, and the bytes of an update."""
    with _running(folder, "127.0.0.1") as (port, _), connect(f"http://127.0.0.1:{port}") as client:
        publish(
            f"http://127.0.0.1:{port}",
            FEDERATION,
            task_of(LARGE),
            options=PublishOptions(admin_token=TOKENS["COORDINATOR_ADMIN_TOKEN"]),
            method="fedavg",
            rounds=100,
            deadline_seconds=3600.0,
            silence_seconds=3600.0,
            cohort=2,
            min_devices=2,
        )
        found: list[str] = []
        transport = Transport(client)
        size = 0
        tokens = []
        for name in ("attacks", "works"):
            transport.token = None
            request = Enrol(name=name, enrolment_key=secrets.token_hex(32), num_examples=100)
            tokens.append(transport.enrol(FEDERATION, request).token)
        for token in tokens:
            transport.token = token
            assignment = None
            while assignment is None:
                assignment, _ = transport.assignment(FEDERATION, 10.0, None)
            assert assignment.payload is not None
            size = assignment.payload.bytes
            found += [token, assignment.assignment_id]
    return found[0], found[1], found[2], found[3], size


@contextlib.contextmanager
def _running(folder: Path, host: str) -> Iterator[tuple[int, int]]:
    """Run a coordinator with its data in this folder; yield its port and process id."""
    port = free_port()
    with Side(folder, {**ours.environment(folder), **TOKENS}) as side:
        process = side.start("coordinator", [*ours.command(port), "--no-access-log", "--host", host])
        ours.wait_until_healthy(f"http://127.0.0.1:{port}", process, folder / "coordinator.log")
        yield port, process.pid


class Others:
    """Honest callers, with the seconds of the longest call of each kind."""

    def __init__(self, port: int, token: str, assignment: str) -> None:
        self._port = port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._assignment = assignment
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.longest: dict[str, float] = {}
        self.calls = 0

    def download(self) -> None:
        """Download the files that the coordinator caches in memory, so that they do not count as an attack's."""
        for path in (f"/v1/assignments/{self._assignment}/payload", MODEL, f"{MODEL}.onnx"):
            self._of_device("GET", path)

    def call(self) -> None:
        """Make each call once."""
        self._timed("health", self._health)
        self._timed("device", lambda: self._of_device("POST", f"/v1/assignments/{self._assignment}/heartbeat"))
        self._timed("device", lambda: self._of_device("GET", POLL.replace("50", "0")))
        self.calls += 1

    def _timed(self, kind: str, call: Callable[[], None]) -> None:
        began = time.perf_counter()
        call()
        self.longest[kind] = max(self.longest.get(kind, 0.0), time.perf_counter() - began)

    def _health(self) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200

    def _of_device(self, method: str, path: str) -> None:
        try:
            self._connection.request(method, path, headers=self._headers)
            answer = self._connection.getresponse()
        except (http.client.HTTPException, OSError):
            # The server closed an idle connection meanwhile.
            self._connection.close()
            self._connection.request(method, path, headers=self._headers)
            answer = self._connection.getresponse()
        answer.read()
        assert answer.status in (200, 204), f"{path}: {answer.status}"


def measure(attack: Attack, data: Path, known: tuple[str, str, str, str, int], host: str) -> Row:
    """Attack one coordinator; return the row of its memory and of the others' delays."""
    with tempfile.TemporaryDirectory(dir=data.parent) as work:
        shutil.copytree(data, Path(work) / "data")
        with _running(Path(work) / "data", "0.0.0.0") as (port, pid):
            others = Others(port, known[2], known[3])
            others.download()
            for _ in range(20):
                others.call()
            time.sleep(0.5)
            before = _status(pid, "VmRSS")
            usual = max(others.longest.values())
            # Writing 5 resets VmHWM.
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            others.longest.clear()
            others.calls = 0
            target = Target(host, port, known[0], known[1], known[4])
            until = time.monotonic() + SECONDS
            process = multiprocessing.get_context("fork").Process(target=_alone, args=(attack, target, until))
            process.start()
            failure = ""
            try:
                while time.monotonic() < until:
                    others.call()
                    time.sleep(0.01)
            except (AssertionError, OSError, http.client.HTTPException) as error:
                failure = f"{type(error).__name__}: {error}"
            peak = _status(pid, "VmHWM")
            process.terminate()
            process.join()
    return {
        "before": before,
        "above": max(0, peak - before),
        "usual": usual,
        "health": others.longest.get("health", 60.0),
        "device": 60.0 if failure else others.longest.get("device", 60.0),
        "calls": others.calls,
        "failure": failure,
        "load": os.getloadavg()[0],
    }


def _alone(attack: Attack, target: Target, until: float) -> None:
    """Attack at low priority, so that the attacker takes no processor time from the coordinator."""
    os.nice(19)
    attack(target, until)


def _status(pid: int, field: str) -> int:
    """Return a size of ``/proc/PID/status`` in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/status has no {field}; run this on Linux")


def network_address() -> str:
    """Return this machine's address in its network. Raises SystemExit."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way, contextlib.suppress(OSError):
        # An address for documentation (RFC 5737). A UDP socket sends nothing when it connects.
        way.connect(("198.51.100.1", 9))
        found: str = way.getsockname()[0]
        return found
    for address in socket.gethostbyname_ex(socket.gethostname())[2]:
        if not address.startswith("127."):
            return address
    raise SystemExit("this machine has no address besides loopback, for which there are no limits; give --host")


def main(arguments: list[str] | None = None) -> int:
    """Run the attacks; return 1 if one of them is beyond a bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator.attacks")
    parser.add_argument("--only", default="", metavar="WORD", help="the attacks whose name has it")
    parser.add_argument("--turns", type=int, default=3, help="how often each is run (default: %(default)s)")
    parser.add_argument("--host", help="address to attack from, if not this machine's own")
    parser.add_argument("--rows", type=Path, help="a file to which a line of JSON is added for each attack")
    options = parser.parse_args(arguments)
    host = options.host or network_address()
    wanted = [
        (who, name, attack)
        for who, attacks in (("no token", ANYBODY), ("device", DEVICE), ("admin", ADMIN))
        for name, attack in attacks.items()
        if options.only in name
    ]
    lines = []
    beyond = []
    with tempfile.TemporaryDirectory() as folder, tqdm(wanted, unit="attack", disable=None) as bar:
        data = Path(folder) / "data"
        data.mkdir()
        known = prepare(data)
        for who, name, attack in bar:
            bar.set_description(name)
            turns = [measure(attack, data, known, host) for _ in range(options.turns)]
            above = max(turn["above"] for turn in turns)
            best = min(turns, key=lambda turn: max(turn["health"], turn["device"]))
            row = {**best, "who": who, "attack": name, "above": above, "machine": machine()}
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            met = above <= MEMORY_BAR and max(best["health"], best["device"]) <= DELAY_BAR
            beyond += [] if met else [name]
            figures = (f"{above / MB:.1f}", *(f"{1000 * best[each]:.0f}" for each in ("usual", "health", "device")))
            lines.append([who, name, *figures, str(best["calls"]), "yes" if met else f"NO {best['failure']}"])
            bar.write(" | ".join(lines[-1]))
    head = ["by", "attack", "MB above rest", "ms at rest", "ms /healthz", "ms device", "others' calls", "met"]
    print(f"\n{machine()}; bars: {MEMORY_BAR / MB:g} MB, {1000 * DELAY_BAR:g} ms\n\n{markdown_table(head, lines)}")
    if beyond:
        print(f"beyond a bar: {', '.join(beyond)}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
