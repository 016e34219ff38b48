"""One device's local training and evaluation, and its model as numpy arrays."""

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
    """An optimisation that ``take_steps`` moves a model by; entered while the model trains."""

    def forget_gradients(self) -> None:
        """Prepare a step's backward pass."""

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

    Steps wrap round the data. The optimiser starts afresh; ``seed`` decides shuffling and dropout. A pull back to the
    start, or to ``proximal_centre`` (``proximal``), of weight μ ``proximal_weight`` is left out of the losses reported.
    adjustment: changes what exists of the model on the way. factors: name -> what a parameter is multiplied by wherever
    the model reads it. Raises TrainingDiverged for a loss or weight that is not finite, ValueError where there is
    nothing to train on.
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
    """Run ``train_locally`` by any ``optimisation``, where ``forward`` gives the outputs for a batch's (inputs,
    targets).

    learning_rate: for advice alone. layout: how the model lies in memory meanwhile. after: called with each step's
    number when it has been taken. Raises what ``train_locally`` does.
    """
    device, total = device_of(model), count_steps(settings, task.train)
    diverged = Divergence(settings, learning_rate, total)
    num_examples = count_examples(task.train)
    seed_generators(device, seed)
    begin_training(model)
    seen, loss_sum = 0, 0.0
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
    for name, tensor in model.state_dict().items():  # running statistics overflow before weights do
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
    """Return mean loss and, where the task is a classification, accuracy of ``model`` on ``batches``, in evaluation
    mode.

    forward: gives the outputs, where that is not calling the model. metrics: measure the task's, too. Leaves every
    module in the mode it was in. Raises TrainingDiverged when the loss is not finite, ValueError when there is no
    sample.
    """
    device = device_of(model)
    seen, loss_sum, correct, measured = 0.0, 0.0, 0, task.measured if metrics else {}
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
    """Return (inputs, targets) as tensors on ``device``; arrays are read where they lie, on the processor."""
    inputs, targets = (as_tensor(each).to(device) for each in batch)
    return inputs, targets


def as_tensor(values: Any) -> torch.Tensor:
    """Return a tensor that shares memory with an array, or the tensor that it is given; copied where it must be."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def get_tensors(model: nn.Module, manifest: Manifest, which: Literal["published", "kept"] = "kept") -> Tensors:
    """Return copies of every tensor that the manifest keeps, by name, C-contiguous whatever the model's memory layout.

    which: those of the manifest that are asked for. Raises ManifestError when the model is another one.
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
    """Copy ``tensors`` into the model, by name; what is not named stays. Raises ManifestError, naming the tensor."""
    state: dict[str, Any] = model.state_dict()
    check_loadable(tensors, {name: tuple(tensor.shape) for name, tensor in state.items()})
    with torch.no_grad():
        for name, tensor in tensors.items():
            if state[name].device.type == "cpu":
                # Through numpy: torch copies an array first or, where it is read-only, warns.
                np.copyto(state[name].numpy(), tensor, casting="unsafe")
            else:
                state[name].copy_(torch.tensor(tensor))


def _on(device: torch.device, tensors: Tensors | None) -> dict[str, torch.Tensor] | None:
    return None if tensors is None else {name: torch.tensor(tensor, device=device) for name, tensor in tensors.items()}


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that training on ``device`` draws from. (torch.manual_seed seeds those of every accelerator
    that there might be, which takes a millisecond: a tenth of a small network's local training.)"""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.manual_seed(seed)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
