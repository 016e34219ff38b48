import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_sdk import predict
from edge_sdk.predict import CHUNK, PredictError, Predictor, Watched, main, top_classes
from sparrow.command_line.exits import Exit
from sparrow.graphs.skeleton import fill
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values

WEIGHT = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], dtype=np.float32)
SAMPLES = np.array([[3, 1, 0], [0, 0, 2]], dtype=np.float32)


def save(path, weight=WEIGHT, properties=None):
    """scores = weight @ sample, put in place in one step."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["input", "w"], ["output"], transB=1)],
        "model",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", weight.shape[1]])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", weight.shape[0]])],
        [numpy_helper.from_array(weight, "w")],
    )
    proto = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    helper.set_model_props(proto, properties or {})
    partial = path.with_suffix(".partial")
    onnx.save(proto, partial)
    os.replace(partial, path)
    return path


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model.onnx", properties={"method": "fedspu", "round": "3"})


@pytest.fixture
def samples(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, SAMPLES)
    return path


def test_outputs_of_one_chunk_and_of_several(model):
    predictor = Predictor(model, threads=1)
    assert (predictor.input_shape, predictor.output_shape, predictor.dtype) == ((3,), (4,), np.dtype("float32"))
    np.testing.assert_allclose(predictor(SAMPLES), SAMPLES @ WEIGHT.T)
    many = np.random.default_rng(0).normal(size=(2 * CHUNK + 3, 3)).astype(np.float32)
    np.testing.assert_allclose(predictor(many), many @ WEIGHT.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (SAMPLES[0], r"shape \(3,\), the model expects \(samples, 3\) \(add the batch axis with inputs\[None\]\)"),
        (SAMPLES[:, :2], r"shape \(2, 2\), the model expects \(samples, 3\)$"),
        (SAMPLES.astype(np.float64), r"float64, the model expects float32; .*astype\('float32'\)"),
        (SAMPLES[:0], "has no samples"),
    ],
)
def test_inputs_that_do_not_fit(model, inputs, message):
    with pytest.raises(PredictError, match=message):
        Predictor(model)(inputs)


def test_latency_is_a_median_in_seconds(model):
    predictor = Predictor(model)
    assert 0 < predictor.latency(repeats=5) < 1
    assert 0 < predictor.latency(SAMPLES[:1], repeats=5) < 1


def test_models_that_cannot_be_used(tmp_path, model):
    with pytest.raises(PredictError, match="there is no model file"):
        Predictor(tmp_path / "none.onnx")
    with pytest.raises(PredictError, match="0 threads"):
        Predictor(model, threads=0)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(PredictError, match="not a model that ONNX Runtime can load"):
        Predictor(broken)


def test_runs_of_as_many_samples_as_asked_for(model):
    many = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    np.testing.assert_allclose(Predictor(model, chunk=2)(many), many @ WEIGHT.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(PredictError, match="0 samples per run"):
        Predictor(model, chunk=0)


def test_a_file_says_what_it_is(model):
    assert Predictor(model).properties == {"method": "fedspu", "round": "3"}


def test_a_provider_that_is_not_there_is_refused_and_what_there_is_named(model):
    with pytest.raises(PredictError, match=r"'tpu'.*cpu, cuda, tensorrt"):
        Predictor(model, provider="tpu")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(PredictError, match=r"\bcuda\b.*onnxruntime-gpu"):
            Predictor(model, provider="cuda")


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_a_provider_that_does_not_start_is_not_replaced_in_silence(model, monkeypatch):
    offered = [*onnxruntime.get_available_providers(), "CUDAExecutionProvider"]
    if onnxruntime.get_available_providers().count("CUDAExecutionProvider"):
        pytest.skip("here it starts")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: offered)
    with pytest.raises(PredictError, match="could not be started"):
        Predictor(model, provider="cuda")


@dataclass
class Energy:
    joules: float | None
    coverage: float = 0.5
    quality: str = "measured"
    source: str = "a wire"
    reason: str | None = None


class Meter:
    """Gives out the energy it was made with; counts nothing."""

    def __init__(self, energy):
        self.energy = energy

    def phase(self, name):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_joules_are_of_one_prediction(model, monkeypatch):
    predictor = Predictor(model, threads=1)
    runs = []
    monkeypatch.setattr(predictor, "_run", lambda inputs: runs.append(inputs))
    monkeypatch.setattr(predict, "ENERGY_SECONDS", 0.0)
    timing = predictor.measure(repeats=20, meter=Meter(Energy(3.0)))
    assert len(runs) == 2 + 20 + 1
    assert timing.joules == 6.0  # of twice the time that was covered
    assert timing.energy == "measured, a wire"
    assert 0 < timing.p50 <= timing.p95
    unknown = predictor.measure(repeats=1, meter=Meter(Energy(None, coverage=0.0, reason="no sensor")))
    assert (unknown.joules, unknown.energy) == (None, "no sensor")


# --- a file that is replaced


def test_a_newer_file_takes_over(model):
    swapped = []
    watched = Watched(model, threads=1, on_swap=swapped.append)
    before = watched.current
    assert not watched.refresh()
    np.testing.assert_allclose(watched(SAMPLES), SAMPLES @ WEIGHT.T)
    save(model, 2 * WEIGHT)
    np.testing.assert_allclose(watched(SAMPLES), SAMPLES @ WEIGHT.T)  # nobody has looked yet
    assert watched.refresh()
    np.testing.assert_allclose(watched(SAMPLES), 2 * SAMPLES @ WEIGHT.T)
    np.testing.assert_allclose(before(SAMPLES), SAMPLES @ WEIGHT.T)  # who still holds it goes on
    assert swapped == [watched.current]
    assert not watched.refresh()


def test_an_unusable_new_file_is_reported_once(model):
    troubles = []
    watched = Watched(model, threads=1, report=troubles.append)
    whole = model.read_bytes()
    model.write_bytes(whole[: len(whole) // 2])
    assert not watched.refresh()
    assert not watched.refresh()
    save(model, WEIGHT[:, :2])
    assert not watched.refresh()
    model.unlink()
    assert not watched.refresh()
    np.testing.assert_allclose(watched(SAMPLES), SAMPLES @ WEIGHT.T)
    assert len(troubles) == 2
    assert "not a model that ONNX Runtime can load" in troubles[0]
    assert "float32 (2,)" in troubles[1]
    save(model, 3 * WEIGHT)
    assert watched.refresh()
    np.testing.assert_allclose(watched(SAMPLES), 3 * SAMPLES @ WEIGHT.T)


def test_a_thread_looks_while_others_predict(model):
    swapped = threading.Event()
    with Watched(model, threads=1, seconds=0.005, on_swap=lambda predictor: swapped.set()) as watched:
        save(model, 2 * WEIGHT)
        while not swapped.is_set():  # the timeout of tests ends it
            scale = watched(SAMPLES)[0, 0] / 3
            assert scale in (1, 2)
        np.testing.assert_allclose(watched(SAMPLES), 2 * SAMPLES @ WEIGHT.T)
    save(model, WEIGHT)
    np.testing.assert_allclose(watched(SAMPLES), 2 * SAMPLES @ WEIGHT.T)


def test_the_command_predicts_again_with_a_newer_file(model, samples):
    command = [sys.executable, "-m", "edge_sdk.predict", str(model), "--input", str(samples), "--watch", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stdout.readline, "")
            assert next(lines) == "sample 0: class 3 (score 4.000)\n"
            assert next(line for line in lines if line.startswith("single sample"))
            save(model, 2 * WEIGHT, {"method": "fedspu", "round": "4"})
            assert next(lines) == "sample 0: class 3 (score 8.000)\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            newer = f"new {model}: method fedspu, round 4\n"
            assert (process.returncode, errors) == (Exit.INTERRUPTED, newer + "sparrow predict: interrupted\n")
        finally:
            process.kill()


def test_without_onnx_runtime_the_install_command_is_given(monkeypatch, model, samples, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main([str(model), "--input", str(samples)]) == Exit.CANNOT
    assert "pip install 'sparrow-fl[predict]'" in capsys.readouterr().err


def test_top_classes_best_first_and_ties_to_the_lower():
    assert top_classes(np.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), 2).tolist() == [[1, 2], [0, 2]]


def test_the_command_prints_classes_and_timing(model, samples, tmp_path, capsys):
    output = tmp_path / "scores.bin"
    assert main([str(model), "--input", str(samples), "--top", "2", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sample 0: class 3 (score 4.000), class 0 (score 3.000)"
    assert lines[1] == "sample 1: class 2 (score 2.000), class 3 (score 2.000)"
    assert lines[2].startswith("2 samples in ")
    assert lines[3].startswith("single sample: ")
    assert "ms (p50)" in lines[3]
    assert "ms (p95), energy" in lines[3]
    np.testing.assert_allclose(np.load(output), SAMPLES @ WEIGHT.T)


def test_the_command_says_what_is_wrong(model, samples, tmp_path, capsys):
    def run(*arguments, code=Exit.FAILED):
        assert main([str(argument) for argument in arguments]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert "there is no model file" in run(tmp_path / "none.onnx", "--input", samples, code=Exit.NOT_FOUND)
    assert "there is no input file" in run(model, "--input", tmp_path / "none.npy", code=Exit.NOT_FOUND)
    pickled = tmp_path / "pickled.npy"
    np.save(pickled, np.array([{"a": 1}]), allow_pickle=True)
    assert "pickled" in run(model, "--input", pickled)
    archive = tmp_path / "several.npz"
    np.savez(archive, a=SAMPLES)
    assert "holds a" in run(model, "--input", archive)
    wide = tmp_path / "wide.npy"
    np.save(wide, np.zeros((2, 5), dtype=np.float32))
    assert "the model expects (samples, 3)" in run(model, "--input", wide)
    assert "cannot be written" in run(model, "--input", samples, "--output", tmp_path / "no" / "y.npy")


def test_wrong_usage_has_its_own_status(model, samples, capsys):
    assert main([str(model), "--input", str(samples), "--top", "0"]) == Exit.USAGE
    assert "give at least 1" in capsys.readouterr().err


# --- with the extra and nothing else, as on a board: an environment built here, with what the registry has ------------

ROOT = Path(__file__).parents[2]

PROBE = """
import importlib.util, json, sys
import numpy as np
from edge_sdk.predict import Predictor, Watched
found = [name for name in ("torch", "onnx", "fastapi") if importlib.util.find_spec(name)]
outputs = Watched(sys.argv[1], threads=1)(np.load(sys.argv[2]))
json.dump({"found": found, "outputs": outputs.tolist()}, sys.stdout)
"""


def run_alone(*command):
    # with PYTHONPATH, pip would think that this checkout is installed there
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_predict_runs_with_its_extra_alone(tmp_path):
    sources = tmp_path / "sources"  # building leaves folders behind
    for package in ("sparrow", "edge_sdk", "coordinator", "export", "devices"):
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    run_alone(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sources)
    (wheel,) = tmp_path.glob("*.whl")
    run_alone(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run_alone(python, "-m", "pip", "install", "--quiet", f"{wheel}[predict]")

    digits = load_builtin("digits")
    model, samples = tmp_path / "model.onnx", tmp_path / "samples.npy"
    model.write_bytes(fill(digits.skeleton, digits.manifest, initial_values(digits.manifest, 0)))
    np.save(samples, np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32))

    # from elsewhere and isolated: nothing of this checkout may help
    answer = json.loads(run_alone(python, "-I", "-c", PROBE, model, samples))
    assert answer["found"] == []
    assert np.shape(answer["outputs"]) == (3, 10)
    output = run_alone(python, "-I", "-m", "edge_sdk.predict", model, "--input", samples, "--top", "2")
    assert output.startswith("sample 0: class ")
    assert "energy" in output
