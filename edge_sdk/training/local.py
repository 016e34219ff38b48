"""A device's local training and evaluation, and its model as numpy arrays."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import Manifest, Tensors, TensorSpec
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.settings import FederationSettings

from ..engines.training import (
    Adjustment,
    Batch,
    Divergence,
    LocalResult,
    check_loadable,
    count_steps,
    evaluation_of,
    weight_of,
)
from ..publishing.modes import begin_training, evaluating
from ..publishing.targets import ignored_label
from ..tasks import Batches, Task, count_examples, passes
from ..tasks.metrics import measure
from .freezing import Freezing
from .layout import Layout
from .optimisation import Optimisation


class Steps(AbstractContextManager[object], Protocol):
    """An optimisation for ``take_steps``; a context manager around training."""

    def forget_gradients(self) -> None:
        """Free the gradients before a step's backward pass."""

    def step(self) -> None:
        """Move the parameters, after a step's backward pass."""


def train_locally(
    model: nn.Module,
    task: Task,
    settings: FederationSettings,
    *,
    learning_rate: float,
    freezing: Freezing,
    seed: int,
    proximal_weight: float = 0.0,
    proximal_centre: Tensors | None = None,
    adjustment: Adjustment | None = None,
    factors: Mapping[str, torch.Tensor] | None = None,
    progress: Callable[[int, int, float], None] = lambda done, total, loss: None,
) -> LocalResult:
    """Train ``model`` in place on the task's training data for ``local_steps``, or else ``local_epochs``.

    Losses exclude the proximal term. adjustment: changes the model's existing elements between steps. factors: name ->
    factor of a parameter in the forward pass. Raises TrainingDiverged for a loss or weight that is not finite,
    ValueError without training data.
    """
    optimisation = Optimisation(
        freezing,
        settings,
        learning_rate=learning_rate,
        proximal_weight=proximal_weight,
        proximal_centre=_on(device_of(model), proximal_centre),
    )
    recent: deque[Batch] = deque(maxlen=adjustment.batches if adjustment else 0)
    layout = Layout(model, task)

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inputs = layout(inputs, targets)
        recent.append((inputs, targets))
        if not factors:
            return cast(torch.Tensor, model(inputs))
        parameters = dict(model.named_parameters())
        multiplied = {name: parameters[name] * factor for name, factor in factors.items()}
        return cast(torch.Tensor, functional_call(model, multiplied, (inputs,)))

    def after(step: int) -> None:
        if adjustment is not None and step in adjustment.steps:
            optimisation.change(partial(adjustment.decide, step, recent))

    return take_steps(
        model,
        task,
        settings,
        optimisation,
        forward,
        learning_rate=learning_rate,
        seed=seed,
        layout=layout,
        after=after,
        progress=progress,
    )


def take_steps(
    model: nn.Module,
    task: Task,
    settings: FederationSettings,
    optimisation: Steps,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    learning_rate: float,
    seed: int,
    layout: AbstractContextManager[object] | None = None,
    after: Callable[[int], None] = lambda step: None,
    progress: Callable[[int, int, float], None] = lambda done, total, loss: None,
) -> LocalResult:
    """Run the steps of ``train_locally`` with any ``optimisation`` and ``forward(inputs, targets)``.

    learning_rate: only for advice. after: called with each step's number.
    """
    device = device_of(model)
    total = count_steps(settings, task.train)
    diverged = Divergence(settings, learning_rate, total)
    num_examples = count_examples(task.train)
    seed_generators(device, seed)
    begin_training(model)
    seen = 0
    loss_sum = 0.0
    with optimisation, layout or nullcontext():
        for step, batch in enumerate(islice(passes(task.train, seed), total), start=1):
            optimisation.forget_gradients()
            inputs, targets = as_tensors(batch, device)
            with task.compute.precision():
                loss = task.loss(forward(inputs, targets), targets)
            value = loss.item()
            if not math.isfinite(value):
                raise diverged.of_loss(value, step, inputs_finite=bool(torch.isfinite(inputs).all()))
            loss.backward()
            optimisation.step()
            after(step)
            seen += len(targets)
            loss_sum += value * len(targets)
            progress(step, total, loss_sum / seen)
    # Running statistics overflow before weights do.
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise diverged.of_tensor(name)
    return LocalResult(num_examples, seen, total, loss_sum / seen)


