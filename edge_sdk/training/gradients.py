"""Gradients of whole weights, and their derivative along a direction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from sparrow.graphs.errors import NoCurvature

from ..engines.training import Batch
from ..publishing.modes import buffers_kept
from ..tasks import Task


def visit_gradients(
    model: nn.Module,
    task: Task,
    batches: Sequence[Batch],
    names: Collection[str],
    visit: Callable[[str, torch.Tensor], None],
    *,
    moves: bool = False,
    judged: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[float, torch.Tensor]:
    """Call ``visit`` with the name and gradient of each parameter in ``names``; return loss and outputs.

    The loss covers all batches together. ``visit`` must not change the model. Buffers are restored unless ``moves``.
    judged: returns loss and outputs of a batch, instead of the task's loss.
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
                if judged is None:
                    outputs = model(inputs)
                    loss = task.loss(outputs, targets)
                else:
                    loss, outputs = judged(inputs, targets)
            loss.backward()
        return float(loss.item()), outputs.detach()
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in wanted.values():
            parameter.grad = None
        for parameter in unwanted:
            parameter.requires_grad_(True)


def curvature(
    model: nn.Module, task: Task, batches: Sequence[Batch], direction: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the Hessian of the loss of all batches together, times ``direction``, for the parameters that it names.
    Raises NoCurvature if the loss has no second derivative.
    """
    inputs, targets = (torch.cat([batch[part] for batch in batches]) for part in (0, 1))
    weights = {name: parameter for name, parameter in model.named_parameters() if name in direction}
    try:
        with buffers_kept(model):
            with task.compute.precision():
                loss = task.loss(model(inputs), targets)
            gradient = torch.autograd.grad(
                loss, list(weights.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
            parts = [(each * direction[name]).sum() for name, each in zip(weights, gradient, strict=True)]
            # torch.autograd.grad for weights only would silently skip functions that are differentiable once.
            torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
        return {
            name: torch.zeros_like(each) if each.grad is None else each.grad.contiguous()
            for name, each in weights.items()
        }
    except RuntimeError as error:
        raise NoCurvature(str(error)) from error
    finally:
        model.zero_grad(set_to_none=True)


def _hand_over(name: str, visit: Callable[[str, torch.Tensor], None], parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    visit(name, parameter.grad)
    parameter.grad = None
