"""What many tests share: a small model with every kind of axis, and a device's answers without a device."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

# Tests run as many at a time as there are cores, and start processes of their own: threads of each for every core
# would wait for one another longer than they work. Before torch is imported, and for the processes, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test writes into the state folder of whoever runs it: coordinators and devices keep theirs here.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="sparrow-tests-")

# Nor a publisher's key into that of their configuration.
os.environ["SPARROW_PUBLISHER_KEY"] = os.path.join(os.environ["XDG_STATE_HOME"], "publisher.key")

import hypothesis
import numpy as np
import pytest

from sparrow.protocol import bundle
from sparrow.protocol.manifest import Constant, Layer, Manifest, NeuronGroup, Segment, TensorSpec, Uniform
from sparrow.protocol.masks import NeuronDraw, count_values, draw_neurons, unpack
from sparrow.protocol.messages import Assignment, Telemetry, UpdateReport

atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# On a busy machine an example takes as long as it takes: no test fails for that.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

# A background job of a shell inherits SIGINT ignored, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test pulls the plug: what this process writes need not reach the disk before it goes on (SQLite: see `_unsynced`).
os.fsync = lambda descriptor: None


INTEGRATION = {"system", "deploy"}
"""Folders whose tests start real coordinators, devices, browsers or programs of others (make test-integration)."""
SERVERS = {"postgresql", "s3"}
"""Fixtures that start such a program."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in INTEGRATION or SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)


@pytest.fixture
def synced() -> None:
    """Let SQLite sync its files as it is told to, for tests of that."""


@pytest.fixture(autouse=True)
def _unsynced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep SQLite from waiting for the disk after every commit."""
    if "sqlalchemy" in sys.modules:
        _listen()
    if "synced" in request.fixturenames:
        SYNCS.set()
    yield
    SYNCS.clear()


# Set while SQLite syncs as it is told to.
SYNCS = threading.Event()


@cache
def _listen() -> None:
    """Listen for as long as the process runs: a thread of an earlier test may connect at any moment."""
    from sqlalchemy import Engine, event

    def unsync(connection: Any) -> None:
        if connection.dialect.name == "sqlite" and not SYNCS.is_set():
            connection.connection.dbapi_connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "engine_connect", unsync)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Chance that a test leaves to the process is the same whatever ran before it, and in whichever worker."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def compiling() -> None:
    """Let ``publish`` compile the training step of a task, which takes seconds, for tests of that."""


@pytest.fixture(autouse=True)
def _compiling_little(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish tasks without their training steps, and compile the same model once."""
    if "edge_sdk.publish" not in sys.modules or "torch" not in sys.modules:
        return
    from edge_sdk.publishing import skeleton, step

    from .compiled import once

    monkeypatch.setattr(skeleton, "make_skeleton", once(skeleton.make_skeleton))
    if "compiling" in request.fixturenames:
        monkeypatch.setattr(step, "compile_step", once(step.compile_step))
        return
    from edge_sdk.publishing.translations import CannotCompile

    def refuse(*given: Any) -> None:
        raise CannotCompile("not in this test")

    monkeypatch.setattr(step, "compile_step", refuse)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _axis(group: str, repeat: int = 1) -> tuple[Segment, ...]:
    return (Segment(group=group, repeat=repeat),)


@pytest.fixture(scope="session")
def small() -> Manifest:
    """conv(1->3), batch norm, flatten of 2x2 maps, linear(12->6), linear(6->2)."""
    one, zero = Constant(value=1), Constant(value=0)
    norm = [
        TensorSpec(name="bn.weight", shape=(3,), axes=(_axis("conv"),), init=one),
        TensorSpec(name="bn.bias", shape=(3,), axes=(_axis("conv"),), init=zero),
        TensorSpec(name="bn.running_mean", shape=(3,), axes=(_axis("conv"),), init=zero, trainable=False),
        TensorSpec(name="bn.running_var", shape=(3,), axes=(_axis("conv"),), init=one, trainable=False),
        TensorSpec(name="bn.num_batches_tracked", shape=(), dtype="int64", policy="dropped", trainable=False),
    ]
    return Manifest(
        task="small",
        input_shape=(1, 2, 2),
        output_shape=(2,),
        tensors=(
            TensorSpec(name="conv.weight", shape=(3, 1, 3, 3), axes=(_axis("conv"), (), (), ()), init=Uniform(bound=1)),
            TensorSpec(name="conv.bias", shape=(3,), axes=(_axis("conv"),), init=Uniform(bound=1)),
            *norm,
            TensorSpec(name="fc.weight", shape=(6, 12), axes=(_axis("fc"), _axis("conv", 4)), init=Uniform(bound=0.5)),
            TensorSpec(name="fc.bias", shape=(6,), axes=(_axis("fc"),), init=zero),
            TensorSpec(name="out.weight", shape=(2, 6), axes=((), _axis("fc")), init=Uniform(bound=0.25)),
            TensorSpec(name="out.bias", shape=(2,), init=zero),
        ),
        groups=(NeuronGroup(name="conv", size=3), NeuronGroup(name="fc", size=6)),
        layers=(Layer(name="fc", kind="linear", tensors=("fc.weight", "fc.bias")),),
    )


def _sign(header: dict, data: bytes = b"") -> bytes:
    """A bundle of this header and data with the digest that the format asks for, whatever else is wrong with it.

    Written from the format's description, not with its encoder: a second opinion, and the way past the digest.
    """
    metadata = {key: text for key, text in header["__metadata__"].items() if key != "sha256"}
    unsigned = json.dumps({**header, "__metadata__": metadata}, sort_keys=True, separators=(",", ":")).encode()
    metadata["sha256"] = hashlib.sha256(unsigned + data).hexdigest()
    text = json.dumps({**header, "__metadata__": metadata}).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture(scope="session")
def sign():
    return _sign


def _take_apart(body: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", body[:8])
    return json.loads(body[8 : 8 + length]), body[8 + length :]


@pytest.fixture(scope="session")
def take_apart():
    """The header and the data of a bundle."""
    return _take_apart


def _train(
    manifest: Manifest,
    assignment: Assignment,
    *,
    status: str = "active",
    examples: int = 10,
    salt: str = "",
    telemetry: Telemetry | None = None,
) -> bytes:
    """The update that a device sends for ``assignment``: values drawn from its key."""
    work = assignment.work
    draw = NeuronDraw(work.key, work.ratio)
    mask = draw_neurons(manifest, draw)
    key = hashlib.sha256(f"{work.key}|{salt}".encode()).digest()
    values = np.random.default_rng(list(key)).normal(size=count_values(manifest, mask)).astype(np.float32)
    for spec, _, part in unpack(manifest, values, mask):
        if spec.name.endswith("running_var"):
            np.abs(part, out=part)
    report = UpdateReport(
        num_examples=examples, status=status, steps=3, train_loss=0.5, telemetry=telemetry or Telemetry()
    )
    return bundle.encode(manifest, values, mask, draw=draw, report=report.model_dump_json())


@pytest.fixture(scope="session")
def train():
    return _train
