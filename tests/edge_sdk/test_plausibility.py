"""The check of a step's gradients: leaks are refused by name, honest steps pass, and nothing changes."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from edge_sdk.engines.engine import OnnxEngine
from edge_sdk.engines.onnx import Network, Sessions, Step
from edge_sdk.engines.plausibility import DIRECTIONS, SAMPLES, ImplausibleStep
from edge_sdk.publishing.step import compile_step
from edge_sdk.publishing.untraced import describe_whole
from edge_sdk.tasks.models import DigitsNet
from sparrow.graphs import Graphs
from sparrow.graphs.checking import check_graphs
from sparrow.protocol.builtin import load_builtin
from sparrow.protocol.manifest import initial_values
from sparrow.protocol.settings import FederationSettings

from .networks import Kind, zoo

SEEDS = range(5)
ONE_LOOK = 1 + 2 * 2 * (DIRECTIONS + 2)  # two directions are looked at in four widths, all others in two


# --- engines and data ----------------------------------------------------------------------------------------------


def digits():
    builtin = load_builtin("digits")
    return Graphs(builtin.graphs["step"], builtin.graphs["evaluation"]), builtin.manifest


def engine_of(graphs, manifest, weights=None):
    network = Network(manifest, Sessions(graphs))
    network.load(initial_values(manifest, 0) if weights is None else weights)
    return OnnxEngine(network, classification=True)


def pictures(count=12, seed=0):
    generator = np.random.default_rng(seed)
    return generator.random((count, 1, 8, 8), np.float32), generator.integers(10, size=count)


def compiled(kind):
    graphs = compile_step(kind.model, kind.loss, kind.inputs, kind.targets)
    manifest = describe_whole(kind.model, kind.inputs[:2], task="t")
    state = kind.model.state_dict()
    engine = engine_of(graphs, manifest, {spec.name: state[spec.name].numpy() for spec in manifest.kept})
    return engine, [(kind.inputs.numpy(), kind.targets.numpy())]


# --- dishonest graphs ----------------------------------------------------------------------------------------------


class Forger:
    """Adds nodes to a step, and lets outputs be other values than they were."""

    def __init__(self, step):
        self.model = onnx.load_from_string(step)
        self.graph, self._count = self.model.graph, 0

    def add(self, kind, *inputs, **attributes):
        read = [self._constant(each) if isinstance(each, np.ndarray) else each for each in inputs]
        name = self._fresh()
        self.graph.node.append(helper.make_node(kind, read, [name], **attributes))
        return name

    def _constant(self, array):
        name = self._fresh()
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def _fresh(self):
        self._count += 1
        return f"forged:{self._count}"

    def take(self, output):
        """Rename a value of which a graph's output was made; return its new name."""
        for node in self.graph.node:
            node.input[:] = [f"honest:{output}" if name == output else name for name in node.input]
            node.output[:] = [f"honest:{output}" if name == output else name for name in node.output]
        return f"honest:{output}"

    def give(self, output, value):
        self.graph.node.append(helper.make_node("Identity", [value], [output]))

    def pixels(self):
        return self.add("Reshape", "input", np.array([-1, 64]))

    def sample(self, *shape, scale=1.0):
        """The first sample of the batch, or its first pixels, in a shape."""
        values = self.add("ReduceSum", self.add("Mul", self.pixels(), self._first()), np.array([0]), keepdims=0)
        values = self.add("Mul", values, np.float32(scale) * np.ones(1, np.float32))
        size = int(np.prod(shape))
        times = -(-size // 64)
        values = self.add("Concat", *[values] * times, axis=0) if times > 1 else values
        return self.add("Reshape", self.add("Slice", values, np.array([0]), np.array([size])), np.array(shape))

    def _first(self):
        """[N, 1]: one for the first sample, zero for the others."""
        ones = self.add("ReduceMax", self.pixels(), np.array([1]))
        ones = self.add("Add", self.add("Mul", ones, np.zeros(1, np.float32)), np.ones(1, np.float32))
        place = self.add("CumSum", ones, np.array(0))
        return self.add("Cast", self.add("Less", place, np.array(1.5, np.float32)), to=TensorProto.FLOAT)

    def graphs(self, graphs):
        return Graphs(self.model.SerializeToString(), graphs.evaluation)


def classes_leak(forger):
    """Return sums of each class's pictures: Boenisch et al.'s product, with the rows chosen by the target."""
    hot = forger.add("OneHot", "target", np.array(10), np.array([0, 1], np.float32))
    leak = forger.add("MatMul", forger.add("Transpose", hot, perm=[1, 0]), forger.add("Neg", forger.pixels()))
    forger.take("grad:out.weight")
    forger.give("grad:out.weight", leak)
    return "out.weight"


def bias_leak(forger):
    forger.take("grad:fc1.bias")
    forger.give("grad:fc1.bias", forger.sample(64, scale=1e-1))
    return "fc1.bias"


def row_leak(forger):
    honest, chosen = forger.take("grad:fc1.weight"), (np.arange(64) == 5).reshape(64, 1)
    forger.give("grad:fc1.weight", forger.add("Where", chosen, forger.sample(1, 128, scale=1e-1), honest))
    return "fc1.weight"


def flat_leak(forger):
    """Batch norm subtracts this bias: its gradient is zero."""
    forger.take("grad:conv1.bias")
    forger.give("grad:conv1.bias", forger.sample(16, scale=1e-2))
    return "conv1.bias"


def added_leak(forger):
    honest = forger.take("grad:fc1.weight")
    forger.give("grad:fc1.weight", forger.add("Add", honest, forger.sample(64, 128, scale=1e-2)))
    return "fc1.weight"


LEAKS = [classes_leak, bias_leak, row_leak, flat_leak, added_leak]


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_refused_by_the_name_of_its_parameter(leak):
    graphs, manifest = digits()
    forger = Forger(graphs.step)
    name = leak(forger)
    forged = forger.graphs(graphs)
    check_graphs(forged, manifest)  # sizes and operators are those of an honest step
    for seed in range(2):
        with pytest.raises(ImplausibleStep, match="ask the operator") as refused:
            engine_of(forged, manifest).check_plausible([pictures(seed=seed)], seed)
        assert refused.value.names == (name,)
        assert name in str(refused.value)


def test_several_leaks_are_named():
    graphs, manifest = digits()
    forger = Forger(graphs.step)
    names = {bias_leak(forger), flat_leak(forger)}
    with pytest.raises(ImplausibleStep) as refused:
        engine_of(forger.graphs(graphs), manifest).check_plausible([pictures()], 0)
    assert set(refused.value.names) == names
    assert copy.copy(refused.value).names == refused.value.names


def test_a_leak_that_is_written_into_the_loss_passes():
    """The limit of the check: such a gradient is that of the loss."""
    graphs, manifest = digits()
    forger = Forger(graphs.step)
    leak = forger.sample(64, 128, scale=0.1)
    product = forger.add("Reshape", forger.add("Mul", "fc1.weight", leak), np.array([-1]))
    more = forger.add("ReduceSum", product, np.array([0]), keepdims=0)
    loss, gradient = forger.take("loss"), forger.take("grad:fc1.weight")
    forger.give("loss", forger.add("Add", loss, more))
    forger.give("grad:fc1.weight", forger.add("Add", gradient, leak))
    assert engine_of(forger.graphs(graphs), manifest).check_plausible([pictures()], 0).judged


# --- honest graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["digits", "mnist", "har"])
def test_a_built_in_step_is_plausible(name):
    builtin = load_builtin(name)
    manifest, generator = builtin.manifest, np.random.default_rng(1)
    engine = engine_of(Graphs(builtin.graphs["step"], builtin.graphs["evaluation"]), manifest)
    inputs = generator.standard_normal((8, *manifest.input_shape)).astype(np.float32)
    targets = generator.integers(manifest.output_shape[0], size=8)
    for seed in SEEDS:
        assert engine.check_plausible([(inputs, targets)], seed).judged


def perceptron():
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    return Kind(model, torch.randn(6, 10))


def padded():
    """The row of the padding has no gradient, whatever the loss does."""
    model = nn.Sequential(nn.Embedding(20, 5, padding_idx=0), nn.Flatten(), nn.Linear(35, 3))
    with torch.no_grad():
        model[0].weight[0] = 1.0
    return Kind(model, torch.randint(0, 3, (6, 7)))


def summed():
    return Kind(nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 10)), torch.randn(6, 10),
                torch.randn(6, 10), lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum"))  # fmt: skip


