"""The training step as a graph: what is compiled answers what PyTorch does, and so does what passes make of it."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from edge_sdk.publishing import chance
from edge_sdk.publishing.skeleton import make_skeleton
from edge_sdk.publishing.step import CannotCompile, compile_step
from edge_sdk.publishing.untraced import describe_whole
from sparrow.graphs import Graphs
from sparrow.graphs.checking import check_graphs
from sparrow.graphs.skeleton import fill
from sparrow.graphs.steps import optimise
from sparrow.protocol.builtin import builtin_tasks, load_builtin

from .networks import zoo

pytestmark = pytest.mark.integration  # each compiles for seconds

ZOO = zoo()


def session(graph):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def noise_of(graph, batch, seed=0):
    rng = np.random.default_rng(seed)
    drawn = {}
    for each in session(graph).get_inputs():
        shape = [batch if isinstance(size, str) else size for size in each.shape]
        if each.name.startswith("uniform"):
            drawn[each.name] = rng.random(shape, np.float32)
        elif each.name.startswith("normal"):
            drawn[each.name] = rng.standard_normal(shape, np.float32)
    return drawn


def run(graph, tensors, inputs, targets, drawn):
    """Answer every output by name."""
    loaded = session(graph)
    given = {**tensors, "input": inputs.numpy(), "target": targets.numpy(), **drawn}
    names = [each.name for each in loaded.get_outputs()]
    return dict(zip(names, loaded.run(names, {e.name: given[e.name] for e in loaded.get_inputs()}), strict=True))


def in_torch(kind, inputs, targets, drawn):
    """Answer what PyTorch does with the same numbers drawn: by the names of the graph's outputs."""
    model, other = (copy.deepcopy(kind.model).train() for _ in range(2))
    with sdpa_kernel(SDPBackend.MATH):
        recorded = chance.record(lambda count: other(kind.inputs[:count]), (5, 3))
    given = chance.Given(recorded, {name: torch.tensor(values) for name, values in drawn.items()})
    with chance.Chance(given), sdpa_kernel(SDPBackend.MATH):
        output = model(inputs)
        output.retain_grad()
        loss = kind.loss(output, targets)
    loss.backward()
    found = {"loss": loss, "output": output, "error": output.grad}
    found |= {f"grad:{name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
    found |= {f"new:{name}": each for name, each in model.named_buffers() if "num_batches" not in name}
    return {name: value.detach().numpy() for name, value in found.items()}


def tensors_of(model):
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().numpy().copy() for name, value in every}


def published(name, kind):
    """Graphs and manifest; a built-in task has its own, which test_builtin.py compares with what is compiled."""
    if name in builtin_tasks():
        task = load_builtin(name)
        return Graphs(task.graphs["step"], task.graphs["evaluation"]), task.manifest
    graphs = compile_step(kind.model, kind.loss, kind.inputs, kind.targets)
    return graphs, describe_whole(kind.model, kind.inputs[:2], task="test")


@pytest.mark.parametrize("name", ZOO)
def test_a_step_answers_what_pytorch_does_and_a_device_accepts_it(name):
    kind = ZOO[name]()
    graphs, manifest = published(name, kind)
    for needs in check_graphs(graphs, manifest):
        assert needs.bytes(2) > needs.bytes(1) > 0
        assert needs.seconds(2) > needs.seconds(1) > 0
    for batch in (4, 11):
        index = torch.arange(batch) % len(kind.inputs)
        inputs, targets = kind.inputs[index], kind.targets[index]
        drawn, tensors = noise_of(graphs.step, batch), tensors_of(kind.model)
        wanted = in_torch(kind, inputs, targets, drawn)
        largest = max(np.linalg.norm(value) for output, value in wanted.items() if output.startswith("grad:"))
        for graph in (graphs.step, optimise(graphs.step)):
            found = run(graph, tensors, inputs, targets, drawn)
            assert {each for each in found if each.startswith("grad:")} == {e for e in wanted if e.startswith("grad:")}
            for output, value in found.items():
                bound = 1e-5 * np.linalg.norm(wanted[output]) + 1e-6 * largest  # where the truth is 0, rounding
                assert np.linalg.norm(value - wanted[output]) <= bound, (output, batch)


