import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.skeleton import make_skeleton
from sparrow.export.compact import compact
from sparrow.export.errors import ExportError
from sparrow.graphs.skeleton import fill
from sparrow.protocol.builtin import builtin_tasks, load_builtin
from sparrow.protocol.masks import NeuronDraw, NeuronMask, block_of, draw_neurons
from sparrow.protocol.neurons import narrowed

pytestmark = pytest.mark.integration  # plays whole federations, or traces or exports many models


def predict(model, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {model.graph.input[0].name: x})[0]


def assert_same(model, small, *shape, batches=(1, 5), seed=0):
    onnx.checker.check_model(small, full_check=True)
    rng = np.random.default_rng(seed)
    for batch in batches:
        x = rng.normal(size=(batch, *shape)).astype(np.float32)
        wanted, got = predict(model, x), predict(small, x)
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())


def sizes(model):
    return {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}


def random_weights(specs, seed):
    """Weights of a scale that keeps activations near 1; positive variances."""
    rng, tensors = np.random.default_rng(seed), {}
    for spec in specs:
        scale = 1 / math.sqrt(max(1, math.prod(spec.shape[1:]))) if len(spec.shape) > 1 else 0.5
        tensors[spec.name] = (rng.normal(size=spec.shape) * scale).astype(np.float32)
        if spec.name.endswith("running_var"):
            tensors[spec.name] = np.abs(tensors[spec.name]) + np.float32(0.5)
    return tensors


def zero_outside(manifest, tensors, mask):
    """What methods that drop neurons leave: zeros in rows, columns, biases, scales, shifts; statistics as they are."""
    masked = {}
    for spec in manifest.kept:
        if not spec.trainable:
            masked[spec.name] = tensors[spec.name]
            continue
        masked[spec.name] = np.zeros(spec.shape, dtype=np.float32)
        part = block_of(manifest, spec, mask)
        part.put(masked[spec.name], part.take(tensors[spec.name]))
    return masked


def masked_task(name, ratio, seed=0):
    task = load_builtin(name)
    mask = draw_neurons(task.manifest, NeuronDraw(f"device-{seed}", ratio))
    tensors = zero_outside(task.manifest, random_weights(task.manifest.kept, seed), mask)
    return task.manifest, mask, onnx.load_from_string(fill(task.skeleton, task.manifest, tensors))


def exported(build, example, seed=0, change=None):
    """A model's ONNX file with random weights, after ``change`` has spoilt its tensors."""
    manifest = describe(build().eval(), example, task="test")
    skeleton = make_skeleton(build(), example, manifest)
    tensors = random_weights(manifest.kept, seed)
    if change is not None:
        change(tensors)
    return manifest, onnx.load_from_string(fill(skeleton, manifest.with_graphs({"skeleton": skeleton}), tensors))


# --- the built-in tasks


@pytest.mark.parametrize("name", [name for name in builtin_tasks() if name not in ("har", "uci_har")])
def test_a_task_becomes_the_network_that_its_active_neurons_form(name):
    manifest, mask, model = masked_task(name, 0.3)
    small = compact(model)
    found = sizes(small)
    assert {spec.name: found.get(spec.name) for spec in manifest.kept} == {
        spec.name: spec.shape for spec in narrowed(manifest, mask).kept
    }
    assert_same(model, small, *manifest.input_shape)


def test_group_norm_loses_whole_groups_only():
    """Its channels are normalised by one another, those that are zero included."""
    task = load_builtin("har")
    whole_groups = {"conv1": np.arange(8, 24), "conv2": np.arange(0, 64, 2), "conv3": np.arange(16, 64)}
    mask = NeuronMask(
        {name: whole_groups.get(name, np.arange(0, size, 3)) for name, size in task.manifest.group_sizes.items()}
    )
    tensors = zero_outside(task.manifest, random_weights(task.manifest.kept, 1), mask)
    model = onnx.load_from_string(fill(task.skeleton, task.manifest, tensors))
    small = compact(model)
    found = sizes(small)
    assert found["conv1.weight"] == (16, 6, 5)
    assert found["conv2.weight"] == (64, 16, 5)
    assert found["conv3.weight"] == (48, 64, 3)
    assert found["fc1.weight"] == (22, 48 * 8)
    assert_same(model, small, *task.manifest.input_shape)


