"""Hermes, the device half: each device prunes its own network once, by its neurons' weights, and goes on with the rest.

Li, Sun, Li, Pu, Li, Chen, "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients", MobiCom
2021, as FedSPU's method card (section 5) compares it, and FedMP and neuron-wise PruneFL with it. At its first
participation a device receives the whole model w, makes one step of SGD on one mini-batch B, and scores neuron i of
layer l by

    ‖(w - 0.005 ∇F(w; B))_l[i, ...]‖₂

In each hidden group the max(1, floor(p_k n)) best are kept, for the whole federation; of equal ones the first. From
then on the device receives, trains and sends w[A, A] alone, and is judged with that narrow network.

Choices of the card, or where it is silent:

- The model *received* is scored, not one freshly initialised as in the released code, and counts are rounded as in
  FedSPU (card 7, row 16). The step is for scoring alone: training begins at what was received.
- Where layers share their neurons (residual additions), scores add up over the weights of all of them, before the root.
- A device whose budget changes receives the whole model once more, and chooses again. So does one that has lost its
  state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from edge_sdk.methods import Job, Trained
from edge_sdk.methods.fjord import FjORD
from edge_sdk.methods.narrow import drawn, train_narrow
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import Manifest, TensorSpec
from edge_sdk.protocol.masks import NeuronMask, active_count
from edge_sdk.protocol.neurons import fits_ratio
from edge_sdk.training.gradients import visit_gradients
from edge_sdk.training.local import TrainingDiverged, device_of, seed_generators, set_tensors
from edge_sdk.training.merging import whole_model

STEP = 0.005
"""Learning rate of the step before scoring (card, section 5)."""


class Hermes(FjORD):
    """A narrow network of neurons that the device has chosen itself."""

    def train(self, job: Job) -> Trained:
        """One round; the first one chooses. Raises what FjORD's does."""
        mask, ratio, flops = job.state.neurons, drawn(job).ratio, 0
        if mask is None or not fits_ratio(job.manifest, mask, ratio):
            mask, flops = self._choose(job, ratio)
        trained = train_narrow(job, mask)
        return replace(trained, state=replace(trained.state, neurons=mask), flops=trained.flops + flops)

    def score(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What each weight adds to the score of its neuron."""
        return (weight - STEP * gradient).square()

    def _choose(self, job: Job, ratio: float) -> tuple[NeuronMask, int]:
        """The best neurons of the model received, and the FLOPs that finding them took."""
        set_tensors(job.model, whole_model(job.manifest, job.received))
        device = device_of(job.model)
        scores = {name: torch.zeros(size, device=device) for name, size in job.manifest.group_sizes.items()}
        parameters = {name: each for name, each in job.model.named_parameters() if each.requires_grad}
        incoming = {spec.name: (spec, axis) for spec, axis in _incoming(job.manifest) if spec.name in parameters}

        def add(name: str, gradient: torch.Tensor) -> None:
            spec, axis = incoming[name]
            rows = self.score(parameters[name].detach(), gradient).movedim(axis, 0).flatten(1).sum(1)
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
    """The weights by which neurons are scored, and the axis on which these lie: rows, and columns of embeddings."""
    embeddings = {name for layer in manifest.layers if layer.kind == "embedding" for name in layer.tensors}
    for spec in manifest.tensors:
        axis = 1 if spec.name in embeddings else 0
        if spec.trainable and len(spec.shape) > 1 and spec.axes and spec.axes[axis]:
            yield spec, axis


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.argsort(descending=True, stable=True)[:count].sort().values
