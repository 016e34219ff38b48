"""Training two models together with their mixture (APFL, arXiv:2003.13461, Algorithm 1)."""

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
    """The result: v by name, v̄ by name, α, and what was done; losses are those of the model that is sent."""

    own: Tensors
    mixture: Tensors
    weight: float
    result: LocalResult


def train_mixture(job: Job, own: Tensors, weight: float) -> Mixed:
    """Train the model that is loaded, w, and v, from ``own`` on, in the same steps; ``weight`` is α."""
    settings, before, mixture = job.assignment.settings, job.engine.read(), job.engine.twin()
    total, rate = count_steps(settings, job.task.train), settings.learning_rate_of(job.assignment.round)
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

    result, tensors = take_steps(job, step), mixture.read()
    if not (math.isfinite(weight) and all(np.isfinite(tensors[name]).all() for name in shared)):
        raise TrainingDiverged(f"a weight is not finite after {total} steps", failure=WEIGHTS)
    return Mixed({**before, **own, **private}, tensors, weight, result)


def _mix(private: Mapping[str, Array], shared: Mapping[str, Array], weight: float) -> dict[str, Array]:
    """Return v̄ = αv + (1-α)w; its running statistics are its own."""
    return {name: each + np.float32(weight) * (private[name] - each) for name, each in shared.items()}
