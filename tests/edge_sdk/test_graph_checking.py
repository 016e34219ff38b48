"""Graphs that a device must not run are refused by what is wrong with them."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.publishing.step import compile_step
from edge_sdk.publishing.untraced import describe_whole
from sparrow.graphs import Graphs
from sparrow.graphs.checking import LARGEST_CONSTANT, MOST_NODES, check_graphs
from sparrow.protocol.errors import GraphError

from .networks import zoo

pytestmark = pytest.mark.integration  # compiles for seconds


@pytest.fixture(scope="module")
def small():
    kind = zoo()["mnist"]()
    graphs = compile_step(kind.model, kind.loss, kind.inputs, kind.targets)
    return graphs, describe_whole(kind.model, kind.inputs[:2], task="test")


def test_what_a_step_takes_is_known_beforehand(small):
    step, evaluation = check_graphs(*small)
    assert evaluation.seconds(32) < step.seconds(32) < 8 * evaluation.seconds(32)
    assert evaluation.bytes(32) < step.bytes(32) < 2**25


def test_a_transposition_costs_nothing_if_products_alone_read_it(small):
    """ONNX Runtime has the product read it the other way round; it has to make what leaves the graph."""
    graphs, manifest = small

    def seconds(*more):
        step = onnx.load_from_string(graphs.step)
        wide = numpy_helper.from_array(np.ones((500, 500), np.float32), "wide")
        step.graph.initializer.append(wide)
        step.graph.node.extend(helper.make_node(*each) for each in more)
        return check_graphs(replace(graphs, step=step.SerializeToString()), manifest)[0].seconds(8)

    product = ("MatMul", ["wide", "turned"], ["product"])
    turned = seconds(("Transpose", ["wide"], ["turned"]), product)
    alone = seconds(("MatMul", ["wide", "wide"], ["product"]))
    also_read = seconds(("Transpose", ["wide"], ["turned"]), product, ("Neg", ["turned"], ["negative"]))
    negative = seconds(("MatMul", ["wide", "wide"], ["product"]), ("Neg", ["wide"], ["negative"]))
    assert turned == pytest.approx(alone, rel=0.02)
    assert also_read > negative + 1e-3


def add(kind, inputs, output="extra", **attributes):
    def change(proto):
        proto.graph.node.append(helper.make_node(kind, inputs, [output], **attributes))

    return change


def output_of(proto, name):
    return next(each for each in proto.graph.output if each.name == name)


def of_domain(proto):
    proto.graph.node[0].domain = "com.microsoft"


def import_domain(proto):
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def older(proto):
    proto.opset_import[0].version = 20


def function(proto):
    proto.functions.append(onnx.FunctionProto(name="f"))


def loop(proto):
    body = helper.make_graph([], "body", [], [])
    proto.graph.node.append(helper.make_node("Loop", ["", ""], ["x"], body=body))


def hidden_graph(proto):
    proto.graph.node[0].attribute.append(helper.make_attribute("body", helper.make_graph([], "body", [], [])))


def external(proto):
    tensor = TensorProto(name="w", dims=[1], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    proto.graph.initializer.append(tensor)


def large_constant(proto):
    array = np.zeros(LARGEST_CONSTANT, np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(array, "w"))


def two_of_a_name(proto):
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "input"))


def many_nodes(proto):
    proto.graph.node.extend(helper.make_node("Identity", ["input"], [f"n{n}"]) for n in range(MOST_NODES))


def foreign_input(proto):
    proto.graph.input.append(helper.make_tensor_value_info("secret", TensorProto.FLOAT, [1]))


def wide_weight(proto):
    value = next(
        each for each in proto.graph.input if len(each.type.tensor_type.shape.dim) == 4 and each.name != "input"
    )
    value.type.tensor_type.shape.dim[0].dim_value = 99


def foreign_output(proto):
    proto.graph.output.append(helper.make_tensor_value_info("grad:other", TensorProto.FLOAT, [1]))
    add("Identity", ["loss"], "grad:other")(proto)


def wrong_gradient(proto):
    value = next(each for each in proto.graph.output if each.name.startswith("grad:"))
    value.type.tensor_type.shape.dim[0].dim_value += 1


def no_loss(proto):
    proto.graph.output.remove(output_of(proto, "loss"))


def false_record(proto):
    value = next(each for each in proto.graph.value_info if len(each.type.tensor_type.shape.dim) == 4)
    value.type.tensor_type.shape.dim[1].dim_value = 1


def constant(proto, name, values):
    proto.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))


def of_constants(*nodes, **arrays):
    def change(proto):
        for name, values in arrays.items():
            constant(proto, name, values)
        for kind, inputs, output, attributes in nodes:
            add(kind, inputs, output, **attributes)(proto)

    return change


HUGE = of_constants(("Expand", ["loss", "size"], "huge", {}), size=[1 << 15, 1 << 15])
SQUARE = of_constants(
    ("Reshape", ["input", "rows"], "flat", {}), ("Gemm", ["flat", "flat"], "square", {"transB": 1}), rows=[0, -1]
)
SOME = of_constants(("Slice", ["input", "from", "to"], "some", {}), **{"from": [1], "to": [100]})
HIDDEN = of_constants(
    ("Shape", ["input"], "shape", {}), ("Slice", ["shape", "zero", "one"], "n", {}), ("Mod", ["n", "big"], "less", {}),
    ("Expand", ["loss", "less"], "hidden", {}), zero=[0], one=[1], big=[1000],
)  # fmt: skip
PLACES = of_constants(
    ("MaxPool", ["input"], "most", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("Cast", ["most"], "places", {"to": int(TensorProto.INT64)}),
    ("MaxUnpool", ["most", "places"], "back", {"kernel_shape": [2, 2], "strides": [2, 2]}),
)

WRONG = {
    "another domain": (of_domain, "only standard operators"),
    "an import of another domain": (import_domain, "uses operators of 'com.microsoft'"),
    "an older version": (older, "operators of version 20"),
    "a function": (function, "has its own functions"),
    "a loop": (loop, "'Loop'.*not accepted"),
    "a hidden graph": (hidden_graph, "a graph"),
    "an operator of no step": (add("NonZero", ["input"]), "'NonZero'.*not accepted"),
    "random numbers": (add("RandomNormal", [], shape=[2]), "'RandomNormal'.*not accepted"),
    "external data": (external, "outside"),
    "a large constant": (large_constant, "'w' has more than"),
    "a constant over an input": (two_of_a_name, "occurs twice"),
    "many nodes": (many_nodes, "nodes; it must have at most"),
    "a foreign input": (foreign_input, "input 'secret'"),
    "a weight of another shape": (wide_weight, "not of the manifest's"),
    "a foreign output": (foreign_output, "output 'grad:other'"),
    "a gradient of another shape": (wrong_gradient, "output 'grad:.*is not float32 of"),
    "no loss": (no_loss, "no output 'loss'"),
    "a false record": (false_record, "is recorded with"),
    "a huge value": (HUGE, "bytes"),
    "the square of the batch": (SQUARE, "square of the batch"),
    "some samples alone": (SOME, "axis of 1 and 2 places"),
    "a size that hides": (HIDDEN, "size of a value is not known"),
    "places out of nowhere": (PLACES, "indices are not those of a maximum"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_graph_is_refused_by_name(small, what):
    graphs, manifest = small
    change, message = WRONG[what]
    proto = onnx.load_from_string(graphs.step)
    change(proto)
    with pytest.raises(GraphError, match=message):
        check_graphs(Graphs(proto.SerializeToString(), graphs.evaluation), manifest)


def test_an_evaluation_has_no_gradients(small):
    graphs, manifest = small
    with pytest.raises(GraphError, match=r"evaluation.*'error'"):
        check_graphs(Graphs(graphs.step, graphs.step), manifest)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(data=st.data())
def test_any_bytes_are_accepted_or_refused(small, data):
    graphs, manifest = small
    changed = bytearray(graphs.step)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(changed), len(changed) // 2]))
    with contextlib.suppress(GraphError):
        check_graphs(Graphs(bytes(changed[:cut]), graphs.evaluation), manifest)
