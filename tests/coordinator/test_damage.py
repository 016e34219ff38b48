"""Every file of a coordinator in the middle of a round is damaged in every way: nothing wrong is served or folded.

Which files there are is looked up, not listed here. Devices answer from their names and rounds, also when they are
asked again, so that whatever a coordinator serves or publishes can be compared with what an undisturbed one does.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections import defaultdict
from contextlib import closing, suppress
from typing import get_args

import numpy as np
import pytest

from edge_sdk.methods.fedsgc import FEDSGC
from sparrow.coordinator.errors import Finished, NotFound, OperatorError, Unavailable
from sparrow.coordinator.rounds.cleanup import clear_all
from sparrow.coordinator.storage.store import RECORDS_FILE
from sparrow.protocol import bundle
from sparrow.protocol.manifest import GraphName
from sparrow.protocol.messages import UpdateReport
from sparrow.protocol.neurons import mask_digest
from sparrow.protocol.parts import expected

from ..conftest import Clock
from .fakes import DIGITS, FakeDevice, LocalCoordinator, next_assignment
from .s3 import BUCKET, KEYS, serving

ROUNDS = 4
SPARSE = {"method": "fedsgc", "method_settings": {"density": 0.3}, "rounds": ROUNDS, "cohort": 2}


class Echo(FakeDevice):
    """A device of a sparse method: sends what it received, moved by what follows from its name and the round."""

    mask = None

    def work(self):
        """Do what there is to do; the assignment and the payload that it was given, or None."""
        self.coordinator.last_seen.note(self.id)
        held = self.mask and mask_digest(DIGITS, self.mask)
        assignment = next_assignment(self.coordinator, self.id, held).assignment
        if assignment is None or assignment.kind != "train":
            return None
        parts = expected(FEDSGC.payload_parts, DIGITS, assignment.plan)
        received = bundle.decode(self.payload(assignment), DIGITS, self.mask, parts=parts)
        self.mask = received.mask
        seed = hashlib.sha256(f"{self.name}|{assignment.round}".encode()).digest()
        moved = np.random.default_rng(list(seed)).random(len(received.values), np.float32)  # variances stay positive
        values = received.values + moved
        report = UpdateReport(num_examples=10, steps=1, train_loss=0.5).model_dump_json()
        self.send(assignment, bundle.encode(DIGITS, values, self.mask, known=self.mask, report=report))
        return assignment, received


def begin(folder, clock, **where):
    """A coordinator with two closed rounds, and a third with one of its two updates, and a part of an upload."""
    coordinator = LocalCoordinator(folder, clock, keep_models=2, **where)
    coordinator.create(**SPARSE)
    devices = [Echo(coordinator, name, "f", 1.0) for name in ("a", "b")]
    for device in devices:
        device.enrol()
    for _ in range(2):
        coordinator.rounds.advance()
        for device in devices:
            device.work()
    coordinator.rounds.advance()
    devices[0].work()
    part = folder / "uploads" / "0" / "1.part"
    part.parent.mkdir(parents=True, mode=0o700)
    part.parent.parent.chmod(0o700)
    part.write_bytes(b"a part of an upload")
    return coordinator, devices


def restarted(folder, clock, devices, **where):
    coordinator = LocalCoordinator(folder, clock, keep_models=2, **where)
    coordinator.rounds.resume_after_restart()
    clear_all(coordinator.store, coordinator.models)
    return taken_up(coordinator, devices)


def taken_up(coordinator, devices):
    again = []
    for device in devices:
        again.append(Echo(coordinator, device.name, "f", 1.0))
        again[-1].id, again[-1].mask = device.id, device.mask
    return coordinator, again


class Seen:
    """What a coordinator has served and published: by what it is, the digests of its contents."""

    def __init__(self):
        self.contents = defaultdict(set)

    def note(self, what, call):
        """Note what a call gives, unless it is refused for now."""
        with suppress(Unavailable, NotFound):
            self.contents[what].add(hashlib.sha256(call()).hexdigest())

    def look(self, coordinator):
        """Download all there is."""
        for graph in get_args(GraphName):
            self.note(graph, lambda: coordinator.served.graph("f", graph))  # noqa: B023
        self.note("manifest", lambda: coordinator.served.manifest("f").model_dump_json().encode())
        with suppress(Unavailable):
            for version in [None, *(kept.version for kept in coordinator.served.models("f"))]:
                number = coordinator.info().model_version if version is None else version
                self.note(("model", number), lambda: coordinator.served.model("f", version))  # noqa: B023

    def play(self, coordinator, devices):
        """Let devices train until nothing moves, and look at all there is after each round."""
        moved = True
        while moved:
            moved = coordinator.rounds.advance()
            self.look(coordinator)
            for device in devices:
                with suppress(Unavailable, Finished):
                    if (worked := device.work()) is not None:
                        moved = True
                        assignment, received = worked
                        values = received.values.tobytes() + received.mask.bits
                        self.note(("payload", device.name, assignment.round), lambda: values)  # noqa: B023
        for record in coordinator.records.rounds("f"):
            if record.status == "closed":
                self.contents["published", record.model_version].add(record.model_sha256)
                self.contents["updates", record.round].add(record.updates)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a coordinator serves that nothing happens to, from its first round on."""
    seen = Seen()
    coordinator = LocalCoordinator(tmp_path_factory.mktemp("undisturbed"), Clock(), keep_models=2)
    with closing(coordinator.store):
        coordinator.create(**SPARSE)
        devices = [Echo(coordinator, name, "f", 1.0) for name in ("a", "b")]
        for device in devices:
            device.enrol()
        seen.play(coordinator, devices)
        assert coordinator.info().round == ROUNDS
    return seen.contents