@pytest.mark.parametrize("name", ["digits", "cifar10", "har", "mnist:leaf"])
def test_a_network_without_dead_neurons_is_unchanged(name):
    manifest, _, model = masked_task(name, 1.0)
    small, found = compact(model), sizes(model)
    assert {key: sizes(small)[key] for key in manifest_names(manifest)} == {
        key: found[key] for key in manifest_names(manifest)
    }
    assert_same(model, small, *manifest.input_shape)


def manifest_names(manifest):
    return [spec.name for spec in manifest.kept]


def test_a_relu_stands_where_it_can_be_part_of_the_convolution():
    """A maximum of rectified values is the rectified maximum."""
    _, _, model = masked_task("mnist:leaf", 1.0)
    operators = [node.op_type for node in compact(model).graph.node]
    assert operators == ["Conv", "Relu", "MaxPool"] * 2 + ["Reshape", "Gemm", "Relu", "Gemm"]


def test_the_given_model_stays_and_the_same_model_gives_the_same_bytes():
    _, _, model = masked_task("digits", 0.3)
    before = model.SerializeToString(deterministic=True)
    first, second = (compact(model).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second
    assert model.SerializeToString(deterministic=True) == before
    again = compact(onnx.load_from_string(first))
    assert again.SerializeToString(deterministic=True) == first


def test_metadata_and_interface_stay():
    _, _, model = masked_task("digits", 0.3)
    helper.set_model_props(model, {"task": "digits"})
    small = compact(model)
    assert small.metadata_props == model.metadata_props
    assert (small.graph.input, small.graph.output) == (model.graph.input, model.graph.output)
    assert small.opset_import == model.opset_import


def test_a_broken_model_is_refused():
    _, _, model = masked_task("digits", 0.3)
    model.graph.node[-1].input[0] = "nowhere"
    with pytest.raises(ExportError, match="not valid ONNX"):
        compact(model)


# --- constants: what a static pFedGate leaves, blocks of zeros with biases that are not


def zero_rows(name, rows):
    def change(tensors):
        tensors[name][rows] = 0

    return change


def test_constant_channels_go_into_the_next_bias():
    task = load_builtin("cifar10:pfedgate")
    tensors = random_weights(task.manifest.kept, 3)
    for name, rows in (("conv1.weight", slice(0, 20)), ("conv2.weight", slice(30, 64)), ("fc1.weight", slice(0, 60))):
        tensors[name][rows] = 0
    assert (tensors["conv1.bias"][:20] > 0).any()
    model = onnx.load_from_string(fill(task.skeleton, task.manifest, tensors))
    small = compact(model)
    found = sizes(small)
    assert found["conv1.weight"] == (12, 3, 5, 5)
    assert found["conv2.weight"] == (30, 12, 5, 5)
    assert found["fc1.weight"] == (60, 30 * 25)
    assert found["fc2.weight"] == (84, 60)
    assert_same(model, small, 3, 32, 32)


class Padded(nn.Module):
    """A constant channel that is not zero meets zeros at the border of the next convolution."""

    def __init__(self, mode="zeros"):
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3, padding=1, padding_mode=mode)
        self.out = nn.Linear(6 * 36, 3)

    def forward(self, x):
        return self.out(torch.relu(self.second(torch.sigmoid(self.first(x)))).flatten(1))


def test_under_padding_one_constant_channel_stands_for_all():
    _, model = exported(Padded, torch.zeros(1, 2, 6, 6), change=zero_rows("first.weight", slice(2, 7)))
    small = compact(model)
    assert sizes(small)["second.weight"] == (6, 4, 3, 3)
    assert_same(model, small, 2, 6, 6)


