"""Neuron-wise PruneFL, the device half: each device keeps the neurons whose gradients gather the most importance.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, "Model Pruning Enables Efficient Federated Learning on Edge Devices",
IEEE TNNLS 2022, arXiv:1909.12326, whose importance of a weight is here that of a neuron; each device has its own
network. In every round whose number ``adjust_interval`` divides, and in its first one, a device receives the whole
model w and adds to the importance of neuron i of layer l

    I_i ← I_i + mean over its mini-batches B of ‖(∇F(w; B))_l[i, ...]‖₂²

of which, in each hidden group, the max(1, floor(p_k n)) best are kept until the next such round. In between it
receives, trains and sends w[A, A] alone, and is judged with it. All neurons are measured on the same whole model, in
one pass over the training data, for which a device needs the memory of the whole model. PruneFL itself is the method
``prunefl``.

``importance = once`` is the form that FedSPU's paper compares (section 5.1): ‖(∇F(w; B))_l[i, ...]‖₂ on one mini-batch
at the first participation chooses for the whole federation.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparrow.protocol.masks import FULL_RATIO
from sparrow.protocol.neurons import best_neurons, counts_at, first_neurons, fits_ratio

from . import ActiveNeurons, DeviceMethod, DeviceState, Job, MethodSettings, Trained
from .choosing import Weights, measure, train_chosen
from .merging import is_whole
from .narrow import adapt_narrow, drawn, train_narrow
from .rounds import evaluate_both

IMPORTANCE = "importance"
"""The device's own array: importance of the neurons, float64 [neurons], of one group after the other."""


class Settings(MethodSettings):
    """The setting that devices read."""

    importance: str


def score(weight: Weights, gradient: Weights) -> Weights:
    """Return what each weight adds to the score of its neuron."""
    return np.square(gradient)


def train(job: Job) -> Trained:
    """Train one round; if the whole model comes, gather importance and choose before. Counts ``adjustments``, choices
    after the first one; ``neurons_replaced`` by them; and ``neurons_pruned``, those or, by the choice once, those
    beyond the budget."""
    if job.own(Settings).importance == "once":
        return train_chosen(job, score)
    manifest, ratio, held = job.manifest, drawn(job).ratio, job.state.neurons
    if ratio >= FULL_RATIO:
        trained = train_narrow(job, mask := first_neurons(manifest, ratio))
        return replace(trained, state=replace(trained.state, neurons=mask))
    before = held if held is not None and fits_ratio(manifest, held, ratio) else None
    if before is not None and job.received is not None and not is_whole(manifest, job.received):
        trained = train_narrow(job, before)
        return replace(trained, state=replace(trained.state, neurons=before))
    scores, flops = measure(job, score)
    gathered = np.concatenate(list(scores.values())) / len(job.task.train)
    gathered += np.asarray(job.state.own.get(IMPORTANCE, 0.0), dtype=np.float64)
    ends = np.cumsum([len(each) for each in scores.values()])[:-1]
    importance = dict(zip(scores, np.split(gathered, ends), strict=True))
    mask = best_neurons(importance, counts_at(manifest, ratio))
    trained = train_narrow(job, mask)
    replaced = 0
    if before is not None:
        replaced = sum(int((~np.isin(index, before.active[name])).sum()) for name, index in mask.active.items())
    return replace(
        trained,
        state=replace(trained.state, neurons=mask, own={**trained.state.own, IMPORTANCE: gathered}),
        flops=trained.flops + flops,
        counts={
            **trained.counts,
            "adjustments": int(before is not None),
            "neurons_replaced": replaced,
            "neurons_pruned": replaced,
        },
    )


def adapt(job: Job) -> DeviceState:
    """Choose from the finished global model, and train what was chosen."""
    return adapt_narrow(job, train)


PRUNEFL_NEURONS = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=first_neurons, narrow=True),
    acts=("neurons_pruned",),
)
