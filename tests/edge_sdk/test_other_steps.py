"""What methods ask of an engine beyond plain steps, with ONNX Runtime and with PyTorch: other losses, the Hessian times
a direction, statistics of batches, weights that are multiplied while they train."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, load_from_string

from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions
from edge_sdk.engines.training import Part, Teacher
from edge_sdk.tasks import Task
from edge_sdk.training.engine import TorchEngine
from sparrow.graphs import Graphs
from sparrow.graphs.variants import judge_outputs
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.masks import NeuronDraw, draw_neurons
from sparrow.protocol.settings import FederationSettings

from .networks import zoo
from .test_engine import compiled

BUILTIN = ("digits", "mnist", "cifar10", "har")

OTHERS = ("residual", "depthwise", "grouped", "1-D", "embedding", "layer norm", "GELU and SiLU")
SAMPLES = 12


@pytest.fixture(params=BUILTIN)
def pair(request):
    """An engine of each kind with the same weights, and a batch."""
    kind, found = zoo()[request.param](), load_builtin(request.param)
    assert found is not None
    return opened(kind, found.manifest, Graphs(found.graphs["step"], found.graphs["evaluation"]))


def opened(kind, manifest, graphs):
    generator = np.random.default_rng(1)
    inputs = generator.standard_normal((SAMPLES, *kind.inputs.shape[1:])).astype(np.float32)
    targets = generator.integers(manifest.output_shape[0], size=SAMPLES)
    task = Task("t", kind.model, kind.loss, train=[(inputs, targets)], validation=None, test=[(inputs, targets)])
    torch, onnx = TorchEngine(task, manifest), OnnxEngine(Network(manifest, Sessions(graphs)), classification=True)
    weights = {
        spec.name: generator.uniform(0.5, 1.5, spec.shape) if "running" in spec.name else tensor
        for spec, tensor in zip(manifest.kept, torch.read().values(), strict=True)
    }
    for engine in (torch, onnx):
        engine.load(weights)
    return torch, onnx, (inputs, targets)


def test_the_loss_of_outputs_that_are_copies_needs_no_more_than_these():
    """So evaluations are written of models that compute the same in training: their values have the step's names."""
    evaluation = load_from_string(load_builtin("digits").graphs["evaluation"])
    for name in ("output", "loss"):
        for node in evaluation.graph.node:
            node.input[:] = [f"the {name}" if read == name else read for read in node.input]
            node.output[:] = [f"the {name}" if made == name else made for made in node.output]
        evaluation.graph.node.append(helper.make_node("Identity", [f"the {name}"], [name]))
    judged = load_from_string(judge_outputs(evaluation.SerializeToString())).graph
    assert {each.name for each in judged.input} == {"output", "target"}


def trainable(engine):
    return [spec.name for spec in engine.manifest.tensors if spec.trainable]


def differentiated(engine, batch, **how):
    found = {}
    batches = [next(iter(engine.epochs([batch], 0)))]
    loss, outputs = engine.differentiate(
        batches, trainable(engine), lambda name, each: found.__setitem__(name, np.array(each)), **how
    )
    return loss, outputs, found


def apart(found, wanted):
    pairs = [(np.asarray(found[name], np.float64), np.asarray(wanted[name], np.float64)) for name in wanted]
    size = sum((b**2).sum() for _, b in pairs)
    return np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / size)


def direction(manifest):
    generator = np.random.default_rng(3)
    return {spec.name: generator.standard_normal(spec.shape).astype(np.float32) for spec in manifest.maskable}


@pytest.mark.integration
@pytest.mark.parametrize(("weight", "temperature"), [(1.0, 1.0), (0.3, 2.0)])
def test_a_student_is_taught_by_outputs_and_by_targets(pair, weight, temperature):
    torch, onnx, batch = pair
    plain, outputs, alone = differentiated(torch, batch)
    other = outputs + np.random.default_rng(2).standard_normal(outputs.shape).astype(np.float32)
    teacher = Teacher(other, weight, temperature)
    (loss, _, wanted), (found_loss, _, found) = (differentiated(each, batch, teacher=teacher) for each in (torch, onnx))
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert abs(loss - plain) > 1e-3
    assert apart(found, wanted) < 1e-5 < apart(alone, wanted)
    itself, _, moved = differentiated(onnx, batch, teacher=Teacher(outputs, 1.0, temperature))
    assert itself == pytest.approx(0, abs=1e-5)  # who agrees learns nothing
    assert max(np.abs(each).max() for each in moved.values()) < 1e-4


