"""What computed a trial: read from a clone, kept in its rows, and said on its page."""

from __future__ import annotations

import subprocess

import pytest

from sparrow.bench import provenance as module
from sparrow.bench.provenance import PACKAGES, provenance


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with a commit, as the one that the benchmarks are run from."""
    for each in ("docs/results", "benchmarks"):
        (tmp_path / each).mkdir(parents=True)
    (tmp_path / "benchmarks" / "a.py").write_text("a = 1\n")
    (tmp_path / "docs" / "results" / "rows.jsonl").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "First")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_it_names_the_commit_and_what_is_installed(clone):
    found = provenance(3)
    assert (found.commit, found.changes, found.threads) == (git(clone, "rev-parse", "HEAD"), 0, 3)
    assert set(found.packages) == {"python", *PACKAGES}
    assert found.processor
    assert list(found.flags) == sorted(found.flags)


def test_changed_and_new_files_are_counted_and_new_rows_are_not(clone):
    (clone / "docs" / "results" / "rows.jsonl").write_text("{}\n")
    (clone / "benchmarks" / "a.py").write_text("a = 2\n")
    (clone / "benchmarks" / "b.py").write_text("b = 1\n")
    assert provenance(1).changes == 2


def test_what_a_process_runs_is_what_it_began_with(clone):
    before = provenance(1)
    (clone / "benchmarks" / "a.py").write_text("a = 2\n")
    assert provenance(1) == before


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch, clone):
    (clone / "site").mkdir()
    monkeypatch.setattr(module, "ROOT", clone / "site")
    assert (provenance(1).commit, provenance(1).changes) == ("", 0)
