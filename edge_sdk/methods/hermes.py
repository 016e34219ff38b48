"""Hermes, the device half: each device prunes its own network step by step, as long as validation accuracy holds.

Li, Sun, Li, Pu, Li, Chen, "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients", MobiCom
2021. In each of its rounds a device receives the values of its own neurons, A, and

    if  accuracy of w[A, A] on its validation data >= accuracy_threshold  and  A is larger than its budget allows:
        in each hidden group, drop the share ``prune_rate`` of the n remaining neurons, smallest ‖w_l[i, ...]‖₂ first,
        but never below max(1, floor(p_k N)) of the group's N

Then it trains and sends w[A, A], and is evaluated with it.

``pruning = once`` is the form that FedSPU's paper compares (section 5.1): at first a device takes one SGD step on one
mini-batch B, scores neuron i of layer l by ‖(w - 0.005 ∇F(w; B))_l[i, ...]‖₂, and keeps the best within its budget for
the whole federation.

Choices beyond the paper:

- The defaults of threshold and rate.
- **Until a device has reached its budget, it trains a larger network, at first the whole one**.
- If the full model comes to a device with neurons, its last update was lost, and it prunes nothing in that round. If
  its budget has grown, it begins anew with the full network.
- Scores are sums of squares over the weights of layers that share their neurons. A late device prunes at once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparrow.protocol.flops import forward_flops
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import FULL_RATIO, NeuronMask, pack, same_mask
from sparrow.protocol.neurons import (
    best_neurons,
    count_neurons,
    counts_at,
    first_neurons,
    fits_ratio,
    norm_scores,
    reaches_ratio,
)

from . import ActiveNeurons, DeviceMethod, DeviceState, Job, MethodSettings, Trained, UnknownWork
from .choosing import STEP, Weights, train_chosen
from .merging import merge
from .narrow import adapt_narrow, drawn, train_narrow
from .rounds import evaluate_both

if TYPE_CHECKING:
    from ..engines.rehearsal import Effort, Rehearsal


class Settings(MethodSettings):
    """The settings that devices read."""

    pruning: str
    prune_rate: float
    accuracy_threshold: float


def score(weight: Weights, gradient: Weights) -> Weights:
    """Return each weight's contribution to its neuron's score, for ``pruning = once``."""
    return np.square(weight - np.float32(STEP) * gradient)


train_once = partial(train_chosen, score=score)


def train(job: Job) -> Trained:
    """Prune if due, then train one round. Raises UnknownWork for a task without accuracy."""
    rules = job.own(Settings)
    if rules.pruning == "once":
        return train_once(job)
    manifest = job.manifest
    ratio = drawn(job).ratio
    received = job.received
    sent = received.mask if received and isinstance(received.mask, NeuronMask) else None
    mask = sent or job.state.neurons
    if mask is None or not reaches_ratio(manifest, mask, ratio):
        mask = first_neurons(manifest, 1.0)
    tensors = merge(manifest, {spec.name: np.zeros(spec.shape, spec.dtype) for spec in manifest.shared}, received, mask)
    smaller = mask
    flops = 0
    due = same_mask(sent, job.state.neurons) and not fits_ratio(manifest, mask, ratio)
    if due:
        accuracy, flops = _accuracy(job, tensors, mask)
        if accuracy >= rules.accuracy_threshold:
            smaller = pruned(manifest, tensors, mask, ratio, rules.prune_rate)
    assert received is not None, "merged"
    part = replace(received, values=pack(manifest, tensors, smaller), mask=smaller)
    trained = train_narrow(replace(job, received=part), smaller)
    assert trained.update is not None, "a narrow network was trained"
    gone = count_neurons(manifest, mask) - count_neurons(manifest, smaller)
    return replace(
        trained,
        update=replace(trained.update, base=tensors),
        state=replace(trained.state, neurons=smaller),
        flops=trained.flops + flops,
        counts={
            **trained.counts,
            "pruning_steps": int(gone > 0),
            "pruning_steps_rejected": int(due and not gone),
            "neurons_pruned": gone,
        },
    )


def pruned(manifest: Manifest, tensors: Tensors, mask: NeuronMask, ratio: float, rate: float) -> NeuronMask:
    """Return the neurons of ``mask`` after dropping the share ``rate`` of each group, but not below ``ratio``."""
    counts = {
        name: max(count, math.floor(len(mask.active[name]) * (1 - rate) + 1e-9))
        for name, count in counts_at(manifest, ratio).items()
    }
    return best_neurons(norm_scores(manifest, tensors, 2), counts, mask)


def _accuracy(job: Job, tensors: Tensors, mask: NeuronMask) -> tuple[float, int]:
    """Return the received network's accuracy on validation data, and the FLOPs."""
    if not job.task.classification:
        raise UnknownWork(
            "hermes prunes as long as validation accuracy holds, and this task has no accuracy; ask the operator to "
            "set pruning = once"
        )
    job.engine.load({**(job.state.personal or {}), **tensors})
    found = job.engine.evaluate(job.task.validation)
    return found.accuracy or 0.0, found.num_examples * forward_flops(job.manifest, mask)


def adapt(job: Job) -> DeviceState:
    """Prune the finished global model to the budget at once, and train the rest."""
    return adapt_narrow(job, train_once)


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return the effort of rounds before the device has pruned: the full network at any budget."""
    from ..engines.rehearsal import MaskedEffort

    once = rehearsal.settings.method_settings.get("pruning") == "once"
    return MaskedEffort(rehearsal, first_neurons(rehearsal.manifest, budget) if once and budget < FULL_RATIO else None)


HERMES = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=first_neurons, narrow=True),
    effort=effort,
    acts=("neurons_pruned",),
)
