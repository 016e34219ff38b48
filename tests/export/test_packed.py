import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from sparrow.export import packed
from sparrow.export.errors import ExportError
from sparrow.export.packed import pack
from sparrow.graphs.skeleton import fill
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.manifest import initial_values

DENSITIES = (0.5, 0.2, 0.1, 0.02)


def sparse(shape, density, seed=0, dtype=np.float32):
    """Values of which about ``density`` are not zero."""
    random = np.random.default_rng(seed)
    values = random.integers(1, 127, shape) if dtype == np.int8 else random.normal(size=shape)
    return np.where(random.random(shape) < density, values, 0).astype(dtype)


def builtin(task, density):
    """A built-in model under a random mask, and how many of its values exist: those of the mask, and all biases."""
    found = load_builtin(task)
    tensors = initial_values(found.manifest, 0)
    for number, spec in enumerate(found.manifest.maskable):
        exists = np.random.default_rng(number).random(spec.shape) < density
        tensors[spec.name] = np.where(exists, tensors[spec.name], np.float32(0))
    count = sum(
        np.count_nonzero(tensors[spec.name]) if spec in found.manifest.maskable else spec.size
        for spec in found.manifest.kept
    )
    return found.manifest, onnx.load_from_string(fill(found.skeleton, found.manifest, tensors)), count


def multiply(weight, *, more=(), ir_version=10, opset=21, inputs=()):
    """y = x @ weight, and what ``more`` makes of it."""
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["y"]), *more]
    out = nodes[-1].output[0]
    graph = helper.make_graph(
        nodes,
        "test",
        [value("x", TensorProto.FLOAT, ["batch", weight.shape[0]]), *inputs],
        [value(out, TensorProto.FLOAT, ["batch", "width"])],
        [numpy_helper.from_array(weight, "weight")],
    )
    return helper.make_model(graph, ir_version=ir_version, opset_imports=[helper.make_opsetid("", opset)])


