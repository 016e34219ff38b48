"""One device's local training and evaluation, and its model as numpy arrays."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from edge_sdk.errors import SdkError
from edge_sdk.protocol.errors import ManifestError
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.messages import Evaluation, FederationSettings, bounded
from edge_sdk.publishing.modes import evaluating
from edge_sdk.tasks import Batches, Task
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.gradients import Batch
from edge_sdk.training.layout import Layout
from edge_sdk.training.optimisation import Change, Optimisation


class TrainingDiverged(SdkError):
    """A loss or a weight is not finite: the round has failed, nothing of it is kept or sent."""


class UnsoundModel(TrainingDiverged):
    """The model that was received gives no finite loss before any training: no fault of this device."""


@dataclass(frozen=True)
class LocalResult:
    """The result of local training.

    num_examples: samples of the training share, n_k, however many of them were seen. samples: those seen, counted as
    often as they were. train_loss: mean of the batch losses, each taken before its step and weighted by its samples
    (FedSPU's method card, 4.6).
    """

    num_examples: int
    samples: int
    steps: int
    train_loss: float


class Adjustment(Protocol):
    """Changes which elements of a model exist while it trains.

    batches: how many of the last ones it is shown.
    """

    batches: int

    @property
    def steps(self) -> Collection[int]:
        """The local steps, counted from 1, after which it does."""

    def decide(self, step: int, batches: Sequence[Batch]) -> Change:
        """Change the model's weights, and say what exists of them from now on.

        batches: the last ones trained on, oldest first, (inputs, targets) as the model takes them.
        """


class Steps(Protocol):
    """An optimisation that ``take_steps`` moves a model by; entered while the model trains."""

    def __enter__(self) -> object:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the model as it has become."""

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
    progress: Callable[[int, int, float], None] = lambda done, total, loss: None,
) -> LocalResult:
    """Train ``model`` in place on the task's training data for ``local_steps``, or else ``local_epochs``.

    Steps wrap round the data. The optimiser starts afresh; ``seed`` decides shuffling and dropout. A pull back to the
    start, or to ``proximal_centre`` (``proximal``), of weight μ ``proximal_weight`` is left out of the losses reported.
    adjustment: changes what exists of the model on the way. Raises TrainingDiverged for a loss or weight that is not
    finite, ValueError where there is nothing to train on.
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
        return cast(torch.Tensor, model(inputs))

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
    if len(task.train) == 0:
        raise ValueError("the task's training data has no batches; give it at least one sample")
    device = device_of(model)
    total = settings.local_steps or settings.local_epochs * len(task.train)
    num_examples = count_examples(task.train)
    seed_generators(device, seed)
    model.train()
    seen, loss_sum = 0, 0.0
    with optimisation, layout or nullcontext():
        for step, (inputs, targets) in enumerate(islice(chain.from_iterable(repeat(task.train)), total), start=1):
            optimisation.forget_gradients()
            inputs, targets = inputs.to(device), targets.to(device)
            with task.compute.precision():
                loss = task.loss(forward(inputs, targets), targets)
            value = loss.item()
            if not math.isfinite(value):
                if inputs.is_floating_point() and not torch.isfinite(inputs).all():
                    raise TrainingDiverged(
                        f"the inputs of training step {step} are NaN or infinite; replace or leave out such samples"
                    )
                raise TrainingDiverged(
                    f"the loss is {value} at step {step} of {total}; {_advice(settings, learning_rate)}"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimisation.step()
            after(step)
            seen += len(targets)
            loss_sum += value * len(targets)
            progress(step, total, loss_sum / seen)
    for name, tensor in model.state_dict().items():  # running statistics overflow before weights do
        if not torch.isfinite(tensor).all():
            raise TrainingDiverged(f"{name} is not finite after {total} steps; {_advice(settings, learning_rate)}")
    return LocalResult(num_examples, seen, total, loss_sum / seen)


def evaluate(
    model: nn.Module, task: Task, batches: Batches, forward: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Evaluation:
    """Return mean loss and, where the task is a classification, accuracy of ``model`` on ``batches``, in evaluation
    mode.

    forward: gives the outputs, where that is not calling the model. Leaves every module in the mode it was in. Raises
    TrainingDiverged when the loss is not finite, ValueError when there is no sample.
    """
    device = device_of(model)
    seen, loss_sum, correct = 0, 0.0, 0
    with evaluating(model), Layout(model, task) as layout, torch.inference_mode(), task.compute.precision():
        for inputs, targets in batches:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = model(layout(inputs, targets)) if forward is None else forward(inputs)
            seen += len(targets)
            loss_sum += task.loss(outputs, targets).item() * len(targets)
            if task.classification:
                correct += int((outputs.argmax(dim=1) == targets).sum())
    if seen == 0:
        raise ValueError("there is no held-out sample to evaluate on; give the task validation data")
    if not math.isfinite(loss_sum):
        raise TrainingDiverged("the loss on held-out data is not finite; lower the learning rate or set a clip")
    accuracy = correct / seen if task.classification else None
    return Evaluation(num_examples=seen, loss=bounded(loss_sum / seen), accuracy=accuracy)


def evaluate_held_out(model: nn.Module, task: Task) -> tuple[Evaluation, Evaluation]:
    """Run ``evaluate`` on test data and on validation data, once where they are the same. Raises what it does."""
    validation = evaluate(model, task, task.validation)
    return validation if task.test is None else evaluate(model, task, task.test), validation


def count_examples(batches: Batches) -> int:
    """Return the number of samples in one pass: as the batches say, as a DataLoader's dataset says, or else counted."""
    known = getattr(batches, "num_examples", None)
    if isinstance(known, int):
        return known
    try:
        return len(batches.dataset)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return sum(len(targets) for _, targets in batches)


def derive_seed(*parts: object) -> int:
    """Return a seed in 0..2^63-1 that follows from ``parts``, the same on every machine."""
    text = json.dumps([str(part) for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def get_tensors(model: nn.Module, manifest: Manifest) -> Tensors:
    """Return copies of every tensor that the manifest keeps, by name, C-contiguous whatever the model's memory layout.

    Raises ManifestError when the model is another one.
    """
    state: dict[str, Any] = model.state_dict()
    missing = [spec.name for spec in manifest.kept if spec.name not in state]
    if missing:
        raise ManifestError(
            f"{missing[0]}: the manifest's tensor is not in the model; publish and train the same model"
        )
    tensors: Tensors = {
        spec.name: np.array(state[spec.name].detach().cpu().numpy(), order="C") for spec in manifest.kept
    }
    manifest.check_tensors(tensors, what="the model's tensors")
    return tensors


def set_tensors(model: nn.Module, tensors: Tensors) -> None:
    """Copy ``tensors`` into the model, by name; what is not named stays. Raises ManifestError, naming the tensor."""
    state: dict[str, Any] = model.state_dict()
    for name, tensor in tensors.items():
        if name not in state or tuple(state[name].shape) != tensor.shape:
            found = f"has shape {tuple(state[name].shape)}" if name in state else "does not exist"
            raise ManifestError(
                f"{name}: should have shape {tensor.shape}, in the model it {found}; publish and train the same model"
            )
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


def _advice(settings: FederationSettings, learning_rate: float) -> str:
    clip = "set a clip, such as 1" if settings.clip is None else f"lower the clip of {settings.clip:g}"
    return f"lower the learning rate of {learning_rate:g} or {clip}"