def test_rounding_that_pytorch_has_itself_is_no_reason_to_refuse():
    """Batch norm over a few samples of maps of one value leaves gradients that nearly cancel."""
    torch.manual_seed(0)
    layers = [each for _ in range(6) for each in (nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), *layers, nn.Flatten(), nn.Linear(16, 3))
    assert compile_step(model, F.cross_entropy, torch.randn(6, 3, 8, 8), torch.arange(6) % 3).step


class Standardised(nn.Linear):
    def forward(self, x):
        x = super().forward(x).add_(1)
        return x / x.std(1, keepdim=True)


def test_in_place_operations_and_exporter_decompositions_are_compiled():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), Standardised(8, 3))
    graph = compile_step(model, F.cross_entropy, torch.randn(6, 6), torch.arange(6) % 3).step
    kinds = {node.op_type for node in onnx.load_from_string(graph).graph.node}
    assert "Sqrt" in kinds


class Scaled(nn.Module):
    """A temperature without axes, a normalised weight, and a deviation that is read only in training."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.mean = nn.Linear(8, 4)
        self.deviation = nn.Linear(8, 4)
        self.out = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        hidden = F.relu(self.first(x))
        code = self.mean(hidden)
        if self.training:
            code = code + torch.randn_like(code) * torch.exp(self.deviation(hidden))
        return self.out(code) * self.scale


def test_parameters_without_axes_and_those_read_only_in_training_are_trained():
    model = Scaled()
    inputs = torch.randn(6, 6)
    graphs = compile_step(model, F.cross_entropy, inputs, torch.arange(6) % 3)
    manifest = describe_whole(model, inputs, task="test")
    check_graphs(graphs, manifest)
    outputs = {each.name for each in onnx.load_from_string(graphs.step).graph.output}
    assert outputs >= {f"grad:{name}" for name, _ in model.named_parameters()}
    filled = fill(make_skeleton(model, inputs, manifest), manifest, tensors_of(model))
    found = session(filled).run(["output"], {"input": inputs.numpy()})[0]
    with torch.no_grad():
        assert np.allclose(found, model.eval()(inputs).numpy(), atol=1e-5)


def test_the_same_model_gives_the_same_graphs_and_stays_as_it_was():
    kind = ZOO["batch norm"]()
    before = tensors_of(kind.model)
    first, second = (compile_step(kind.model, kind.loss, kind.inputs, kind.targets) for _ in range(2))
    assert first == second
    assert all(np.array_equal(value, before[name]) for name, value in tensors_of(kind.model).items())
    assert kind.model.training
    for graph in (first.step, first.evaluation):
        assert not onnx.load_from_string(graph).metadata_props
        assert b"/" + b"work" not in graph
        assert not any(dim > 64 for tensor in onnx.load_from_string(graph).graph.initializer for dim in tensor.dims)


def test_an_evaluation_is_of_the_model_as_it_is_used():
    kind = ZOO["dropout"]()
    graph = compile_step(kind.model, kind.loss, kind.inputs, kind.targets).evaluation
    assert not noise_of(graph, 4)
    found = run(graph, tensors_of(kind.model), kind.inputs, kind.targets, {})
    with torch.no_grad():
        output = kind.model.eval()(kind.inputs)
    np.testing.assert_allclose(found["output"], output.numpy(), atol=1e-6)
    np.testing.assert_allclose(found["loss"], kind.loss(output, kind.targets).numpy(), rtol=1e-6)


def part_of(values, rows, columns):
    values = values if rows is None else values[rows]
    return values if columns is None else values[:, columns]


@pytest.mark.parametrize("name", ["mnist", "digits"])
def test_errors_of_active_rows_and_columns_are_those_of_the_whole(name):
    kind = ZOO[name]()
    step = compile_step(kind.model, kind.loss, kind.inputs, kind.targets).step
    weights = [each for each, value in kind.model.named_parameters() if value.dim() > 1]
    rng, index, parts = np.random.default_rng(0), {}, {}
    for weight in weights:
        shape = kind.model.get_parameter(weight).shape
        for what, size in (("rows", shape[0]), ("columns", shape[1])):
            index[f"{what}:{weight}"] = np.sort(rng.permutation(size)[: max(1, size // 3)])
        parts[weight] = tuple(len(index[f"{what}:{weight}"]) for what in ("rows", "columns"))
    lowest = weights[:1]
    whole, part = optimise(step), optimise(step, parts, lowest)
    tensors = tensors_of(kind.model)
    wanted = run(whole, tensors, kind.inputs, kind.targets, {})
    found = run(part, {**tensors, **index}, kind.inputs, kind.targets, {})
    for output, value in found.items():
        weight = output.removeprefix("grad:")
        rows, columns = index.get(f"rows:{weight}"), index.get(f"columns:{weight}")
        if output.startswith("grad:") and value.shape != wanted[output].shape and rows is None:
            rows = index[f"rows:{lowest[0]}"]  # of its bias
        expected = part_of(wanted[output], rows, columns) if output.startswith("grad:") else wanted[output]
        assert value.shape == expected.shape
        assert np.linalg.norm(value - expected) <= 1e-6 * np.linalg.norm(expected), output
    counts = {output: value.size for output, value in found.items() if output.startswith("grad:")}
    assert all(
        counts[f"grad:{weight}"] == np.prod(parts[weight]) * np.prod(tensors[weight].shape[2:]) for weight in weights
    )


class Gated(nn.Module):
    """Channels that are multiplied by one value for all of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)
        self.gate = nn.Conv2d(1, 1, 3)

    def forward(self, x):
        return self.second(F.relu(self.first(x)) * self.gate(x)).mean((2, 3))


