"""Narrow networks without PyTorch: the same steps as PyTorch's narrow ones, of less work, for masks of any neurons."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch

from edge_sdk.engines.narrow import Narrow
from edge_sdk.engines.onnx import Network, Sessions, Training
from edge_sdk.engines.optimiser import Rule
from edge_sdk.training import narrow as with_pytorch
from sparrow.graphs import Graphs
from sparrow.graphs.cutting import cut_graph
from sparrow.protocol.masks import NeuronDraw, NeuronMask, count_values, draw_neurons, neuron_block
from sparrow.protocol.neurons import CannotNarrow

from .test_engine import ZOO, compiled

pytestmark = pytest.mark.integration  # each model compiles for seconds

BUILTIN = ("digits", "mnist", "mnist:leaf", "cifar10", "har")
MIXED = ("layer norm", "group norm", "embedding", "depthwise", "grouped", "residual", "1-D")
"""Kinds that mix neurons, or are cut in no way of their own."""


def opened(name, ratio, seed="key"):
    """A kind of the zoo, zero where a mask drops neurons, in the engine too."""
    kind, (graphs, manifest) = ZOO[name](), compiled(name)
    mask = draw_neurons(manifest, NeuronDraw(seed, ratio))
    state = kind.model.state_dict()
    for spec in manifest.kept:
        block, zeros = neuron_block(manifest, spec, mask), np.zeros(spec.shape, spec.dtype)
        block.put(zeros, block.take(state[spec.name].numpy()))
        state[spec.name].copy_(torch.from_numpy(zeros))
    network = Network(manifest, Sessions(graphs))
    network.load({spec.name: state[spec.name].numpy() for spec in manifest.kept})
    return kind, manifest, mask, network


def apart(found, wanted):
    pairs = [(found[name].astype(np.float64), np.asarray(wanted[name])) for name in found]
    return np.sqrt(
        sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b.astype(np.float64) ** 2).sum() for _, b in pairs)
    )


def work(graph):
    """Count the values of a graph's inputs and outputs: weights and gradients, whose products are its work."""
    proto = onnx.load_from_string(graph)
    return sum(
        int(np.prod([dim.dim_value or 1 for dim in info.type.tensor_type.shape.dim]))
        for info in (*proto.graph.input, *proto.graph.output)
    )


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_steps_are_those_of_pytorchs_narrow_network(name, ratio):
    kind, manifest, mask, network = opened(name, ratio)
    right = with_pytorch.Narrow(kind.model, manifest, mask, None)
    optimiser = torch.optim.SGD(right.model.train().parameters(), lr=0.02)
    narrow = Narrow(network, mask)
    assert narrow.manifest == narrow.network.manifest == right.manifest
    assert narrow.manifest.shared_values == count_values(manifest, mask)
    training = Training(narrow.network, Rule(learning_rate=0.02))
    for _ in range(10):
        found = training.step(kind.inputs.numpy(), kind.targets.numpy())
        optimiser.zero_grad()
        loss = kind.loss(right.model(kind.inputs), kind.targets)
        loss.backward()
        optimiser.step()
        assert found == pytest.approx(loss.item(), rel=1e-4)
    narrow.write_back()
    right.write_back()
    assert apart(network.tensors, kind.model.state_dict()) < 1e-5
    outputs = [
        each.evaluation.answer(kind.inputs.numpy(), kind.targets.numpy())[1] for each in (network, narrow.network)
    ]
    with torch.no_grad():
        outputs.append(right.model.eval()(kind.inputs).numpy())
    for each in outputs[1:]:
        np.testing.assert_allclose(each, outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BUILTIN)
