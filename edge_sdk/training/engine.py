"""A model that PyTorch trains: on accelerators, for models that do not compile, and for gradients of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_sdk.engines import Progress
from edge_sdk.engines.training import EVERYTHING, Adjustment, Batch, LocalResult, Part, Pull
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.masks import NeuronMask
from edge_sdk.protocol.messages import Evaluation, FederationSettings
from edge_sdk.publishing.modes import evaluating
from edge_sdk.tasks import Batches, Task, passes
from edge_sdk.training.elements import tensors_of
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.gradients import visit_gradients
from edge_sdk.training.layout import Layout
from edge_sdk.training.local import (
    as_tensors,
    device_of,
    evaluate,
    get_tensors,
    seed_generators,
    set_tensors,
    train_locally,
)
from edge_sdk.training.narrow import Narrow


class TorchEngine:
    """The model of ``task``, trained with its loss where its ``compute`` says. An ``Engine``."""

    title = "PyTorch"

    def __init__(self, task: Task, manifest: Manifest) -> None:
        self.task, self.manifest = task, manifest

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
            seed=seed,
            progress=progress,
        )

    def freezing(self, part: Part) -> Freezing:
        """Return what leaves all else of the model alone."""
        elements, trained = (None if flags is None else tensors_of(flags) for flags in (part.elements, part.trained))
        return Freezing(self.model, self.manifest, part.mask, elements, trained)

    def epochs(self, batches: Batches, seed: int) -> Iterator[Batch]:
        """Go through data again and again, on the model's device."""
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
    ) -> float:
        """Return the loss; each gradient is freed before the backward pass makes the next."""
        self.model.train()

        def hand_over(name: str, gradient: torch.Tensor) -> None:
            visit(name, gradient.detach().cpu().contiguous().numpy())

        return visit_gradients(self.model, self.task, batches, names, hand_over, moves=moves)

    def evaluate(self, batches: Batches) -> Evaluation:
        """Return mean loss and accuracy."""
        return evaluate(self.model, self.task, batches)

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

    def judge(self, scores: NDArray[Any], targets: NDArray[Any]) -> Evaluation:
        """Return loss and accuracy of scores."""
        loss = float(self.task.loss(torch.from_numpy(scores), torch.from_numpy(targets)))
        right = int((scores.argmax(axis=1) == targets).sum())
        return Evaluation(num_examples=len(targets), loss=loss, accuracy=right / len(targets))

    def twin(self) -> TorchEngine:
        """Return an engine of a copy of the model."""
        return TorchEngine(replace(self.task, model=copy.deepcopy(self.model)), self.manifest)

    def narrow(self, mask: NeuronMask, batches: Batches) -> TorchCut:
        """Return the network of the active neurons."""
        return TorchCut(self, Narrow(self.model, self.manifest, mask, batches))


class TorchCut:
    """A narrow network, and the engine that trains it."""

    def __init__(self, whole: TorchEngine, network: Narrow) -> None:
        self.engine = TorchEngine(replace(whole.task, model=network.model), network.manifest)
        self.write_back = network.write_back
