"""The README's script for a model of one's own does what it says, as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from .conftest import environment

README = Path(__file__).parents[2] / "README.md"
SERVER = "http://127.0.0.1:8000"
LONGEST = 19
"""Lines: below 20."""


@pytest.fixture(scope="module")
def script() -> str:
    """The one block of Python under the heading "Your own model"."""
    assert README.exists(), "there is no README.md"
    sections = re.split(r"^(#+ .*)$", README.read_text(), flags=re.MULTILINE)
    found = [
        body for title, body in zip(sections[1::2], sections[2::2], strict=True) if "your own model" in title.lower()
    ]
    assert len(found) == 1, f'README.md has {len(found)} headings "Your own model", wanted is one'
    blocks = re.findall(r"^```python\n(.*?)^```", found[0], flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f'README.md has {len(blocks)} blocks of python under "Your own model", wanted is one'
    return blocks[0]


def test_it_is_short(script):
    assert len(script.strip().splitlines()) <= LONGEST


@pytest.mark.slow
def test_two_devices_run_it_as_printed(script, coordinator, tmp_path):
    assert SERVER in script, "it names the server that the README starts"
    folder = tmp_path / "mine"  # a folder called "devices" beside the script would hide the package of that name
    folder.mkdir()
    file = folder / "own_model.py"
    file.write_text(script.replace(SERVER, coordinator.url))
    home = {"XDG_STATE_HOME": str(tmp_path / "state")}
    running = {
        name: subprocess.Popen(
            [sys.executable, file.name, name],
            cwd=folder,
            env=environment(**home, OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("one", "two")
    }
    outputs = {}
    try:
        for name, process in running.items():
            outputs[name] = process.communicate(timeout=80)[0]
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
    assert [process.returncode for process in running.values()] == [0, 0], outputs

    (federation,) = coordinator.get("/v1/federations").json()
    assert (federation["status"], federation["devices"]) == ("finished", 2)
    for record in coordinator.rounds(federation["name"]):
        assert record["updates"] == len(record["cohort"])
    for name in running:
        session = onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        (taken,) = session.get_inputs()
        assert taken.type == "tensor(float)", "adapt this test to what the README's model takes"
        sample = np.zeros([2 if not isinstance(length, int) else length for length in taken.shape], dtype=np.float32)
        (scores,) = session.run(None, {taken.name: sample})
        assert np.isfinite(scores).all()