class Autoencoder(nn.Module):
    """A variational autoencoder: outputs are reconstruction, mean and log-variance."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(10, 16), nn.Linear(16, 6)
        self.third, self.last = nn.Linear(3, 16), nn.Linear(16, 10)

    def forward(self, x):
        mean, logarithm = self.middle(F.relu(self.first(x))).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (logarithm / 2).exp()
        return torch.cat([self.last(F.relu(self.third(code))), mean, logarithm], 1)


def variational():
    def loss(outputs, targets):
        found, mean, logarithm = outputs.split([10, 3, 3], 1)
        divergence = (mean.square() + logarithm.exp() - 1 - logarithm).sum(1).mean() / 2
        return F.mse_loss(found, targets) + 0.1 * divergence

    inputs = torch.randn(6, 10)
    return Kind(Autoencoder(), inputs, inputs, loss)


OWN = {"perceptron": perceptron, "padding": padded, "sum": summed, "VAE": variational}
KINDS = {
    **{name: make for name, make in zoo().items()
       if name in ("residual", "batch norm", "dropout", "variational", "LSTM", "GRU", "transformer",
                   "MultiheadAttention", "heads", "embedding", "tied weights", "instance norm", "custom loss")},
    **OWN,
}  # fmt: skip


@pytest.mark.integration  # each compiles for seconds
@pytest.mark.parametrize("name", KINDS)
def test_an_honest_step_is_plausible(name):
    torch.manual_seed(0)
    engine, batches = compiled(KINDS[name]())
    for seed in SEEDS:
        assert engine.check_plausible(batches, seed).judged


def test_weights_on_kinks_are_judged_beside_them():
    """Black pictures and biases of zero: every ReLU of the first layer is at its kink."""
    graphs, manifest = digits()
    weights = {
        name: np.zeros_like(value) if "bias" in name else value for name, value in initial_values(manifest, 0).items()
    }
    inputs, targets = pictures()
    inputs[:, :, 2:] = 0
    for seed in SEEDS:
        assert engine_of(graphs, manifest, weights).check_plausible([(inputs, targets)], seed).judged
    forger = Forger(graphs.step)
    bias_leak(forger)
    with pytest.raises(ImplausibleStep, match=r"fc1\.bias"):
        engine_of(forger.graphs(graphs), manifest, weights).check_plausible([(inputs, targets)], 0)


def test_a_loss_that_float32_cannot_resolve_is_not_judged():
    """All answers are right by far: the loss is zero, and its gradient almost."""
    graphs, manifest = digits()
    inputs, _ = pictures()
    weights = dict(initial_values(manifest, 0))
    engine = engine_of(graphs, manifest, weights)
    engine.load({"out.weight": 1e-3 * weights["out.weight"], "out.bias": np.float32([20] + [0] * 9)})
    for seed in SEEDS:
        assert engine.check_plausible([(inputs, np.zeros(len(inputs), np.int64))], seed).runs > 0


def test_a_loss_that_is_not_finite_is_not_judged():
    graphs, manifest = digits()
    inputs, targets = pictures()
    inputs[0, 0, 0, 0] = np.nan
    assert not engine_of(graphs, manifest).check_plausible([(inputs, targets)], 0).judged


# --- nothing else changes ------------------------------------------------------------------------------------------


class Dropping(DigitsNet):
    def forward(self, images):
        return super().forward(F.dropout(images, 0.3, training=self.training))


SETTINGS = FederationSettings(local_epochs=2, learning_rate=0.05, momentum=0.9)


def trained(engine, batches, *, checked):
    if checked:
        engine.check_plausible(batches, 3)
    before = engine.read()
    result = engine.train(batches, SETTINGS, learning_rate=0.05, seed=1)
    return before, result, engine.read()


def loader(seed=0):
    inputs, targets = (torch.from_numpy(each) for each in pictures(40))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets),
        batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def assert_same(found, wanted):
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_check_leaves_model_data_and_chance_as_they_are():
    graphs, manifest = digits()
    (before, result, after), (start, wanted, end) = (
        trained(engine_of(graphs, manifest), loader(), checked=checked) for checked in (True, False)
    )
    assert_same(before, start)
    assert_same(after, end)
    assert result == wanted
    assert not np.array_equal(after["bn1.running_mean"], before["bn1.running_mean"])


@pytest.mark.integration  # compiles for seconds
def test_a_check_leaves_the_masks_of_dropout_as_they_are():
    model = Dropping()
    inputs, targets = (torch.from_numpy(each) for each in pictures())
    engines = [compiled(Kind(model, inputs, targets))[0] for _ in range(2)]
    for engine in engines:
        next(engine.epochs([pictures()], 5))
    engines[0].check_plausible([pictures()], 3)
    losses = [engine.differentiate([pictures()], (), lambda name, each: None)[0] for engine in engines]
    assert losses[0] == losses[1]
    (_, result, after), (_, wanted, end) = (
        trained(engine, loader(), checked=checked) for engine, checked in zip(engines, (True, False), strict=True)
    )
    assert_same(after, end)
    assert result == wanted


def test_few_runs_on_few_samples_are_enough(monkeypatch):
    seen = []
    run = Step.run
    monkeypatch.setattr(
        Step, "run", lambda step, inputs, *given, **how: seen.append(len(inputs)) or run(step, inputs, *given, **how)
    )
    graphs, manifest = digits()
    found = engine_of(graphs, manifest).check_plausible([pictures(30)], 0)
    assert found.runs == len(seen) == ONE_LOOK
    assert set(seen) == {SAMPLES}


def test_data_without_a_batch():
    with pytest.raises(ValueError, match="no batches"):
        engine_of(*digits()).check_plausible([], 0)
