import itertools
import logging
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from sparrow.export.errors import ExportError
from sparrow.export.fusing import fuse
from sparrow.export.packed import pack
from sparrow.export.precision import choose, quantise, to_half
from sparrow.graphs.skeleton import fill
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values


def builtin(task, density=1.0):
    """A built-in model under a random mask, and inputs for it."""
    found = load_builtin(task)
    tensors = initial_values(found.manifest, 0)
    for number, spec in enumerate(found.manifest.maskable):
        exists = np.random.default_rng(number).random(spec.shape) < density
        tensors[spec.name] = np.where(exists, tensors[spec.name], np.float32(0))
    inputs = np.random.default_rng(0).normal(size=(64, *found.manifest.input_shape)).astype(np.float32)
    return onnx.load_from_string(fill(found.skeleton, found.manifest, tensors, metadata={"method": "test"})), inputs


def run(model, inputs):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: inputs})[0]


def operators(model, path):
    """What ONNX Runtime runs, and what it holds."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(path).graph
    return sorted(n.op_type for n in graph.node), sorted((tuple(t.dims), t.data_type) for t in graph.initializer)


def weights(model):
    return {tensor.name: tensor for tensor in model.graph.initializer}


# --- float16


@pytest.mark.parametrize("task", ["cifar10", "har", "mnist"])
def test_half_precision_is_stored_and_float32_is_computed(task, tmp_path):
    model, inputs = builtin(task)
    before = model.SerializeToString(deterministic=True)
    half = to_half(model)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(half, full_check=True)
    assert (half.graph.input, half.graph.output) == (model.graph.input, model.graph.output)
    assert half.ByteSize() < 0.56 * model.ByteSize()
    assert operators(half, tmp_path / "half.onnx") == operators(model, tmp_path / "plain.onnx")
    np.testing.assert_allclose(run(half, inputs), run(model, inputs), atol=5e-3)
    assert to_half(half) == half


def test_half_precision_of_a_sparse_model_is_packed(tmp_path):
    model, inputs = builtin("cifar10", 0.1)
    half = to_half(model)
    small = pack(half)
    assert small.ByteSize() < 0.2 * model.ByteSize()
    assert operators(small, tmp_path / "small.onnx") == operators(half, tmp_path / "half.onnx")
    assert run(small, inputs).tobytes() == run(half, inputs).tobytes()


def linear(weight, *, given=False):
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["batch", weight.shape[0]])]
    inputs += [value("weight", TensorProto.FLOAT, list(weight.shape))] * given
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "test",
        inputs,
        [value("y", TensorProto.FLOAT, ["batch", weight.shape[1]])],
        [numpy_helper.from_array(weight, "weight")],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


@pytest.mark.parametrize("value", [65505, -1e30, np.inf, np.nan])
def test_weights_that_float16_cannot_hold_stay(value):
    weight = np.ones((20, 20), dtype=np.float32)
    weight[3, 3] = value
    assert to_half(linear(weight)) == linear(weight)


def test_small_weights_and_those_a_caller_may_replace_stay():
    weight = np.ones((20, 20), dtype=np.float32)
    for model in (linear(weight[:5]), linear(weight[:0]), linear(weight, given=True)):
        assert to_half(model) == model


def test_names_that_are_taken_are_left_alone():
    model = linear(np.ones((20, 20), dtype=np.float32))
    model.graph.node[0].output[0] = model.graph.output[0].name = "weight.half"
    half = to_half(model)
    assert (run(half, np.ones((1, 20), dtype=np.float32)) == 20).all()


# --- fusing


@pytest.fixture(scope="module")
def network():
    """[N,2,8,8] -> [N,5]: norms behind convolutions with and without bias, pooling before ReLU, a sum, group norm."""
    random = np.random.default_rng(1)
    held = {"one.weight": (12, 2, 3, 3), "two.weight": (12, 12, 3, 3), "three.weight": (12, 12, 3, 3)}
    held |= {"two.bias": (12,), "three.bias": (12,), "group.weight": (12,), "group.bias": (12,)}
    held |= {f"norm{i}.{name}": (12,) for i in (1, 2) for name in ("weight", "bias", "mean", "var")}
    held |= {"out.weight": (5, 48), "out.bias": (5,)}
    arrays = {name: random.normal(size=shape, scale=0.5).astype(np.float32) for name, shape in held.items()}
    arrays |= {name: np.abs(array) + np.float32(0.5) for name, array in arrays.items() if name.endswith("var")}
    make, value = helper.make_node, helper.make_tensor_value_info
    norms = [[f"norm{i}.{name}" for name in ("weight", "bias", "mean", "var")] for i in (1, 2)]
    same = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    halve = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        make("Conv", ["input", "one.weight"], ["a"], **same),
        make("BatchNormalization", ["a", *norms[0]], ["b"], epsilon=0.01),
        make("MaxPool", ["b"], ["c"], **halve),
        make("Relu", ["c"], ["d"]),
        make("Conv", ["d", "two.weight", "two.bias"], ["e"], **same),
        make("BatchNormalization", ["e", *norms[1]], ["f"]),
        make("Add", ["d", "f"], ["g"]),
        make("Conv", ["g", "three.weight", "three.bias"], ["h"], **same),
        make("GroupNormalization", ["h", "group.weight", "group.bias"], ["i"], num_groups=3),
        make("Relu", ["i"], ["j"]),
        make("MaxPool", ["j"], ["k"], **halve),
        make("Flatten", ["k"], ["l"]),
        make("Gemm", ["l", "out.weight", "out.bias"], ["output"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "model",
        [value("input", TensorProto.FLOAT, ["batch", 2, 8, 8])],
        [value("output", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def test_norms_are_folded_and_relus_come_before_pools(network):
    inputs = np.random.default_rng(0).normal(size=(9, 2, 8, 8)).astype(np.float32)
    before = network.SerializeToString(deterministic=True)
    fused = fuse(network)
    assert network.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(fused, full_check=True)
    kinds = [node.op_type for node in fused.graph.node]
    assert "BatchNormalization" not in kinds
    assert kinds.index("Relu") < kinds.index("MaxPool")
    assert not any(name.startswith("norm") for name in weights(fused))
    wanted = run(network, inputs)
    np.testing.assert_allclose(run(fused, inputs), wanted, atol=1e-5 * np.abs(wanted).max())
    assert fuse(fused) == fused


def test_names_that_a_fused_norm_would_take_are_left_alone(network):
    model = onnx.ModelProto()
    model.CopyFrom(network)
    model = onnx.shape_inference.infer_shapes(model)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["two" if name == "b" else name for name in names]
    inputs = np.random.default_rng(0).normal(size=(9, 2, 8, 8)).astype(np.float32)
    fused = fuse(model)
    onnx.checker.check_model(fused, full_check=True)
    wanted = run(network, inputs)
    np.testing.assert_allclose(run(fused, inputs), wanted, atol=1e-5 * np.abs(wanted).max())


def test_what_others_read_is_not_fused(network):
    model = onnx.ModelProto()
    model.CopyFrom(network)
    for node in model.graph.node:
        if node.op_type in ("Conv", "MaxPool"):
            model.graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None))
    assert fuse(model) == model


# --- int8


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("task", ["digits", "har", "mnist"])
def test_int8_predicts_nearly_the_same_from_a_quarter_of_the_bytes(task, folder, capfd, caplog):
    model, inputs = builtin(task)
    before, handlers = model.SerializeToString(deterministic=True), list(logging.root.handlers)
    small = quantise(model, inputs)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(small, full_check=True)
    assert (small.graph.input, small.graph.output) == (model.graph.input, model.graph.output)
    assert [(entry.key, entry.value) for entry in small.metadata_props] == [("method", "test")]
    assert (small.producer_name, small.graph.name, len(small.opset_import)) == ("sparrow", "model", 1)
    held = sum(len(tensor.raw_data) for tensor in weights(small).values())
    assert held < 0.3 * sum(len(tensor.raw_data) for tensor in weights(model).values())
    wanted = run(model, inputs)
    assert np.abs(run(small, inputs) - wanted).max() < 0.06 * np.abs(wanted).max()
    assert list(folder.iterdir()) == []
    assert logging.root.handlers == handlers
    assert (*capfd.readouterr(), caplog.text) == ("", "", "")


def test_int8_of_a_network_with_norms_pools_and_sums(network, folder, capfd):
    inputs = np.random.default_rng(0).normal(size=(40, 2, 8, 8)).astype(np.float32)
    small = quantise(network, inputs)
    kinds = [node.op_type for node in small.graph.node]
    assert "BatchNormalization" not in kinds
    assert "GroupNormalization" in kinds
    convolutions = [node for node in small.graph.node if node.op_type == "Conv"]
    made_by = {name: node.op_type for node in small.graph.node for name in node.output}
    assert all(made_by[name] == "DequantizeLinear" for node in convolutions for name in node.input)
    wanted = run(network, inputs)
    assert np.abs(run(small, inputs) - wanted).max() < 0.1 * np.abs(wanted).max()
    assert tuple(capfd.readouterr()) == ("", "")


def test_int8_of_a_sparse_model_is_packed(tmp_path):
    model, inputs = builtin("mnist:leaf", 0.1)
    small = quantise(model, inputs)
    packed = pack(small)
    size = sum(spec.size for spec in load_builtin("mnist:leaf").manifest.kept)
    # an eighth for the mask; biases are integers of 32 bits with a scale each, as are weights' channels
    assert packed.ByteSize() < size * (0.1 + 1 / 8) + 2154 * 14 + 16384
    assert operators(packed, tmp_path / "packed.onnx") == operators(small, tmp_path / "small.onnx")
    assert run(packed, inputs).tobytes() == run(small, inputs).tobytes()


def test_zeros_stay_zeros_in_int8():
    model, inputs = builtin("mnist", 0.1)
    kept = sum(np.count_nonzero(numpy_helper.to_array(tensor)) for tensor in weights(model).values())
    small = quantise(model, inputs)
    arrays = [numpy_helper.to_array(t) for t in weights(small).values() if t.data_type == TensorProto.INT8]
    assert sum(np.count_nonzero(array) for array in arrays if array.ndim > 1) <= kept


@pytest.mark.integration
def test_int8_has_the_same_bytes_in_another_process():
    code = """
