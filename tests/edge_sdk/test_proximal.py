from __future__ import annotations

import torch
from torch import nn

from edge_sdk.training.proximal import Pull


def test_the_pull_adds_its_weight_times_the_distance():
    model = nn.Linear(2, 1)
    pull = Pull([model.weight], 0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(torch.tensor([[1.0, -2.0]]))
    model.weight.grad = torch.ones(1, 2)
    pull.add_to_gradients()
    torch.testing.assert_close(model.weight.grad, 1 + 0.5 * (model.weight.detach() - start))
    assert model.bias.grad is None


def test_a_parameter_without_gradient_is_left_alone_and_a_weight_of_zero_keeps_no_copy():
    model = nn.Linear(2, 1)
    Pull([model.weight], 0.5).add_to_gradients()
    assert model.weight.grad is None
    model.weight.grad = torch.full((1, 2), -0.0)
    Pull([model.weight], 0.0).add_to_gradients()
    assert torch.signbit(model.weight.grad).all(), "not even a sign changes"
