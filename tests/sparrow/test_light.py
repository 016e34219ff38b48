"""A part is imported when its command is called, counted in a process of its own; a device is a small installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.bench.server import coordinator
from sparrow.transport import httpx

PROBE = """
import io, json, sys
from contextlib import redirect_stdout, suppress

def heavy():
    known = ("torch", "numpy", "httpx", "httpx2", "pydantic", "fastapi", "sqlalchemy", "onnx", "onnxruntime", "shtab")
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
    assert found["status"] == ["numpy", httpx.__name__, "pydantic"]
    assert set(found["export"]) <= {"numpy", httpx.__name__, "pydantic", "onnx", "onnxruntime"}
    assert "fastapi" not in found["token"]
    assert not {"torch", "shtab"} & set(found["serve"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_device_is_installed_in_220_mb_and_trains_without_pytorch(tmp_path):
    from benchmarks.engines import install
    from edge_sdk.publish import publish

    python, size = install(Path(__file__).parents[2], tmp_path / "device", "device")
    assert size <= 220e6
    place = {"cwd": tmp_path, "env": {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}}
    assert subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL, check=False, **place).returncode
    with coordinator(tmp_path) as server:
        publish(server, "default", "digits", rounds=2, cohort=1, min_devices=1, local_epochs=2)
        options = [
            "--server",
            server,
            "--device-name",
            "small",
            "--state-dir",
            "state",
            "--export",
            "model.onnx",
            "--json",
        ]
        join = [python, "-m", "edge_sdk.join", *options, "--engine", "onnx", "--quiet"]
        done = subprocess.run(join, capture_output=True, text=True, timeout=120, check=False, **place)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["rounds"] == 2
    assert result["accuracy_after"] > result["accuracy_before"]
    assert result["export"]["engine"] == "ONNX Runtime"
