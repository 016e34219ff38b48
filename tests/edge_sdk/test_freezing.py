"""Frozen means bit-identical, whatever the optimiser does, and the error signal still passes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.loading import Arrays, classification
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import as_tensor, get_tensors, train_locally
from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest, NeuronGroup, Segment, TensorSpec
from sparrow.protocol.masks import NeuronDraw, NeuronMask, block_of, draw_neurons
from sparrow.protocol.settings import FederationSettings


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
    mask = draw_neurons(manifest, NeuronDraw("pi", 0.4))
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
    train(digits, draw_neurons(manifest, NeuronDraw("pi", 0.4)), local_steps=2)
    assert (get_tensors(model, manifest)["bn1.running_mean"] != before).all()


def test_a_mask_does_not_outlive_its_round(digits):
    model, manifest, _ = digits
    train(digits, draw_neurons(manifest, NeuronDraw("pi", 0.2)), local_steps=1)
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
    with pytest.raises(ManifestError, match=r"^layers\.0\.weight: "):
        Freezing(Chain(1, 3, 2, 1), CHAIN, None)
    with pytest.raises(ManifestError, match=r"layers.3.weight"):
        Freezing(Chain(1, 2, 2, 2, 1), CHAIN.model_copy(update={"tensors": (*CHAIN.tensors[:2], third())}), None)


def third():
    return TensorSpec(name="layers.2.weight", shape=(2, 2), axes=((), group_of("h2")))


# --- frozen as it is: ``trained`` -------------------------------------------------------------------------------------

OPTIMISERS = [
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam", "weight_decay": 0.1},
    {"optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5},
]


def train_some(digits, trained, *, elements=None, **settings):
    model, manifest, task = digits
    freezing = Freezing(model, manifest, None, elements, trained)
    return train_locally(
        model, task, FederationSettings(local_epochs=2, **settings), learning_rate=0.05, freezing=freezing, seed=1
    )


@pytest.mark.parametrize("settings", OPTIMISERS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_what_is_not_trained_stays_as_it_is_zero_or_not(digits, settings):
    model, manifest, _ = digits
    chance = torch.Generator().manual_seed(3)
    trained = {
        name: torch.rand(model.get_parameter(name).shape, generator=chance) < 0.3
        for name in ("conv2.weight", "fc1.weight", "out.bias")
    }
    trained["out.weight"] = torch.zeros_like(model.out.weight, dtype=torch.bool)
    before = get_tensors(model, manifest)
    train_some(digits, trained, **settings)
    after = get_tensors(model, manifest)
    for name, moving in trained.items():
        still = ~moving.numpy()
        assert before[name][still].any()
        assert before[name][still].tobytes() == after[name][still].tobytes(), name
        assert still.all() or (before[name][~still] != after[name][~still]).mean() > 0.5, name
    assert not np.array_equal(before["conv1.weight"], after["conv1.weight"]), "what is not named is trained as a whole"
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all("forward" not in vars(module) for module in model.modules())


def test_training_some_elements_is_training_all_with_masked_gradients():
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    manifest = describe(model, torch.zeros(1, 5), task="t")
    arrays = Arrays(torch.randn(12, 5), torch.arange(12) % 3)
    moving = torch.rand(4, 5) < 0.5
    task = classification("t", model, arrays, arrays, None, batch_size=12)
    settings = FederationSettings(local_steps=1)
    freezing = Freezing(model, manifest, None, None, {"0.weight": moving})
    train_locally(model, task, settings, learning_rate=0.1, freezing=freezing, seed=1)
    nn.functional.cross_entropy(twin(as_tensor(arrays.inputs)), as_tensor(arrays.targets)).backward()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter -= 0.1 * parameter.grad * (moving if name == "0.weight" else 1.0)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).detach(), parameter.detach())


def test_a_parameter_of_which_nothing_is_trained_needs_no_gradient(digits):
    model, manifest, _ = digits
    nothing = {name: torch.zeros_like(model.get_parameter(name), dtype=torch.bool) for name in ("out.weight",)}
    freezing = Freezing(model, manifest, None, None, nothing)
    assert "out.weight" not in freezing.names
    with freezing:
        assert not model.out.weight.requires_grad
        model(torch.rand(2, 1, 8, 8)).sum().backward()
        assert model.out.weight.grad is None
        assert model.out.bias.grad is not None
    assert model.out.weight.requires_grad


def test_leaving_after_an_error_gives_everything_back(digits):
    model, manifest, _ = digits
    nothing = {"out.weight": torch.zeros_like(model.out.weight, dtype=torch.bool)}
    with pytest.raises(KeyError), Freezing(model, manifest, None, None, nothing):
        raise KeyError("x")
    assert model.out.weight.requires_grad


def test_training_does_not_revive_pruned_elements(digits):
    model, _, _ = digits
    exists = torch.rand(model.fc1.weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    moving = torch.rand(model.fc1.weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    with torch.no_grad():
        model.fc1.weight.mul_(exists)
    before = model.fc1.weight.detach().clone()
    train_some(digits, {"fc1.weight": moving}, elements={"fc1.weight": exists})
    after = model.fc1.weight.detach()
    assert not after[~exists].any()
    assert torch.equal(after[~moving], before[~moving])
    assert (after[moving & exists] != before[moving & exists]).float().mean() > 0.5


def test_what_is_frozen_stays_so_when_elements_change(digits):
    model, manifest, _ = digits
    nothing = {"out.weight": torch.zeros_like(model.out.weight, dtype=torch.bool)}
    assert "out.weight" not in Freezing(model, manifest, None, None, nothing).with_elements({}).names


def test_a_parameter_that_the_task_does_not_train_may_be_named(digits):
    model, manifest, _ = digits
    model.out.bias.requires_grad_(False)
    freezing = Freezing(model, manifest, None, None, {"out.bias": torch.zeros(10, dtype=torch.bool)})
    with freezing:
        pass
    assert not model.out.bias.requires_grad


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("other.weight", torch.ones(3, dtype=torch.bool), "elements for other.weight"),
        ("out.bias", torch.zeros(9, dtype=torch.bool), "out.bias: elements of type"),
        ("out.bias", torch.ones(9, dtype=torch.bool), "out.bias: elements of type"),
        ("out.bias", torch.zeros(10), "out.bias: elements of type"),
    ],
)
def test_what_is_trained_must_be_the_models(digits, name, flags, said):
    model, manifest, _ = digits
    with pytest.raises(ValueError, match=said):
        Freezing(model, manifest, None, None, {name: flags})
