"""Blobs in S3-compatible storage: as in a folder, for a whole federation, and when the storage does not answer."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import warnings
from contextlib import closing
from unittest.mock import Mock

import pytest

from sparrow.coordinator.errors import BadStorage, Damaged, Unavailable, WrongBlobs
from sparrow.coordinator.storage.blobs import FolderBlobs
from sparrow.coordinator.storage.objects import ObjectBlobs
from sparrow.coordinator.storage.store import Store
from sparrow.transport import httpx

from ..fakes import LocalCoordinator
from ..s3 import BUCKET, KEYS, serving

ADDRESS = f"s3://{BUCKET}/fleet/one"


@pytest.fixture(scope="module")
def endpoint():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the test server does with its own sockets
        with serving() as address:
            yield address


@pytest.fixture
def s3(endpoint, monkeypatch):
    """The server, with an empty bucket, as the environment names it."""
    httpx.post(f"{endpoint}/moto-api/reset").raise_for_status()
    httpx.put(f"{endpoint}/{BUCKET}").raise_for_status()
    for name, text in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, text)
    return endpoint


@pytest.fixture(params=["folder", "objects"])
def blobs(request, tmp_path):
    if request.param == "folder":
        return FolderBlobs(tmp_path)
    request.getfixturevalue("s3")
    return ObjectBlobs(ADDRESS)


def named(folder, data):
    """The key of a blob with this content."""
    return f"{folder}.{hashlib.sha256(data).hexdigest()}"


@pytest.mark.integration
def test_blobs_are_the_same_wherever_they_are(blobs):
    large = bytes(range(256)) * 50_000  # beyond what a client would send in parts
    contents = {"1/models/2": large, "1/models/10": b"ten", "1/updates/a": b"", "11/models/1": b"x"}
    two, ten, empty, _ = keys = [named(*each) for each in contents.items()]
    for key, data in zip(keys, contents.values(), strict=True):
        blobs.put(key, data)
    assert blobs.get(two) == blobs.load(two) == large
    assert blobs.get(empty) == b""
    assert blobs.sizes("1/models") == {ten: 3, two: len(large)}
    assert blobs.keys("1/models") == [ten, two]
    assert blobs.keys("2/models") == []
    blobs.put(ten, b"ten")
    assert blobs.get(ten) == b"ten"
    blobs.delete(ten)
    blobs.delete(ten)
    with pytest.raises(FileNotFoundError):
        blobs.get(ten, needed=False)
    other = named("1/updates/b", b"b")
    blobs.write(other, b"b")
    blobs.settle([other])
    blobs.clean()
    assert blobs.keys("1/updates") == [empty, other]
    blobs.retain("1/updates", [empty])
    assert blobs.keys("1/updates") == [empty]


def test_a_blob_that_is_not_what_its_key_names_is_never_handed_out(blobs, caplog):
    key = named("1/models/3", b"three")
    blobs.put(key, b"three")
    for damage in (b"thref", b"thre", b"", b"another, older one"):
        blobs.put(key, damage)
        for read in (blobs.get, blobs.load):
            with pytest.raises(Damaged, match="retry after its operator has restored it"):
                read(key)
    blobs.delete(key)
    with pytest.raises(Damaged):
        blobs.get(key)
    blobs.put(key, b"three")
    assert blobs.get(key) == b"three"
    said = [record.getMessage() for record in caplog.records if record.name == "sparrow.coordinator.storage.failing"]
    assert [key in line for line in said] == [True] * len(said)
    assert said[0].endswith("restore this file from a backup")
    assert said[-1].endswith("is intact again")
    with pytest.raises(ValueError, match="does not name the SHA-256"):
        blobs.get("1/models/4")


@pytest.mark.parametrize("linkable", [True, False])
def test_a_local_file_becomes_a_blob_and_may_be_removed(blobs, tmp_path, monkeypatch, linkable):
    if not linkable:
        refused = OSError(errno.EXDEV, "the folders are on different file systems")
        monkeypatch.setattr(os, "link", Mock(side_effect=refused))
    file = tmp_path / "whole.part"
    file.write_bytes(b"an update")
    first, second = named("1/updates/c", b"an update"), named("1/updates/d", b"an update")
    for _ in range(2):  # the same update twice
        blobs.write(first, b"an update", file)
    blobs.settle([first])
    file.unlink()
    blobs.write(second, b"an update", file)  # another copy of the call has brought it, and removed the file
    blobs.settle([second])
    assert blobs.get(first) == blobs.get(second) == b"an update"
    assert blobs.keys("1/updates") == [first, second]
    assert [path.name for path in tmp_path.rglob("*.partial")] == []


def open_coordinator(folder, clock, blobs=None):
    return LocalCoordinator(folder, clock, blobs=blobs)


def test_a_federation_ends_as_with_a_folder_over_restarts(s3, tmp_path, clock, play):
    models = {}
    for kind, address in {"folder": None, "objects": ADDRESS}.items():
        coordinator = open_coordinator(tmp_path / kind, clock, address)
        coordinator.create(rounds=3)
        devices = coordinator.enrol("a", "b", "c")
        coordinator.rounds.advance()
        coordinator.store.close()
        coordinator = open_coordinator(tmp_path / kind, clock, address)
        with closing(coordinator.store):
            for device in devices:
                device.coordinator = coordinator
            play(coordinator, devices)
            models[kind] = coordinator.model()
            assert [record.updates for record in coordinator.records.rounds("f")] == [3, 3, 3]
            assert coordinator.store.blobs.keys("1/updates") == []
            assert len(coordinator.store.blobs.keys("1/models")) == 1
    assert models["objects"] == models["folder"]
    assert not (tmp_path / "objects" / "blobs").exists()


def test_storage_that_cannot_be_used_is_refused_at_start_with_advice(s3, tmp_path, monkeypatch):
    with pytest.raises(BadStorage, match=r"set s3://BUCKET or s3://BUCKET/PREFIX"):
        Store(tmp_path, None, "bucket/prefix")
    with pytest.raises(BadStorage, match="there is no bucket elsewhere: create it"):
        Store(tmp_path, None, "s3://elsewhere/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BadStorage, match="check AWS_ENDPOINT_URL"):
        ObjectBlobs(ADDRESS, retries=0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    Store(tmp_path, None, ADDRESS).close()


def test_credentials_that_are_refused_are_named(s3, tmp_path):
    httpx.post(f"{s3}/moto-api/reset-auth", content="0").raise_for_status()  # from now on it asks who is calling
    try:
        with pytest.raises(BadStorage, match="credentials"):
            Store(tmp_path, None, ADDRESS)
    finally:
        httpx.post(f"{s3}/moto-api/reset-auth", content="inf")


def test_blobs_of_another_coordinator_are_not_touched(s3, tmp_path, clock, play):
    coordinator = open_coordinator(tmp_path / "one", clock, ADDRESS)
    coordinator.create(rounds=1)
    play(coordinator, coordinator.enrol("a", "b"))
    coordinator.store.close()
    with pytest.raises(WrongBlobs, match="belong to another coordinator"):
        open_coordinator(tmp_path / "two", clock, ADDRESS)
    with pytest.raises(WrongBlobs, match="models"):
        open_coordinator(tmp_path / "one", clock, f"s3://{BUCKET}/elsewhere")
    open_coordinator(tmp_path / "one", clock, ADDRESS).store.close()


def test_storage_that_goes_and_comes_back(s3, tmp_path, clock, answer, caplog):
    """The bucket is taken away and made anew: nothing is acknowledged meanwhile, and nothing is lost that was not."""
    coordinator = open_coordinator(tmp_path, clock, ADDRESS)
    with closing(coordinator.store):
        coordinator.create(rounds=1, cohort=2)
        one, two = coordinator.enrol("a", "b")
        coordinator.rounds.advance()
        kept = {key: coordinator.store.blobs.get(key) for key in coordinator.store.blobs.keys("1/models")}
        httpx.post(f"{s3}/moto-api/reset").raise_for_status()
        for _ in range(3):
            with pytest.raises(Unavailable, match="cannot reach its object storage"):
                answer(one)
            with pytest.raises(Unavailable):
                coordinator.store.check()
        said = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(said) == 1
        httpx.put(f"{s3}/{BUCKET}").raise_for_status()
        for key, data in kept.items():
            coordinator.store.blobs.put(key, data)
        coordinator.store.check()
        answer(one), answer(two)
        coordinator.rounds.advance()
        assert coordinator.record(1).updates == 2
