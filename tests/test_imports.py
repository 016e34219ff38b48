"""What promises to be light is: no torch behind the coordinator, the protocol, prediction, export and devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LIGHT = ["edge_sdk", "sparrow.protocol.bundle", "sparrow.protocol.messages", "sparrow.protocol.checkpoint"]
LIGHT += [
    "sparrow.protocol.builtin",
    "edge_sdk.device.transport",
    "edge_sdk.device.state",
    "edge_sdk.predict",
    "sparrow.devices",
]
LIGHT += ["sparrow.export", "sparrow.graphs.skeleton", "sparrow.export.__main__", "sparrow.coordinator.main"]

PROBE = """
import importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    found[name] = sorted({module.split(".")[0] for module in sys.modules} & set(json.loads(sys.argv[2])))
print(json.dumps(found))
"""


def loaded(names, heavy, folder):
    """name -> which of ``heavy`` is loaded once it and those before it are imported, in a process of their own."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(names), json.dumps(heavy)],
        env={**os.environ, "COORDINATOR_DATA_DIR": str(folder / "data")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_nothing_light_loads_torch(tmp_path):
    found = loaded(LIGHT, ["torch", "torchvision"], tmp_path)
    assert found == {name: [] for name in LIGHT}
    assert list(tmp_path.iterdir()) == [], "importing the coordinator makes no data folder"


def test_the_protocol_needs_neither_server_nor_onnx(tmp_path):
    protocol = [name for name in LIGHT if name.startswith(("sparrow.protocol", "sparrow.devices"))]
    found = loaded(protocol, ["fastapi", "sqlalchemy", "onnx", "onnxruntime", "uvicorn"], tmp_path)
    assert found == {name: [] for name in protocol}


@pytest.mark.integration
def test_a_coordinator_that_starts_loads_only_what_it_needs_every_day(tmp_path):
    """Migrations, checks of foreign models and ONNX Runtime together take as much memory as all else of it."""
    heavy = ["alembic", "mako", "onnx", "onnxruntime", "dp_accounting"]
    assert loaded(["sparrow.coordinator.main"], heavy, tmp_path) == {"sparrow.coordinator.main": []}
