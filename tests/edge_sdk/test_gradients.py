"""Gradients of whole weights: those of autograd, one at a time, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.tasks import Task
from edge_sdk.training.gradients import visit_gradients


class Net(nn.Module):
    """A convolution, batch norm with its buffers, dropout, and a layer that the forward pass leaves out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(4, 6)
        self.out = nn.Linear(6, 3, bias=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.out(self.drop(torch.relu(self.fc(x))))


WEIGHTS = ("conv.weight", "fc.weight", "out.weight")


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().train()


def batches(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 2, 5, 5, generator=generator), torch.arange(size) % 3) for size in sizes]


def task_of(model):
    return Task("net", model, F.cross_entropy, batches(4), batches(4))


def visited(model, some, names):
    """Name -> a copy of its gradient, in the order of the visits."""
    found = {}

    def visit(name, gradient):
        assert name not in found
        found[name] = gradient.clone()

    torch.manual_seed(5)
    visit_gradients(model, task_of(model), some, names, visit)
    return found


@pytest.mark.parametrize("sizes", [(5,), (4, 4), (3, 5, 1)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_are_autograds_on_all_batches_as_one(net, sizes, channels_last):
    some = batches(*sizes)
    if channels_last:
        net.to(memory_format=torch.channels_last)
        some = [(inputs.to(memory_format=torch.channels_last), targets) for inputs, targets in some]
    reference = copy.deepcopy(net)
    torch.manual_seed(5)
    loss = F.cross_entropy(reference(torch.cat([x for x, _ in some])), torch.cat([y for _, y in some]))
    wanted = torch.autograd.grad(loss, [reference.get_parameter(name) for name in WEIGHTS])
    found = visited(net, some, WEIGHTS)
    assert set(found) == set(WEIGHTS)
    for name, gradient in zip(WEIGHTS, wanted, strict=True):
        assert torch.equal(found[name], gradient), name


def test_gradients_are_of_whole_weights_where_most_are_zero(net):
    with torch.no_grad():
        net.fc.weight.mul_(torch.rand(6, 4) < 0.3)
    gone = net.fc.weight == 0
    assert visited(net, batches(6), ["fc.weight"])["fc.weight"][gone].count_nonzero() > 0


def test_only_one_gradient_exists_at_a_time(net):
    alive = []

    def visit(name, gradient):
        alive.append([other for other, parameter in net.named_parameters() if parameter.grad is not None])

    visit_gradients(net, task_of(net), batches(4), WEIGHTS, visit)
    assert sorted(alive) == sorted([name] for name in WEIGHTS)


def test_nothing_is_left_behind(net):
    net.fc.bias.requires_grad_(False)  # a user's own frozen parameter
    before = copy.deepcopy(net.state_dict())
    visited(net, batches(6), WEIGHTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items()), "buffers, too"
    assert all(parameter.grad is None for parameter in net.parameters())
    assert [name for name, parameter in net.named_parameters() if not parameter.requires_grad] == ["fc.bias"]
    F.cross_entropy(net(batches(4)[0][0]), torch.arange(4) % 3).backward()
    assert net.conv.weight.grad is not None, "no hook takes it away any more"


def test_a_weight_that_the_loss_does_not_depend_on_is_not_visited(net):
    assert set(visited(net, batches(4), ["unused.weight", "out.weight"])) == {"out.weight"}


def test_nothing_is_left_behind_where_the_visitor_raises(net):
    before = copy.deepcopy(net.state_dict())

    def visit(name, gradient):
        raise ArithmeticError(name)

    with pytest.raises(ArithmeticError, match=r"out\.weight"):  # the last layer's gradient comes first
        visit_gradients(net, task_of(net), batches(4), WEIGHTS, visit)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert set(visited(net, batches(4), WEIGHTS)) == set(WEIGHTS)


def test_nothing_is_left_behind_where_the_model_raises(net):
    with pytest.raises(RuntimeError):
        visit_gradients(net, task_of(net), [(torch.zeros(2, 9, 5, 5), torch.zeros(2).long())], WEIGHTS, print)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert set(visited(net, batches(4), WEIGHTS)) == set(WEIGHTS)