import hashlib
import numpy as np, onnx
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values
from sparrow.export.precision import quantise
from sparrow.graphs.skeleton import fill
found = load_builtin("digits")
model = onnx.load_from_string(fill(found.skeleton, found.manifest, initial_values(found.manifest, 0)))
inputs = np.random.default_rng(0).normal(size=(9, 1, 8, 8)).astype(np.float32)
print(hashlib.sha256(quantise(model, inputs).SerializeToString(deterministic=True)).hexdigest())
"""
    digests = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        for env in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    }
    assert len(digests) == 1


def test_what_cannot_be_quantised_is_refused():
    model, inputs = builtin("digits", 0.1)
    small = quantise(model, inputs)
    with pytest.raises(ExportError, match="quantised already; give the float32 one"):
        quantise(small, inputs)


# --- the choice


def clock(*durations):
    """Time in which the models, in turn, take so many seconds."""
    turns = itertools.cycle(durations)
    ticks = itertools.accumulate(step for _ in itertools.count() for step in (0.0, next(turns)))
    return lambda: next(ticks)


def test_the_fastest_that_is_right_is_chosen():
    model, inputs = builtin("digits")
    labels = run(model, inputs).argmax(axis=1)
    labels[:10] += 1
    choice = choose(model, inputs, inputs, labels, max_fall=0.2, runs=3, clock=clock(3, 2, 1))
    assert choice.precision == "int8"
    assert choice.chosen.name == "int8 in fully connected layers"
    assert [trial.milliseconds for trial in choice.trials] == pytest.approx([3000, 2000, 1000])
    assert choice.trials[0].accuracy == pytest.approx(54 / 64)
    assert not any(trial.refused for trial in choice.trials)
    assert choice.chosen.bytes == choice.model.ByteSize() < model.ByteSize()
    assert run(choice.model, inputs).argmax(axis=1).shape == (64,)
    assert "int8, measured on 64 samples\n  fp32: 3000.000 ms (p50), " in str(choice)
    assert "accuracy 84.38 %" in str(choice)


def test_int8_that_is_not_faster_is_refused():
    model, inputs = builtin("digits")
    choice = choose(model, inputs, inputs, max_fall=0.2, runs=3, clock=clock(1, 1, 0.96))
    assert choice.precision == "fp32"
    assert choice.model is model
    assert choice.trials[1].refused == "not 1.05 times faster than fp32: 1.00"
    assert choice.trials[2].refused == "not 1.05 times faster than fp32: 1.04"


def test_int8_that_loses_accuracy_is_refused():
    model, inputs = builtin("mnist")
    labels = run(model, inputs).argmax(axis=1)
    # ranges measured on next to nothing: all that is larger is cut off
    choice = choose(model, inputs * np.float32(1e-3), inputs, labels, runs=3, clock=clock(3, 2, 1))
    assert choice.precision == "fp32"
    assert choice.trials[1].refused.startswith("accuracy falls from 100.00 % to ")
    assert choice.trials[1].refused.endswith(", more than 1.00 %")


def test_without_labels_the_classes_must_agree():
    model, inputs = builtin("mnist")
    choice = choose(model, inputs * np.float32(1e-3), inputs, runs=3, clock=clock(3, 2, 1))
    assert choice.precision == "fp32"
    assert choice.trials[1].refused.endswith(" % of the samples change class, more than 1.00 %")
    assert choice.trials[1].accuracy is None


@pytest.mark.parametrize(("max_fall", "precision"), [(0.05, "int8"), (1e-6, "fp32")])
def test_outputs_that_are_no_classes_must_be_close(max_fall, precision):
    model = linear(np.random.default_rng(0).normal(size=(30, 1)).astype(np.float32))
    inputs = np.random.default_rng(1).normal(size=(50, 30)).astype(np.float32)
    choice = choose(model, inputs, inputs, max_fall=max_fall, runs=3, clock=clock(3, 2, 1))
    assert choice.precision == precision
    assert choice.trials[1].agreement is None
    if precision == "fp32":
        assert "of the largest, more than 0.00 %" in choice.trials[1].refused


def test_labels_of_outputs_that_are_not_class_scores_are_refused():
    model = linear(np.random.default_rng(0).normal(size=(30, 1)).astype(np.float32))
    inputs = np.random.default_rng(1).normal(size=(50, 30)).astype(np.float32)
    with pytest.raises(ExportError, match=r"shape \(1,\).*--data"):
        choose(model, inputs, inputs, np.zeros(50, int))


def test_what_onnx_runtime_cannot_quantise_stays_fp32():
    model, inputs = builtin("digits", 0.1)
    small = quantise(model, inputs)
    choice = choose(small, inputs, inputs, runs=3)
    assert choice.precision == "fp32"
    assert choice.model is small
    assert [trial.name for trial in choice.trials] == ["fp32", "int8", "int8 in fully connected layers"]
    assert "quantised already" in str(choice)


def test_importing_loads_no_torch_and_no_onnxruntime():
    heavy = {"torch", "onnxruntime", "edge_sdk.predict"}
    code = f"import sys, export.precision, export.packed; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_weight_that_is_turned_is_quantised():
    model = linear(np.random.default_rng(0).normal(size=(30, 30)).astype(np.float32))
    model.graph.node.insert(0, helper.make_node("Transpose", ["weight"], ["turned"]))
    model.graph.node[1].input[1] = "turned"
    inputs = np.random.default_rng(1).normal(size=(50, 30)).astype(np.float32)
    wanted = run(model, inputs)
    assert np.abs(run(quantise(model, inputs), inputs) - wanted).max() < 0.05 * np.abs(wanted).max()
