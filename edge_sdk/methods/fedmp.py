"""FedMP, the device half: each round trains the network that the coordinator has pruned for the device.

Jiang, Xu, Xu, Wang, Qiao, Qian, "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing", ICDE 2022. The paper evaluates the global model; here a device is also evaluated with its last narrow
network.

``ratios = budget`` is the form that FedSPU's paper compares (section 5.1): devices prune themselves once, to their
budgets, by ‖(w - 0.005 ∇F(w; B))_l[i, ...]‖₁ of neuron i of layer l on one mini-batch B of the first participation.
Ties keep the first neurons.

A device that adapts the finished model prunes it to its own budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparrow.protocol.errors import BundleError
from sparrow.protocol.masks import NeuronMask
from sparrow.protocol.neurons import best_neurons, count_neurons, counts_at, first_neurons, fits_ratio, norm_scores

from . import ActiveNeurons, DeviceMethod, DeviceState, Job, MethodSettings, Trained
from .choosing import STEP, Weights, train_chosen
from .merging import whole_model
from .narrow import adapt_narrow, drawn, train_narrow
from .rounds import evaluate_both

RATIO = "ratio"
"""The device's note of its last budget."""


class Settings(MethodSettings):
    """The setting that devices read."""

    ratios: str


def score(weight: Weights, gradient: Weights) -> Weights:
    """Return each weight's contribution to its neuron's score."""
    return np.abs(weight - np.float32(STEP) * gradient)


def train(job: Job) -> Trained:
    """Train one round on the received neurons."""
    if job.own(Settings).ratios == "budget":
        return train_chosen(job, score)
    manifest = job.manifest
    ratio = drawn(job).ratio
    mask = job.received.mask if job.received else None
    # A payload of the whole model: the device is adapting the finished one.
    if not isinstance(mask, NeuronMask):
        scores = norm_scores(manifest, whole_model(manifest, job.received), 1)
        mask = best_neurons(scores, counts_at(manifest, ratio))
    if not fits_ratio(manifest, mask, ratio):
        raise BundleError(
            f"the payload's mask does not fit an active ratio of {ratio:g}; fetch the assignment and its payload again"
        )
    trained = train_narrow(job, mask)
    return replace(
        trained,
        state=replace(trained.state, memory={**trained.state.memory, RATIO: ratio}),
        counts={
            **trained.counts,
            "neurons_pruned": count_neurons(manifest, None) - count_neurons(manifest, mask),
            "ratio_changes": int(job.state.memory.get(RATIO, ratio) != ratio),
        },
    )


def adapt(job: Job) -> DeviceState:
    """Prune the finished global model to the budget, and train the rest."""
    return adapt_narrow(job, train)


FEDMP = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=first_neurons, narrow=True),
    acts=("neurons_pruned",),
)
