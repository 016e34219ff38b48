"""A part is imported when its command is called: counted in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROBE = """
import io, json, sys
from contextlib import redirect_stdout, suppress

def heavy():
    known = ("torch", "numpy", "httpx", "pydantic", "fastapi", "sqlalchemy", "onnx", "onnxruntime", "shtab")
    return [name for name in known if name in sys.modules]

from sparrow.main import main
found = {"": heavy()}
for name in sys.argv[1:]:
    with suppress(SystemExit), redirect_stdout(io.StringIO()):
        main([name, "--help"])
    found[name] = heavy()
print(json.dumps(found))
"""


def loaded(folder, *names):
    """Name of a command -> what is loaded once it and those before it have shown their help."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names],
        env={**os.environ, "COORDINATOR_DATA_DIR": str(folder / "data")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_command_loads_its_own_part_alone(tmp_path):
    found = loaded(tmp_path, "devices", "predict", "status", "export", "token", "serve")
    assert found[""] == found["devices"] == []
    assert found["predict"] == ["numpy"]
    assert found["status"] == ["numpy", "httpx", "pydantic"]
    assert set(found["export"]) <= {"numpy", "httpx", "pydantic", "onnx", "onnxruntime"}
    assert "fastapi" not in found["token"]
    assert not {"torch", "shtab"} & set(found["serve"])
    assert list(tmp_path.iterdir()) == []
