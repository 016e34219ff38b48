"""A preparation's graph: its results, the graphs that are refused, and its place in front of a model."""

import hashlib

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.tasks.preparing import own_constants, prepare_array, prepare_rows, statistics_of
from sparrow.export.errors import ExportError, SkeletonError
from sparrow.export.older import older
from sparrow.export.preparation import PREFIX, Preparer, check_preparation, complete, compose, draw_raw
from sparrow.protocol.manifest import Manifest, TensorSpec
from sparrow.protocol.preparation import Column, Preparation

RANDOM = np.random.default_rng(0)
COLUMNS = (Column(name="a"), Column(name="room", categories=("bath", "hall", "kitchen")), Column(name="flat"))


def rows(count=40):
    room = RANDOM.integers(0, 3, count)
    return np.stack([RANDOM.normal(1000, 3, count), room, np.full(count, 7)], 1).astype(np.float32)


def manifest_of(built, made):
    return Manifest(
        task="t",
        input_shape=made,
        output_shape=(2,),
        tensors=(TensorSpec(name="w", shape=(1,)),),
        preparation=built.description,
        preparation_sha256=hashlib.sha256(built.graph).hexdigest(),
    )


# --- what the kinds make ---------------------------------------------------------------------------------------------


def test_a_row_is_standardised_and_its_categories_are_spread_out():
    raw = rows()
    built = prepare_rows(COLUMNS, statistics_of([raw[:10], raw[10:]], 0, COLUMNS))
    check_preparation(built.graph, manifest_of(built, (5,)))
    made = Preparer(built.graph)(raw)
    np.testing.assert_allclose(made[:, 0].mean(), 0, atol=1e-3)
    np.testing.assert_allclose(made[:, 0].std(), 1, atol=1e-3)
    assert not made[:, 1].any(), "a column of one value is only centred"
    assert np.array_equal(made[:, 2:], np.eye(3)[raw[:, 1].astype(int)])


def test_what_is_missing_becomes_the_mean_and_what_is_unknown_zeros():
    raw = rows()
    raw[0] = np.nan, -1, np.nan
    raw[1, 1] = np.nan
    built = prepare_rows(COLUMNS, statistics_of([raw], 0, COLUMNS))
    made = Preparer(built.graph)(raw)
    assert not made[0].any()
    assert not made[1, 2:].any()
    assert np.isfinite(made).all()


def test_each_devices_own_statistics_are_no_part_of_what_is_published():
    raw, other = rows(), rows() * np.array([3, 1, 1], np.float32)
    built = prepare_rows(COLUMNS, statistics_of([raw], 0, COLUMNS), own=True)
    manifest = manifest_of(built, (5,))
    check_preparation(built.graph, manifest)
    assert not manifest.preparation.mean
    assert np.float32(raw[:, 0].mean()).tobytes() not in built.graph
    mine = Preparer(complete(built.graph, own_constants(statistics_of([other], 0, COLUMNS), COLUMNS)))(other)
    np.testing.assert_allclose(mine[:, 0].mean(), 0, atol=1e-2)
    with pytest.raises(ExportError, match="own:mean"):
        complete(built.graph, {})


ARRAYS = [
    ("uint8", (12, 10), "HW", None, (1, 12, 10)),
    ("uint8", (3, 9, 9), "CHW", None, (3, 9, 9)),
    ("uint8", (16, 16, 4), "HWC", None, (4, 16, 16)),
    ("float32", (128, 6), "TC", 1, (6, 128)),
    ("float32", (6, 128), "CT", 0, (6, 128)),
    ("float32", (8, 8, 3), "HWC", 2, (3, 8, 8)),
    ("uint16", (6,), "", 0, (6,)),
    ("int64", (4,), "", 0, (4,)),
]


