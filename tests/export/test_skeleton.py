import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.skeleton import make_skeleton
from sparrow.export.errors import ExportError, SkeletonError
from sparrow.graphs import bounds
from sparrow.graphs import skeleton as export_skeleton
from sparrow.graphs.bounds import samples_at_once
from sparrow.graphs.skeleton import check_skeleton, fill
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.manifest import Manifest

pytestmark = pytest.mark.integration  # exports many models


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.max_pool2d(x + self.norm(self.conv(x)), 2)
        return self.out(x.view(x.size(0), -1))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.norm = nn.Conv1d(3, 4, 3, stride=2), nn.BatchNorm1d(4), nn.LayerNorm(5)
        self.hidden, self.out = nn.Linear(20, 5), nn.Linear(5, 2)

    def forward(self, x):
        x = torch.flatten(nn.functional.gelu(self.bn(self.conv(x))), 1)
        return self.out(torch.tanh(self.norm(self.hidden(x))))


class Separable(nn.Module):
    """Depthwise convolution, squeeze-and-excitation, concatenation."""

    def __init__(self):
        super().__init__()
        self.expand, self.depth = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.gate, self.prelu, self.out = nn.Linear(4, 4), nn.PReLU(4), nn.Linear(8, 3)

    def forward(self, x):
        x = nn.functional.hardswish(self.depth(self.expand(x)))
        gated = self.prelu(x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None])
        return self.out(nn.functional.adaptive_avg_pool2d(torch.cat([gated, x], 1), 1).flatten(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.embed(x).mean(1))


NETS = {
    "residual": (Residual, torch.zeros(1, 1, 4, 4)),
    "sequence": (Sequence, torch.zeros(1, 3, 11)),
    "separable": (Separable, torch.zeros(1, 2, 5, 5)),
    "words": (Words, torch.zeros(1, 6, dtype=torch.int64)),
}


def trained(build):
    """A model whose statistics and affine weights differ from their first values."""
    torch.manual_seed(5)
    model = build().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if name.endswith("var") else torch.randn_like(tensor) * 0.5)
    return model


@pytest.mark.parametrize("name", NETS)
def test_the_filled_model_predicts_as_pytorch_does(name):
    build, example = NETS[name]
    model = trained(build)
    manifest = describe(model, example, task="test")
    skeleton = make_skeleton(build(), example, manifest)
    filled = fill(skeleton, manifest.with_graphs({"skeleton": skeleton}), weights(model))
    session = onnxruntime.InferenceSession(filled, providers=["CPUExecutionProvider"])
    for count in (1, 7):
        shape = (count, *example.shape[1:])
        x = torch.randn(shape) if example.is_floating_point() else torch.randint(0, 11, shape)
        (output,) = session.run(["output"], {"input": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(output, model(x).numpy(), atol=1e-5)


def weights(model):
    return {key: value.numpy() for key, value in model.state_dict().items()}


# --- a skeleton small enough to break by hand: linear(3->2)


@pytest.fixture
def manifest():
    return Manifest.model_validate(
        {
            "task": "test",
            "input_shape": [3],
            "output_shape": [2],
            "tensors": [{"name": "out.weight", "shape": [2, 3]}, {"name": "out.bias", "shape": [2]}],
        }
    )


@pytest.fixture
def proto():
    def empty(name, *dims):
        return TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT)

    def value(name, *dims):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

    graph = helper.make_graph(
        [helper.make_node("Gemm", ["input", "out.weight", "out.bias"], ["output"], name="out", transB=1)],
        "model",
        [value("input", "batch", 3)],
        [value("output", "batch", 2)],
        [empty("out.weight", 2, 3), empty("out.bias", 2)],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


TENSORS = {
    "out.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "out.bias": np.array([0.5, -0.5], dtype=np.float32),
}


def test_fill_writes_weights_and_metadata(proto, manifest):
    skeleton = proto.SerializeToString()
    filled = fill(skeleton, manifest, {**TENSORS, "bn.num_batches_tracked": np.array(3)}, metadata={"b": "2", "a": "1"})
    model = onnx.load_from_string(filled)
    assert [(entry.key, entry.value) for entry in model.metadata_props] == [("a", "1"), ("b", "2")]
    (output,) = onnxruntime.InferenceSession(filled).run(None, {"input": np.ones((1, 3), dtype=np.float32)})
    assert output.tolist() == [[3.5, 11.5]]
    assert fill(skeleton, manifest, TENSORS, metadata={"a": "1", "b": "2"}) == filled


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"out.weight": TENSORS["out.weight"]}, "out.bias: its values are missing"),
        ({**TENSORS, "out.bias": np.zeros(3, np.float32)}, r"out.bias: the personal model has shape \(3,\)"),
        ({**TENSORS, "out.bias": np.zeros(2)}, "of float64, the manifest has .* of float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(proto, manifest, tensors, message):
    with pytest.raises(ExportError, match=message):
        fill(proto.SerializeToString(), manifest, tensors)


def add_external(model, tensor):
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def external_attribute(model):
    tensor = TensorProto(name="x", dims=[1], data_type=TensorProto.FLOAT)
    add_external(model, tensor)
    model.graph.node.append(helper.make_node("Constant", [], ["x"], value=tensor))


def subgraph(model):
    inner = helper.make_graph([helper.make_node("Identity", ["input"], ["y"])], "inner", [], [])
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner))


