"""Files for older runtimes: each operator in an older version, with the same result."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from sparrow.export.older import older

RANDOM = np.random.default_rng(0)


def model_of(*nodes, shape=("batch", 4, 6, 9), rank=4, **constants):
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [None] * rank)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def node(kind, inputs, outputs="output", **attributes):
    return helper.make_node(kind, inputs.split(" "), outputs.split(" "), **attributes)


def joined(*parts):
    """A split into these parts, concatenated in reverse, so that their sizes and order count."""
    names = [f"part{index}" for index in range(parts[0])]
    split = node("Split", "input", " ".join(names), axis=parts[1], num_outputs=parts[0])
    return split, node("Concat", " ".join(reversed(names)), axis=parts[1])


def reduced(kind, **attributes):
    return model_of(node(f"Reduce{kind}", "input axes", **attributes), axes=np.array([1, -1]))


def resized(**attributes):
    sizes = np.array([1, 1, 0.5, 1.5], np.float32)
    return model_of(node("Resize", "input  sizes", mode="linear", **attributes), sizes=sizes)


GRID = RANDOM.uniform(-1, 1, (2, 5, 5, 2)).astype(np.float32)
SCALE = RANDOM.random((2, 4)).astype(np.float32)

MODELS = {
    "gelu": (17, model_of(node("Gelu", "input"))),
    "gelu by tanh": (17, model_of(node("Gelu", "input", approximate="tanh"))),
    "mish": (17, model_of(node("Mish", "input"))),
    "even split": (17, model_of(*joined(3, 3))),
    "uneven split": (17, model_of(*joined(2, 3))),
    "split of a free axis": (17, model_of(*joined(2, 0))),
    "pad": (17, model_of(node("Pad", "input pads  axes", mode="reflect"), pads=[1, 2, 0, 3], axes=[3, -2])),
    "pad around": (19, model_of(node("Pad", "input pads  axes", mode="wrap"), pads=[1, 2, 0, 3], axes=[3, -2])),
    **{f"reduce {each}": (17, reduced(each)) for each in ("Mean", "Max", "Min", "L1", "L2", "Prod", "LogSumExp")},
    "reduce everything": (17, model_of(node("ReduceMean", "input", keepdims=0), rank=0)),
    "reduce along axes from a computation": (
        17,
        model_of(
            node("Reshape", "axis flat", "axes"),
            node("ReduceMean", "input axes"),
            axis=np.array(2),
            flat=np.array([-1]),
        ),
    ),
    "resize": (17, resized(antialias=0, keep_aspect_ratio_policy="stretch")),
    "antialiased resize": (18, resized(antialias=1)),
    "group norm": (
        17,
        model_of(node("GroupNormalization", "input scale bias", num_groups=2), scale=SCALE[0], bias=SCALE[1]),
    ),
    "sample a grid": (
        17,
        model_of(node("GridSample", "input grid", mode="cubic"), shape=(2, 4, 6, 9), grid=GRID),
    ),
    "average of a window": (17, model_of(node("AveragePool", "input", kernel_shape=[3, 3], dilations=[1, 1]))),
    "average of a sparse window": (19, model_of(node("AveragePool", "input", kernel_shape=[3, 3], dilations=[2, 2]))),
    "largest at a place": (
        18,
        model_of(
            node("ScatterElements", "input places input", axis=1, reduction="max"), shape=(1, 4), places=[[0] * 4]
        ),
    ),
    "types that an old version lacks": (
        20,
        model_of(
            node("Greater", "input zero", "positive"),
            node("ReduceMax", "positive axes", "any"),
            node("Cast", "any", to=TensorProto.FLOAT, saturate=1),
            zero=np.float32(0),
            axes=[1],
        ),
    ),
    "quantised in blocks": (
        21,
        model_of(
            node("DequantizeLinear", "weight scale", "plain", axis=0, block_size=2),
            node("Mul", "input plain"),
            shape=("batch", 4, 6),
            rank=3,
            weight=np.arange(24, dtype=np.int8).reshape(4, 6),
            scale=np.full((2, 6), 0.5, np.float32),
        ),
    ),
}


def run(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"input": inputs})[0]


def draw(model):
    sizes = [dim.dim_value or 5 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    return RANDOM.uniform(0.5, 2, sizes).astype(np.float32)


@pytest.mark.parametrize("case", MODELS)
def test_each_operator_is_written_in_the_oldest_version_that_has_it(case):
    version, model = MODELS[case]
    inputs = draw(model)
    before = model.SerializeToString()
    made = older(model)
    assert model.SerializeToString() == before
    assert made.opset_import[0].version == version
    assert made.ir_version == {17: 8, 18: 8, 19: 9, 20: 9, 21: 10}[version]
    onnx.checker.check_model(made)
    np.testing.assert_allclose(run(made, inputs), run(model, inputs), rtol=1e-5, atol=1e-5)


def test_operators_within_others_are_written_in_an_older_version_too():
    inner = helper.make_graph(
        [node("Gelu", "row", "made"), node("ReduceMean", "made axes", "mean")],
        "each",
        [helper.make_tensor_value_info("row", TensorProto.FLOAT, [9])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, [1])],
    )
    model = model_of(node("Scan", "input", num_scan_inputs=1, body=inner), shape=("batch", 9), rank=2, axes=[0])
    made = older(model)
    assert made.opset_import[0].version == 17
    inputs = draw(model)
    np.testing.assert_allclose(run(made, inputs), run(model, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("case", [case for case, (version, _) in MODELS.items() if version < 21])
def test_an_old_runtime_computes_the_same(case, old_runtime, tmp_path):
    _, model = MODELS[case]
    onnx.save(older(model), tmp_path / "m.onnx")
    inputs = draw(model)
    np.testing.assert_allclose(old_runtime(tmp_path / "m.onnx", inputs), run(model, inputs), rtol=1e-5, atol=1e-5)