def load(model, path):
    """A session, and the graph that it runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(path)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, onnx.load(path).graph


def same(model, path, samples=3):
    """Pack, check that ONNX Runtime makes the same of both and computes the same; answers with the packed model."""
    before = model.SerializeToString(deterministic=True)
    small = pack(model)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(small, full_check=True)
    (plain, wanted), (session, got) = load(model, path), load(small, path)
    assert sorted(node.op_type for node in got.node) == sorted(node.op_type for node in wanted.node)
    held = [sorted((tuple(t.dims), t.data_type) for t in graph.initializer) for graph in (wanted, got)]
    assert held[0] == held[1]
    (put,) = plain.get_inputs()
    shape = (samples, *put.shape[1:])
    inputs = {put.name: np.random.default_rng(7).normal(size=shape).astype(np.float32)}
    for one, other in zip(plain.run(None, inputs), session.run(None, inputs), strict=True):
        assert one.tobytes() == other.tobytes()
    return small


@pytest.mark.integration
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("task", builtin_tasks())
def test_built_in_models_are_the_same_from_a_file_of_their_density(task, density, tmp_path):
    manifest, model, count = builtin(task, density)
    small = same(model, tmp_path / "optimised.onnx")
    size = sum(spec.size for spec in manifest.kept)
    assert small.ByteSize() <= 4 * size * (count / size + 1 / 32) + 8192
    assert pack(small) == small


@pytest.mark.parametrize("shape", [(64, 64), (63, 65)])
def test_loading_says_nothing(shape, capfd):
    small = pack(multiply(sparse(shape, 0.1)))
    onnxruntime.InferenceSession(small.SerializeToString(), providers=["CPUExecutionProvider"])
    assert tuple(capfd.readouterr()) == ("", "")


def test_a_dense_model_stays_as_it_is():
    _, model, _ = builtin("mnist", 1)
    assert pack(model) == model


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    density=st.sampled_from([0, 0.01, 0.3, 0.9, 1]),
    dtype=st.sampled_from([np.float32, np.float16, np.int8]),
    seed=st.integers(0, 99),
)
def test_any_weight_comes_out_as_it_went_in(rows, columns, density, dtype, seed):
    assert_unpacked(sparse((rows, columns), density, seed, dtype))


@pytest.mark.parametrize("size", [*range(packed.MIN_VALUES - 1, packed.MIN_VALUES + 10), 10007])
@pytest.mark.parametrize("existing", [0, 1, "last", "two"])
def test_few_or_no_values(size, existing):
    weight = np.zeros(size, dtype=np.float32)
    if existing:
        weight[{"last": -1, "two": [0, size - 1]}.get(existing, 0)] = 1.5
    small = assert_unpacked(weight)
    # with the table for all weights, 1,200 bytes
    assert small.ByteSize() < 1200 + size // 8


def test_zeros_with_a_sign_and_what_is_no_number_are_values():
    weight = np.zeros(4096, dtype=np.float32)
    weight[5:9] = np.array([0x80000000, 0x7FC00123, 0xFF800000, 0x00000001], dtype=np.uint32).view(np.float32)
    assert_unpacked(weight)


def assert_unpacked(weight):
    """What ONNX Runtime makes of the packed weight is the weight, bit for bit."""
    kind = helper.np_dtype_to_tensor_dtype(weight.dtype)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["weight"], ["out"])],
        "test",
        [],
        [helper.make_tensor_value_info("out", kind, list(weight.shape))],
        [numpy_helper.from_array(weight, "weight")],
    )
    small = pack(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]))
    assert small.ByteSize() <= weight.nbytes + 200
    onnx.checker.check_model(small, full_check=True)
    levels = onnxruntime.GraphOptimizationLevel
    for level in (levels.ORT_ENABLE_ALL, levels.ORT_DISABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = 1
        body = small.SerializeToString()
        (got,) = onnxruntime.InferenceSession(body, options, providers=["CPUExecutionProvider"]).run(None, {})
        assert got.dtype == weight.dtype
        assert got.shape == weight.shape
        assert got.tobytes() == weight.tobytes()
    return small


def test_values_of_half_precision_are_cast_after_unpacking(tmp_path):
    weight = sparse((64, 99), 0.1, dtype=np.float16)
    model = multiply(weight.astype(np.float32))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "half"))
    model.graph.node.insert(0, helper.make_node("Cast", ["half"], ["weight"], to=TensorProto.FLOAT))
    small = same(model, tmp_path / "optimised.onnx")
    assert small.ByteSize() < weight.nbytes * (0.12 + 1 / 16) + 2048


def test_int8_values_are_dequantised_after_unpacking(tmp_path):
    weight = sparse((64, 200), 0.1, dtype=np.int8)
    model = multiply(weight.astype(np.float32))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "int8"))
    scale = np.linspace(0.01, 0.02, 200, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(scale, "scale"))
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["int8", "scale"], ["weight"], axis=1))
    small = same(model, tmp_path / "optimised.onnx")
    assert small.ByteSize() < weight.nbytes * (0.12 + 1 / 8) + scale.nbytes + 2048


def test_a_weight_of_two_operators_is_stored_once(tmp_path):
    weight = sparse((64, 64), 0.2)
    more = [helper.make_node("Transpose", ["weight"], ["turned"]), helper.make_node("MatMul", ["y", "turned"], ["z"])]
    small = same(multiply(weight, more=more), tmp_path / "optimised.onnx")
    assert small.ByteSize() < weight.nbytes * 0.3 + 2300


def test_a_weight_that_is_an_output_too(tmp_path):
    model = multiply(sparse((64, 64), 0.2))
    model.graph.output.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, [64, 64]))
    small = same(model, tmp_path / "optimised.onnx")
    assert small.ByteSize() < model.ByteSize() / 2


def test_a_weight_that_inner_graphs_read(tmp_path):
    value = helper.make_tensor_value_info
    weight = sparse((64, 64), 0.2)
    branches = {
        key: helper.make_graph(
            [helper.make_node(op, ["y", "weight"], [out])], key, [], [value(out, 1, ["batch", "width"])]
        )
        for key, op, out in (("then_branch", "MatMul", "a"), ("else_branch", "Gemm", "b"))
    }
    more = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["flag"], to=TensorProto.BOOL),
        helper.make_node("If", ["flag"], ["z"], **branches),
    ]
    small = same(multiply(weight, more=more), tmp_path / "optimised.onnx")
    assert small.ByteSize() < weight.nbytes * 0.3 + 2800


def test_a_weight_that_a_caller_may_replace_stays(tmp_path):
    weight = sparse((64, 64), 0.1)
    model = multiply(weight, inputs=[helper.make_tensor_value_info("weight", TensorProto.FLOAT, [64, 64])])
    assert pack(model) == model


def test_names_that_are_taken_are_left_alone(tmp_path):
    model = multiply(sparse((64, 64), 0.1))
    model.graph.node[0].output[0] = model.graph.output[0].name = "~0.count"
    small = same(model, tmp_path / "optimised.onnx")
    assert small.ByteSize() < model.ByteSize() / 2


def test_a_packed_model_to_which_a_weight_was_added_is_packed_again(tmp_path):
    small = pack(multiply(sparse((64, 64), 0.1)))
    small.graph.initializer.append(numpy_helper.from_array(sparse((64, 128), 0.1, 1), "more"))
    small.graph.node.append(helper.make_node("MatMul", ["y", "more"], ["z"]))
    small.graph.output[0].name = "z"
    again = same(small, tmp_path / "optimised.onnx")
    assert again.ByteSize() < small.ByteSize() / 3


def test_a_weight_that_onnx_runtime_would_not_fold_stays(monkeypatch):
    monkeypatch.setattr(packed, "MAX_VALUES", 4095)
    model = multiply(sparse((64, 64), 0.1))
    assert pack(model) == model


def test_weights_of_other_types_stay():
    for dtype in (np.float64, np.int32, np.uint8):
        weight = sparse((64, 64), 0.1).astype(dtype)
        model = multiply(weight)
        assert pack(model) == model


def test_old_operators_are_refused():
    with pytest.raises(ExportError, match=r"\b12\b.*\b13\b"):
        pack(multiply(sparse((64, 64), 0.1), opset=12))


def test_data_outside_the_model_is_refused():
    model = multiply(sparse((64, 64), 0.1))
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    with pytest.raises(ExportError, match=r"'weight'.*file"):
        pack(model)


@pytest.mark.parametrize("opset", [packed.OLDEST_OPSET, 17, 23])
def test_old_and_new_operators(opset, tmp_path):
    model = multiply(sparse((65, 67), 0.1), opset=opset)
    assert same(model, tmp_path / "optimised.onnx").ByteSize() < model.ByteSize() / 4
