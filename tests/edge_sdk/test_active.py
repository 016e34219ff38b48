"""Layers with kernels of their own train as if dense gradients were masked: every layer, any mask, any optimiser."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks.public import MODELS
from edge_sdk.training import active
from edge_sdk.training.freezing import Freezing
from sparrow.protocol.flops import training_flops
from sparrow.protocol.masks import NeuronDraw, block_of, draw_neurons


class Images(nn.Module):
    """[N,3,9,9]: a convolution, then whatever ``make`` puts in the middle, then a flatten and two linear layers."""

    def __init__(self, make):
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.middle = make()
        with torch.no_grad():
            width = self.middle(self.first(torch.zeros(2, 3, 9, 9)))[0].numel()
        self.fc = nn.Linear(width, 20)
        self.out = nn.Linear(20, 4, bias=False)

    def forward(self, x):
        x = torch.flatten(torch.relu(self.middle(torch.relu(self.first(x)))), 1)
        return self.out(torch.tanh(self.fc(x)))


class Series(nn.Module):
    """[N,4,16] in time."""

    def __init__(self, make):
        super().__init__()
        self.first = nn.Conv1d(4, 12, 5, stride=2, padding=2)
        self.middle = make()
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        return self.out(torch.relu(self.middle(torch.relu(self.first(x)))).mean(2))


class Words(nn.Module):
    """int64 [N,6] -> one vector a word, a linear layer on three axes, layer norm."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.fc = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.norm(torch.relu(self.fc(self.words(x)))).mean(1))


# No bias before a batch norm: its gradient is zero but for rounding, which Adam blows up.
IMAGES = {
    "wide": lambda: nn.Conv2d(12, 16, 3),
    "strided": lambda: nn.Conv2d(12, 16, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=False),
    "few inputs": lambda: nn.Conv2d(12, 16, 1),
    "in groups": lambda: nn.Conv2d(12, 16, 3, stride=2, groups=4),
    "depthwise": lambda: nn.Conv2d(12, 12, 3, padding=1, groups=12),
    "depthwise, two a channel": lambda: nn.Conv2d(12, 24, 3, groups=12),
    "same": lambda: nn.Conv2d(12, 16, 3, padding="same"),
    "reflected": lambda: nn.Conv2d(12, 16, 3, padding=1, padding_mode="reflect"),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(12, 16, 3, bias=False), nn.BatchNorm2d(16)),
    "group norm": lambda: nn.Sequential(nn.Conv2d(12, 16, 3), nn.GroupNorm(4, 16)),
    "prelu": lambda: nn.Sequential(nn.Conv2d(12, 16, 3), nn.PReLU(16)),
}
SERIES = {
    "wide in time": lambda: nn.Conv1d(12, 12, 9, padding=4),
    "depthwise in time": lambda: nn.Conv1d(12, 12, 3, groups=12),
    "batch norm in time": lambda: nn.Sequential(nn.Conv1d(12, 12, 9, padding=4, bias=False), nn.BatchNorm1d(12)),
}
NETS = {
    **{name: (lambda make=make: Images(make), torch.randn(6, 3, 9, 9)) for name, make in IMAGES.items()},
    **{name: (lambda make=make: Series(make), torch.randn(6, 4, 16)) for name, make in SERIES.items()},
    "words": (Words, torch.arange(36).reshape(6, 6) % 11),
}
OPTIMISERS = {
    "sgd": lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": lambda leaves: torch.optim.Adam(leaves, lr=0.01, weight_decay=0.05),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=0.01, weight_decay=0.05),
}


def made(name, channels_last=False):
    """(model in float64, manifest, inputs)"""
    torch.manual_seed(0)
    build, inputs = NETS[name]
    model = build()
    manifest = describe(model, inputs[:2], task="t")
    if inputs.is_floating_point():
        inputs = inputs.double()
    if channels_last:
        model, inputs = model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    return model.double(), manifest, inputs


def active_values(manifest, mask):
    """name -> bool array: which values the mask lets train."""
    result = {}
    for spec in manifest.tensors:
        where = np.zeros(spec.shape, dtype=bool)
        block = block_of(manifest, spec, mask)
        block.put(where, np.ones(block.shape, dtype=bool))
        result[spec.name] = torch.from_numpy(where)
    return result