@pytest.mark.integration
@pytest.mark.parametrize("blind", [False, True])
def test_a_loss_of_scaled_outputs(pair, blind):
    torch, onnx, batch = pair
    classes = torch.manifest.output_shape[0]
    scale = (np.arange(classes) % 2).astype(np.float32) if blind else np.array(1 / 200, np.float32)
    (loss, _, wanted), (found_loss, _, found) = (differentiated(each.scaled(scale), batch) for each in (torch, onnx))
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert apart(found, wanted) < 1e-5
    if blind:  # rows of these classes have no gradient
        last = trainable(torch)[-1]
        assert not found[last][::2].any()
        assert found[last][1::2].any()
    assert differentiated(onnx, batch)[0] == pytest.approx(differentiated(torch, batch)[0], rel=1e-5)


def test_the_hessian_times_a_direction(pair):
    torch, onnx, batch = pair
    along = direction(torch.manifest)
    before = onnx.read()
    wanted, found = (each.curvature([next(iter(each.epochs([batch], 0)))], along) for each in (torch, onnx))
    assert found.keys() == wanted.keys() == along.keys()
    assert apart(found, wanted) < 1e-5
    assert all(np.array_equal(tensor, before[name]) for name, tensor in onnx.read().items())


def test_statistics_of_batches(pair):
    torch, onnx, (inputs, targets) = pair
    batches = [(inputs, targets), (inputs[:5], targets[:5])]
    counts = [each.take_statistics(batches) for each in (torch, onnx)]
    running = {name: tensor for name, tensor in torch.read().items() if "running" in name}
    assert counts == [17 if running else 0] * 2
    if running:
        assert apart({name: onnx.read()[name] for name in running}, running) < 1e-5
    assert apart(onnx.read(), torch.read()) < 1e-6


def test_weights_are_multiplied_while_they_train(pair):
    torch, onnx, batch = pair
    generator = np.random.default_rng(4)
    factors = {
        spec.name: generator.uniform(1, 2, (1, *spec.shape[1:2], *[1] * (len(spec.shape) - 2))).astype(np.float32)
        for spec in torch.manifest.maskable[1:]
    }
    settings, before = FederationSettings(method="fedavg", local_steps=5, momentum=0.9), onnx.read()
    results = [
        each.train([batch], settings, Part(factors=factors), learning_rate=0.01, seed=0) for each in (torch, onnx)
    ]
    assert results[1].train_loss == pytest.approx(results[0].train_loss, rel=1e-4)
    assert apart(onnx.read(), torch.read()) < 1e-4 < apart(onnx.read(), before)
    with pytest.raises(ValueError, match="trains as a whole"):
        Part(mask=draw_neurons(onnx.manifest, NeuronDraw("k", 0.5)), factors=factors)


@pytest.mark.integration  # each model compiles for seconds
@pytest.mark.parametrize(
    "name", ["residual", "depthwise", "grouped", "1-D", "embedding", "layer norm", "GELU and SiLU"]
)
def test_second_derivatives_of_other_networks(name):
    kind, (graphs, manifest) = zoo()[name](), compiled(name)
    engine = OnnxEngine(Network(manifest, Sessions(graphs)), classification=True)
    task = Task("t", kind.model, kind.loss, train=[], validation=None, test=[(kind.inputs, kind.targets)])
    torch = TorchEngine(task, manifest)
    engine.load(torch.read())
    along = direction(manifest)
    wanted = torch.curvature([(kind.inputs, kind.targets)], along)
    assert apart(engine.curvature([(kind.inputs.numpy(), kind.targets.numpy())], along), wanted) < 1e-5
