"""Steps that take more than a device gives them are refused before anything of their size exists."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.engines.affordable import TooCostly, check_affordable, try_step
from sparrow.graphs.bounds import MIB, check_sizes, samples_at_once
from sparrow.graphs.checking import check_graphs
from sparrow.graphs.errors import SkeletonError
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.errors import GraphError

from ..graphs import step_of


def node(kind, inputs, output, **attributes):
    return helper.make_node(kind, inputs.split(), [output], name=output, **attributes)


def cast(source, output, kind):
    return node("Cast", source, output, to=int(kind))


SLOW = {
    "a pool of large windows": lambda: step_of(
        [node("AveragePool", "input", "slow", kernel_shape=[200, 200])], (16, 400, 400)
    ),
    "a pool that gives places": lambda: step_of(
        [helper.make_node("MaxPool", ["input"], ["most", "slow"], name="slow", kernel_shape=[90, 90])], (64, 200, 200)
    ),
    "a product of whole numbers": lambda: step_of(
        [cast("input", "whole", TensorProto.INT64), node("MatMul", "whole whole", "slow")], (2048, 2048)
    ),
    "remainders of doubles": lambda: step_of(
        [cast("input", "double", TensorProto.DOUBLE), node("Mod", "double double", "slow", fmod=1)], (2048, 2048)
    ),
    "a convolution of one channel": lambda: step_of(
        [node("Conv", "input kernel", "slow")], (1, 1500, 1500), kernel=np.ones((1, 1, 90, 90), np.float32)
    ),
}


@pytest.mark.parametrize("what", SLOW)
def test_a_node_that_takes_seconds_for_one_sample_is_refused_by_name(what):
    with pytest.raises(GraphError, match=r"'slow'.* s\b.*\b2 s\b"):
        check_graphs(*SLOW[what]())


def test_a_node_that_takes_seconds_for_a_batch_is_refused_on_the_device():
    graphs, manifest = step_of([node("AveragePool", "input", "slow", kernel_shape=[40, 40])], (8, 100, 100))
    needs = check_graphs(graphs, manifest)
    check_affordable(needs, manifest, 1, 1, free=2**40)
    with pytest.raises(TooCostly, match=r"'slow' .*\b4096\b.*batch_size"):
        check_affordable(needs, manifest, 4096, 1, free=2**40)


def test_a_batch_that_takes_more_memory_than_there_is_is_refused_on_the_device():
    graphs, manifest = step_of([node("Expand", "input size", "large")], (1, 100), size=np.array([1, 50_000, 1]))
    needs = check_graphs(graphs, manifest)
    check_affordable(needs, manifest, 1, 1, free=64 * MIB)
    with pytest.raises(TooCostly, match=r"6\d\d MiB .*\b16 samples\b.*\b64\b"):
        check_affordable(needs, manifest, 16, 1, free=64 * MIB)


@pytest.mark.parametrize(
    ("kind", "divisor"),
    [("Div", 0), ("Div", -1), ("Mod", 0), ("Mod", [3, -1]), ("Div", None), ("Mod", None)],
)
def test_whole_numbers_are_divided_by_constants_that_trap_no_processor(kind, divisor):
    nodes = [cast("input", "whole", TensorProto.INT32)]
    constants = {} if divisor is None else {"by": np.array(divisor, np.int32)}
    nodes += [cast("w", "by", TensorProto.INT32)] if divisor is None else []
    graphs, manifest = step_of([*nodes, node(kind, "whole by", "divided")], (2,), **constants)
    with pytest.raises(GraphError, match="divided by a value that may be 0 or -1"):
        check_graphs(graphs, manifest)


@pytest.mark.parametrize("slope", [(1, 1, 7), (5, 1, 1, 1), (2, 3, 4, 4), (4, 1)])
def test_a_slope_enlarges_nothing(slope):
    """ONNX's inference gives the result the shape of the input, and ONNX Runtime makes the larger one of both."""
    step = step_of([node("PRelu", "input slope", "y")], (3, 4, 1), slope=np.ones(slope, np.float32))
    if slope == (4, 1):
        check_graphs(*step)
        return
    with pytest.raises(GraphError, match="factors"):
        check_graphs(*step)


def test_a_size_of_the_batch_divides_nothing():
    nodes = [
        cast("input", "whole", TensorProto.INT64),
        node("Shape", "input", "count", start=0, end=1),
        node("Sub", "count seven", "by"),
        node("Div", "whole by", "divided"),
    ]
    with pytest.raises(GraphError, match="divided by a value that may be 0 or -1"):
        check_graphs(*step_of(nodes, (2,), seven=np.array([7])))