def train_masked(model, active, inputs, targets, optimise, steps):
    """The reference: dense gradients, zeroed; frozen values put back after each step."""
    parameters = dict(model.named_parameters())
    before = {name: each.detach().clone() for name, each in parameters.items()}
    optimizer = optimise(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        for name, each in parameters.items():
            each.grad *= active[name]
        optimizer.step()
        with torch.no_grad():
            for name, each in parameters.items():
                each.copy_(torch.where(active[name], each, before[name]))


def train_frozen(model, manifest, mask, inputs, targets, optimise, steps):
    with Freezing(model, manifest, mask) as freezing:
        optimizer = optimise(freezing.parameters)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            freezing.collect_gradients()
            optimizer.step()
            freezing.write_back()
        return freezing.parameters, optimizer


@pytest.fixture
def always_gathering(monkeypatch):
    """Kernels run however small the layer is: those of tests are."""
    monkeypatch.setattr(active, "FEW_INPUTS", 0)
    monkeypatch.setattr(active, "FEW_PRODUCTS", 0)
    monkeypatch.setattr(active, "FEW_SAVED", 0)


@pytest.mark.integration
@pytest.mark.parametrize(
    "optimise",
    [pytest.param(each, id=name) for name, each in OPTIMISERS.items()],
)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("always_gathering")
def test_training_equals_masked_dense_training(name, optimise):
    assert_as_masked(name, optimise)


@pytest.mark.integration
@pytest.mark.parametrize("name", NETS)
def test_training_of_small_layers_equals_masked_dense_training(name):
    assert_as_masked(name, OPTIMISERS["adam"], ratios=(0.5,))


def assert_as_masked(name, optimise, ratios=(0.2, 0.5, 0.9)):
    for ratio in ratios:
        channels_last = name in IMAGES and ratio != 0.5
        model, manifest, inputs = made(name, channels_last)
        targets = torch.arange(len(inputs)) % 4
        mask = draw_neurons(manifest, NeuronDraw(f"{name}-{round(10 * ratio)}", ratio))
        trained = active_values(manifest, mask)
        reference, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
        train_masked(reference, trained, inputs, targets, optimise, steps=3)
        train_frozen(model, manifest, mask, inputs, targets, optimise, steps=3)
        parameters = dict(model.named_parameters())
        for key, wanted in reference.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], wanted, rtol=0, atol=1e-10, msg=f"{key} at {ratio}")
            if key in parameters:
                assert torch.equal(model.state_dict()[key][~trained[key]], before[key][~trained[key]]), key


@pytest.mark.parametrize("name", NETS)
def test_the_optimiser_keeps_state_for_active_values_only(name):
    model, manifest, inputs = made(name)
    mask = draw_neurons(manifest, NeuronDraw(name, 0.4))
    optimise = OPTIMISERS["adam"]
    leaves, optimizer = train_frozen(model, manifest, mask, inputs, torch.arange(len(inputs)) % 4, optimise, 1)
    wanted = sum(block_of(manifest, spec, mask).size for spec in manifest.tensors if spec.trainable)
    assert sum(leaf.numel() for leaf in leaves) == wanted < manifest.trainable_values
    assert sum(optimizer.state[leaf]["exp_avg"].numel() for leaf in leaves) == wanted


@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_what_is_frozen_is_not_computed(ratio):
    """Of `leaf`, whose first convolution and output layer are small, and computed whole; the error of the second one's
    input is computed only where it is of use, up to a half of it. All else is as it is counted."""
    choice = MODELS["mnist"]["leaf"]
    model, inputs = choice.build(), torch.randn(4, *choice.shape)
    manifest = describe(model, inputs[:1], task="t")
    mask = draw_neurons(manifest, NeuronDraw("pi", ratio))
    with Freezing(model, manifest, mask), FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(inputs), torch.arange(4)).backward()
    silent = {name: size - len(mask.active[name]) for name, size in (("conv1", 32), ("fc1", 2048))}
    first, second, last = 2 * 24 * 24 * 25, 2 * 8 * 8 * 25 * 64, 2 * 10
    computed = silent["conv1"] * (first - second * (ratio <= 0.5)) + silent["fc1"] * last
    counted = training_flops(manifest, 4, weight_gradients=mask) + 4 * computed
    assert counter.get_total_flops() == counted
    assert counted < 0.85 * training_flops(manifest, 4)


def test_kept_for_the_backward_pass_are_active_columns_only():
    model = nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 500), nn.Linear(500, 200))
    inputs = torch.randn(64, 100)
    manifest = describe(model, inputs[:1], task="t")
    mask = draw_neurons(manifest, NeuronDraw("pi", 0.1))
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with Freezing(model, manifest, mask), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs).sum().backward()
    assert kept == [(64, 100), (64, 100), (64, 50)]


def test_layers_are_as_they_were_afterwards():
    model, manifest, inputs = made("batch norm")
    outputs = model(inputs)
    names = [name for name, _ in model.named_parameters()]
    mask = draw_neurons(manifest, NeuronDraw("pi", 0.4))
    with Freezing(model, manifest, mask):
        model(inputs)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(model(inputs), outputs)
