"""Helpers of methods that use gradients directly: for their own steps, or to score weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.masks import count_values
from sparrow.protocol.messages import Assignment, Kind

from ..engines import Engine
from ..engines.optimiser import Optimiser, rule_of
from ..engines.training import GRADIENTS, Batch, Divergence, LocalResult, TrainingDiverged, count_steps
from ..tasks import count_examples
from . import DeviceState, Job

if TYPE_CHECKING:
    from ..engines.rehearsal import Rehearsal

Weights = dict[str, NDArray[np.float32]]
"""Trained parameters, or their gradients, by name."""

STANDSTILL = 1e-30
"""A learning rate that changes no weight, for rehearsals."""


def trained_weights(engine: Engine) -> Weights:
    """Return copies of the model's trained parameters."""
    tensors = engine.read()
    return {spec.name: np.array(tensors[spec.name], np.float32) for spec in engine.manifest.tensors if spec.trainable}


def optimiser_of(job: Job, weights: Weights) -> Optimiser:
    """Return this round's optimiser, which moves ``weights`` in place."""
    settings = job.assignment.settings
    return Optimiser(rule_of(settings, settings.learning_rate_of(job.assignment.round)), weights)


def in_silence(job: Job) -> Job:
    """Return the same job without progress reports."""
    return replace(job, progress=lambda done, total, loss: None)


@dataclass
class Gradients:
    """Gradients of the engine's model with respect to the parameters ``names``."""

    engine: Engine
    diverged: Divergence
    names: Sequence[str]
    # Total over all gradients, for FLOPs.
    samples: int = 0
    # Step of the round, from 1.
    step: int = 0
    # Outputs of the last batch.
    outputs: NDArray[Any] | None = None

    def of(self, batch: Batch, at: Mapping[str, NDArray[Any]], **how: Any) -> tuple[float, Weights]:
        """Load the parameters ``at``; return loss and gradient on a batch. how: arguments of ``Engine.differentiate``.
        Parameters that the loss does not depend on may be missing."""
        found: Weights = {}

        def keep(name: str, gradient: NDArray[Any]) -> None:
            found[name] = np.array(gradient, np.float32)

        self.engine.load(at)
        loss, self.outputs = self.engine.differentiate([batch], self.names, keep, **how)
        self.samples += len(batch[1])
        self.check(loss, batch)
        return loss, found

    def check(self, loss: float, batch: Batch) -> None:
        """Raise TrainingDiverged if a loss is not finite."""
        if not math.isfinite(loss):
            # Works for arrays, and for tensors on any device.
            finite = bool((batch[0] - batch[0] == 0).all())
            raise self.diverged.of_loss(loss, self.step, inputs_finite=finite)


Step = Callable[[Gradients, Iterator[Batch]], tuple[float, int]]
"""Takes one step, with gradients on one or more of the next batches; returns a loss and its number of samples."""


def take_steps(
    job: Job,
    step: Step,
    *,
    purpose: str = "train",
    names: Sequence[str] | None = None,
    trained: Mapping[str, NDArray[Any]] | None = None,
) -> LocalResult:
    """Take as many steps as ``Engine.train``, from the loaded model. purpose: seeds batches and dropout. names: the
    parameters to differentiate; by default all trained ones. trained: arrays that must be finite at the end; by default
    the model. The result's samples are those of all gradients."""
    settings = job.assignment.settings
    engine = job.engine
    data = job.task.train
    total = count_steps(settings, data)
    diverged = Divergence(settings, settings.learning_rate_of(job.assignment.round), total)
    names = names or [spec.name for spec in engine.manifest.tensors if spec.trainable]
    gradients = Gradients(engine, diverged, names)
    coming = engine.epochs(data, job.seed(purpose))
    seen = 0
    loss_sum = 0.0
    for gradients.step in range(1, total + 1):
        loss, samples = step(gradients, coming)
        seen += samples
        loss_sum += loss * samples
        job.progress(gradients.step, total, loss_sum / seen)
    for name, tensor in (engine.read() if trained is None else trained).items():
        if not np.isfinite(tensor).all():
            raise diverged.of_tensor(name)
    return LocalResult(count_examples(data), gradients.samples, total, loss_sum / seen)


def pass_over(
    job: Job,
    names: Sequence[str],
    visit: Callable[[str, NDArray[Any]], None],
    *,
    purpose: str,
    batches: int | None = None,
) -> int:
    """Call ``visit`` with the gradients on each training batch, or on ``batches`` of them; return the sample count."""
    samples = 0
    count = len(job.task.train)
    for batch in islice(job.engine.epochs(job.task.train, job.seed(purpose)), min(batches or count, count)):
        job.engine.differentiate([batch], names, visit)
        samples += len(batch[1])
    return samples


def check_finite(arrays: Mapping[str, NDArray[Any]], what: str, advice: str | None = None) -> None:
    """Raise TrainingDiverged, naming the first array that is not finite."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise TrainingDiverged(f"{name}: {what} is not finite", advice, failure=GRADIENTS)


def rehearsed(rehearsal: Rehearsal, engine: Engine, steps: int, samples: int | None, budget: float = 1.0) -> Job:
    """Return a round of ``steps`` on ``samples`` for a rehearsal; it leaves the model unchanged."""
    settings = rehearsal.settings.model_copy(update={"local_steps": steps, "learning_rate": STANDSTILL})
    assignment = Assignment(
        assignment_id="rehearsal", kind=Kind.train, round=1, deadline_seconds=0.0, settings=settings
    )
    task = replace(rehearsal.task, train=[rehearsal.batch(samples)])
    return Job(assignment, engine.manifest, task, engine, DeviceState(), None, budget=budget)


class StepsEffort:
    """``Effort`` of the full model for a method's own steps. gradients: number per step of ``work``."""

    def __init__(self, rehearsal: Rehearsal, work: Callable[[Job], object], gradients: int) -> None:
        self._rehearsal = rehearsal
        self._work = work
        self._gradients = gradients
        self.values = count_values(rehearsal.manifest, None)

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take steps."""
        job = rehearsed(self._rehearsal, self._rehearsal.engine(), steps, samples)
        return self._rehearsal.timed(lambda progress: self._work(replace(job, progress=progress)))

    def flops(self) -> int:
        """Return the FLOPs of a step."""
        return self._gradients * self._rehearsal.flops(self._rehearsal.samples, None)

    def judge(self, samples: int) -> None:
        """Judge the model."""
        self._rehearsal.evaluate(samples)