def test_they_are_of_less_work(name):
    """No operator is added but for layer and group norm, and none gets whole values."""
    _, _, mask, network = opened(name, 0.2)
    graphs, narrow = network.sessions.graphs, Narrow(network, mask)
    assert work(narrow.network.sessions.graphs.step) < 0.2 * work(graphs.step)
    step = narrow.network.step()
    assert {key: gradient.shape for key, gradient in step.gradients.items()} == {
        spec.name: spec.shape for spec in narrow.manifest.tensors if spec.trainable
    }
    norms = name == "har"
    assert norms == any(each.startswith(("kept:", "places:")) for each in step.inputs)
    before, after = (
        len(onnx.load_from_string(each).graph.node) for each in (graphs.step, narrow.network.sessions.graphs.step)
    )
    assert after == before or norms


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_what_mixes_neurons_sees_zeros_in_place_of_dropped_ones(name, ratio):
    """Gradients, loss and answers are the whole network's, which PyTorch's narrow one has not for all of these."""
    kind, _, mask, network = opened(name, ratio)
    narrow = Narrow(network, mask)
    batch = kind.inputs.numpy(), kind.targets.numpy()
    whole, small = network.step(), narrow.network.step()
    answers = [whole.answer(*batch), small.answer(*batch)]
    assert answers[0][0] == pytest.approx(answers[1][0], rel=1e-5)
    np.testing.assert_allclose(answers[1][1], answers[0][1], rtol=1e-4, atol=1e-5)
    left = {
        spec.name: neuron_block(network.manifest, spec, mask).take(whole.gradients[spec.name]).reshape(-1)
        for spec in network.manifest.tensors
        if spec.name in whole.gradients
    }
    assert apart({key: small.gradients[key].reshape(-1) for key in left}, left) < 1e-5


def test_sessions_serve_every_mask_of_as_many_neurons():
    kind, manifest, _, network = opened("har", 0.5)
    batch = kind.inputs.numpy(), kind.targets.numpy()
    before = network.read()
    first = Narrow(network, draw_neurons(manifest, NeuronDraw("one", 0.5)))
    wanted = copy.deepcopy(first.network.step().answer(*batch))
    network.load({name: np.zeros_like(tensor) for name, tensor in before.items()})
    _, _, mask, other = opened("har", 0.5, "two")
    network.load(other.read())
    second = Narrow(network, mask)
    assert second.network.sessions is first.network.sessions
    assert list(network.sessions.narrow) == [tuple(len(index) for index in mask.active.values())]
    loss, outputs = second.network.step().answer(*batch)
    whole_loss, whole_outputs = network.step().answer(*batch)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    np.testing.assert_allclose(outputs, whole_outputs, rtol=1e-4, atol=1e-5)
    again = first.network.step().answer(*batch)
    assert again[0] == wanted[0], "networks of the same widths have weights of their own"


def test_of_all_neurons_it_is_the_network_itself():
    _, manifest, mask, network = opened("digits", 1.0)
    narrow = Narrow(network, mask)
    narrow.write_back()
    assert narrow.network is network
    assert narrow.manifest is manifest


def test_a_graph_inside_a_graph_is_refused():
    graphs, manifest = compiled("digits")
    proto = onnx.load_from_string(graphs.step)
    inner = onnx.helper.make_graph([], "inner", [], [])
    proto.graph.node[2].attribute.append(onnx.helper.make_attribute("body", inner))
    counts = dict.fromkeys(manifest.group_sizes, 2)
    with pytest.raises(CannotNarrow, match="operators with subgraphs cannot be narrowed"):
        cut_graph(Graphs(proto.SerializeToString(), graphs.evaluation).step, manifest, counts)


@pytest.mark.parametrize("name", ["digits", *MIXED])
def test_a_network_within_a_narrow_one_is_that_of_its_neurons(name):
    """As FjORD's widths are, also of models whose narrow graphs put neurons back where they were."""
    _, _, outer, network = opened(name, 0.8)
    narrow = Narrow(network, outer)
    inner = draw_neurons(narrow.manifest, NeuronDraw("inner", 0.5))
    both = NeuronMask({group: outer.active[group][active] for group, active in inner.active.items()})
    nested, direct = Narrow(narrow.network, inner), Narrow(network, both)
    assert nested.manifest == direct.manifest
    kind = ZOO[name]()
    steps = [Training(each.network, Rule(learning_rate=0.02)) for each in (nested, direct)]
    for _ in range(3):
        losses = {step.step(kind.inputs.numpy(), kind.targets.numpy()) for step in steps}
        assert len(losses) == 1
    for each, wanted in direct.network.tensors.items():
        np.testing.assert_array_equal(nested.network.tensors[each], wanted)
