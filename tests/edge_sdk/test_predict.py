import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.predict import CHUNK, PredictError, Predictor, main, top_classes

WEIGHT = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], dtype=np.float32)
SAMPLES = np.array([[3, 1, 0], [0, 0, 2]], dtype=np.float32)


@pytest.fixture
def model(tmp_path):
    """scores = WEIGHT @ sample."""
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["input", "w"], ["output"], transB=1)],
        "model",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


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
        (SAMPLES[0], r"shape \(3,\), the model wants \(samples, 3\) \(add the batch axis with inputs\[None\]\)"),
        (SAMPLES[:, :2], r"shape \(2, 2\), the model wants \(samples, 3\)$"),
        (SAMPLES.astype(np.float64), r"float64, the model wants float32; .*astype\('float32'\)"),
        (SAMPLES[:0], "holds no sample"),
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


def test_without_onnx_runtime_the_install_command_is_given(monkeypatch, model, samples, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main([str(model), "--input", str(samples)]) == 1
    assert "pip install sparrow-fl[predict]" in capsys.readouterr().err


def test_top_classes_best_first_and_ties_to_the_lower():
    assert top_classes(np.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), 2).tolist() == [[1, 2], [0, 2]]


def test_the_command_prints_classes_and_timing(model, samples, tmp_path, capsys):
    output = tmp_path / "scores.bin"
    assert main([str(model), "--input", str(samples), "--top", "2", "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sample 0: class 3 (score 4.000), class 0 (score 3.000)"
    assert lines[1] == "sample 1: class 2 (score 2.000), class 3 (score 2.000)"
    assert lines[2].startswith("2 samples in ")
    assert lines[2].endswith("ms (p50)")
    np.testing.assert_allclose(np.load(output), SAMPLES @ WEIGHT.T)


def test_the_command_says_what_is_wrong(model, samples, tmp_path, capsys):
    def run(*arguments):
        assert main([str(argument) for argument in arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert "there is no model file" in run(tmp_path / "none.onnx", "--input", samples)
    assert "there is no input file" in run(model, "--input", tmp_path / "none.npy")
    pickled = tmp_path / "pickled.npy"
    np.save(pickled, np.array([{"a": 1}]), allow_pickle=True)
    assert "not an array that numpy.save wrote" in run(model, "--input", pickled)
    archive = tmp_path / "several.npz"
    np.savez(archive, a=SAMPLES)
    assert "holds several arrays" in run(model, "--input", archive)
    wide = tmp_path / "wide.npy"
    np.save(wide, np.zeros((2, 5), dtype=np.float32))
    assert "the model wants (samples, 3)" in run(model, "--input", wide)
    assert "cannot be written" in run(model, "--input", samples, "--output", tmp_path / "no" / "y.npy")


def test_wrong_usage_has_its_own_status(model, samples, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(model), "--input", str(samples), "--top", "0"])
    assert stop.value.code == 2
    assert "at least 1 class" in capsys.readouterr().err