def test_padding_by_repetition_keeps_constants_constant():
    _, model = exported(
        lambda: Padded("replicate"), torch.zeros(1, 2, 6, 6), change=zero_rows("first.weight", slice(2, 7))
    )
    small = compact(model)
    assert sizes(small)["second.weight"] == (6, 3, 3, 3)
    assert_same(model, small, 2, 6, 6)


def test_inputs_that_nobody_weighs_go():
    def unused(tensors):
        tensors["second.weight"][:, 1:5] = 0

    _, model = exported(Padded, torch.zeros(1, 2, 6, 6), change=unused)
    small = compact(model)
    assert sizes(small)["first.weight"] == (4, 2, 3, 3)
    assert_same(model, small, 2, 6, 6)


def test_what_has_gone_sets_free_what_fed_it():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    def change(tensors):
        tensors["c.weight"][:, 4:] = 0  # b's last neurons are for nothing,
        tensors["b.weight"][:4, 2:] = 0  # and the others read only two of a's

    _, model = exported(Chain, torch.zeros(1, 3), change=change)
    small = compact(model)
    assert sizes(small) == {
        "a.weight": (2, 3),
        "a.bias": (2,),
        "b.weight": (4, 2),
        "b.bias": (4,),
        "c.weight": (2, 4),
        "c.bias": (2,),
    }
    assert_same(model, small, 3)


@pytest.mark.parametrize("bias", ["zero", "kept"])
@pytest.mark.parametrize("layer", ["conv1", "conv2", "fc1", "out"])
def test_a_layer_may_be_dead_as_a_whole(layer, bias):
    task = load_builtin("mnist:leaf")
    tensors = random_weights(task.manifest.kept, 4)
    tensors[f"{layer}.weight"][:] = 0
    if bias == "zero":
        tensors[f"{layer}.bias"][:] = 0
    model = onnx.load_from_string(fill(task.skeleton, task.manifest, tensors))
    small = compact(model)
    assert small.ByteSize() < 0.6 * model.ByteSize()
    assert_same(model, small, 1, 28, 28)


# --- networks of all kinds


class Block(nn.Module):
    """ResNet's basic block (He et al., arXiv:1512.03385)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    """For 32x32 inputs."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        widths, blocks = (64, 64, 128, 128, 256, 256, 512, 512), []
        for inputs, outputs in zip((64, *widths), widths, strict=False):
            blocks.append(Block(inputs, outputs, 1 if inputs == outputs else 2))
        self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(512, 10)

    def forward(self, x):
        x = self.blocks(torch.relu(self.bn(self.stem(x))))
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))


@pytest.fixture(scope="module")
def resnet():
    example = torch.zeros(1, 3, 32, 32)
    manifest = describe(ResNet18().eval(), example, task="test")
    return manifest, make_skeleton(ResNet18(), example, manifest)


def test_resnet_18_with_half_its_channels_is_under_three_tenths_of_its_size(resnet):
    manifest, skeleton = resnet
    mask = draw_neurons(manifest, NeuronDraw("device-0", 0.5))
    tensors = zero_outside(manifest, random_weights(manifest.kept, 0), mask)
    model = onnx.load_from_string(fill(skeleton, manifest.with_graphs({"skeleton": skeleton}), tensors))
    small = compact(model)
    found = sizes(small)
    assert {spec.name: found.get(spec.name) for spec in manifest.kept} == {
        spec.name: spec.shape for spec in narrowed(manifest, mask).kept
    }
    assert small.ByteSize() < 0.3 * model.ByteSize()
    assert_same(model, small, 3, 32, 32, batches=(2,))


