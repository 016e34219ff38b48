"""Packages for pages: kept when each file has its digest, and what an operator reads otherwise."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile

import pytest

from sparrow.coordinator.commands import web
from sparrow.coordinator.errors import BadRuntime, NotFound, Unavailable
from sparrow.coordinator.web import runtime


def pinned(name, inside, **files):
    """A package of the table, with these files."""
    digests = {f"{file}.js": hashlib.sha256(content).hexdigest() for file, content in files.items()}
    return runtime.Package(name, "1.0.0", inside, digests)


def packed(name, inside, **files):
    """The same as ``npm pack`` saves it."""
    contents = {f"{inside}{file}.js": content for file, content in files.items()}
    contents["package/package.json"] = json.dumps({"name": name}).encode()
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for path, content in contents.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


TRAINS = ("trains", "package/dist/")
CHECKS = ("@some/checks", "package/")


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Two small packages, kept below a folder of this test."""
    found = pinned(*TRAINS, one=b"1", two=b"2"), pinned(*CHECKS, index=b"3")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(runtime, "PACKAGES", found)
    monkeypatch.setattr(runtime, "TRAINING", found[0])
    runtime.load.cache_clear()
    yield found
    runtime.load.cache_clear()


def test_what_is_kept_is_served(packages):
    trains, checks = packages
    assert (trains.slug, checks.slug) == ("trains-1.0.0", "some-checks-1.0.0")
    assert checks.path == "@some/checks/-/checks-1.0.0.tgz"
    assert runtime.missing() == [trains, checks]
    with pytest.raises(Unavailable, match=r"trains 1\.0\.0\b"):
        runtime.load("trains-1.0.0", "one.js")
    assert runtime.why_not_there() == "Pages cannot train here yet: run sparrow web on the coordinator's machine"
    runtime.keep(packed(*TRAINS, one=b"1", two=b"2"))
    assert runtime.load("trains-1.0.0", "two.js").plain == b"2"
    assert "@some/checks 1.0.0 is missing" in runtime.why_not_there()
    runtime.keep(packed(*CHECKS, index=b"3"))
    assert runtime.load("some-checks-1.0.0", "index.js").plain == b"3"
    assert not runtime.missing()
    assert runtime.why_not_there() is None
    for slug, name in (("trains-1.0.0", "index.js"), ("trains-2.0.0", "one.js"), ("..", "one.js")):
        with pytest.raises(NotFound, match=r"trains 1\.0\.0\b"):
            runtime.load(slug, name)


def test_another_package_is_not_kept(packages):
    for archive, said in (
        (b"no archive", "cannot be read as an npm package"),
        (packed(*TRAINS, one=b"1", two=b"9"), "its two.js differs from that of trains 1.0.0; give that version"),
        (packed(*TRAINS, one=b"1"), "its two.js differs from that of"),
        (packed("other", "package/", index=b"3"), "the package is other; give trains 1.0.0 and"),
    ):
        with pytest.raises(BadRuntime, match=said):
            runtime.keep(archive)
    assert not any(package.folder.exists() for package in packages)


def test_files_are_taken_one_after_another_or_together(packages, tmp_path, capsys):
    one, other = tmp_path / "one.tgz", tmp_path / "other.tgz"
    one.write_bytes(packed(*TRAINS, one=b"1", two=b"2"))
    other.write_bytes(packed(*CHECKS, index=b"3"))
    assert web.main(["--file", str(one)]) == 3
    assert "@some/checks 1.0.0" in capsys.readouterr().err
    assert web.main(["--file", str(other)]) == 0
    assert "pages can train now, and verify signed models" in capsys.readouterr().out
    assert web.main(["--file", str(one), str(other)]) == 0
    assert web.main([]) == 0, "nothing is downloaded that is there"
    assert web.main(["--file", str(tmp_path / "none.tgz")]) == 3
    assert "none.tgz" in capsys.readouterr().err