def test_what_is_broadcast_over_channels_has_no_part():
    torch.manual_seed(0)
    model, inputs, targets = Gated(), torch.randn(6, 1, 8, 8), torch.arange(6) % 2
    step = compile_step(model, F.cross_entropy, inputs, targets).step
    rows = np.array([1, 3])
    part = optimise(step, {"first.weight": (2, None)}, ["first.weight"])
    wanted = run(optimise(step), tensors_of(model), inputs, targets, {})
    found = run(part, {**tensors_of(model), "rows:first.weight": rows}, inputs, targets, {})
    for name in ("first.weight", "first.bias"):
        np.testing.assert_allclose(found[f"grad:{name}"], wanted[f"grad:{name}"][rows], atol=1e-6)


def test_equal_maxima_give_their_error_to_the_first():
    """As PyTorch does; the background of a digit is nothing but equal windows."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    inputs, targets = torch.zeros(6, 1, 4, 4), torch.arange(6) % 3
    inputs[:, :, 1, 1:3] = 1.0
    graph = optimise(compile_step(model, F.cross_entropy, inputs, targets).step)
    assert not {"MaxPool", "MaxUnpool"} & {node.op_type for node in onnx.load_from_string(graph).graph.node}
    found = run(graph, tensors_of(model), inputs, targets, {})
    F.cross_entropy(model(inputs), targets).backward()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(found[f"grad:{name}"], parameter.grad.numpy(), atol=1e-6)


class Refused(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.out = what, nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.what(x))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda x: x[x[:, 0] > 0], "cannot be traced|cannot be left free"),
        (lambda x: x * torch.randint(1, 3, (1,)), "aten.randint"),
    ],
)
def test_a_model_that_cannot_be_compiled_is_named_by_what_it_does(what, said):
    with pytest.raises(CannotCompile, match=said):
        compile_step(Refused(what), F.cross_entropy, torch.rand(6, 4), torch.arange(6) % 3)


def test_statistics_that_go_by_a_count_of_batches_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
    with pytest.raises(CannotCompile, match="1: running statistics need a momentum"):
        compile_step(model, F.cross_entropy, torch.rand(6, 4), torch.arange(6) % 3)
