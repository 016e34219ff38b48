"""An environment with the ``predict`` extra and nothing else, as on a board: built here, with what the registry has."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_sdk.protocol.builtin import load_builtin
from edge_sdk.protocol.manifest import initial_values
from sparrow.export.skeleton import fill

ROOT = Path(__file__).parents[2]

PROBE = """
import importlib.util, json, sys
import numpy as np
from edge_sdk.predict import Predictor, Watched
found = [name for name in ("torch", "onnx", "fastapi") if importlib.util.find_spec(name)]
outputs = Watched(sys.argv[1], threads=1)(np.load(sys.argv[2]))
json.dump({"found": found, "outputs": outputs.tolist()}, sys.stdout)
"""


def run(*command):
    # with PYTHONPATH, pip would think that this checkout is installed there
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_predict_runs_with_its_extra_alone(tmp_path):
    sources = tmp_path / "sources"  # building leaves folders behind
    for package in ("sparrow", "command_line", "edge_sdk", "coordinator", "export", "devices"):
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sources)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[predict]")

    digits = load_builtin("digits")
    model, samples = tmp_path / "model.onnx", tmp_path / "samples.npy"
    model.write_bytes(fill(digits.skeleton, digits.manifest, initial_values(digits.manifest, 0)))
    np.save(samples, np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32))

    # from elsewhere and isolated: nothing of this checkout may help
    answer = json.loads(run(python, "-I", "-c", PROBE, model, samples))
    assert answer["found"] == []
    assert np.shape(answer["outputs"]) == (3, 10)
    output = run(python, "-I", "-m", "edge_sdk.predict", model, "--input", samples, "--top", "2")
    assert output.startswith("sample 0: class ")
    assert "energy" in output