FAULTS = {
    "a bit flips": lambda data, other: data[:-1] + bytes([data[-1] ^ 1]),
    "cut off": lambda data, other: data[: len(data) // 2],
    "empty": lambda data, other: b"",
    "another": lambda data, other: other,
    "gone": lambda data, other: None,
}
"""(content, that of an older or another file of its kind) -> what is there instead."""


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def damage(path, fault, names):
    siblings = [each for each in names if each.parent == path.parent and each != path] or names
    damaged = FAULTS[fault](path.read_bytes(), siblings[0].read_bytes())
    path.unlink() if damaged is None else path.write_bytes(damaged)


def why_not_ready(coordinator):
    try:
        asyncio.run(coordinator.check_ready())
    except Unavailable as error:
        return str(error)
    return None


def go_on(coordinator, devices, undisturbed, said):
    """Play on: what is served and published is what the undisturbed one has, too. The outcome."""
    with closing(coordinator.store):
        seen = Seen()
        seen.play(coordinator, devices)
        for what, found in seen.contents.items():
            assert found <= undisturbed[what], f"{said}: {what} is wrong"
        finished, why = coordinator.info().round == ROUNDS, why_not_ready(coordinator)
        assert finished or why, f"{said}: it neither goes on nor says why not"
        assert why is None or "restore this file from a backup" in why
        return "went on" if finished else "not ready"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A data folder in the middle of a round, its devices, and the names of its files."""
    folder = tmp_path_factory.mktemp("stopped") / "data"
    coordinator, devices = begin(folder, Clock())
    coordinator.store.close()
    names = [path.relative_to(folder) for path in files_of(folder)]
    kinds = {name.parts[2] for name in names if name.parts[0] == "blobs"}
    assert kinds == {"models", "masks", "files", "updates"}, "there is one of each kind"
    assert {RECORDS_FILE, f"{RECORDS_FILE}.sha256"} <= {name.name for name in names}
    return folder, devices, names


def copies(stopped, tmp_path):
    """A copy of the folder for each of its files: the file's name in it, the path, and the others' paths."""
    folder, _, names = stopped
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        yield name, copy / name, [copy / each for each in names]


@pytest.mark.integration
@pytest.mark.parametrize("fault", ["a bit flips", "gone", *list(FAULTS)[1:4]])
def test_no_file_that_was_damaged_at_rest_is_used(tmp_path, clock, stopped, undisturbed, fault):
    outcomes = {}
    for name, path, names in copies(stopped, tmp_path):
        damage(path, fault, names)
        try:
            coordinator, devices = restarted(tmp_path / path.relative_to(tmp_path).parts[0], clock, stopped[1])
        except OperatorError as error:
            outcomes[name] = str(error)
        else:
            outcomes[name] = go_on(coordinator, devices, undisturbed, f"{name}: {fault}")
    refused = {name.name: said for name, said in outcomes.items() if said not in ("went on", "not ready")}
    assert RECORDS_FILE in refused
    assert all("\n" not in said and "sparrow restore" in said for said in refused.values())
    assert {"went on", "not ready"} <= set(outcomes.values()), "what devices can send again is asked for"


@pytest.mark.integration
@pytest.mark.parametrize("fault", FAULTS)
def test_no_blob_that_is_damaged_while_the_coordinator_runs_is_used(tmp_path, clock, stopped, undisturbed, fault):
    for name, path, names in copies(stopped, tmp_path):
        if name.parts[0] == "blobs":
            coordinator, devices = restarted(tmp_path / path.relative_to(tmp_path).parts[0], clock, stopped[1])
            damage(path, fault, names)
            go_on(coordinator, devices, undisturbed, f"{name}: {fault}")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("place", "fault"), [("objects", "a bit flips"), ("objects", "gone"), ("postgresql", "another")]
)
def test_nor_in_object_storage_or_beside_postgresql(request, tmp_path, clock, undisturbed, fault, place):
    where = request.getfixturevalue(f"in_{place}")
    number = 0
    while True:
        folder, settings = tmp_path / str(number), where(number)
        coordinator, devices = begin(folder, clock, **settings)
        blobs = coordinator.store.blobs
        folders = [f"1/{each}" for each in ("masks", "models", "files", "updates")]
        keys = [key for each in folders for key in blobs.keys(each)]
        key, others = keys[number], [each for each in keys if each != keys[number]]
        damaged = FAULTS[fault](blobs.get(key), blobs.get(others[number - 1]))
        blobs.delete(key) if damaged is None else blobs.put(key, damaged)
        coordinator.store.close()
        try:
            coordinator, devices = restarted(folder, clock, devices, **settings)
        except OperatorError:  # no model at all
            refused = True
        else:
            refused = False
            go_on(coordinator, devices, undisturbed, f"{key}: {fault}")
        assert not refused or fault == "gone"
        number += 1
        if number == len(keys):
            break


@pytest.fixture
def in_objects(monkeypatch):
    with serving() as endpoint:
        for name, text in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, text)
        yield lambda number: {"blobs": f"s3://{BUCKET}/{number}"}


@pytest.fixture
def in_postgresql(postgresql):
    return lambda number: {"database_url": postgresql.new_database()}
