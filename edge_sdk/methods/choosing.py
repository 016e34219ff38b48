"""Helpers of methods whose devices choose their neurons by a score: PruneFL, and the simple forms of Hermes, FedMP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import torch

from edge_sdk.methods import Job, Trained
from edge_sdk.methods.narrow import drawn, train_narrow
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.neurons import (
    Scores,
    add_scores_in_place,
    best_neurons,
    count_neurons,
    counts_at,
    fits_ratio,
    incoming,
    no_scores,
)
from edge_sdk.training.gradients import visit_gradients
from edge_sdk.training.local import TrainingDiverged, device_of, seed_generators, set_tensors
from edge_sdk.training.merging import whole_model

STEP = 0.005
"""Learning rate of the step before scoring (card, section 5)."""

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
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
    set_tensors(job.model, whole_model(job.manifest, job.received))
    device = device_of(job.model)
    scores, samples = no_scores(job.manifest), 0
    parameters = {name: each for name, each in job.model.named_parameters() if each.requires_grad}
    weights = {spec.name: (spec, axis) for spec, axis in incoming(job.manifest) if spec.name in parameters}

    def add(name: str, gradient: torch.Tensor) -> None:
        spec, axis = weights[name]
        rows = score(parameters[name].detach(), gradient).movedim(axis, 0).flatten(1).sum(1)
        if not torch.isfinite(rows).all():
            raise TrainingDiverged("the scores of neurons are not finite; is the model received sound?")
        add_scores_in_place(scores, spec, axis, rows.cpu().numpy())

    seed_generators(device, job.seed("score"))
    job.model.train()
    for inputs, targets in islice(job.task.train, batches):
        visit_gradients(job.model, job.task, [(inputs.to(device), targets.to(device))], list(weights), add)
        samples += len(targets)
    return scores, training_flops(job.manifest, samples)
