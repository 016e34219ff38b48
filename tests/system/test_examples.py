"""The scripts in ``examples/``: each runs as its first line says, and learns what it is about."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ..kinds import chosen
from .conftest import environment

ROOT = Path(__file__).parents[2]


EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
KINDS = ("next_character", "segmentation", "sensors", "vision")
LEAST = {
    "anomalies": ("auc", 0.9),
    "forecasting": ("r2", 0.6),
    "next_character": ("top1", 0.5),
    "segmentation": ("iou", 0.6),
    "sensors": ("right", 0.8),
    "speech": ("right", 0.8),
    "vision": ("right", 0.8),
}
"""What a device's model must reach, of the personal models where there are such."""


def write_text(path):
    """Write speeches of a language of few words, in the form of shakespeare.npz."""
    rng = np.random.default_rng(0)
    words = [rng.integers(1, 60, rng.integers(2, 6)) for _ in range(12)]
    text = np.concatenate([np.append(words[each], 0) for each in rng.integers(0, 12, 6000)]).astype(np.uint8)
    start = np.linspace(0, len(text), 61).astype(np.int32)
    np.savez(path, text=text, start=start, role=np.repeat(np.arange(6), 10).astype(np.uint16))


@pytest.mark.parametrize("name", chosen(EXAMPLES, KINDS))
def test_an_example_runs_and_learns(name, tmp_path):
    if name == "adapters":
        pytest.importorskip("peft", reason="the extra adapters is not installed")
        pytest.skip("with transformers, in tests/system/test_zoo.py")
    script = EXAMPLES[name]
    write_text(tmp_path / "text.npz")
    arguments = [str(tmp_path / "text.npz")] if ".npz" in script.read_text().splitlines()[0] else []
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=tmp_path,
        env=environment(COORDINATOR_DATA_DIR=str(tmp_path / "data"), XDG_STATE_HOME=str(tmp_path / "state")),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured, least = LEAST[name]
    found = [float(value) for value in re.findall(rf"{measured} ([\d.]+)", done.stdout)]
    assert found[0] >= least, done.stdout
