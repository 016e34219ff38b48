"""Scores of weights by the curvature of the loss: what removing them does to the gradient flow (GraSP)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from edge_sdk.engines import Progress
from edge_sdk.engines.training import TrainingDiverged
from edge_sdk.protocol.errors import ManifestError
from edge_sdk.publishing.modes import buffers_kept
from edge_sdk.tasks import Batches
from edge_sdk.training.engine import TorchEngine


@dataclass(frozen=True)
class Scored:
    """scores: name -> float32, of every maskable tensor. loss: of the model as it is, without a temperature."""

    scores: dict[str, NDArray[np.float32]]
    samples: int
    loss: float


class NoCurvature(ManifestError):
    """The loss cannot be differentiated twice."""


class Scoring:
    """Scores of the weights of an engine's model, which is left as it is.

    count: of the batches, the first so many; 0: all. Raises ValueError where there is none.
    """

    def __init__(
        self, engine: TorchEngine, batches: Batches, count: int, temperature: float, seed: int, progress: Progress
    ) -> None:
        self._engine, self._data, self._temperature = engine, batches, temperature
        self._seed, self._progress = seed, progress
        self._batches = min(count or len(batches), len(batches))
        if self._batches == 0:
            raise ValueError("the task's training data has no batches; give it at least one sample")
        parameters = dict(engine.model.named_parameters())
        self._weights = {spec.name: parameters[spec.name] for spec in engine.manifest.maskable}
        self._samples, self._done, self._loss = 0, 0, 0.0

    def scores(self) -> Scored:
        """Return θ ⊙ H g. Raises NoCurvature, TrainingDiverged."""
        model = self._engine.model
        model.train()
        with buffers_kept(model):
            gradient = self._mean(self._gradient)
            flow = self._mean(lambda loss: self._product(loss, gradient))
        scores = {}
        for (name, weight), product in zip(self._weights.items(), flow, strict=True):
            score = weight.detach() * product
            if not torch.isfinite(score).all():
                raise TrainingDiverged(f"{name}: a score is not finite; publish a sound model, or raise temperature")
            scores[name] = score.cpu().contiguous().numpy()
        return Scored(scores, self._samples, self._loss / self._samples)

    def _mean(self, of_loss: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return what ``of_loss`` makes of each batch's loss, averaged over samples; the same batches each time."""
        task = self._engine.task
        sums = [torch.zeros_like(weight) for weight in self._weights.values()]
        self._samples, self._loss = 0, 0.0
        for inputs, targets in islice(self._engine.epochs(self._data, self._seed), self._batches):
            outputs = self._engine.model(inputs)
            loss = task.loss(outputs.detach(), targets).item()
            if not math.isfinite(loss):
                raise TrainingDiverged(f"the loss is {loss} before any training; publish a sound model")
            for total, part in zip(sums, of_loss(task.loss(outputs / self._temperature, targets)), strict=True):
                total.add_(part, alpha=len(targets))
            self._samples += len(targets)
            self._loss += loss * len(targets)
            self._done += 1
            self._progress(self._done, 2 * self._batches, self._loss / self._samples)
        return [total.div_(self._samples) for total in sums]

    def _gradient(self, loss: torch.Tensor, *, differentiable: bool = False) -> Sequence[torch.Tensor]:
        weights = list(self._weights.values())
        return torch.autograd.grad(
            loss, weights, create_graph=differentiable, allow_unused=True, materialize_grads=True
        )

    def _product(self, loss: torch.Tensor, vector: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return H v, as the gradient of gᵀv.

        Asked for the gradients of weights alone, torch would pass over functions that are differentiable once, and be
        wrong without a word.
        """
        gradient = self._gradient(loss, differentiable=True)
        along = torch.stack([(part * other).sum() for part, other in zip(gradient, vector, strict=True)]).sum()
        try:
            along.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise NoCurvature(str(error)) from error
        else:
            return [torch.zeros_like(each) if each.grad is None else each.grad for each in self._weights.values()]
        finally:
            self._engine.model.zero_grad(set_to_none=True)
