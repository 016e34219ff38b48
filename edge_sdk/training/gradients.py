"""Gradients of whole weights, whatever of them exists: what decides where a sparse model grows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from edge_sdk.engines.training import Batch
from edge_sdk.publishing.modes import buffers_kept
from edge_sdk.tasks import Task


def visit_gradients(
    model: nn.Module,
    task: Task,
    batches: Sequence[Batch],
    names: Collection[str],
    visit: Callable[[str, torch.Tensor], None],
    *,
    moves: bool = False,
) -> float:
    """Hand ``visit`` the name and gradient of each parameter in ``names``, of the loss on ``batches`` taken as one;
    return the loss.

    One at a time: each is freed before the backward pass makes the next. ``visit`` must not change the model. Buffers
    (running statistics) are as before afterwards unless they are to move, and no gradient is left, whatever ``visit``
    raises.
    """
    inputs, targets = (torch.cat([batch[part] for batch in batches]) for part in (0, 1))
    hooks = []
    wanted = {name: parameter for name, parameter in model.named_parameters() if name in names}
    for name, parameter in wanted.items():
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(_hand_over, name, visit)))  # type: ignore[no-untyped-call]
    unwanted = [each for name, each in model.named_parameters() if name not in names and each.requires_grad]
    for parameter in unwanted:
        parameter.requires_grad_(False)
    try:
        with nullcontext() if moves else buffers_kept(model):
            with task.compute.precision():
                loss = task.loss(model(inputs), targets)
            loss.backward()
        return float(loss.item())
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in wanted.values():
            parameter.grad = None  # of what was under way, where ``visit`` raised
        for parameter in unwanted:
            parameter.requires_grad_(True)


def _hand_over(name: str, visit: Callable[[str, torch.Tensor], None], parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    visit(name, parameter.grad)
    parameter.grad = None
