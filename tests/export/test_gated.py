"""pFedGate in one file, against PyTorch: gates trained for a round, over a thousand inputs."""

import copy
import functools
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from edge_sdk.methods import DeviceState, Job, load_method
from edge_sdk.methods.pfedgate import gated_model as gated_in_torch
from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.skeleton import make_skeleton
from edge_sdk.tasks import Task
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.tasks.public import MODELS
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.gates.gated import Gated
from edge_sdk.training.local import get_tensors
from sparrow.coordinator.fleet.checks import completed
from sparrow.coordinator.methods import load_method as load_server_half
from sparrow.export.errors import ExportError
from sparrow.export.gated import GATES, MARGIN, gated_model
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.bundle import Bundle
from sparrow.protocol.flops import block_flops
from sparrow.protocol.masks import pack, unpack
from sparrow.protocol.messages import Assignment
from sparrow.protocol.settings import FederationSettings

pytestmark = pytest.mark.integration  # exports many models

DIGITS = (DigitsNet, (1, 8, 8))
MNIST, CIFAR, HAR = (
    (MODELS[task][name].build, MODELS[task][name].shape)
    for task, name in (("mnist", "small"), ("cifar10", "pfedgate"), ("har", "small"))
)
BUILTIN = {DIGITS[0]: "digits", MNIST[0]: "mnist", CIFAR[0]: "cifar10:pfedgate", HAR[0]: "har"}

INPUTS = 1000
CALL = 250
"""Inputs of one call."""

LARGEST = 1e-5


@pytest.fixture(autouse=True)
def _layers_take_what_they_are_said_to(monkeypatch):
    """Seconds that are measured, on a machine that is busy for one layer and not the next, may leave no choice."""
    monkeypatch.setattr(
        "edge_sdk.methods.pfedgate.block_nanoseconds", lambda model, manifest, inputs: block_flops(manifest) // 7
    )


