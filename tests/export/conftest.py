import subprocess
import sys

import numpy as np
import pytest

OLD = ("onnxruntime==1.17.3", "numpy<2")
RUN = """
import sys

import numpy
import onnxruntime

model, inputs, outputs = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
numpy.save(outputs, session.run(None, {session.get_inputs()[0].name: numpy.load(inputs)})[0])
"""


@pytest.fixture(scope="session")
def old_runtime(tmp_path_factory):
    """Function from an ONNX file and inputs to the outputs of ONNX Runtime 1.17, in an environment of its own."""
    folder = tmp_path_factory.mktemp("old")
    if sys.version_info >= (3, 13):
        pytest.skip("ONNX Runtime 1.17 has no wheels for this Python")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    # Of the variables, PYTHONPATH would bring this environment's packages.
    clean = {"PATH": "/usr/bin:/bin"}
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *OLD], capture_output=True, text=True, timeout=100
    )
    if installed.returncode:
        pytest.skip(f"pip cannot install {OLD[0]}: {installed.stderr.strip()[-200:]}")

    def run(model, inputs):
        given = folder / "inputs.npy"
        made = folder / "outputs.npy"
        np.save(given, inputs)
        done = subprocess.run([python, "-c", RUN, model, given, made], env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return np.load(made)

    return run
