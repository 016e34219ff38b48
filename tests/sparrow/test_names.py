"""A user's own export.py, devices/ or coordinator.py beside their script hides ours no more, and ours hides none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models

NAMES = ("coordinator", "export")
ROOT = Path(__file__).parents[2]
INSIDE = "theirs was imported by Sparrow"


@pytest.fixture
def folder(tmp_path):
    """A folder with files of these names, which raise unless their own script asks for them."""
    raises = f"import os\nif 'WANTED' not in os.environ:\n    raise SystemExit({INSIDE!r})\nMINE = True\n"
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(raises)
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "__init__.py").write_text(raises)
    return tmp_path


def run(folder, *command):
    """Run a command in the folder, as its user does: their files stand first on the path, this checkout after them."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COORDINATOR_DATA_DIR": str(folder / "data")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SCRIPT = """
import os
from sparrow import JoinOptions, SdkError, Task, join
from edge_sdk.predict import PredictError, Predictor

try:
    join("http://127.0.0.1:9", lambda info: None, options=JoinOptions(patience_seconds=0), state_dir="state")
except SdkError as error:
    assert "does not answer" in str(error), error
try:
    Predictor("none.onnx")
except PredictError as error:
    assert "there is no model file" in str(error), error
import sparrow.export.build, sparrow.devices.board, sparrow.bench.experiment, sparrow.coordinator.main

os.environ["WANTED"] = "1"
import coordinator, devices, export
assert all(module.MINE for module in (coordinator, devices, export))
print("both")
"""


def test_a_script_has_both(folder):
    (folder / "script.py").write_text(SCRIPT)
    done = run(folder, "script.py")
    assert (done.returncode, done.stdout) == (0, "both\n"), done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("-m", "edge_sdk.join", "--help"), "Take part in a federation"),
        (("-m", "sparrow", "devices"), "cores"),
        (("-m", "sparrow", "export", "--help"), "Export a personal model"),
        (("-m", "sparrow", "serve", "--help"), "Run the coordinator"),
        (("-m", "sparrow", "bench", "--help"), "compare"),
    ],
)
def test_commands_are_ours(folder, command, says):
    done = run(folder, *command)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert INSIDE not in done.stderr


@pytest.mark.parametrize("start", [("-m", "edge_sdk.join"), ("-m", "sparrow", "join")])
def test_a_device_joins_with_ours(folder, start):
    done = run(folder, *start, "--server", "http://127.0.0.1:9", "--wait", "0", "--state-dir", "state", "--quiet")
    assert done.returncode == 4, done.stderr
    assert "does not answer" in done.stderr
    assert INSIDE not in done.stderr
