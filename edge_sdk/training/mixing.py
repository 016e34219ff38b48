"""Training two models together with their mixture (APFL, arXiv:2003.13461, Algorithm 1)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice, repeat

import torch
from torch import nn

from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks import Task
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.layout import Layout
from edge_sdk.training.local import (
    LocalResult,
    TrainingDiverged,
    count_examples,
    device_of,
    get_tensors,
    seed_generators,
    set_tensors,
)
from edge_sdk.training.optimisation import Optimisation


@dataclass(frozen=True)
class Mixed:
    """The result: v by name, v̄ by name, α, and what was done; losses are those of the model that is sent."""

    own: Tensors
    mixture: Tensors
    weight: float
    result: LocalResult


def train_mixture(
    model: nn.Module,
    task: Task,
    settings: FederationSettings,
    manifest: Manifest,
    *,
    own: Tensors,
    weight: float,
    learning_rate: float,
    seed: int,
    progress: Callable[[int, int, float], None] = lambda done, total, loss: None,
) -> Mixed:
    """Train ``model``, w, in place, and v, which starts as ``own``, where α is ``weight``, in the same steps.

    As many as ``train_locally`` takes. Raises TrainingDiverged for a loss or weight that is not finite, ValueError
    where there is nothing to train on.
    """
    if len(task.train) == 0:
        raise ValueError("the task's training data has no batches; give it at least one sample")
    device, total = device_of(model), settings.local_steps or settings.local_epochs * len(task.train)
    seed_generators(device, seed)
    personal, mixture = copy.deepcopy(model), copy.deepcopy(model)
    set_tensors(personal, own)
    seen, loss_sum, slope = 0, 0.0, 0.0
    model.train(), mixture.train()
    with ExitStack() as stack:
        layout, other = (stack.enter_context(Layout(each, task)) for each in (model, mixture))
        shared, private = (
            stack.enter_context(Optimisation(Freezing(each, manifest, None), settings, learning_rate=learning_rate))
            for each in (model, personal)
        )
        for step, (inputs, targets) in enumerate(islice(chain.from_iterable(repeat(task.train)), total), start=1):
            inputs, targets = inputs.to(device), targets.to(device)
            _mix(mixture, personal, model, weight)
            shared.forget_gradients()
            mixture.zero_grad()
            with task.compute.precision():
                loss = task.loss(model(layout(inputs, targets)), targets)
                mixed_loss = task.loss(mixture(other(inputs, targets)), targets)
            if not (math.isfinite(loss.item()) and math.isfinite(mixed_loss.item())):
                raise TrainingDiverged(f"a loss is not finite at step {step} of {total}; lower the learning rate")
            (loss + mixed_loss).backward()  # type: ignore[no-untyped-call]
            if step == total:
                slope = _slope(mixture, personal, model)
            for parameter, mixed in zip(personal.parameters(), mixture.parameters(), strict=True):
                parameter.grad = None if mixed.grad is None else weight * mixed.grad
            shared.step()
            private.step()
            seen += len(targets)
            loss_sum += loss.item() * len(targets)
            progress(step, total, loss_sum / seen)
    weight = min(1.0, max(0.0, weight - learning_rate * slope))
    _mix(mixture, personal, model, weight)
    tensors = get_tensors(mixture, manifest)
    if not (math.isfinite(weight) and all(torch.isfinite(each).all() for each in mixture.parameters())):
        raise TrainingDiverged(f"a weight is not finite after {total} steps; lower the learning rate")
    result = LocalResult(count_examples(task.train), seen, total, loss_sum / seen)
    return Mixed(get_tensors(personal, manifest), tensors, weight, result)


@torch.no_grad()
def _mix(mixture: nn.Module, personal: nn.Module, model: nn.Module, weight: float) -> None:
    """Set v̄ <- αv + (1-α)w; its running statistics are its own."""
    for mixed, own, shared in zip(mixture.parameters(), personal.parameters(), model.parameters(), strict=True):
        mixed.copy_(torch.lerp(shared, own, weight))


@torch.no_grad()
def _slope(mixture: nn.Module, personal: nn.Module, model: nn.Module) -> float:
    """Return ⟨v - w, ∇F(v̄)⟩."""
    pairs = zip(mixture.parameters(), personal.parameters(), model.parameters(), strict=True)
    return sum(float(((own - shared) * mixed.grad).sum()) for mixed, own, shared in pairs if mixed.grad is not None)