class Mixed(nn.Module):
    """Every kind of layer whose rows can be scaled, a residual, and a linear map of sequences."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depth, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8)
        self.each, self.layer = nn.Linear(16, 12), nn.LayerNorm(12)
        self.out = nn.Linear(96, 5, bias=False)

    def forward(self, x):
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.max_pool2d(x + self.norm(self.depth(x)), 2)
        return self.out(self.layer(self.each(x.flatten(2))).flatten(1))


class Odd(nn.Module):
    """Has a weight that outputs are not linear in."""

    def __init__(self):
        super().__init__()
        self.hidden, self.slope, self.out = nn.Linear(18, 20), nn.PReLU(20), nn.Linear(20, 4)

    def forward(self, x):
        return self.out(torch.tanh(self.slope(self.hidden(x))))


class Words(nn.Module):
    """Takes whole numbers, and looks rows up."""

    vocabulary = 11

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(30, 4)

    def forward(self, x):
        return self.out(self.norm(self.words(x)).flatten(1))


def draw(network, *shape):
    """Random inputs that differ in the large, which is what a pooled gate sees."""
    if network is Words:
        return torch.randint(Words.vocabulary, shape)
    walk = torch.randn(shape).cumsum(-1)
    return walk / walk.std()


@functools.cache
def published(network, shape):
    """The network as it begins, its manifest and skeleton."""
    torch.manual_seed(0)
    model = network()
    if network in BUILTIN:
        known = load_builtin(BUILTIN[network])
        return model, known.manifest, known.skeleton
    example = draw(network, 2, *shape)
    manifest = describe(model, example, task="t")
    skeleton = make_skeleton(model, example, manifest)
    return model, manifest.with_graphs({"skeleton": skeleton}), skeleton


class Device:
    """A device of pFedGate that has trained for a round on random batches."""

    def __init__(self, network, shape, *, budget=0.5, **own):
        model, manifest, self.skeleton = published(network, shape)
        self.model = copy.deepcopy(model)
        (classes,) = manifest.output_shape
        settings = completed(
            FederationSettings(
                method="pfedgate",
                method_settings={
                    "smallest_budget": min(budget, 0.5),
                    "gate_bias": 1.0,
                    "gate_learning_rate": 1.0,
                    **own,
                },
                local_epochs=1,
                learning_rate=0.03,
                early_stopping="off",
            )
        )
        self.settings, self.budget = settings.method_settings, budget
        self.manifest = load_server_half("pfedgate").manifest(manifest, settings)
        data = [(draw(network, 16, *shape), torch.randint(classes, (16,))) for _ in range(4)]
        task = Task("t", self.model, nn.functional.cross_entropy, data, data[:1])
        values = pack(self.manifest, get_tensors(self.model, self.manifest), None)
        assignment = Assignment(assignment_id="a", kind="train", round=1, deadline_seconds=9.0, settings=settings)
        received = Bundle(np.asarray(values), None, None, "fp32", "")
        job = Job(
            assignment, self.manifest, task, TorchEngine(task, self.manifest), DeviceState(), received, budget=budget
        )
        self.job, self.state = job, load_method("pfedgate").train(job).state
        self.inputs = draw(network, INPUTS, *shape)

    def export(self, **more):
        given = {"settings": self.settings, "budget": self.budget, "own": self.state.own, **more}
        return gated_model(self.skeleton, self.manifest, personal=self.state.personal, **given)

    def trained(self):
        """The model as the round left it."""
        values = unpack(self.manifest, self.state.own["model"], None)
        return {spec.name: np.array(part).reshape(spec.shape) for spec, _, part in values}

    def torch(self, rule="exact"):
        """(gates M' [N, L], importances [N, L], outputs) of the device's model for all inputs."""
        gated = gated_in_torch(replace(self.job, state=self.state), self.trained())
        gated = Gated(
            self.model,
            gated.table,
            gated.gate,
            replace(gated.budget, rule=rule),
            flops=block_flops(self.manifest),
            window=self.settings["gate_window"],
        )
        with torch.inference_mode():
            gated.gate.eval()
            importances, scales = gated.gate.each(self.inputs)
            window = self.settings["gate_window"]
            parts = [slice(max(place // CALL * CALL, place + 1 - window), place + 1) for place in range(INPUTS)]
            importances, scales = (
                torch.stack([each[part].mean(0) for part in parts]) for each in (importances, scales)
            )
            on = gated.select(importances)
            return (
                np.where(on, scales.numpy(), 0),
                importances.numpy(),
                torch.cat([gated.each(part) for part in self.inputs.split(CALL)]).numpy(),
            )


def run(model, inputs, *names):
    """The model's output for all inputs, and other values of the graph by name."""
    onnx.checker.check_model(model, full_check=True)
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    for name in names:
        shown.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(shown.SerializeToString(), options)
    parts = [session.run(None, {"input": part.numpy()}) for part in inputs.split(CALL)]
    one = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"input": inputs[:1].numpy()})
    np.testing.assert_allclose(one[0], parts[0][0][:1], atol=LARGEST)
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def compare(device, model, rule="exact"):
    """Assert that the file predicts what PyTorch does, and return how many choices differ, and PyTorch's."""
    gates, importances, wanted = device.torch(rule)
    found, chosen = run(model, device.inputs, GATES)
    flipped = ((gates != 0) != (chosen != 0)).any(axis=1)
    np.testing.assert_allclose(found[~flipped], wanted[~flipped], atol=LARGEST * max(1, np.abs(wanted).max()))
    np.testing.assert_allclose(chosen[~flipped], gates[~flipped], atol=1e-5)
    if rule == "exact":
        worth = [(importances[flipped] * (each[flipped] != 0)).sum(axis=1) for each in (gates, chosen)]
        assert (np.abs(worth[0] - worth[1]) < MARGIN).all()
    return int(flipped.sum()), gates


def selection(model):
    return {entry.key: entry.value for entry in model.metadata_props}["selection"]