def evaluate(
    model: nn.Module,
    task: Task,
    batches: Batches,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    metrics: bool = False,
) -> Evaluation:
    """Return mean loss and, for a classification, accuracy of ``model`` on ``batches``, in evaluation mode.

    forward: returns the outputs instead of the model. Raises TrainingDiverged if the loss is not finite, ValueError
    without a sample.
    """
    device = device_of(model)
    seen = 0.0
    loss_sum = 0.0
    correct = 0
    measured = task.measured if metrics else {}
    ignored = ignored_label(task.loss)
    pairs: list[tuple[Any, Any]] = []
    with evaluating(model), Layout(model, task) as layout, torch.inference_mode(), task.compute.precision():
        for batch in batches:
            inputs, targets = as_tensors(batch, device)
            weight = weight_of(targets, ignored)
            if not weight:
                continue
            outputs = model(layout(inputs, targets)) if forward is None else forward(inputs)
            seen += weight
            loss_sum += task.loss(outputs, targets).item() * weight
            if task.classification:
                right = outputs.argmax(dim=1) == targets
                correct += int((right if ignored is None else right & (targets != ignored)).sum())
            if measured:
                pairs.append((outputs.float().cpu().numpy(), targets.cpu().numpy()))
    found = measure(measured, pairs, ignored)
    return evaluation_of(seen, loss_sum, correct if task.classification else None, found)


def as_tensors(batch: Iterable[Any], device: torch.device | str = "cpu") -> Batch:
    """Return (inputs, targets) as tensors on ``device``, sharing memory with arrays if possible."""
    inputs, targets = (as_tensor(each).to(device) for each in batch)
    return inputs, targets


def as_tensor(values: Any) -> torch.Tensor:
    """Return a tensor, sharing memory with an array if possible."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def get_tensors(model: nn.Module, manifest: Manifest, which: Literal["published", "kept"] = "kept") -> Tensors:
    """Return C-contiguous copies of the tensors that the manifest keeps: name -> array.

    which: a field of the manifest. Raises ManifestError if the model does not match.
    """
    state: dict[str, Any] = model.state_dict()
    wanted: tuple[TensorSpec, ...] = getattr(manifest, which)
    missing = [spec.name for spec in wanted if spec.name not in state]
    if missing:
        raise ManifestError(
            f"{missing[0]}: the manifest's tensor is not in the model; publish and train the same model"
        )
    tensors: Tensors = {spec.name: np.array(state[spec.name].detach().cpu().numpy(), order="C") for spec in wanted}
    manifest.check_tensors(tensors, what="the model's tensors", which=which)
    return tensors


def set_tensors(model: nn.Module, tensors: Tensors) -> None:
    """Copy ``tensors`` into the model by name. Raises ManifestError, naming the tensor."""
    state: dict[str, Any] = model.state_dict()
    check_loadable(tensors, {name: tuple(tensor.shape) for name, tensor in state.items()})
    with torch.no_grad():
        for name, tensor in tensors.items():
            if state[name].device.type == "cpu":
                # By numpy: torch copies an array first, or warns if it is read-only.
                np.copyto(state[name].numpy(), tensor, casting="unsafe")
            else:
                state[name].copy_(torch.tensor(tensor))


def _on(device: torch.device, tensors: Tensors | None) -> dict[str, torch.Tensor] | None:
    return None if tensors is None else {name: torch.tensor(tensor, device=device) for name, tensor in tensors.items()}


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that training on ``device`` uses."""
    # torch.manual_seed also seeds all accelerators. That takes a millisecond, a tenth of a small network's training.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.manual_seed(seed)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
