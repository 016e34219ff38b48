"""Neuron-wise PruneFL, the device half: each device keeps the neurons with the largest accumulated importance.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, IEEE TNNLS 2022, arXiv:1909.12326, with its importance of weights applied
to neurons, and a network for each device. In its first round, and in rounds whose number ``adjust_interval`` divides, a
device receives the full model w and adds to the importance of neuron i of layer l

    I_i ← I_i + mean over its mini-batches B of ‖(∇F(w; B))_l[i, ...]‖₂²

Until the next such round it keeps the max(1, floor(p_k n)) best of each hidden group; it receives, trains, sends and is
evaluated with w[A, A]. Importance takes one pass of the full model, so a device needs memory for it.

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
"""The device's own array: importance of the neurons, float64 [neurons], group after group."""


class Settings(MethodSettings):
    """The setting that devices read."""

    importance: str


def score(weight: Weights, gradient: Weights) -> Weights:
    """Return each weight's contribution to its neuron's score."""
    return np.square(gradient)


def train(job: Job) -> Trained:
    """Train one round; if the full model comes, accumulate importance and choose before."""
    if job.own(Settings).importance == "once":
        return train_chosen(job, score)
    manifest = job.manifest
    ratio = drawn(job).ratio
    held = job.state.neurons
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
    """Choose neurons of the finished global model, and train them."""
    return adapt_narrow(job, train)


PRUNEFL_NEURONS = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=first_neurons, narrow=True),
    acts=("neurons_pruned",),
)
