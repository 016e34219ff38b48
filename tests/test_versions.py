"""What version a build of the project has: it differs by commit, without tags, and needs no git in an archive."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path):
    """A folder with the file that decides."""
    folder = tmp_path / "clone"
    folder.mkdir()
    shutil.copy(ROOT / "setup.py", folder)
    return folder


def git(folder, *arguments):
    person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *person, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder, text):
    (folder / "file").write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", text)
    return git(folder, "rev-parse", "--short=10", "HEAD")


def version_of(folder, **environment):
    command = [sys.executable, "setup.py", "--quiet", "--version"]
    done = subprocess.run(
        command, cwd=folder, env={"PATH": "/usr/bin:/bin", **environment}, check=True, capture_output=True
    )
    return done.stdout.decode().split()[-1]


def test_it_differs_by_commit(tree):
    git(tree, "init", "--quiet")
    base = version_of(tree, SPARROW_RELEASE="1")
    for count in (1, 2):
        name = commit(tree, f"commit {count}")
        assert version_of(tree) == f"{base}.dev{count}+g{name}"


def test_a_shallow_clone_says_that_it_cannot_count(tree, tmp_path):
    git(tree, "init", "--quiet")
    commit(tree, "one")
    name = commit(tree, "two")
    git(tmp_path, "clone", "--quiet", "--depth", "1", tree.as_uri(), "shallow")
    assert version_of(tmp_path / "shallow").endswith(f".dev0+g{name}")


def test_a_copy_in_another_repository_takes_nothing_of_that(tree, tmp_path):
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "not ours")
    assert version_of(tree).endswith(".dev0")


def test_an_archive_keeps_its_version(tree):
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: sparrow-fl\nVersion: 4.5.6.dev7+gabc\n\nText.\n")
    assert version_of(tree, SPARROW_RELEASE="1") == "4.5.6.dev7+gabc"
