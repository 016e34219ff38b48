"""Helpers of methods that make their steps of several gradients: of one batch (pFedMe), or of several (Per-FedAvg)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.masks import count_values
from sparrow.protocol.settings import FederationSettings

from ..engines import Engine, Progress
from ..engines.training import Batch, Divergence, LocalResult, count_steps
from ..tasks import Batches, count_examples

if TYPE_CHECKING:
    from ..engines.rehearsal import Rehearsal

Weights = dict[str, NDArray[np.float32]]
"""Trained parameters, or gradients of them, by name."""


def trained_weights(engine: Engine) -> Weights:
    """Return copies of the parameters that the engine's model trains."""
    tensors = engine.read()
    return {spec.name: np.array(tensors[spec.name], np.float32) for spec in engine.manifest.tensors if spec.trainable}


class Gradients:
    """Gradients of the engine's model, of all that it trains. samples: those of all gradients so far, for FLOPs."""

    def __init__(self, engine: Engine, diverged: Divergence) -> None:
        self.engine, self.samples, self.step = engine, 0, 0
        self._diverged = diverged
        self._names = [spec.name for spec in engine.manifest.tensors if spec.trainable]

    def of(self, batch: Batch, at: Mapping[str, NDArray[Any]], *, moves: bool = False) -> tuple[float, Weights]:
        """Return loss and gradient on a batch with the parameters ``at``, which the model has from now on.

        moves: running statistics do, as in a step. A parameter that the loss does not depend on may be missing. Raises
        TrainingDiverged for a loss that is not finite.
        """
        found: Weights = {}

        def keep(name: str, gradient: NDArray[Any]) -> None:
            found[name] = np.array(gradient, np.float32)

        self.engine.load(at)
        loss, _ = self.engine.differentiate([batch], self._names, keep, moves=moves)
        self.samples += len(batch[1])
        if not math.isfinite(loss):
            finite = bool((batch[0] - batch[0] == 0).all())  # of an array or a tensor, wherever it is
            raise self._diverged.of_loss(loss, self.step, inputs_finite=finite)
        return loss, found


Step = Callable[[Gradients, Iterator[Batch]], tuple[float, int]]
"""Takes a step, of gradients on as many of the batches to come as it takes; returns a loss, and of how many samples."""


def take_steps(
    engine: Engine,
    batches: Batches,
    settings: FederationSettings,
    step: Step,
    *,
    learning_rate: float,
    seed: int,
    progress: Progress = lambda done, total, loss: None,
) -> LocalResult:
    """Take as many steps as ``Engine.train`` does.

    learning_rate: for advice alone. The result's samples are those of all gradients. Raises TrainingDiverged for a loss
    or weight that is not finite, ValueError where there is nothing to train on.
    """
    total = count_steps(settings, batches)
    diverged = Divergence(settings, learning_rate, total)
    gradients, coming = Gradients(engine, diverged), engine.epochs(batches, seed)
    seen, loss_sum = 0, 0.0
    for gradients.step in range(1, total + 1):
        loss, samples = step(gradients, coming)
        seen += samples
        loss_sum += loss * samples
        progress(gradients.step, total, loss_sum / seen)
    for name, tensor in engine.read().items():
        if not np.isfinite(tensor).all():
            raise diverged.of_tensor(name)
    return LocalResult(count_examples(batches), gradients.samples, total, loss_sum / seen)


class StepsEffort:
    """Steps of a method's own, to be rehearsed: an ``Effort`` of the whole model.

    work: takes a round's steps on (engine, batches, settings, progress), with a learning rate of 0. gradients: how many
    a step takes, each on a batch.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        work: Callable[[Engine, Batches, FederationSettings, Progress], object],
        gradients: int,
    ) -> None:
        self._rehearsal, self._work, self._gradients = rehearsal, work, gradients
        self.values = count_values(rehearsal.manifest, None)

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take steps."""
        rehearsal = self._rehearsal
        engine, batches = rehearsal.engine(), [rehearsal.batch(samples)]
        settings = rehearsal.settings.model_copy(update={"local_steps": steps})
        return rehearsal.timed(lambda progress: self._work(engine, batches, settings, progress))

    def flops(self) -> int:
        """Return the FLOPs of a step."""
        return self._gradients * self._rehearsal.flops(self._rehearsal.samples, None)

    def judge(self, samples: int) -> None:
        """Judge the model."""
        self._rehearsal.evaluate(samples)
