"""Frozen means bit-identical, whatever the optimiser does, and the error signal still passes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.protocol.errors import ManifestError
from edge_sdk.protocol.manifest import Manifest, NeuronGroup, Segment, TensorSpec
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, block_of, draw_neurons
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks.digits import DigitsNet
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tracing import describe
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import get_tensors, train_locally


@pytest.fixture
def digits():
    """(model, manifest, task) over forty random images."""
    torch.manual_seed(0)
    model = DigitsNet()
    arrays = Arrays(torch.rand(40, 1, 8, 8), torch.arange(40) % 10)
    task = classification("digits", model, arrays, arrays, None, batch_size=8)
    return model, describe(model, torch.zeros(1, 1, 8, 8), task="digits"), task


def train(digits, mask, *, learning_rate=0.05, **settings):
    model, manifest, task = digits
    freezing = Freezing(model, manifest, mask)
    return train_locally(
        model, task, FederationSettings(**settings), learning_rate=learning_rate, freezing=freezing, seed=1
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
        {"optimizer": "adam", "weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_frozen_parameters_are_bit_identical_and_active_ones_move(digits, settings):
    model, manifest, _ = digits
    before = get_tensors(model, manifest)
    mask = draw_neurons(manifest, NeuronDraw("job", 1, "pi", 0.4))
    train(digits, mask, local_epochs=2, **settings)
    after = get_tensors(model, manifest)
    for spec in manifest.tensors:
        if not spec.trainable:
            continue
        active = np.zeros(spec.shape, dtype=bool)
        block = block_of(manifest, spec, mask)
        block.put(active, np.ones(block.shape, dtype=bool))
        assert active.any(), spec.name
        frozen_before, frozen_after = before[spec.name][~active], after[spec.name][~active]
        assert frozen_before.tobytes() == frozen_after.tobytes(), spec.name
        if spec.name.endswith("weight"):  # batch norm cancels the bias of the convolution before it
            assert not np.array_equal(before[spec.name][active], after[spec.name][active]), spec.name


def test_running_statistics_of_frozen_channels_move_too(digits):
    model, manifest, _ = digits
    before = get_tensors(model, manifest)["bn1.running_mean"]
    train(digits, draw_neurons(manifest, NeuronDraw("job", 1, "pi", 0.4)), local_steps=2)
    assert (get_tensors(model, manifest)["bn1.running_mean"] != before).all()


def test_a_mask_does_not_outlive_its_round(digits):
    model, manifest, _ = digits
    train(digits, draw_neurons(manifest, NeuronDraw("job", 1, "pi", 0.2)), local_steps=1)
    before = get_tensors(model, manifest)["out.weight"]
    train(digits, None, local_epochs=2)
    assert (get_tensors(model, manifest)["out.weight"] != before).mean() > 0.5  # a dead unit or two apart


def group_of(name):
    return (Segment(group=name),)


class Chain(nn.Module):
    """Linear layers without bias, one after the other, all weights 1."""

    def __init__(self, *widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


CHAIN = Manifest(
    task="chain",
    input_shape=(1,),
    output_shape=(1,),
    tensors=(
        TensorSpec(name="layers.0.weight", shape=(2, 1), axes=(group_of("h1"), ())),
        TensorSpec(name="layers.1.weight", shape=(2, 2), axes=(group_of("h2"), group_of("h1"))),
        TensorSpec(name="layers.2.weight", shape=(1, 2), axes=((), group_of("h2"))),
    ),
    groups=(NeuronGroup(name="h1", size=2), NeuronGroup(name="h2", size=2)),
)
FIRST_OF_EACH = NeuronMask({"h1": np.array([0]), "h2": np.array([0])})


def test_v6_the_signal_passes_through_frozen_neurons():
    model = Chain(1, 2, 2, 1)
    with Freezing(model, CHAIN, FIRST_OF_EACH) as freezing:
        model(torch.ones(1, 1)).sum().backward()
        freezing.collect_gradients()
        assert [leaf.grad.tolist() for leaf in freezing.parameters] == [
            [[2.0]],  # 1 if the signal stopped at the frozen neuron of the second layer
            [[1.0]],
            [[2.0]],
        ]
    assert all(layer.weight.requires_grad and "forward" not in vars(layer) for layer in model.layers)


def test_a_step_without_its_gradients_is_refused():
    model = Chain(1, 2, 2, 1)
    with Freezing(model, CHAIN, FIRST_OF_EACH) as freezing:
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(RuntimeError, match=r"call collect_gradients\(\) between backward and step"):
            freezing.write_back()


def test_an_infinite_gradient_of_a_kept_zero_counts_as_zero():
    model = Chain(1, 2, 2, 1)
    with torch.no_grad():
        model.layers[0].weight[1] = 0
    with Freezing(
        model, CHAIN, None, {name: weight.detach() != 0 for name, weight in model.named_parameters()}
    ) as freezing:
        model(torch.ones(1, 1)).sum().backward()
        model.layers[0].weight.grad[1] = torch.inf
        freezing.collect_gradients()
        assert model.layers[0].weight.grad.tolist() == [[2.0], [0.0]]


def test_another_model_than_the_manifests_is_refused():
    with pytest.raises(ManifestError, match=r"layers.0.weight: .* publish and train the same model"):
        Freezing(Chain(1, 3, 2, 1), CHAIN, None)
    with pytest.raises(ManifestError, match=r"layers.3.weight"):
        Freezing(Chain(1, 2, 2, 2, 1), CHAIN.model_copy(update={"tensors": (*CHAIN.tensors[:2], third())}), None)


def third():
    return TensorSpec(name="layers.2.weight", shape=(2, 2), axes=((), group_of("h2")))
