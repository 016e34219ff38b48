"""Training two models together with their mixture (APFL, arXiv:2003.13461, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Tensors
from sparrow.protocol.settings import FederationSettings

from ..engines import Engine, Progress
from ..engines.optimiser import Array, Optimiser, rule_of
from ..engines.training import LOSS, WEIGHTS, LocalResult, TrainingDiverged, count_steps
from ..tasks import Batches, count_examples


@dataclass(frozen=True)
class Mixed:
    """The result: v by name, v̄ by name, α, and what was done; losses are those of the model that is sent."""

    own: Tensors
    mixture: Tensors
    weight: float
    result: LocalResult


def train_mixture(
    engine: Engine,
    batches: Batches,
    settings: FederationSettings,
    *,
    own: Tensors,
    weight: float,
    learning_rate: float,
    seed: int,
    progress: Progress = lambda done, total, loss: None,
) -> Mixed:
    """Train the model that ``engine`` holds, w, and v, which starts as ``own``, where α is ``weight``, in the same
    steps.

    As many as ``Engine.train`` takes. Raises TrainingDiverged for a loss or weight that is not finite, ValueError
    where there is nothing to train on.
    """
    total = count_steps(settings, batches)
    names = [spec.name for spec in engine.manifest.tensors if spec.trainable]
    mixture, before = engine.twin(), engine.read()
    shared, private = ({name: np.array(each[name], np.float32) for name in names} for each in (before, own))
    rule = rule_of(settings, learning_rate)
    optimisers = Optimiser(rule, shared), Optimiser(rule, private)
    seen, loss_sum, slope = 0, 0.0, 0.0
    mixture.load(_mix(private, shared, weight))
    for step, batch in enumerate(islice(engine.epochs(batches, seed), total), start=1):
        gradients, mixed = (dict[str, NDArray[Any]]() for _ in range(2))
        loss, _ = engine.differentiate([batch], names, gradients.__setitem__, moves=True)
        mixed_loss, _ = mixture.differentiate([batch], names, mixed.__setitem__, moves=True)
        if not (math.isfinite(loss) and math.isfinite(mixed_loss)):
            raise TrainingDiverged(f"a loss is not finite at step {step} of {total}", failure=LOSS)
        if step == total:
            slope = sum(float(((private[name] - shared[name]) * each).sum()) for name, each in mixed.items())
        optimisers[0].step({name: np.array(each) for name, each in gradients.items()})
        optimisers[1].step({name: np.float32(weight) * each for name, each in mixed.items()})
        engine.load(shared)
        if step == total:
            weight = min(1.0, max(0.0, weight - learning_rate * slope))
        mixture.load(_mix(private, shared, weight))
        seen += len(batch[1])
        loss_sum += loss * len(batch[1])
        progress(step, total, loss_sum / seen)
    tensors = mixture.read()
    if not (math.isfinite(weight) and all(np.isfinite(tensors[name]).all() for name in names)):
        raise TrainingDiverged(f"a weight is not finite after {total} steps", failure=WEIGHTS)
    result = LocalResult(count_examples(batches), seen, total, loss_sum / seen)
    return Mixed({**before, **own, **private}, tensors, weight, result)


def _mix(private: Mapping[str, Array], shared: Mapping[str, Array], weight: float) -> dict[str, Array]:
    """Return v̄ = αv + (1-α)w; its running statistics are its own."""
    return {name: each + np.float32(weight) * (private[name] - each) for name, each in shared.items()}
