"""Standard streams that are closed, or cannot encode a character."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparrow.command_line.exits import Exit

COMMAND = f"{sys.executable} -m sparrow"


def run(words, **environment):
    command = ["sh", "-c", f"{COMMAND} {words}"]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_closed_streams(closed):
    assert run(f"devices --json {closed}").returncode == Exit.DONE
    assert run(f"--help {closed}").returncode == Exit.DONE
    assert run(f"status --server ftp://here {closed}").returncode == Exit.USAGE


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_characters_that_cannot_be_encoded_are_escaped(encoding):
    done = run("status --server ftp://h\u4e2d", PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert done.returncode == Exit.USAGE
    assert b"\\u4e2d" in done.stderr
    assert b"Traceback" not in done.stderr
