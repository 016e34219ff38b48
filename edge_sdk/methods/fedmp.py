"""FedMP, the device half: each round trains the network that the coordinator has pruned for the device.

Jiang, Xu, Xu, Wang, Qiao, Qian, "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing", ICDE 2022. The coordinator chooses a ratio for the device with a bandit, prunes the global model to it by
the l1 norm of each neuron's weights, and sends what is left with its mask; the device trains and returns that
(``coordinator/methods/fedmp.py``). The paper judges the global model, which is reported here, too; a device is judged
with the last narrow network that it trained, as those of FedSPU's other baselines are.

``ratios = budget`` is the form in which FedSPU's paper (section 5.1) compares FedMP: devices prune themselves,
once, to their budgets. Neuron i of layer l has the score ‖(w - 0.005 ∇F(w; B))_l[i, ...]‖₁ on one mini-batch B of the
first participation, and of equal ones the first are kept.

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
"""The device's note of its last active ratio."""


class Settings(MethodSettings):
    """The setting that devices read."""

    ratios: str


def score(weight: Weights, gradient: Weights) -> Weights:
    """Return what each weight adds to the score of its neuron, where devices prune themselves."""
    return np.abs(weight - np.float32(STEP) * gradient)


def train(job: Job) -> Trained:
    """Train one round on the neurons received. Counts ``neurons_pruned``, those that its network lacks, and
    ``ratio_changes``."""
    if job.own(Settings).ratios == "budget":
        return train_chosen(job, score)
    manifest, ratio = job.manifest, drawn(job).ratio
    mask = job.received.mask if job.received else None
    if not isinstance(mask, NeuronMask):  # the whole model: the device adapts it
        scores = norm_scores(manifest, whole_model(manifest, job.received), 1)
        mask = best_neurons(scores, counts_at(manifest, ratio))
    if not fits_ratio(manifest, mask, ratio):
        raise BundleError(
            f"the payload's mask has not the neurons of an active ratio of {ratio:g}; fetch the assignment and its "
            f"payload again"
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
    """Prune the finished global model to the budget, and train what is left."""
    return adapt_narrow(job, train)


FEDMP = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=first_neurons, narrow=True),
    acts=("neurons_pruned",),
)
