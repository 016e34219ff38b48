"""The HTTP library: which one is chosen, and clients of the other one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from edge_sdk.errors import BadArgument
from edge_sdk.join import join
from edge_sdk.publish import publish
from sparrow.transport import httpx, refuse_foreign

PROBE = """
import json, sys
from sparrow.main import main
from sparrow.transport import httpx
code = main(["status", "--server", "http://127.0.0.1:9"])
print(json.dumps([httpx.__name__, code, sorted({"httpx", "httpx2"} & set(sys.modules))]))
"""
STAND_IN = "from httpx import *\nfrom httpx import __all__\n"


def probe(path):
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_successor_is_chosen_if_it_is_installed(tmp_path):
    package = tmp_path / "httpx2"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    chosen, code, _ = probe(os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(Path.cwd()))]))
    assert (chosen, code) == ("httpx2", 4)


def test_one_library_is_loaded():
    assert probe(os.environ.get("PYTHONPATH", "")) == [httpx.__name__, 4, [httpx.__name__]]


class Client:
    """A client of another library."""


Client.__module__ = "httpx0"


@pytest.mark.parametrize("call", [partial(join, "http://here"), partial(publish, "http://here", "lab", "digits")])
def test_a_client_of_another_library_is_refused(call):
    with pytest.raises(BadArgument, match=r"httpx0\.Client; give a Client of httpx"):
        call(client=Client())
    refuse_foreign(None)
    with httpx.Client() as ours:
        refuse_foreign(ours)
