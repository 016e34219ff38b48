"""PruneFL, the device half: train the existing weights, and at times report every weight's importance.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, IEEE TNNLS 2022, arXiv:1909.12326. Ordinary rounds are FedAvg's of the
sparse model, or with a ``proximal_weight`` FedProx's. In re-adjusting rounds a device computes at the received model,
before training, and sends with its update

    g² = (1/B) Σ_b (∂F_b/∂θ)²      of all maskable weights, existing or not, over the B batches of its training data,

from which the server chooses. One device prepares the model: starting dense, it trains locally and re-adjusts every
``adjust_interval`` rounds by its own g², until the number of weights has changed by less than a tenth five times in a
row, or ``prepare_rounds`` are over.

Choices beyond the paper: preparation uses the first round's learning rate, no pull, no early stopping, and ρ = share.
It starts to prune after the first interval and ends with a re-adjustment. K limits every choice: the first uses |θ| if
more than K weights must be kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.elements import ElementMask, everything
from sparrow.protocol.flops import growth_flops, training_flops
from sparrow.protocol.masks import pack
from sparrow.protocol.sparsity import prunefl_interval, readjust

from ..engines.training import LocalResult
from . import DeviceMethod, Job, MethodSettings, Trained, Update
from .gradients import check_finite, pass_over
from .merging import whole_model
from .whole import adapt_global, evaluate_global, part_of, sparse_mask, train_pulled

STEADY_CHANGE = 0.1
"""A choice is steady if the number of weights changes by less than this share."""

STEADY_CHOICES = 5
"""Number of steady choices in a row that end the preparation."""


class Settings(MethodSettings):
    """PruneFL's own settings."""

    prepare_rounds: int
    adjust_interval: int | Literal["auto"]
    density: float
    share: float
    fixed_cost: float


def train(job: Job) -> Trained:
    """Train one round."""
    if not job.assignment.plan.get("gradients"):
        return train_pulled(job)
    mask = sparse_mask(job)
    job.engine.load(whole_model(job.manifest, job.received))
    squares, samples = squared_gradients(job, "gradients")
    trained = train_pulled(job)
    assert trained.update is not None
    flat = np.concatenate([part.reshape(-1) for part in squares.values()])
    return replace(
        trained,
        update=replace(trained.update, parts={"gradients": flat}),
        flops=trained.flops + growth_flops(job.manifest, samples, mask),
    )


def prepare(job: Job) -> Trained:
    """Train locally and prune."""
    own = job.own(Settings)
    rounds = own.prepare_rounds
    interval = prunefl_interval(own.adjust_interval, job.assignment.settings.rounds)
    job.engine.load(whole_model(job.manifest, job.received))
    mask = everything(job.manifest)
    steady = 0
    steps = 0
    flops = 0
    number = 0
    while steady < STEADY_CHOICES and number < rounds:
        number += 1
        result = _train_alone(job, number, rounds, mask)
        steps += result.steps
        flops += training_flops(job.manifest, result.samples, weight_gradients=mask)
        if number < rounds and (not interval or number % interval):
            continue
        squares, samples = squared_gradients(job, f"gradients {number}")
        flops += growth_flops(job.manifest, samples, mask)
        before = mask
        mask = _choose(job, squares, mask)
        steady = steady + 1 if abs(mask.count - before.count) < STEADY_CHANGE * before.count else 0
    values = pack(job.manifest, job.engine.read(), mask)
    return Trained(
        state=job.state,
        update=Update(values, mask),
        num_examples=result.num_examples,
        steps=steps,
        flops=flops,
        train_loss=result.train_loss,
        counts={"prepare_rounds": number, "prepare_pruned": mask.size - mask.count},
    )


def squared_gradients(job: Job, purpose: str) -> tuple[dict[str, NDArray[np.float32]], int]:
    """Return g² of every maskable tensor, and the number of samples. purpose: seeds shuffling and dropout."""
    squares = {spec.name: np.zeros(spec.shape, np.float32) for spec in job.manifest.maskable}

    def add(name: str, gradient: NDArray[np.float32]) -> None:
        squares[name] += np.square(gradient)

    samples = pass_over(job, list(squares), add, purpose=purpose)
    check_finite(squares, "a squared gradient")
    for total in squares.values():
        total /= np.float32(len(job.task.train))
    return squares, samples


def _train_alone(job: Job, number: int, rounds: int, mask: ElementMask) -> LocalResult:
    settings = job.assignment.settings
    return job.engine.train(
        job.task.train,
        settings,
        part_of(mask),
        learning_rate=settings.learning_rate_of(1),
        seed=job.seed(f"prepare {number}"),
        progress=lambda done, total, loss: job.progress((number - 1) * total + done, rounds * total, loss),
    )


def _choose(job: Job, squares: dict[str, NDArray[np.float32]], mask: ElementMask) -> ElementMask:
    """Return the re-adjusted mask; set all other weights to zero."""
    own = job.own(Settings)
    weights: dict[str, Any] = {
        name: np.asarray(tensor, np.float32) for name, tensor in job.engine.read().items() if name in squares
    }
    chosen = readjust(
        job.manifest,
        weights,
        squares,
        mask,
        density=own.density,
        share=own.share,
        fixed_cost=own.fixed_cost,
    )
    job.engine.load(chosen.apply(weights))
    return chosen


PRUNEFL = DeviceMethod(
    train=train,
    prepare=prepare,
    evaluate=evaluate_global,
    adapt=adapt_global,
    acts=("prepare_pruned", "positions_changed"),
)
"""Between rounds a device keeps nothing except the mask."""
