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
def section() -> str:
    """What is under the heading "Your own model"."""
    sections = re.split(r"^(#+ .*)$", README.read_text(), flags=re.MULTILINE)
    found = [
        body for title, body in zip(sections[1::2], sections[2::2], strict=True) if "your own model" in title.lower()
    ]
    assert len(found) == 1, f'README.md has {len(found)} headings "Your own model", wanted is one'
    return found[0]


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


def test_it_is_short(section):
    (script,) = blocks(section, "python")
    assert len(script.strip().splitlines()) <= LONGEST


def test_one_machine_publishes_and_two_devices_join_as_printed(section, coordinator, tmp_path, compiling):
    (script,), commands = blocks(section, "python"), blocks(section, "sh")[-1]
    assert SERVER in script, "it names the server that the README starts"
    assert "own_model.py" in commands
    folder = tmp_path / "mine"  # a folder called "devices" beside the script would hide the package of that name
    folder.mkdir()
    (folder / "own_model.py").write_text(script.replace(SERVER, coordinator.url))
    place = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-e", "-c", commands.replace(SERVER, coordinator.url) + "\nwait"],
        cwd=folder,
        env=environment(
            SPARROW_SERVER=coordinator.url, XDG_STATE_HOME=str(tmp_path / "state"), OMP_NUM_THREADS="1", PATH=place
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    running = re.findall(r"--device-name (\S+)", commands)
    assert len(running) == 2

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
