"""Helpers of methods whose devices choose their neurons by a score: PruneFL, and the simple forms of Hermes, FedMP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

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

from ..engines.training import GRADIENTS, TrainingDiverged
from . import Job, Trained
from .merging import whole_model
from .narrow import drawn, train_narrow

Weights = NDArray[np.float32]

STEP = 0.005
"""Learning rate of the step before scoring (FedSPU, section 5.1)."""

Score = Callable[[Weights, Weights], Weights]
"""(weight, its gradient) -> what each weight adds to the score of its neuron."""


def train_chosen(job: Job, score: Score) -> Trained:
    """Train one round on the neurons that the device has chosen, once: the first round chooses, on one mini-batch.

    Counts ``neurons_pruned``, those left out by a choice. Raises BundleError for a payload that does not fit,
    CannotNarrow for a model that does not run with fewer neurons, TrainingDiverged.
    """
    mask, ratio, flops, pruned = job.state.neurons, drawn(job).ratio, 0, 0
    if mask is None or not fits_ratio(job.manifest, mask, ratio):
        scores, flops = measure(job, score, batches=1)
        mask = best_neurons(scores, counts_at(job.manifest, ratio))
        pruned = count_neurons(job.manifest, None) - count_neurons(job.manifest, mask)
    trained = train_narrow(job, mask)
    state, counts = replace(trained.state, neurons=mask), {**trained.counts, "neurons_pruned": pruned}
    return replace(trained, state=state, flops=trained.flops + flops, counts=counts)


def measure(job: Job, score: Score, *, batches: int | None = None) -> tuple[Scores, int]:
    """Return the scores of the neurons of the model received, and the FLOPs that finding them took.

    batches: of the training data, the first so many, each by itself; their scores are added up. None: all. Raises
    BundleError for a payload that is not the whole model, TrainingDiverged.
    """
    job.engine.load(whole_model(job.manifest, job.received))
    scores, samples, tensors = no_scores(job.manifest), 0, job.engine.read()
    weights = {spec.name: (spec, axis) for spec, axis in incoming(job.manifest) if spec.trainable}

    def add(name: str, gradient: Weights) -> None:
        spec, axis = weights[name]
        scored = np.moveaxis(score(np.asarray(tensors[name], np.float32), gradient), axis, 0)
        rows = scored.reshape(len(scored), -1).sum(axis=1)
        if not np.isfinite(rows).all():
            raise TrainingDiverged(
                "the scores of neurons are not finite", "is the model received sound?", failure=GRADIENTS
            )
        add_scores_in_place(scores, spec, axis, rows)

    count = len(job.task.train) if batches is None else min(batches, len(job.task.train))
    for batch in islice(job.engine.epochs(job.task.train, job.seed("score")), count):
        job.engine.differentiate([batch], list(weights), add)
        samples += len(batch[1])
    return scores, training_flops(job.manifest, samples)