def set_fixed_batch(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


HOSTILE = {
    "external initialiser": (lambda m: add_external(m, m.graph.initializer[0]), "refers to a file outside"),
    "external attribute": (external_attribute, "refers to a file outside"),
    "own operator domain": (lambda m: m.opset_import.add(domain="evil", version=1), "operators of 'evil'"),
    "node of another domain": (lambda m: setattr(m.graph.node[0], "domain", "com.microsoft"), "of 'com.microsoft'"),
    "future operators": (lambda m: setattr(m.opset_import[0], "version", 999), r"operator versions \[999\]"),
    "no operators": (lambda m: m.ClearField("opset_import"), r"operator versions \[\]"),
    "unknown operator": (
        lambda m: setattr(m.graph.node[0], "op_type", "Launch"),
        "'Launch'.: this operator is not accepted",
    ),
    "function": (lambda m: m.functions.add(name="f"), "its own functions"),
    "training": (lambda m: m.training_info.add(), "training"),
    "sparse": (lambda m: m.graph.sparse_initializer.add(), "sparse"),
    "graph in a graph": (subgraph, "a graph"),
    "missing initialiser": (lambda m: m.graph.initializer.pop(), "out.bias: the skeleton has no such initialiser"),
    "extra initialiser": (
        lambda m: m.graph.initializer.add(name="more", dims=[9], data_type=1),
        "needs values for 'more'",
    ),
    "initialiser twice": (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "'out.weight' occurs twice"),
    "wrong dims": (
        lambda m: m.graph.initializer[0].dims.append(2**40),
        r"out.weight: the skeleton has shape \(2, 3, 10",
    ),
    "wrong type": (lambda m: setattr(m.graph.initializer[0], "data_type", 7), "of ONNX type 7"),
    "weights inside": (lambda m: m.graph.initializer[0].float_data.append(1.0), "contains its values"),
    "short constant": (
        lambda m: m.graph.initializer.add(name="c", dims=[2**30], data_type=1, raw_data=b"1234"),
        "not a valid ONNX graph",
    ),
    "second input": (lambda m: m.graph.input.append(m.graph.input[0]), "the skeleton's inputs are"),
    "other output": (lambda m: setattr(m.graph.output[0], "name", "y"), r"the skeleton's outputs are \['y'\]"),
    "fixed batch": (set_fixed_batch, "fixed batch size"),
    "other input shape": (
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 4),
        r"input has shape \(4,\) per sample, but the manifest has \(3,\)",
    ),
    "input not a tensor": (lambda m: m.graph.input[0].ClearField("type"), "must be a tensor"),
    "cut wire": (lambda m: m.graph.node[0].input.__setitem__(0, "nowhere"), "reads a value that no earlier node makes"),
    "shapes that clash": (lambda m: m.graph.node[0].attribute.pop(), "cannot be inferred"),
    "no graph": (lambda m: m.ClearField("graph"), "has no graph"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_skeletons_are_refused(proto, manifest, case):
    spoil, message = HOSTILE[case]
    check_skeleton(proto.SerializeToString(), manifest)
    spoil(proto)
    with pytest.raises(SkeletonError, match=message):
        check_skeleton(proto.SerializeToString(), manifest)


# --- files that ask for more memory than they have bytes


def before(model, *nodes):
    """Put nodes before the layer, which the last of them feeds."""
    for place, node in enumerate(nodes):
        model.graph.node.insert(place, node)
    model.graph.node[len(nodes)].input[0] = nodes[-1].output[0]


def constant(name, *numbers, dtype=np.int64):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(numbers, dtype), name))


def make(op, inputs, output, **attributes):
    return helper.make_node(op, inputs.split(), [output], **attributes)


def plus(output):
    """Nodes that add all of a value to the input, so that it is used."""
    return [
        make("ReduceMax", output, "most", keepdims=0),
        make("Add", "input most", "used"),
    ]


