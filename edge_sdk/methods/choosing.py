"""Helpers of methods whose devices choose neurons by a score: neuron-wise PruneFL and simple forms of Hermes, FedMP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.flops import training_flops
from sparrow.protocol.neurons import (
    Scores,
    add_scores_in_place,
    best_neurons,
    count_neurons,
    counts_at,
    fits_ratio,
    incoming,
    no_scores,
)

from . import Job, Trained
from .gradients import check_finite, pass_over
from .merging import whole_model
from .narrow import drawn, train_narrow

Weights = NDArray[np.float32]

STEP = 0.005
"""Learning rate of the step before scoring (FedSPU, section 5.1)."""

Score = Callable[[Weights, Weights], Weights]
"""(weight, its gradient) -> each weight's contribution to its neuron's score."""


def train_chosen(job: Job, score: Score) -> Trained:
    """Train one round on neurons chosen once, on one mini-batch of the device's first round."""
    mask = job.state.neurons
    ratio = drawn(job).ratio
    flops = 0
    pruned = 0
    if mask is None or not fits_ratio(job.manifest, mask, ratio):
        scores, flops = measure(job, score, batches=1)
        mask = best_neurons(scores, counts_at(job.manifest, ratio))
        pruned = count_neurons(job.manifest, None) - count_neurons(job.manifest, mask)
    trained = train_narrow(job, mask)
    state = replace(trained.state, neurons=mask)
    counts = {**trained.counts, "neurons_pruned": pruned}
    return replace(trained, state=state, flops=trained.flops + flops, counts=counts)


def measure(job: Job, score: Score, *, batches: int | None = None) -> tuple[Scores, int]:
    """Return the scores of the received model's neurons, and FLOPs. batches: number of training batches to use; None:
    all.
    """
    job.engine.load(whole_model(job.manifest, job.received))
    scores = no_scores(job.manifest)
    tensors = job.engine.read()
    weights = {spec.name: (spec, axis) for spec, axis in incoming(job.manifest) if spec.trainable}

    def add(name: str, gradient: Weights) -> None:
        spec, axis = weights[name]
        scored = np.moveaxis(score(np.asarray(tensors[name], np.float32), gradient), axis, 0)
        add_scores_in_place(scores, spec, axis, scored.reshape(len(scored), -1).sum(axis=1))

    samples = pass_over(job, list(weights), add, purpose="score", batches=batches)
    check_finite(scores, "a neuron's score", "is the model received sound?")
    return scores, training_flops(job.manifest, samples)