@pytest.mark.parametrize(("dtype", "shape", "axes", "channel", "made"), ARRAYS)
def test_an_array_has_its_channels_first_and_is_scaled(dtype, shape, axes, channel, made):
    raw = RANDOM.integers(0, 250, (30, *shape)).astype(dtype)
    found = None if channel is None else statistics_of([raw], channel)
    built = prepare_array(dtype, shape, axes, found)
    check_preparation(built.graph, manifest_of(built, made))
    prepared = Preparer(built.graph)(raw)
    wanted = raw.astype(np.float64)
    if axes in ("TC", "HWC"):
        wanted = np.moveaxis(wanted, -1, 1)
    if channel is None:
        wanted = wanted / 255
    else:
        over = (0, *range(2, wanted.ndim))
        wanted = (wanted - wanted.mean(over, keepdims=True)) / wanted.std(over, keepdims=True)
    np.testing.assert_allclose(prepared, wanted.reshape(-1, *made), atol=1e-4)


@pytest.mark.parametrize(("dtype", "shape", "axes", "channel", "made"), ARRAYS)
def test_samples_are_prepared_alike_alone_and_in_a_batch(dtype, shape, axes, channel, made):
    built = prepare_array(dtype, shape, axes, None)
    preparer = Preparer(built.graph)
    raw = draw_raw(built.description, 7)
    assert raw.dtype == dtype
    assert np.array_equal(preparer(raw), np.concatenate([preparer(raw[place : place + 1]) for place in range(7)]))


def test_statistics_do_not_suffer_from_a_large_offset():
    values = (1.7e6 + RANDOM.normal(0, 2, (1000, 1))).astype(np.float32)
    found = statistics_of(np.array_split(values, 10), 0)
    np.testing.assert_allclose(found.mean, values.astype(np.float64).mean(), rtol=1e-9)
    np.testing.assert_allclose(found.deviation, values.astype(np.float64).std(), rtol=1e-6)


# --- what is refused -------------------------------------------------------------------------------------------------


def graph_of(
    nodes, *, shape=(3,), made=(3,), kind=TensorProto.FLOAT, initializers=(), batch="batch", inputs=("input",)
):
    graph = helper.make_graph(
        nodes,
        "p",
        [helper.make_tensor_value_info(name, kind, [batch, *shape]) for name in inputs],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [batch, *made])],
        list(initializers),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


def described(graph, *, own=False, shape=(3,), made=(3,)):
    return Manifest(
        task="t",
        input_shape=made,
        output_shape=(2,),
        tensors=(TensorSpec(name="w", shape=(1,)),),
        preparation=Preparation(shape=shape, own=own),
        preparation_sha256=hashlib.sha256(graph).hexdigest(),
    )


def node(kind, *given, output="output", **attributes):
    return helper.make_node(kind, list(given), [output], **attributes)


def constant(name, values):
    return numpy_helper.from_array(np.asarray(values), name)


def inner():
    return helper.make_graph(
        [node("Identity", "input")], "inner", [], [helper.make_tensor_value_info("output", 1, None)]
    )