BILLION = 2**30
GREEDY = {
    "constant of a shape": [constant("n", BILLION), make("ConstantOfShape", "n", "big"), *plus("big")],
    "expand": [constant("n", 2**15, 2**15, 3), make("Expand", "input n", "big"), *plus("big")],
    "tile": [constant("n", BILLION, 1), make("Tile", "input n", "big"), *plus("big")],
    "tile that wraps around": [constant("n", 2**62, 4), make("Tile", "input n", "big"), *plus("big")],
    "range": [
        helper.make_node("Constant", [], ["a"], value_float=0.0),
        helper.make_node("Constant", [], ["b"], value_float=1e9),
        helper.make_node("Constant", [], ["c"], value_float=1.0),
        make("Range", "a b c", "big"),
        *plus("big"),
    ],
    "endless range": [
        helper.make_node("Constant", [], ["a"], value_float=0.0),
        helper.make_node("Constant", [], ["b"], value_float=float("inf")),
        helper.make_node("Constant", [], ["c"], value_float=1e-30),
        make("Range", "a b c", "big"),
        *plus("big"),
    ],
    "pad": [constant("n", 0, 0, 0, BILLION), make("Pad", "input n", "big"), *plus("big")],
    "one-hot": [
        constant("d", BILLION),
        constant("v", 0.0, 1.0, dtype=np.float32),
        make("Cast", "input", "i", to=7),
        make("OneHot", "i d v", "big"),
        *plus("big"),
    ],
    "resize": [
        constant("s", 1.0, 1e9, dtype=np.float32),
        helper.make_node("Resize", ["input", "", "s"], ["big"]),
        *plus("big"),
    ],
    "concatenations that double": [
        make("Concat", "input input", "c0", axis=1),
        *(make("Concat", f"c{place} c{place}", f"c{place + 1}", axis=1) for place in range(40)),
        *plus("c41"),
    ],
    "shapes that double": [
        make("Shape", "input", "c0"),
        *(make("Concat", f"c{place} c{place}", f"c{place + 1}", axis=0) for place in range(40)),
        make("ConstantOfShape", "c41", "big"),
        *plus("big"),
    ],
    "an outer product": [
        constant("n", 2**15, 1),
        make("ConstantOfShape", "n", "tall"),
        make("Transpose", "tall", "wide"),
        make("MatMul", "tall wide", "big"),
        *plus("big"),
    ],
    "broadcasting": [
        constant("n", 2**15, 1),
        make("ConstantOfShape", "n", "tall"),
        make("Transpose", "tall", "wide"),
        make("Add", "tall wide", "big"),
        *plus("big"),
    ],
    "a size that is computed": [
        constant("n", 2**15),
        make("Mul", "n n", "m"),
        make("ConstantOfShape", "m", "big"),
        *plus("big"),
    ],
    "a size that depends on values": [make("NonZero", "input", "big"), make("Cast", "big", "f", to=1), *plus("f")],
    "a size that depends on the input": [
        make("Cast", "input", "i", to=7),
        constant("shape", 3),
        make("ReduceMax", "i", "most", keepdims=0),
        make("Reshape", "most one", "n"),
        make("ConstantOfShape", "n", "big"),
        *plus("big"),
    ],
    "random numbers": [helper.make_node("RandomNormal", [], ["big"], shape=[BILLION]), *plus("big")],
    "a kernel": [
        constant("s", 0, 1, 3),
        make("Reshape", "input s", "maps"),
        constant("w", 1.0, dtype=np.float32),
        constant("ws", 1, 1, 1),
        make("Reshape", "w ws", "kernel"),
        make("ConvTranspose", "maps kernel", "big", strides=[2**30]),
        *plus("big"),
    ],
    "many operands": [make("Einsum", "input input input", "big", equation="ai,bj,ck->abcijk"), *plus("big")],
    "many small ones": [
        constant("n", 2**22),
        *(make("ConstantOfShape", "n", f"b{place}") for place in range(100)),
        helper.make_node("Sum", [f"b{place}" for place in range(100)], ["big"]),
        *plus("big"),
    ],
}


