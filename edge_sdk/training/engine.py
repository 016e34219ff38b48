"""The PyTorch engine: for accelerators, models that do not compile, and second-order gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import NeuronMask
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.settings import FederationSettings

from ..engines import Progress
from ..engines.training import EVERYTHING, Adjustment, Batch, LocalResult, Part, Pull, Teacher
from ..publishing.modes import begin_training, evaluating, frozen_norms
from ..tasks import Batches, Task, passes
from .elements import tensors_of
from .freezing import Freezing
from .gradients import curvature, visit_gradients
from .layout import Layout
from .local import (
    as_tensor,
    as_tensors,
    device_of,
    evaluate,
    get_tensors,
    seed_generators,
    set_tensors,
    train_locally,
)
from .mixture import mixture_in
from .narrow import Narrow


class TorchEngine:
    """An ``Engine`` that trains the model of ``task`` with its loss on its ``compute`` device."""

    title = "PyTorch"

    def __init__(self, task: Task, manifest: Manifest) -> None:
        self.task = task
        self.manifest = manifest

    @property
    def model(self) -> nn.Module:
        """The task's model."""
        model: nn.Module = self.task.model
        return model

    def load(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Copy tensors into the model."""
        set_tensors(self.model, dict(tensors))

    def read(self) -> Tensors:
        """Return copies of the model's tensors."""
        return get_tensors(self.model, self.manifest)

    def train(
        self,
        batches: Batches,
        settings: FederationSettings,
        part: Part = EVERYTHING,
        *,
        learning_rate: float,
        seed: int,
        pull: Pull | None = None,
        adjustment: Adjustment | None = None,
        progress: Progress = lambda done, total, loss: None,
    ) -> LocalResult:
        """Train a part of the model in place."""
        return train_locally(
            self.model,
            replace(self.task, train=batches),
            settings,
            learning_rate=learning_rate,
            freezing=self.freezing(part),
            proximal_weight=pull.weight if pull else 0.0,
            proximal_centre=dict(pull.centre) if pull and pull.centre else None,
            adjustment=adjustment,
            factors=self._on_device(part.factors or {}),
            seed=seed,
            progress=progress,
        )

    def freezing(self, part: Part) -> Freezing:
        """Return the freezing of everything except a part."""
        elements, trained = (None if flags is None else tensors_of(flags) for flags in (part.elements, part.trained))
        return Freezing(self.model, self.manifest, part.mask, elements, trained)

    def epochs(self, batches: Batches, seed: int) -> Iterator[Batch]:
        """Iterate over the data indefinitely, on the model's device, reseeding from ``seed``."""
        device = device_of(self.model)
        seed_generators(device, seed)
        for batch in passes(batches, seed):
            yield as_tensors(batch, device)

    def differentiate(
        self,
        batches: Sequence[Batch],
        names: Collection[str],
        visit: Callable[[str, NDArray[Any]], None],
        *,
        moves: bool = False,
        teacher: Teacher | None = None,
        responsibilities: NDArray[Any] | None = None,
    ) -> tuple[float, NDArray[Any]]:
        """Return loss and outputs; free each gradient before the next is computed."""
        begin_training(self.model)

        def hand_over(name: str, gradient: Tensor) -> None:
            visit(name, gradient.detach().cpu().contiguous().numpy())

        task = self.task if teacher is None else replace(self.task, loss=self._taught_by(teacher))
        judged = None
        if responsibilities is not None:
            shares = torch.tensor(np.asarray(responsibilities, np.float32), device=device_of(self.model))
            judged = partial(mixture_in(self.model).weighed, self.task.loss, shares)
        loss, outputs = visit_gradients(self.model, task, batches, names, hand_over, moves=moves, judged=judged)
        return loss, outputs.float().cpu().numpy()

    def _taught_by(self, teacher: Teacher) -> Callable[[Tensor, Tensor], Tensor]:
        weight = teacher.weight
        temperature = teacher.temperature
        wanted = (as_tensor(teacher.outputs).to(device_of(self.model)) / temperature).log_softmax(1)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            found = (outputs / temperature).log_softmax(1)
            divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(1).mean()
            total: Tensor = weight * temperature**2 * divergence
            return total + (1 - weight) * self.task.loss(outputs, targets) if weight < 1 else total

        return loss

    def curvature(self, batches: Sequence[Batch], direction: Mapping[str, NDArray[np.float32]]) -> Tensors:
        """Return the Hessian times a direction."""
        begin_training(self.model)
        found = curvature(self.model, self.task, batches, self._on_device(direction))
        return {name: each.cpu().numpy() for name, each in found.items()}

    def take_statistics(self, batches: Batches) -> int:
        """Set the running statistics of batch norms to the means over the batches."""
        frozen = set(frozen_norms(self.model))
        norms = [
            each
            for each in self.model.modules()
            if isinstance(each, _BatchNorm) and each.track_running_stats and each not in frozen
        ]
        momenta = [norm.momentum for norm in norms]
        passed = 0
        device = device_of(self.model)
        with evaluating(self.model), torch.no_grad(), self.task.compute.precision():
            for norm in norms:
                norm.reset_running_stats()
                # In PyTorch, no momentum means the mean of all batches.
                norm.momentum = None
                norm.train()
            for inputs, targets in batches if norms else ():
                self.model(as_tensor(inputs).to(device))
                passed += len(targets)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        return passed

    def _on_device(self, arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
        device = device_of(self.model)
        return {name: torch.tensor(np.asarray(array), device=device) for name, array in arrays.items()}

    def evaluate(self, batches: Batches, *, metrics: bool = False) -> Evaluation:
        """Return mean loss, accuracy and metrics."""
        return evaluate(self.model, self.task, batches, metrics=metrics)

    def scores(self, batches: Batches) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the model's outputs and their targets."""
        device = device_of(self.model)
        scores, labels = [], []
        with evaluating(self.model), Layout(self.model, self.task) as layout, torch.inference_mode():
            for inputs, targets in (as_tensors(batch, device) for batch in batches):
                with self.task.compute.precision():
                    scores.append(self.model(layout(inputs, targets)).float().cpu().numpy())
                labels.append(targets.cpu().numpy())
        return np.concatenate(scores), np.concatenate(labels)

    def likelihoods(self, batches: Batches) -> NDArray[Any]:
        """Return the likelihoods of a mixture's components."""
        mixture = mixture_in(self.model)
        found = []
        with evaluating(self.model), torch.inference_mode():
            for inputs, targets in (as_tensors(batch, device_of(self.model)) for batch in batches):
                with self.task.compute.precision():
                    found.append(mixture.likelihoods(inputs, targets).float().cpu().numpy())
        return np.concatenate(found)

    def loss(self, outputs: NDArray[Any], targets: Any) -> float:
        """Return the loss of given outputs."""
        return float(self.task.loss(as_tensor(outputs), as_tensor(targets).cpu()))

    def scaled(self, scale: NDArray[np.float32]) -> TorchEngine:
        """Return an engine of this model that computes the loss from its outputs times ``scale``."""
        factor = torch.tensor(np.asarray(scale, np.float32), device=device_of(self.model))

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            by = factor.view(-1, *(1,) * (outputs.dim() - 2)) if factor.dim() else factor
            loss: Tensor = self.task.loss(outputs * by, targets)
            return loss

        return TorchEngine(replace(self.task, loss=loss), self.manifest)

    def twin(self) -> TorchEngine:
        """Return an engine of a copy of the model."""
        return TorchEngine(replace(self.task, model=copy.deepcopy(self.model)), self.manifest)

    def narrow(self, mask: NeuronMask, batches: Batches | None) -> TorchCut:
        """Return the engine of a network with only the active neurons."""
        return TorchCut(self, Narrow(self.model, self.manifest, mask, batches))


class TorchCut:
    """A narrow network with its engine."""

    def __init__(self, whole: TorchEngine, network: Narrow) -> None:
        self.engine = TorchEngine(replace(whole.task, model=network.model), network.manifest)
        self.write_back = network.write_back
