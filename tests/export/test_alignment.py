"""Channels of zeros that fill the blocks of ONNX Runtime's convolutions."""

import numpy as np
import onnx
import onnx.checker
import pytest
from onnx import TensorProto, helper, numpy_helper

from sparrow.export.alignment import align
from sparrow.export.compact import compact


def network(first, second, *, between=("Relu", "MaxPool"), group=1, read_twice=False):
    """conv -> layers -> conv -> conv, of ``first`` and ``second`` channels, on [N, 3, 12, 12]."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.normal(size=(first, 3, 3, 3)),
        "b1": rng.normal(size=first),
        "w2": rng.normal(size=(second, first // group, 3, 3)),
        "w3": rng.normal(size=(5, second, 1, 1)),
        "b3": rng.normal(size=5),
    }
    nodes = [helper.make_node("Conv", ["input", "w1", "b1"], ["x0"], pads=[1] * 4)]
    for number, kind in enumerate(between):
        shape = {"kernel_shape": [2, 2]} if kind.endswith("Pool") else {}
        nodes.append(helper.make_node(kind, [f"x{number}"], [f"x{number + 1}"], **shape))
    last = f"x{len(between)}"
    nodes += [
        helper.make_node("Conv", [last, "w2"], ["y"], group=group),
        helper.make_node("Sigmoid", ["y"], ["z"]),
        helper.make_node("Conv", ["z", "w3", "b3"], ["output"]),
    ]
    outputs = ["output", "x0"] if read_twice else ["output"]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, 12, 12])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in outputs],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def run(model):
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"input": np.random.default_rng(1).normal(size=(4, 3, 12, 12)).astype(np.float32)})


def sizes(model):
    return {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}


@pytest.mark.parametrize("between", [(), ("Relu",), ("Relu", "MaxPool"), ("AveragePool", "Tanh")])
def test_channels_fill_blocks_and_nothing_changes(between):
    model = network(9, 19, between=between)
    aligned = align(model)
    onnx.checker.check_model(aligned, full_check=True)
    found = sizes(aligned)
    assert found["w1"] == (16, 3, 3, 3)
    assert found["b1"] == (16,)
    assert found["w2"] == (24, 16, 3, 3)
    assert found["w3"] == (5, 24, 1, 1)
    for got, wanted in zip(run(aligned), run(model), strict=True):
        assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_the_given_model_is_not_changed():
    model = network(9, 19)
    before = model.SerializeToString()
    align(model)
    assert model.SerializeToString() == before


def test_compacting_takes_the_zeros_out_again():
    model = network(9, 19)
    assert sizes(compact(align(model))) == sizes(compact(model))


@pytest.mark.parametrize(("first", "second"), [(8, 16), (4, 7), (32, 8)])
def test_whole_blocks_and_less_than_one_stay(first, second):
    assert sizes(align(network(first, second))) == sizes(network(first, second))


@pytest.mark.parametrize(
    "model",
    [
        network(9, 9, group=9),
        network(9, 16, read_twice=True),
        network(9, 16, between=("Softmax",)),
    ],
    ids=["by groups", "read by others", "channels together"],
)
def test_what_would_change_the_answer_stays(model):
    assert sizes(align(model))["w1"] == (9, 3, 3, 3)
    assert [each.shape for each in run(align(model))] == [each.shape for each in run(model)]
