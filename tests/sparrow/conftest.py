"""A command run in this process, and a coordinator on a real port whose calls all need a token."""

from __future__ import annotations

import pytest

from sparrow.coordinator.settings import Settings
from sparrow.main import main

from ..coordinator.api.test_contract import ADMIN, ENROLMENT, OBSERVER, TOKENS, serving

__all__ = ["ADMIN", "ENROLMENT", "OBSERVER"]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    """No settings or tokens of whoever runs the tests."""
    for kind in ("ADMIN", "OBSERVER", "ENROLMENT"):
        monkeypatch.delenv(f"SPARROW_{kind}_TOKEN", raising=False)
    for name in ("SPARROW_SERVER", "SPARROW_TRACEBACK", "NO_COLOR", "COORDINATOR_DATA_DIR", "COORDINATOR_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sparrow(capsys):
    """Runs ``sparrow`` with these words: its exit code, and what it printed on stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def fails(sparrow):
    """Runs ``sparrow``, which ends with this code and prints one line on stderr alone; gives that line."""

    def run(code, *words):
        found, out, err = sparrow(*words)
        assert (found, out) == (code, ""), err
        (line,) = err.splitlines()
        assert line.startswith(f"sparrow {words[0]}: ")
        return line

    return run


@pytest.fixture(scope="session")
def guarded(tmp_path_factory):
    """The address of a coordinator that has a federation ``default`` and all three tokens."""
    folder = tmp_path_factory.mktemp("coordinator") / "data"
    with serving(Settings(data_dir=folder, **TOKENS)) as client:
        yield str(client.base_url).rstrip("/")
