"""Random federated dropout, the device half: each round trains a different narrow part of the global model.

Caldas, Konečný, McMahan, Talwalkar, arXiv:1812.07210; Wen, Jeon, Huang, arXiv:2109.15258, with a dropout rate for each
device. Neurons are drawn per round as in FedSPU, but inactive ones are dropped instead of frozen, and there is no
personal model:

    w_k ← w^t[A, A];   w_k ← w_k - η ∇F_k(w_k; b) on the network of A;   send w_k and n_k

``scaled`` (Wen et al.; inverted dropout): a layer's remaining activations are multiplied by n / |A| = 1 / (1 - dropout
rate), by scaling the columns of the next layer's weight, except if an embedding uses the same weight. The global model
is not scaled.

Running statistics must fit the whole width, which narrow devices cannot run. So a scaled round ends with a pass over
the device's data without gradients; it sends the mean of the batches' statistics.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.flops import forward_flops
from sparrow.protocol.manifest import MULTIPLYING, Manifest
from sparrow.protocol.masks import count_values, draw_neurons

from ..engines.training import Part
from . import ActiveNeurons, DeviceMethod, Job, MethodSettings, Trained
from .narrow import drawn, multiplied, sample_drawn, train_narrow, train_plainly
from .rounds import conclude, train_loaded
from .whole import adapt_global, evaluate_global


class Settings(MethodSettings):
    """FedDrop's own setting."""

    scaled: bool


def train(job: Job) -> Trained:
    """Train one round; a device only keeps its notes for early stopping."""
    draw = drawn(job)
    mask = draw_neurons(job.manifest, draw)
    scales = job.own(Settings).scaled and count_values(job.manifest, mask) < job.manifest.shared_values
    how = partial(_train_scaled, whole=job.manifest) if scales else train_plainly
    trained = train_narrow(job, mask, draw=draw, train=how)
    return replace(trained, state=replace(trained.state, personal=None))


def _train_scaled(job: Job, whole: Manifest) -> Trained:
    """Train the loaded narrow network with scaled inputs of each layer."""
    factors = factors_of(job.manifest, whole)
    result = train_loaded(job, Part(factors=factors))
    counts = {"columns_scaled": result.steps * sum(factor.size for factor in factors.values())}
    with multiplied(job.engine, factors):
        passed = job.engine.take_statistics(job.task.train)
        trained = conclude(job, result, personal=None, update=None, counts=counts)
    return replace(trained, flops=trained.flops + passed * forward_flops(job.manifest))


def factors_of(narrow: Manifest, whole: Manifest) -> dict[str, NDArray[np.float32]]:
    """Return the factors of each weight's columns: name -> [1, columns, 1, ...]."""
    specs = {spec.name: spec for spec in narrow.tensors}
    found = {}
    looked_up = {name for layer in narrow.layers if layer.kind == "embedding" for name in layer.tensors}
    for layer in narrow.layers:
        weight = next((specs[name] for name in layer.tensors if any(specs[name].axes[1:2])), None)
        if layer.kind in MULTIPLYING and weight is not None and weight.name not in looked_up:
            scales = [
                whole.group_sizes[each.group] / narrow.group_sizes[each.group]
                for each in weight.axes[1]
                for _ in range(narrow.group_sizes[each.group] * each.repeat)
            ]
            found[weight.name] = np.array(scales, np.float32).reshape(1, -1, *(1,) * (len(weight.shape) - 2))
    return found


FEDDROP = DeviceMethod(
    train=train,
    evaluate=evaluate_global,
    adapt=adapt_global,
    active=ActiveNeurons(sample=sample_drawn, narrow=True),
    acts=("neurons_left_out",),
    sums=True,
)