@pytest.mark.parametrize("kind", ["Div", "Mod"])
def test_whole_numbers_are_divided_by_other_constants_and_floats_by_anything(kind):
    whole = [cast("input", "whole", TensorProto.INT64), node(kind, "whole by", "divided")]
    check_graphs(*step_of(whole, (2,), by=np.array([2, -3])))
    attributes = {"fmod": 1} if kind == "Mod" else {}
    check_graphs(*step_of([node(kind, "input zero", "divided", **attributes)], (2,), zero=np.zeros(2, np.float32)))


def batch_of(manifest, samples):
    return np.zeros((samples, *manifest.input_shape), np.float32), np.zeros(samples, np.int64)


def test_a_step_that_runs_as_predicted_passes_its_trial():
    graphs, manifest = step_of([node("Relu", "input", "positive")], (4,))
    try_step(graphs, check_graphs(graphs, manifest)[0], {"w": np.ones(1, np.float32)}, *batch_of(manifest, 3))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "int32"])
def test_a_trial_takes_tensors_of_every_type(dtype):
    graphs, manifest = step_of([node("Relu", "input", "positive")], (4,))
    step = onnx.load_from_string(graphs.step)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    step.graph.input.append(helper.make_tensor_value_info("held", kind, [3]))
    graphs = replace(graphs, step=step.SerializeToString())
    tensors = {"w": np.ones(1, np.float32), "held": np.ones(3, dtype)}
    try_step(
        graphs, check_graphs(*step_of([node("Relu", "input", "positive")], (4,)))[0], tensors, *batch_of(manifest, 3)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
def test_a_step_beyond_its_prediction_ends_only_its_process():
    """As one would that deceives the prediction."""
    cheap = check_graphs(*step_of([node("Relu", "input", "positive")], (4,)))[0]
    graphs, manifest = step_of([node("Expand", "input size", "large")], (1, 4), size=np.array([1, 2**28, 1]))
    with pytest.raises(GraphError, match=r"was tried .* separate process"):
        try_step(graphs, cheap, {"w": np.ones(1, np.float32)}, *batch_of(manifest, 1))


@pytest.mark.parametrize("task", builtin_tasks())
def test_built_in_steps_are_far_from_the_limits(task):
    known = load_builtin(task)
    from sparrow.graphs import Graphs

    graphs = Graphs(known.graphs["step"], known.graphs["evaluation"])
    step, _ = check_graphs(graphs, known.manifest)
    assert step.slowest(32)[2] < 0.2
    assert step.bytes(32) < 128 * MIB


def forward_of(shape, *nodes):
    """A forward pass as a skeleton has it, whose result is that of the last node."""
    given = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", *shape])
    graph = helper.make_graph(nodes, "forward", [given], [helper.make_empty_tensor_value_info(nodes[-1].output[0])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_forward_pass_that_takes_seconds_within_a_node_is_refused():
    check_sizes(forward_of((4, 50, 50), node("AveragePool", "input", "y", kernel_shape=[20, 20])))
    with pytest.raises(SkeletonError, match=r"'y'.* s\b"):
        check_sizes(forward_of((16, 400, 400), node("AveragePool", "input", "y", kernel_shape=[200, 200])))


@pytest.mark.parametrize(("length", "accepted"), [(4, True), (4000, False), (1, False)])
def test_the_factors_of_groups_enlarge_nothing(length, accepted):
    factors = [
        node("Constant", "", name, value=numpy_helper.from_array(np.ones(length, np.float32)))
        for name in ("scale", "bias")
    ]
    model = forward_of((4, 6), *factors, node("GroupNormalization", "input scale bias", "y", num_groups=2))
    if accepted:
        check_sizes(model)
        return
    with pytest.raises(SkeletonError, match=r"'y' .*factors"):
        check_sizes(model)


def test_a_forward_pass_of_many_slow_nodes_is_refused():
    pool = {"kernel_shape": [91, 91], "pads": [45] * 4}
    nodes = [
        node("AveragePool", "input" if place == 0 else f"y{place - 1}", f"y{place}", **pool) for place in range(99)
    ]
    check_sizes(forward_of((1, 200, 200), *nodes[:10]))
    with pytest.raises(SkeletonError, match=r"\b60 s\b"):
        check_sizes(forward_of((1, 200, 200), *nodes))


def test_the_number_of_samples_at_once_bounds_each_nodes_time():
    slow = forward_of((1, 200, 200), node("AveragePool", "input", "y", kernel_shape=[91, 91], pads=[45] * 4))
    fast = forward_of((1, 200, 200), node("Relu", "input", "y"))
    assert samples_at_once(fast, 256) == 256
    assert samples_at_once(slow, 256) == 1