@pytest.mark.parametrize(
    ("network", "own"),
    [
        (DIGITS, {}),
        (DIGITS, {"gate_paths": 1, "cost": "flops"}),
        (DIGITS, {"gate_window": 5}),
        (MNIST, {"budget_per": "model", "cost": "flops"}),
        (MNIST, {"budget_per": "layer"}),
        (MNIST, {"cost": "flops"}),
        (MNIST, {"gate_pool": 3, "cost": "seconds"}),
        (CIFAR, {}),
        (HAR, {"gate_batch_norm": False}),
        ((Mixed, (2, 8, 8)), {"gate_sigmoid": False, "blocks": 3}),
        ((Mixed, (2, 8, 8)), {"gate_input_norm": False, "cost": "flops"}),
    ],
)
def test_rows_are_scaled_for_a_batch_at_once(network, own):
    device = Device(*network, **own)
    model = device.export()
    assert selection(model) == "exact"
    assert "Scan" not in {node.op_type for node in model.graph.node}
    flips, gates = compare(device, model)
    assert flips <= INPUTS // 100
    assert len(np.unique(gates != 0, axis=0)) > 1, "choices differ from sample to sample"


@pytest.mark.parametrize(
    ("network", "own"),
    [
        (MNIST, {"align_rows": False, "blocks": 7}),
        ((Odd, (18,)), {}),
        ((Odd, (18,)), {"align_rows": False, "cost": "flops"}),
        ((Words, (5,)), {}),
    ],
)
def test_other_blocks_and_layers_go_sample_by_sample(network, own):
    device = Device(*network, **own)
    model = device.export()
    assert "Scan" in {node.op_type for node in model.graph.node}
    assert compare(device, model)[0] <= INPUTS // 100


@pytest.mark.parametrize(
    ("own", "largest"),
    [({}, 3), ({"cost": "flops"}, 3), ({"align_rows": False}, 3), ({"importance": "per_weight"}, 100_000)],
)
def test_the_guard_rule(own, largest):
    device = Device(*MNIST, **own)
    model = device.export(largest_table=largest)
    assert selection(model) == "greedy"
    assert compare(device, model, "greedy")[0] <= INPUTS // 100


@pytest.mark.parametrize("paths", [1, 2])
def test_with_a_budget_of_everything_all_blocks_are_on(paths):
    device = Device(*DIGITS, budget=1.0, gate_paths=paths)
    model = device.export()
    assert selection(model) == "fixed"
    flips, gates = compare(device, model)
    assert flips == 0
    assert gates.all()


@pytest.mark.parametrize("sees", ["nothing", "device"])
def test_a_gate_that_does_not_see_the_input_is_no_part_of_the_file(sees):
    device = Device(*DIGITS, gate_input=sees)
    model = device.export()
    assert selection(model) == "fixed"
    (found,) = run(model, device.inputs)
    np.testing.assert_allclose(found, device.torch()[2], atol=LARGEST)
    assert len(model.graph.node) == len(onnx.load_from_string(device.skeleton).graph.node)


def test_weights_are_stored_once_and_choices_take_little():
    device = Device(*CIFAR)
    size = len(device.export().SerializeToString())
    model = 4 * device.manifest.trainable_values
    gate = sum(array.nbytes for name, array in device.state.own.items() if name.startswith("gate:"))
    assert size < model + gate + 60_000


def test_the_same_state_gives_the_same_bytes():
    device = Device(*MNIST)
    first, second = (device.export().SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_what_does_not_belong_together_is_refused():
    device = Device(*MNIST)
    own = device.state.own
    with pytest.raises(ExportError, match="not with pFedGate"):
        device.export(own={})
    with pytest.raises(ExportError, match="the smallest is"):
        device.export(budget=0.01)
    with pytest.raises(ExportError, match="of one federation"):
        device.export(own={**own, "gate:linear.weight": own["gate:linear.weight"][:-1]})
    with pytest.raises(ExportError, match="no pooling of inputs"):
        device.export(own={**own, "gate:linear.weight": own["gate:linear.weight"][:, :-1]})
    with pytest.raises(ExportError, match="another model"):
        device.export(own={**own, "model": own["model"][:-1]})
    with pytest.raises(ExportError, match="device that trained"):
        device.export(settings={**device.settings, "cost": "seconds"})
    with pytest.raises(ExportError, match="federation's manifest"):
        gated_model(device.skeleton, device.manifest.with_blocks({}), own, device.settings, 0.5)
