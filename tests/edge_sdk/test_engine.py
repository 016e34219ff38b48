"""The ONNX engine against PyTorch: the same steps, of everything, of a mask's neurons, and of elements that exist."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
import torch

from edge_sdk.engines.onnx import Network, Sessions, Training
from edge_sdk.engines.optimiser import Optimiser, Rule
from edge_sdk.engines.parts import frozen_in_part, leaves_of
from edge_sdk.engines.training import Part, Pull
from edge_sdk.publishing.coupling import describe
from edge_sdk.publishing.step import compile_step
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.optimisation import Optimisation
from sparrow.graphs.steps import optimise, products_of
from sparrow.protocol.masks import NeuronDraw, draw_neurons
from sparrow.protocol.settings import FederationSettings

from .networks import zoo

pytestmark = pytest.mark.integration  # each model compiles for seconds

ZOO = zoo()
RULES = {
    "sgd": {"learning_rate": 0.05},
    "momentum": {"learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0},
    "adam": {"optimizer": "adam", "learning_rate": 0.001, "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.001, "weight_decay": 0.1},
}
PARTS = {
    "everything": lambda manifest: Part(),
    "mask": lambda manifest: Part(mask=draw_neurons(manifest, NeuronDraw("key", 0.4))),
    "elements": lambda manifest: Part(elements={spec.name: some(spec) for spec in manifest.maskable}),
    "trained": lambda manifest: Part(trained={manifest.maskable[0].name: some(manifest.maskable[0])}),
}


def some(spec):
    return np.random.default_rng(spec.size).random(spec.shape) < 0.3


@functools.cache
def compiled(name):
    kind = ZOO[name]()
    graphs = compile_step(kind.model, kind.loss, kind.inputs, kind.targets)
    return graphs, describe(kind.model, kind.inputs[:2], task="t")


def opened(name, part):
    """A kind of the zoo, and the same model in the engine, without what does not exist."""
    kind, (graphs, manifest) = ZOO[name](), compiled(name)
    model = kind.model.train()
    state = {each: model.state_dict()[each].numpy() for each in (spec.name for spec in manifest.kept)}
    for each, flags in (part.elements or {}).items():
        state[each] *= flags
    network = Network(manifest, Sessions(graphs))
    network.load(state)
    return kind, model, network


def distance(network, model):
    pairs = [(network.tensors[name], model.state_dict()[name].numpy()) for name in network.tensors]
    return np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs))


def rule_of(given):
    given = dict(given)
    return Rule(given.pop("optimizer", "sgd"), **given)


# A bias before batch norm has a gradient of rounding alone, of which Adam makes whole steps: no digits with it.
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("mnist", "digits", "har") for how in RULES if name != "digits" or how[0] != "a"]
    + [(name, "momentum") for name in ("beside", "turned", "GRU", "LSTM", "embedding", "residual", "U-Net")],
)
@pytest.mark.parametrize("what", PARTS)
def test_steps_are_those_of_pytorch(name, what, how):
    manifest = compiled(name)[1]
    part = PARTS[what](manifest)
    kind, model, network = opened(name, part)
    before = network.read()
    training = Training(network, rule_of(RULES[how]), part, Pull(0.1))
    elements, trained = (
        None if each is None else {key: torch.from_numpy(flags) for key, flags in each.items()}
        for each in (part.elements, part.trained)
    )
    freezing = Freezing(model, manifest, part.mask, elements, trained)
    settings = FederationSettings(**RULES[how])
    optimisation = Optimisation(freezing, settings, learning_rate=settings.learning_rate, proximal_weight=0.1)
    with optimisation:
        for step in range(6):
            rows = slice(0, 6 if step % 2 else 4)
            inputs, targets = kind.inputs[rows], kind.targets[rows]
            found = training.step(inputs.numpy(), targets.numpy())
            optimisation.forget_gradients()
            loss = kind.loss(model(inputs), targets)
            loss.backward()
            optimisation.step()
            assert found == pytest.approx(loss.item(), rel=1e-4)
    assert distance(network, model) < 1e-4
    leaves = leaves_of(manifest, before, part)
    for spec in manifest.tensors:
        if spec.trainable:
            moved = network.tensors[spec.name] != before[spec.name]
            leaf = leaves.get(spec.name)
            assert moved.sum() <= (0 if leaf is None else leaf.values.size), "what is frozen stays bit for bit"


def test_a_network_repeats_itself_bit_for_bit_and_reads_what_it_has_become():
    kind, _, first = opened("digits", Part())
    second = opened("digits", Part())[2]
    for network in (first, second):
        training = Training(network, Rule(momentum=0.5))
        for _ in range(3):
            training.step(kind.inputs.numpy(), kind.targets.numpy())
    one, other = first.read(), second.read()
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    first.load({name: np.zeros_like(tensor) for name, tensor in one.items()})
    assert one["out.weight"].any()
    loss, outputs = first.evaluation.answer(kind.inputs.numpy(), kind.targets.numpy())
    assert loss == pytest.approx(np.log(outputs.shape[1]))
    assert not outputs.any()


def test_few_neurons_are_less_work():
    manifest = compiled("mnist")[1]
    network = opened("mnist", Part())[2]
    mask = draw_neurons(manifest, NeuronDraw("key", 0.2))
    parts, index, lowest = products_of(manifest, frozen_in_part(leaves_of(manifest, network.tensors, Part(mask=mask))))
    step = network.step(parts, lowest)
    whole = network.step()
    assert lowest == ["conv1.weight"]
    assert sum(each.size for each in step.gradients.values()) < 0.1 * sum(e.size for e in whole.gradients.values())
    assert index.keys() == {name for name in step.inputs if name.startswith(("rows:", "columns:"))}
    assert network.step(parts, lowest) is step, "made once for as many neurons"
    graph = onnx.load_from_string(optimise(network.sessions.graphs.step, parts, lowest))
    shapes = {
        info.name: [axis.dim_value for axis in info.type.tensor_type.shape.dim]
        for info in onnx.shape_inference.infer_shapes(graph).graph.value_info
    }
    below = [shapes[node.output[0]] for node in graph.graph.node if node.op_type == "ConvTranspose"]
    assert [channels for _, channels, *_ in below] == [len(index["rows:conv1.weight"])], "errors that nobody needs"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Part(elements={"nobody": np.ones(3, bool)}), "nobody: elements of type bool"),
        (Part(elements={"out.weight": np.ones(3, bool)}), r"out.weight: elements of type bool and shape \(3,\)"),
        (Part(trained={"out.bias": np.ones(10, np.int8)}), "out.bias: elements of type int8"),
        (Part(elements={"out.bias": np.zeros(10, bool)}), "out.bias: masked weights must be zero"),
    ],
)
def test_elements_that_do_not_fit_are_named(part, said):
    network = opened("digits", Part())[2]
    with pytest.raises(ValueError, match=said):
        Training(network, Rule(), part)


def test_a_large_array_is_moved_piece_by_piece_to_the_same_values():
    rng = np.random.default_rng(0)
    weight, gradient = (rng.standard_normal(200_001, dtype=np.float32) for _ in range(2))
    wanted = weight - np.float32(0.1) * (gradient + np.float32(0.01) * weight)
    Optimiser(Rule("sgd", 0.1, weight_decay=0.01), {"w": weight}).step({"w": gradient})
    np.testing.assert_allclose(weight, wanted, rtol=1e-6)
