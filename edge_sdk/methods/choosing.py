"""Helpers of methods whose devices choose their neurons once, by a score (Hermes, FedMP, neuron-wise PruneFL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from edge_sdk.methods import ActiveNeurons, DeviceMethod, DeviceState, Job, Trained
from edge_sdk.methods.narrow import adapt_narrow, drawn, train_narrow
from edge_sdk.methods.rounds import evaluate_both
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import Manifest, TensorSpec
from edge_sdk.protocol.masks import NeuronMask, active_count
from edge_sdk.protocol.neurons import first_neurons, fits_ratio
from edge_sdk.training.gradients import visit_gradients
from edge_sdk.training.local import TrainingDiverged, device_of, seed_generators, set_tensors
from edge_sdk.training.merging import whole_model

STEP = 0.005
"""Learning rate of the step before scoring (card, section 5)."""

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(weight, its gradient) -> what each weight adds to the score of its neuron."""


def choosing_method(score: Score) -> DeviceMethod:
    """Return a method whose devices choose their neurons themselves, once, and exchange these alone from then on."""
    train = partial(train_chosen, score=score)

    def adapt(job: Job) -> DeviceState:
        return adapt_narrow(job, train)

    return DeviceMethod(
        train=train, evaluate=evaluate_both, adapt=adapt, active=ActiveNeurons(sample=first_neurons, narrow=True)
    )


def train_chosen(job: Job, score: Score) -> Trained:
    """Train one round on the neurons that the device has chosen; the first round chooses. Raises BundleError for a
    payload that does not fit, CannotNarrow for a model that does not run with fewer neurons, TrainingDiverged."""
    mask, ratio, flops = job.state.neurons, drawn(job).ratio, 0
    if mask is None or not fits_ratio(job.manifest, mask, ratio):
        mask, flops = choose(job, ratio, score)
    trained = train_narrow(job, mask)
    return replace(trained, state=replace(trained.state, neurons=mask), flops=trained.flops + flops)


def choose(job: Job, ratio: float, score: Score) -> tuple[NeuronMask, int]:
    """Return the best neurons of the model received, and the FLOPs that finding them took."""
    set_tensors(job.model, whole_model(job.manifest, job.received))
    device = device_of(job.model)
    scores = {name: torch.zeros(size, device=device) for name, size in job.manifest.group_sizes.items()}
    parameters = {name: each for name, each in job.model.named_parameters() if each.requires_grad}
    incoming = {spec.name: (spec, axis) for spec, axis in _incoming(job.manifest) if spec.name in parameters}

    def add(name: str, gradient: torch.Tensor) -> None:
        spec, axis = incoming[name]
        rows = score(parameters[name].detach(), gradient).movedim(axis, 0).flatten(1).sum(1)
        start = 0
        for segment in spec.axes[axis]:
            end = start + len(scores[segment.group]) * segment.repeat
            scores[segment.group] += rows[start:end].view(-1, segment.repeat).sum(1)
            start = end

    seed_generators(device, job.seed("score"))
    inputs, targets = next(iter(job.task.train))
    job.model.train()
    visit_gradients(job.model, job.task, [(inputs.to(device), targets.to(device))], list(incoming), add)
    if not all(torch.isfinite(each).all() for each in scores.values()):
        raise TrainingDiverged("the scores of neurons are not finite; is the model received sound?")
    best = {name: _best(each, active_count(len(each), ratio)).cpu().numpy() for name, each in scores.items()}
    return NeuronMask(best), training_flops(job.manifest, len(targets))


def _incoming(manifest: Manifest) -> Iterator[tuple[TensorSpec, int]]:
    """Yield the weights by which neurons are scored, with the neurons' axis: rows, and columns of embeddings."""
    embeddings = {name for layer in manifest.layers if layer.kind == "embedding" for name in layer.tensors}
    for spec in manifest.tensors:
        axis = 1 if spec.name in embeddings else 0
        if spec.trainable and len(spec.shape) > 1 and spec.axes and spec.axes[axis]:
            yield spec, axis


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.argsort(descending=True, stable=True)[:count].sort().values