def test_a_residual_block_that_is_off_leaves_nothing_behind(resnet):
    manifest, skeleton = resnet
    tensors = random_weights(manifest.kept, 0)
    for name in ("blocks.1.conv2.weight", "blocks.3.bn2.weight", "blocks.5.conv1.weight"):
        tensors[name][:] = 0
    tensors["blocks.3.bn2.bias"][:] = 0
    model = onnx.load_from_string(fill(skeleton, manifest.with_graphs({"skeleton": skeleton}), tensors))
    small = compact(model)
    for block in (1, 3):
        assert not [name for name in sizes(small) if name.startswith(f"blocks.{block}.conv")]
    assert sizes(small)["blocks.5.conv2.weight"] == (256, 1, 3, 3)
    assert_same(model, small, 3, 32, 32, batches=(2,))


class Separable(nn.Module):
    """Depthwise and grouped convolution, squeeze-and-excitation, concatenation."""

    def __init__(self):
        super().__init__()
        self.expand, self.depth = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.grouped, self.gate = nn.Conv2d(16, 8, 3, groups=4), nn.Linear(8, 8)
        self.prelu, self.out = nn.PReLU(8), nn.Linear(16, 3)

    def forward(self, x):
        x = self.grouped(F.hardswish(self.depth(self.expand(x))))
        gated = self.prelu(x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None])
        return self.out(F.adaptive_avg_pool2d(torch.cat([gated, x], 1), 1).flatten(1))


def test_depthwise_and_grouped_channels_go_by_groups():
    def change(tensors):
        for name in ("expand.weight", "expand.bias"):
            tensors[name][4:6] = 0
        for name in ("depth.weight", "depth.bias"):
            tensors[name][8:12] = 0
        for name in ("grouped.weight", "grouped.bias"):
            tensors[name][4:6] = 0

    _, model = exported(Separable, torch.zeros(1, 2, 5, 5), change=change)
    small = compact(model)
    found = sizes(small)
    assert found["expand.weight"] == (6, 2, 1, 1)
    assert found["depth.weight"] == (12, 1, 3, 3)
    assert found["grouped.weight"] == (6, 4, 3, 3)
    assert_same(model, small, 2, 5, 5)