HOSTILE = {
    "no ONNX": b"\x07\x08 nothing",
    "a graph within": graph_of(
        [helper.make_node("If", ["c"], ["output"], then_branch=inner(), else_branch=inner())],
        initializers=[constant("c", True)],
    ),
    "another domain": graph_of([helper.make_node("Relu", ["input"], ["output"], domain="evil")]),
    "chance": graph_of([node("RandomNormalLike", "input")]),
    "a file beside": graph_of(
        [node("Add", "input", "c")],
        initializers=[TensorProto(name="c", data_type=1, dims=[3], data_location=TensorProto.EXTERNAL)],
    ),
    "gigabytes": graph_of(
        [node("Tile", "input", "n", output="t"), node("ReduceSum", "t", "axes", keepdims=1)],
        made=(1,),
        initializers=[constant("n", np.array([1, 10**9])), constant("axes", np.array([1]))],
    ),
    "a size that the data decide": graph_of([node("NonZero", "input", output="n"), node("Cast", "n", to=1)]),
    "a fixed batch": graph_of([node("Identity", "input")], batch=4),
    "two inputs": graph_of([node("Add", "input", "other")], inputs=("input", "other")),
    "a batch that shrinks": graph_of(
        [node("ReduceMean", "input", "axes", keepdims=1)], initializers=[constant("axes", np.array([0]))]
    ),
    "values that nothing gives": graph_of(
        [node("Add", "input", "c")], initializers=[TensorProto(name="c", data_type=1, dims=[3])]
    ),
    "a large constant": graph_of(
        [node("Add", "input", "c", output="s"), node("Slice", "s", "b", "e", "a")],
        initializers=[
            constant("c", np.zeros((2**21, 3), np.float32)),
            *(constant(name, np.array([value])) for name, value in (("b", 0), ("e", 1), ("a", 0))),
        ],
    ),
    "another shape": graph_of([node("Concat", "input", "input", axis=1)], made=(6,)),
    "another type": graph_of([node("Cast", "input", to=1)], kind=TensorProto.UINT8),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_graph_that_devices_must_not_run_is_refused(case):
    with pytest.raises(SkeletonError):
        check_preparation(HOSTILE[case], described(HOSTILE[case]))


def test_a_graph_is_the_one_that_the_manifest_names():
    graph = graph_of([node("Identity", "input")])
    check_preparation(graph, described(graph))
    with pytest.raises(SkeletonError, match="SHA-256"):
        check_preparation(graph_of([node("Neg", "input")]), described(graph))


def test_own_statistics_have_the_length_of_a_raw_axis():
    open_tensors = [TensorProto(name=f"own:{name}", data_type=1, dims=[2**20]) for name in ("mean", "deviation")]
    graph = graph_of(
        [node("Sub", "input", "own:mean", output="c"), node("Div", "c", "own:deviation")], initializers=open_tensors
    )
    with pytest.raises(SkeletonError, match="own:"):
        check_preparation(graph, described(graph, own=True))


# --- in front of a model ---------------------------------------------------------------------------------------------


def model():
    weights = RANDOM.normal(size=(2, 5)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["input", "w"], ["output"], transB=1)],
        "model",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 5])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 2])],
        [constant("w", weights)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    helper.set_model_props(made, {"method": "fedavg"})
    return made


def test_a_composed_model_answers_raw_samples():
    raw, plain = rows(), model()
    built = prepare_rows(COLUMNS, statistics_of([raw], 0, COLUMNS))
    composed = compose(plain, built.graph)
    session = onnxruntime.InferenceSession(composed.SerializeToString())
    assert [value.name for value in session.get_inputs()] == ["input"]
    assert session.get_inputs()[0].shape[1:] == [3]
    wanted = onnxruntime.InferenceSession(plain.SerializeToString()).run(None, {"input": Preparer(built.graph)(raw)})[0]
    for batch in (1, 7):
        for start in range(0, 35, batch):
            (found,) = session.run(None, {"input": raw[start : start + batch]})
            np.testing.assert_allclose(found, wanted[start : start + batch], atol=1e-6)
    assert session.get_modelmeta().custom_metadata_map["method"] == "fedavg"
    names = {each.name for each in composed.graph.initializer} - {"w"}
    assert names
    assert all(name.startswith(PREFIX) for name in names)
    assert onnx.checker.check_model(composed) is None


@pytest.mark.slow
@pytest.mark.integration
def test_an_old_runtime_prepares_the_same(tmp_path, old_runtime):
    raw = rows()
    made = older(compose(model(), prepare_rows(COLUMNS, statistics_of([raw], 0, COLUMNS)).graph))
    assert (made.opset_import[0].version, made.ir_version) == (17, 8)
    onnx.save(made, tmp_path / "m.onnx")
    wanted = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"input": raw})[0]
    np.testing.assert_allclose(old_runtime(tmp_path / "m.onnx", raw), wanted, atol=1e-6)
