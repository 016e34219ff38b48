from __future__ import annotations

import torch
from torch import nn

from edge_sdk.training.optimisation import Pull


def test_the_pull_adds_its_weight_times_the_distance():
    model = nn.Linear(2, 1)
    start = model.weight.detach().clone()
    pull = Pull([model.weight], [start], 0.5)
    with torch.no_grad():
        model.weight.add_(torch.tensor([[1.0, -2.0]]))
    model.weight.grad = torch.ones(1, 2)
    pull.add_to_gradients()
    torch.testing.assert_close(model.weight.grad, 1 + 0.5 * (model.weight.detach() - start))
    assert model.bias.grad is None


def test_a_parameter_without_gradient_is_left_alone():
    model = nn.Linear(2, 1)
    Pull([model.weight], [model.weight.detach().clone()], 0.5).add_to_gradients()
    assert model.weight.grad is None
