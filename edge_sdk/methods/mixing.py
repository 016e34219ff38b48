"""Joint training of two models and their mixture (APFL, arXiv:2003.13461, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sparrow.protocol.manifest import Tensors

from ..engines.optimiser import Array
from ..engines.training import WEIGHTS, Batch, LocalResult, TrainingDiverged, count_steps
from . import Job
from .gradients import Gradients, optimiser_of, take_steps, trained_weights


@dataclass(frozen=True)
class Mixed:
    """Result: v and v̄ by name, α, and the training; losses are those of the sent model."""

    own: Tensors
    mixture: Tensors
    weight: float
    result: LocalResult


def train_mixture(job: Job, own: Tensors, weight: float) -> Mixed:
    """Train the loaded model w together with v, which starts as ``own``; ``weight`` is α."""
    settings = job.assignment.settings
    before = job.engine.read()
    mixture = job.engine.twin()
    total = count_steps(settings, job.task.train)
    rate = settings.learning_rate_of(job.assignment.round)
    shared = trained_weights(job.engine)
    private = {name: np.array(own[name], np.float32) for name in shared}
    optimisers = optimiser_of(job, shared), optimiser_of(job, private)
    mixture.load(_mix(private, shared, weight))

    def step(gradients: Gradients, batches: Iterator[Batch]) -> tuple[float, int]:
        nonlocal weight
        batch = next(batches)
        loss, found = gradients.of(batch, shared, moves=True)
        _, mixed = replace(gradients, engine=mixture).of(batch, {}, moves=True)
        slope = sum(float(((private[name] - shared[name]) * each).sum()) for name, each in mixed.items())
        optimisers[0].step(found)
        optimisers[1].step({name: np.float32(weight) * each for name, each in mixed.items()})
        if gradients.step == total:
            weight = min(1.0, max(0.0, weight - rate * slope))
        job.engine.load(shared)
        mixture.load(_mix(private, shared, weight))
        return loss, len(batch[1])

    result = take_steps(job, step)
    tensors = mixture.read()
    if not (math.isfinite(weight) and all(np.isfinite(tensors[name]).all() for name in shared)):
        raise TrainingDiverged(f"a weight is not finite after {total} steps", failure=WEIGHTS)
    return Mixed({**before, **own, **private}, tensors, weight, result)


def _mix(private: Mapping[str, Array], shared: Mapping[str, Array], weight: float) -> dict[str, Array]:
    """Return v̄ = αv + (1-α)w, without running statistics."""
    return {name: each + np.float32(weight) * (private[name] - each) for name, each in shared.items()}