class Transformer(nn.Module):
    """A mixer over tokens: matrix products on the last axis, layer norm, embedding-like positions."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 8), nn.LayerNorm(8)
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.out(x.mean(1))


def test_hidden_units_behind_layer_norm_go_and_normalised_ones_stay():
    def change(tensors):
        tensors["up.weight"][4:] = 0
        tensors["up.bias"][8:] = 0

    _, model = exported(Transformer, torch.zeros(1, 5, 3), change=change)
    small = compact(model)
    assert {dims for name, dims in sizes(small).items() if len(dims) == 2} == {(3, 8), (8, 4), (4, 8), (2, 8)}
    assert_same(model, small, 5, 3)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(11, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.embed(x).mean(1))))


def test_columns_of_an_embedding_go():
    def change(tensors):
        tensors["embed.weight"][:, :2] = 0
        tensors["hidden.weight"][:, 2] = 0

    _, model = exported(Words, torch.zeros(1, 4, dtype=torch.int64), change=change)
    small = compact(model)
    assert sizes(small)["embed.weight"] == (11, 3)
    x = np.arange(20).reshape(5, 4) % 11
    np.testing.assert_allclose(predict(small, x), predict(model, x), atol=1e-5)


# --- graphs that torch's exporter does not write


def by_hand(nodes, constants, input_shape, output_rank=2):
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", *input_shape])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", *[None] * (output_rank - 1)])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def dead(*shape, rows):
    array = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    array[rows] = 0
    return array


def test_a_product_without_a_bias_gets_one():
    nodes = [
        helper.make_node("Gemm", ["input", "w1", "b1"], ["h"], transB=1),
        helper.make_node("Sigmoid", ["h"], ["s"]),
        helper.make_node("MatMul", ["s", "w2"], ["m"]),
        helper.make_node("Softmax", ["m"], ["output"]),
    ]
    constants = {"w1": dead(6, 3, rows=slice(2, 5)), "b1": dead(6, rows=0), "w2": dead(6, 4, rows=0)}
    model = by_hand(nodes, constants, [3])
    small = compact(model)
    assert sizes(small)["w2"] == (2, 4)
    assert [node.op_type for node in small.graph.node] == ["Gemm", "Sigmoid", "MatMul", "Add", "Softmax"]
    assert_same(model, small, 3)


def test_an_operator_that_no_rule_knows_keeps_all_channels():
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["c"]),
        helper.make_node("CumSum", ["c", "axis"], ["s"]),
        helper.make_node("GlobalAveragePool", ["s"], ["output"]),
    ]
    model = by_hand(nodes, {"w": dead(6, 2, 3, 3, rows=slice(1, 4)), "axis": np.array(1)}, [2, 4, 4], 4)
    small = compact(model)
    assert sizes(small)["w"] == (6, 2, 3, 3)
    assert_same(model, small, 2, 4, 4)


def test_weights_and_biases_that_two_layers_share_are_cut_and_folded_apart():
    nodes = [
        helper.make_node("Gemm", ["input", "w", "b"], ["h"], transB=1),
        helper.make_node("Sigmoid", ["h"], ["s"]),
        helper.make_node("Gemm", ["s", "w", "b"], ["output"], transB=1),
    ]
    tied = by_hand(nodes, {"w": dead(4, 4, rows=slice(1, 3)), "b": dead(4, rows=0)}, [4])
    assert sizes(compact(tied))["w"] == (4, 4)  # its rows are an output, its columns an input
    nodes = [
        helper.make_node("Gemm", ["input", "w", "b"], ["h"], transB=1),
        helper.make_node("Sigmoid", ["h"], ["s"]),
        helper.make_node("Gemm", ["s", "v", "c"], ["one"], transB=1),
        helper.make_node("Gemm", ["s", "u", "c"], ["two"], transB=1),
        helper.make_node("Concat", ["one", "two"], ["output"], axis=1),
    ]
    constants = {name: dead(4, 4, rows=slice(0, 0)) for name in ("u", "v")} | {
        "w": dead(4, 4, rows=slice(1, 3)),
        "b": dead(4, rows=0),
        "c": dead(4, rows=0),
    }
    constants["u"] *= 2
    model = by_hand(nodes, constants, [4])
    small = compact(model)
    assert sizes(small)["u"] == (4, 2)
    assert_same(model, small, 4)


def test_channels_added_by_padding_go_where_nothing_needs_them():
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["c"]),
        helper.make_node("Pad", ["c", "pads", "value"], ["p"]),
        helper.make_node("Conv", ["p", "v"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["output"]),
    ]
    pads = np.array([0, 2, 0, 0, 0, 3, 0, 0])
    constants = {"w": dead(4, 2, 1, 1, rows=1), "pads": pads, "value": np.float32([0.5]).reshape(())}
    model = by_hand(nodes, constants | {"v": dead(3, 9, 1, 1, rows=0)}, [2, 4, 4], 4)
    small = compact(model)
    assert sizes(small)["v"] == (3, 3, 1, 1)
    assert_same(model, small, 2, 4, 4)


# --- any network


class Drawn(nn.Module):
    """A network put together by a list of choices, for inputs [2, 8, 8]."""

    def __init__(self, choices, width):
        super().__init__()
        self.choices, layers = choices, []
        channels, side = 2, 8
        for kind in choices:
            if kind in ("conv", "valid"):
                layers.append(nn.Conv2d(channels, width, 3, padding=int(kind == "conv")))
                channels, side = width, side - 2 * (kind == "valid")
            elif kind == "bn":
                layers.append(nn.BatchNorm2d(channels))
            elif kind == "residual":
                layers.append(nn.Conv2d(channels, channels, 1))
            elif kind == "concat":
                layers.append(nn.Conv2d(channels, 3, 1))
                channels += 3
            elif kind == "depthwise":
                layers.append(nn.Conv2d(channels, channels, 3, padding=1, groups=channels))
            elif kind == "pad":
                layers.append(nn.ConstantPad2d(1, 0.75))
                side += 2
            elif kind == "max":
                layers.append(nn.MaxPool2d(2, 2, padding=1))
                side = side // 2 + 1
            else:
                modules = {"average": nn.AvgPool2d(3, 1, padding=1), "relu": nn.ReLU(), "sigmoid": nn.Sigmoid()}
                layers.append(modules[kind])
        self.layers = nn.ModuleList(layers)
        self.hidden, self.out = nn.Linear(channels * side * side, 7), nn.Linear(7, 3)

    def forward(self, x):
        for kind, layer in zip(self.choices, self.layers, strict=True):
            y = layer(x)
            x = x + y if kind == "residual" else torch.cat([y, x], 1) if kind == "concat" else y
        return self.out(torch.relu(self.hidden(x.flatten(1))))


def spoil(tensors, rng, rows, columns, biases):
    """Zero rows, with or without what belongs to them, and columns."""
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and not name.startswith("out"):
            gone = rng.random(len(tensor)) < rows
            tensor[gone] = 0
            bias = tensors.get(name.replace("weight", "bias"))
            if biases and bias is not None and len(bias) == len(gone):  # a transposed convolution has columns first
                bias[gone] = 0
            tensor[:, rng.random(tensor.shape[1]) < columns] = 0
        elif "bn" in name and name.endswith("weight"):
            tensor[rng.random(len(tensor)) < rows / 2] = 0


SPOILT = {
    "seed": st.integers(0, 1000),
    "rows": st.sampled_from([0.0, 0.4, 0.8, 1.0]),
    "columns": st.sampled_from([0.0, 0.3]),
    "biases": st.booleans(),
}
NETWORKS = [
    ["conv", "bn", "relu", "residual", "concat", "sigmoid", "depthwise", "valid", "max"],
    ["valid", "sigmoid", "pad", "conv", "average", "residual", "relu", "concat", "bn"],
]


@pytest.fixture(scope="module", params=range(len(NETWORKS)))
def network(request):
    def build():
        return Drawn(NETWORKS[request.param], 6).eval()

    example = torch.zeros(1, 2, 8, 8)
    manifest = describe(build(), example, task="test")
    skeleton = make_skeleton(build(), example, manifest)
    return manifest.with_graphs({"skeleton": skeleton}), skeleton


@settings(max_examples=15, deadline=None, derandomize=True)
@given(**SPOILT)
def test_a_network_of_torch_predicts_the_same(network, seed, rows, columns, biases):
    manifest, skeleton = network
    tensors = random_weights(manifest.kept, seed)
    spoil(tensors, np.random.default_rng(seed), rows, columns, biases)
    model = onnx.load_from_string(fill(skeleton, manifest, tensors))
    small = compact(model)
    assert small.ByteSize() <= model.ByteSize() + 200
    assert_same(model, small, 2, 8, 8, batches=(3,))


class Builder:
    """The same kinds of layers as ONNX at once: the exporter takes seconds for each network."""

    def __init__(self, rng):
        self.rng, self.nodes, self.constants = rng, [], {}
        self.channels, self.side = 2, 16

    def add(self, op, inputs, **attributes):
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def draw(self, name, *shape):
        scale = 1 / math.sqrt(max(1, math.prod(shape[1:])))
        self.constants[name] = (self.rng.normal(size=shape) * scale).astype(np.float32)
        return name

    def conv(self, x, width, size, **attributes):
        name, inputs = f"conv{len(self.nodes)}", self.channels // attributes.get("group", 1)
        weights = [self.draw(f"{name}.weight", width, inputs, size, size), self.draw(f"{name}.bias", width)]
        return self.add("Conv", [x, *weights], **attributes)

    def layer(self, kind, x, width):
        channels = self.channels
        if kind in ("conv", "strided") or (kind == "valid" and self.side > 2):
            pad, stride = int(kind != "valid"), 1 + (kind == "strided")
            x = self.conv(x, width, 3, pads=[pad] * 4, strides=[stride] * 2)
            self.channels, self.side = width, (self.side + 2 * pad - 3) // stride + 1
        elif kind == "valid":
            x = self.add("Softplus", [x])
        elif kind == "bn":
            name = f"bn{len(self.nodes)}"
            parts = [self.draw(f"{name}.{part}", channels) for part in ("weight", "bias", "mean", "var")]
            self.constants[parts[3]] = np.abs(self.constants[parts[3]]) + np.float32(0.5)
            x = self.add("BatchNormalization", [x, *parts])
        elif kind == "residual":
            x = self.add("Add", [x, self.conv(x, channels, 1)])
        elif kind == "gated":
            mean = self.add("GlobalAveragePool", [x])
            x = self.add("Mul", [x, self.add("HardSigmoid", [self.conv(mean, channels, 1)])])
        elif kind == "concat":
            x = self.add("Concat", [self.conv(x, 3, 1), x], axis=1)
            self.channels += 3
        elif kind == "depthwise":
            x = self.conv(x, channels, 3, pads=[1] * 4, group=channels)
        elif kind == "transposed":
            name = f"up{len(self.nodes)}"
            weights = [self.draw(f"{name}.weight", channels, width, 2, 2), self.draw(f"{name}.bias", width)]
            x = self.add("ConvTranspose", [x, *weights])
            self.channels, self.side = width, self.side + 1
        elif kind == "pad":
            self.constants["pads"], self.constants["value"] = np.array([0, 0, 1, 1, 0, 0, 1, 1]), np.float32(0.75)
            x = self.add("Pad", [x, "pads", "value"])
            self.side += 2
        elif kind == "last":
            x = self.add("Transpose", [x], perm=[0, 2, 3, 1])
            x = self.add("MatMul", [x, self.draw(f"mix{len(self.nodes)}.weight", channels, width)])
            x = self.add("Transpose", [x], perm=[0, 3, 1, 2])
            self.channels = width
        elif kind == "GroupNormalization":
            name = f"gn{len(self.nodes)}"
            parts = [self.draw(f"{name}.weight", channels), self.draw(f"{name}.bias", channels)]
            x = self.add(kind, [x, *parts], num_groups=math.gcd(channels, 2))
        elif kind in ("MaxPool", "AveragePool", "padded average"):
            attributes = {"count_include_pad": 1} if kind == "padded average" else {}
            kind = kind.replace("padded average", "AveragePool")
            x = self.add(kind, [x], kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1], **attributes)
        else:
            x = self.add(kind, [x])
        return x


KINDS = (
    *("conv", "valid", "strided", "bn", "residual", "gated", "concat", "depthwise", "transposed", "pad", "last"),
    *("MaxPool", "AveragePool", "padded average", "GroupNormalization", "Relu", "Sigmoid", "Gelu", "Neg"),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(choices=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8), width=st.integers(1, 6), **SPOILT)
def test_any_graph_predicts_the_same(choices, width, seed, rows, columns, biases):
    rng = np.random.default_rng(seed)
    builder, x = Builder(rng), "input"
    for kind in choices:
        x = builder.layer(kind, x, width)
    pooled = builder.add("AveragePool", [x], kernel_shape=[1, 1], strides=[3, 3])
    flat = builder.add("Flatten", [pooled], axis=1)
    size = builder.channels * ((builder.side - 1) // 3 + 1) ** 2
    head = [builder.draw("hidden.weight", 7, size), builder.draw("hidden.bias", 7)]
    x = builder.add("Relu", [builder.add("Gemm", [flat, *head], transB=1)])
    head = [builder.draw("out.weight", 3, 7), builder.draw("out.bias", 3)]
    builder.nodes.append(helper.make_node("Gemm", [x, *head], ["output"], transB=1))
    spoil(builder.constants, rng, rows, columns, biases)
    model = by_hand(builder.nodes, builder.constants, [2, 16, 16])
    small = compact(model)
    assert_same(model, small, 2, 16, 16, batches=(3,))