@pytest.mark.parametrize("case", GREEDY)
def test_a_small_file_that_asks_for_much_memory_is_refused(proto, manifest, case):
    before(proto, *GREEDY[case])
    data = proto.SerializeToString()
    assert len(data) < 20_000
    with pytest.raises(SkeletonError, match=r"the node '.*'") as refused:
        check_skeleton(data, manifest)
    assert "not a valid ONNX graph" not in str(refused.value), "found before ONNX infers all shapes"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x3a\xd0\x8c\x01" + b"\x0a\x00" * 9000, "more than 5000 fields"),
        (b"\x0a\x00" * 9000, "more than 5000 fields"),
        (b"\x3a\xff\xff\xff\xff\x0f", "is not an ONNX file"),
        (b"\x3a" + b"\xff" * 20, "is not an ONNX file"),
    ],
)
def test_a_file_of_countless_fields_is_refused_before_it_is_parsed(manifest, monkeypatch, data, message):
    parsed = []
    monkeypatch.setattr(export_skeleton, "parse", parsed.append)
    monkeypatch.setattr(bounds, "MOST_FIELDS", 5000)
    with pytest.raises(SkeletonError, match=message):
        check_skeleton(data, manifest)
    assert parsed == []


def test_a_graph_within_a_graph_within_a_graph_ends(manifest):
    data = b""
    for _ in range(200):
        attribute = b"\x32" + _length(data) + data
        node = b"\x2a" + _length(attribute) + attribute
        data = b"\x0a" + _length(node) + node
    with pytest.raises(SkeletonError, match="deeper than"):
        check_skeleton(b"\x3a" + _length(data) + data, manifest)


def _length(data):
    number, out = len(data), []
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


@pytest.mark.integration
def test_the_memory_of_a_process_that_is_sent_such_a_file_stays_small(proto, manifest, tmp_path):
    """The file of 279 bytes that took 2.1 GB, through all that a device does with a skeleton."""
    before(proto, constant("n", 2**29), make("ConstantOfShape", "n", "big"), *plus("big"))
    (tmp_path / "skeleton.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    code = """
import resource, sys
from pathlib import Path
import numpy as np, onnx, onnxruntime
from sparrow.protocol.manifest import Manifest
from sparrow.export.errors import SkeletonError
from sparrow.graphs.skeleton import fill
folder = Path(sys.argv[1])
manifest = Manifest.model_validate_json((folder / "manifest.json").read_text())
tensors = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in manifest.kept}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    filled = fill((folder / "skeleton.onnx").read_bytes(), manifest, tensors)
    onnxruntime.InferenceSession(filled).run(None, {"input": np.zeros((1, 3), np.float32)})
except SkeletonError:
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 * 1024, "KiB"


def test_fewer_samples_run_at_a_time_where_each_takes_much(proto, manifest):
    model = check_skeleton(proto.SerializeToString(), manifest)
    assert samples_at_once(model, 256) == 256
    before(proto, constant("n", 2**22, 1), make("Tile", "input n", "many"), *plus("many"))
    model.CopyFrom(proto)
    assert samples_at_once(model, 256) == 16


@pytest.mark.parametrize("data", [b"", b"not onnx", b"\xff" * 100])
def test_bytes_that_are_no_model_are_refused(manifest, data):
    with pytest.raises(SkeletonError, match=r"not an ONNX file|has no graph"):
        check_skeleton(data, manifest)


def test_every_prefix_of_a_skeleton_is_refused(proto, manifest):
    data = proto.SerializeToString()
    for end in range(len(data)):
        with pytest.raises(SkeletonError):
            check_skeleton(data[:end], manifest)


def test_a_skeleton_that_is_too_large_is_refused_unread(manifest, monkeypatch):
    monkeypatch.setattr(export_skeleton, "MAX_GRAPH", 10)
    with pytest.raises(SkeletonError, match="11 bytes; it must have at most 10"):
        check_skeleton(b"x" * 11, manifest)


def test_a_model_beyond_what_one_file_holds_is_refused(proto, manifest, monkeypatch):
    monkeypatch.setattr(export_skeleton, "MAX_MODEL", 100)
    with pytest.raises(ExportError, match="at most 100"):
        fill(proto.SerializeToString(), manifest, TENSORS)


def test_another_skeleton_than_the_published_one_is_refused(proto, manifest):
    named = manifest.model_copy(update={"skeleton_sha256": "0" * 64})
    with pytest.raises(SkeletonError, match="fetch it again"):
        check_skeleton(proto.SerializeToString(), named)


@pytest.mark.parametrize("module", ["edge_sdk.predict", "sparrow.graphs.skeleton", "sparrow.protocol.builtin"])
def test_importing_loads_no_torch(module):
    heavy = {"torch", "onnx", "pydantic", "onnxruntime"} if module == "edge_sdk.predict" else {"torch", "onnxscript"}
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("task", builtin_tasks())
def test_skeletons_of_built_in_tasks_are_such_as_the_coordinator_would_take(task):
    """It takes them without looking."""
    built_in = load_builtin(task)
    check_skeleton(built_in.skeleton, built_in.manifest)
