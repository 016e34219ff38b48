"""Helpers of methods whose devices choose their neurons by a score: PruneFL, and the simple forms of Hermes, FedMP."""

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
"""(weight, its gradient) -> what each weight adds to the score of its neuron."""


def train_chosen(job: Job, score: Score) -> Trained:
    """Train one round on the neurons that the device has chosen, once, on one mini-batch of its first round. Counts
    ``neurons_pruned``, those left out by a choice."""
    mask, ratio, flops, pruned = job.state.neurons, drawn(job).ratio, 0, 0
    if mask is None or not fits_ratio(job.manifest, mask, ratio):
        scores, flops = measure(job, score, batches=1)
        mask = best_neurons(scores, counts_at(job.manifest, ratio))
        pruned = count_neurons(job.manifest, None) - count_neurons(job.manifest, mask)
    trained = train_narrow(job, mask)
    state, counts = replace(trained.state, neurons=mask), {**trained.counts, "neurons_pruned": pruned}
    return replace(trained, state=state, flops=trained.flops + flops, counts=counts)


def measure(job: Job, score: Score, *, batches: int | None = None) -> tuple[Scores, int]:
    """Return the scores of the neurons of the model received, and FLOPs. batches: the first so many of the training
    data, each by itself; None: all."""
    job.engine.load(whole_model(job.manifest, job.received))
    scores, tensors = no_scores(job.manifest), job.engine.read()
    weights = {spec.name: (spec, axis) for spec, axis in incoming(job.manifest) if spec.trainable}

    def add(name: str, gradient: Weights) -> None:
        spec, axis = weights[name]
        scored = np.moveaxis(score(np.asarray(tensors[name], np.float32), gradient), axis, 0)
        add_scores_in_place(scores, spec, axis, scored.reshape(len(scored), -1).sum(axis=1))

    samples = pass_over(job, list(weights), add, purpose="score", batches=batches)
    check_finite(scores, "a neuron's score", "is the model received sound?")
    return scores, training_flops(job.manifest, samples)
