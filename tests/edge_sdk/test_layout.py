"""The faster memory layout is nobody's business but the training's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.publishing.coupling import describe
from edge_sdk.tasks import Task, passes
from edge_sdk.tasks.loading import ArrayBatches, Arrays
from edge_sdk.tasks.models import DigitsNet
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.layout import Layout
from edge_sdk.training.local import evaluate, get_tensors, set_tensors, train_locally
from sparrow.protocol.settings import FederationSettings

EXAMPLE = torch.zeros(1, 1, 8, 8)
LAST = torch.channels_last


class Watching(nn.Module):
    """Says in which layout its convolution ran."""

    def __init__(self, flatten):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 6 * 6, 10)
        self.flatten = flatten
        self.seen = []

    def forward(self, x):
        maps = self.conv(x)
        self.seen.append(maps.is_contiguous(memory_format=LAST))
        return self.out(self.flatten(maps))


def flattened(maps):
    return torch.flatten(maps, 1)


def viewed(maps):
    return maps.view(-1, 4 * 6 * 6)


def task_of(model, loss=F.cross_entropy):
    generator = torch.Generator().manual_seed(0)
    arrays = Arrays(torch.rand(24, 1, 8, 8, generator=generator), torch.arange(24) % 10)
    batches = ArrayBatches(arrays, 8)
    return Task("digits", model, loss, batches, batches)


def train(model, task, **settings):
    manifest = describe(DigitsNet(), EXAMPLE, task="t") if isinstance(model, DigitsNet) else None
    freezing = Freezing(model, manifest, None) if manifest else _NothingFrozen(model)
    settings = FederationSettings(local_epochs=2, **settings)
    return train_locally(model, task, settings, learning_rate=0.1, freezing=freezing, seed=3)


class _NothingFrozen(contextlib.nullcontext):
    """For models that no manifest describes."""

    def __init__(self, model):
        super().__init__(self)
        self.parameters = list(model.parameters())

    def collect_gradients(self):
        pass

    def write_back(self):
        pass


def test_convolutions_run_in_channels_last_and_nobody_finds_out():
    model = Watching(flattened)
    task = task_of(model)
    strides = [parameter.stride() for parameter in model.parameters()]
    train(model, task)
    assert all(model.seen)
    evaluate(model, task, task.validation)
    assert all(model.seen)
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert all(parameter.is_contiguous() and not parameter.is_inference() for parameter in model.parameters())
    train(model, task)  # after an evaluation, which lays out in inference mode


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_result_is_that_of_the_other_layout_but_for_rounding(momentum):
    torch.manual_seed(0)
    model = DigitsNet()
    plain = copy.deepcopy(model)
    task = task_of(model)
    train(model, task, momentum=momentum)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=momentum)
    torch.manual_seed(3)
    for batch in islice(passes(task.train, 3), 2 * len(task.train)):
        inputs, targets = map(torch.from_numpy, batch)
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("what", ["model", "loss"])
def test_what_cannot_take_it_runs_as_it_is(what):
    """``x.view`` of a tensor in channels last raises; the layout must not be what breaks a user's model or loss."""
    if what == "model":
        model, loss = Watching(viewed), F.cross_entropy
    else:
        model = nn.Sequential(nn.Conv2d(1, 10, 3))
        loss = lambda maps, targets: F.cross_entropy(maps.view(-1, 10, 36).mean(2), targets)  # noqa: E731
    task = dataclasses.replace(task_of(model, loss), classification=what == "model")
    before = [parameter.clone() for parameter in model.parameters()]
    train(model, task)
    evaluate(model, task, task.validation)
    assert not torch.equal(before[0], next(iter(model.parameters())))
    if what == "model":
        assert model.seen[0], "tried once"
        assert not any(model.seen[1:])


def test_trying_moves_neither_random_numbers_nor_running_statistics():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 10))
    model[1].eval()
    task = task_of(model)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with Layout(model, task) as layout:
        layout(torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(8, dtype=torch.long))
        assert not model[0].weight.is_contiguous() or model[0].weight.stride()[1] == 1
    assert torch.equal(torch.rand(3), expected)
    assert model[1].running_mean.tolist() == [0] * 4
    assert [module.training for module in model] == [True, False, True, True, True]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 10)),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    ],
    ids=["group norm", "no convolution"],
)
def test_models_that_would_not_gain_are_left_alone(model):
    with Layout(model, task_of(model)) as layout:
        inputs = torch.rand(8, 1, 8, 8)
        assert layout(inputs, torch.zeros(8, dtype=torch.long)) is inputs


def test_the_layout_is_put_back_when_training_fails():
    model = Watching(flattened)
    with torch.no_grad():
        model.conv.bias.fill_(torch.nan)
    strides = model.conv.weight.stride()
    with pytest.raises(TrainingDiverged):
        train(model, task_of(model))
    assert model.conv.weight.stride() == strides


def test_a_users_model_in_channels_last_stays_so_and_is_sent_in_order():
    torch.manual_seed(0)
    model = DigitsNet().to(memory_format=LAST)
    manifest = describe(DigitsNet(), EXAMPLE, task="t")
    train(model, task_of(model))
    assert model.conv2.weight.is_contiguous(memory_format=LAST)
    assert not model.conv2.weight.is_contiguous()
    tensors = get_tensors(model, manifest)
    assert all(tensor.flags.c_contiguous and tensor.flags.owndata for tensor in tensors.values())
    other = DigitsNet().to(memory_format=LAST)
    set_tensors(other, tensors)
    assert torch.equal(other.conv2.weight, model.conv2.weight)
    np.testing.assert_array_equal(tensors["conv2.weight"], model.conv2.weight.detach().numpy())
