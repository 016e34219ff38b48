"""GraSP, the device half: keep the weights that preserve gradient flow, then train them as in FedAvg.

Wang, Zhang, Grosse, ICLR 2020, arXiv:2002.07376. Removing weight i, δ = -θ_i, changes the gradient's squared norm by 2
δ (H g)_i to first order. The preparing device scores all weights on its training data's loss F,

    g = ∇F(θ),     H = ∇²F(θ),     score = θ ⊙ H g          with outputs (logits) divided by a temperature, 200,

keeps the K = floor(density·n_w) largest scores of the full network, and sends the received weights under that mask.
Ordinary rounds are FedAvg's, or with a ``proximal_weight`` FedProx's.

Choices beyond the paper and its code: F is the mean over all local samples, or over ``score_batches`` batches, and g is
complete before H g begins. H g is exact. Scoring uses training mode and float32. Each layer keeps at least its best
weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.graphs.errors import NoCurvature
from sparrow.protocol.flops import training_flops
from sparrow.protocol.masks import pack
from sparrow.protocol.sparsity import keep_by_score, weight_budget

from ..engines.training import GRADIENTS, Batch, TrainingDiverged
from ..tasks import count_examples
from . import DeviceMethod, Job, MethodSettings, Trained, UnknownWork, Update
from .gradients import check_finite
from .merging import whole_model
from .whole import adapt_global, evaluate_global, train_pulled

# For g, for the gradient that H g is differentiated from, and two for that.
PASSES = 4
"""Cost of scoring a sample, in training passes."""


class Settings(MethodSettings):
    """GraSP's own settings."""

    density: float
    temperature: float
    score_batches: int


def prepare(job: Job) -> Trained:
    """Score the weights and choose. Raises UnknownWork if the model cannot be differentiated twice."""
    received = whole_model(job.manifest, job.received)
    job.engine.load(received)
    try:
        scored = score(job)
    except NoCurvature as error:
        raise UnknownWork(
            f"GraSP needs second derivatives, which this model does not support: {error}", failure=error.failure
        ) from error
    mask = keep_by_score(scored.scores, weight_budget(job.manifest, job.own(Settings).density))
    return Trained(
        state=job.state,
        update=Update(pack(job.manifest, received, mask), mask),
        num_examples=count_examples(job.task.train),
        steps=0,
        flops=PASSES * training_flops(job.manifest, scored.samples),
        train_loss=scored.loss,
        counts={"prepare_pruned": mask.size - mask.count},
    )


@dataclass(frozen=True)
class Scored:
    """The scores of every maskable tensor, and the model's loss at temperature 1."""

    scores: dict[str, NDArray[np.float32]]
    samples: int
    loss: float


def score(job: Job) -> Scored:
    """Return θ ⊙ H g of the loaded model, which stays unchanged. Raises ValueError without data, NoCurvature."""
    engine = job.engine
    batches = job.task.train
    own = job.own(Settings)
    number = min(own.score_batches or len(batches), len(batches))
    if number == 0:
        raise ValueError("the task's training data has no batches; give it at least one sample")
    cool = engine.scaled(np.array(1 / own.temperature, np.float32))
    names = [spec.name for spec in engine.manifest.maskable]
    weights = {name: np.asarray(tensor, np.float32) for name, tensor in engine.read().items() if name in names}
    seen = 0
    loss_sum = 0.0

    def mean(of_batch: Callable[[Batch, Callable[[str, NDArray[Any]], None]], None], done: int) -> dict[str, Any]:
        sums = {name: np.zeros_like(weight) for name, weight in weights.items()}
        for step, batch in enumerate(islice(cool.epochs(batches, job.seed("score")), number), start=done + 1):
            share = np.float32(len(batch[1]))

            def add(name: str, part: NDArray[Any], share: np.float32 = share) -> None:
                sums[name] += share * part

            of_batch(batch, add)
            job.progress(step, 2 * number, loss_sum / seen)
        return {name: total / np.float32(seen) for name, total in sums.items()}

    def slope(batch: Batch, add: Callable[[str, NDArray[Any]], None]) -> None:
        nonlocal seen, loss_sum
        _, outputs = cool.differentiate([batch], names, add)
        loss = engine.loss(outputs, batch[1])
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss is {loss} before any training", "publish a model with a finite loss", failure=GRADIENTS
            )
        seen += len(batch[1])
        loss_sum += loss * len(batch[1])

    gradient = mean(slope, 0)

    def bend(batch: Batch, add: Callable[[str, NDArray[Any]], None]) -> None:
        for name, part in cool.curvature([batch], gradient).items():
            add(name, part)

    scores = {name: weights[name] * product for name, product in mean(bend, number).items()}
    check_finite(scores, "a score", "publish a model with finite gradients, or raise temperature")
    return Scored(scores, seen, loss_sum / seen)


GRASP = DeviceMethod(
    train=train_pulled,
    prepare=prepare,
    evaluate=evaluate_global,
    adapt=adapt_global,
    acts=("prepare_pruned",),
)
"""Between rounds a device keeps nothing except the mask."""
