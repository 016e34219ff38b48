"""The files of a model that lie on a device's disk: shared by its federations, resumed, and never by way of a link."""

from __future__ import annotations

import errno
import os
import stat
import time

import numpy as np
import pytest

from edge_sdk.device.transport import Transport
from edge_sdk.device.values import UNUSED_SECONDS, load_values, shared_folder
from sparrow.protocol import values
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.transport import httpx

ARRAY = np.arange(600, dtype=np.float32)


@pytest.fixture
def manifest(small):
    """A model with a tensor that nobody trains."""
    spec = TensorSpec(name="body.table", shape=ARRAY.shape, policy="frozen", trainable=False)
    with_spec = Manifest.model_validate({**small.model_dump(), "tensors": (*small.tensors, spec)})
    return with_spec.with_values("frozen", values.pack(with_spec, "frozen", {"body.table": ARRAY}))


@pytest.fixture
def body(manifest):
    return values.pack(manifest, "frozen", {"body.table": ARRAY})


@pytest.fixture
def load(manifest, body, tmp_path, monkeypatch):
    """Loads the values for a device with a state folder of this name; ``load.ranges`` are what its calls asked for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))

    def answer(request):
        wanted = request.headers.get("Range")
        run.ranges.append(wanted)
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        return httpx.Response(206 if wanted else 200, content=body[first:])

    def run(name, *, share=True):
        (tmp_path / name).mkdir(exist_ok=True)
        with httpx.Client(base_url="http://coordinator", transport=httpx.MockTransport(answer)) as client:
            found = load_values("frozen", manifest, "f", Transport(client), tmp_path / name, share=share)
        assert np.array_equal(found["body.table"], ARRAY)
        return tmp_path / name / "frozen.values"

    run.ranges = []
    return run


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_two_federations_download_once(load):
    one, two = load("one"), load("two")
    assert load.ranges == [None]
    assert one.samefile(two)


def test_without_sharing_no_coordinator_learns_of_other_federations(load):
    load("one", share=False)
    assert not shared_folder().exists(), "nothing is left for others"
    load("two")
    load("three", share=False)
    assert load.ranges == [None] * 3, "and nothing is taken from them"


def test_a_broken_download_goes_on(load, body, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "frozen.values.partial").write_bytes(body[:1000])
    assert load("one").read_bytes() == body
    assert load.ranges == ["bytes=1000-"]


@pytest.mark.parametrize("plant", ["link", "hard link", "too long"])
def test_a_download_writes_to_no_file_that_is_not_its_own(load, body, tmp_path, plant):
    victim, partial = tmp_path / "victim", tmp_path / "one" / "frozen.values.partial"
    victim.write_bytes(body[:1000])
    partial.parent.mkdir()
    if plant == "link":
        partial.symlink_to(victim)
    elif plant == "hard link":
        partial.hardlink_to(victim)
    else:
        partial.write_bytes(body + b"x")
    file = load("one")
    assert load.ranges == [None], "it begins anew"
    assert victim.read_bytes() == body[:1000]
    assert (file.read_bytes(), mode(file), partial.exists()) == (body, 0o600, False)


@pytest.mark.parametrize("plant", ["link", "dangling link", "pipe"])
def test_no_link_is_followed_among_shared_files(load, manifest, body, tmp_path, plant):
    others = tmp_path / "others"
    if plant == "link":
        others.write_bytes(body)
    shared_folder().mkdir(parents=True)
    shared = shared_folder() / manifest.frozen_sha256
    if plant == "pipe":
        os.mkfifo(shared)
    else:
        shared.symlink_to(others)
    file = load("one")
    assert load.ranges == [None]
    assert shared.lstat().st_ino == file.lstat().st_ino, "the device's own is in its place"
    assert others.exists() == (plant == "link")


def test_a_file_of_another_user_is_not_used(load, manifest, body, monkeypatch):
    shared_folder().mkdir(parents=True)
    (shared_folder() / manifest.frozen_sha256).write_bytes(body)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    load("one")
    assert load.ranges == [None], "its owner could change it after it was compared"


def test_a_copy_is_made_across_file_systems(load, monkeypatch):
    def refuse(*arguments, **named):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    files = [load("one"), load("two"), *shared_folder().iterdir()]
    assert load.ranges == [None]
    assert [mode(path) for path in files] == [0o600] * 3


def test_shared_files_that_no_device_uses_any_more_are_removed(load):
    load("one")
    (used,) = shared_folder().iterdir()
    unused, lately = shared_folder() / ("0" * 64), shared_folder() / ("1" * 64)
    part, notes = shared_folder() / f"{'2' * 64}.123.partial", shared_folder() / "notes"
    for path in (unused, lately, part, notes):
        path.write_bytes(b"values")
    limit = time.time() - UNUSED_SECONDS
    for path in (used, unused, part, notes):
        os.utime(path, (limit - 60, limit - 60))
    os.utime(lately, (limit + 3600, limit + 3600))
    load("one", share=False)
    assert unused.exists(), "who does not share leaves the folder alone"
    load("one")
    assert sorted(shared_folder().iterdir()) == sorted([used, lately, notes]), "its own is left there again"
    assert used.stat().st_mtime > limit + 3600
    assert load.ranges == [None]
