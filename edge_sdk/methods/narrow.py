"""Helpers of methods that train some neurons of each layer; in a narrow network the others are gone.

The weights of dropped neurons are zero in whatever is kept, judged or exported whole, so the whole network then answers
what the narrow one does (``training.narrow``). What goes up are the values between active neurons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from edge_sdk.methods import DeviceState, Job, Trained, Update
from edge_sdk.methods.rounds import conclude, fine_tuning, train_loaded
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, draw_neurons, pack
from edge_sdk.protocol.neurons import count_neurons
from edge_sdk.publishing.modes import evaluating
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import device_of, get_tensors, set_tensors
from edge_sdk.training.merging import merge
from edge_sdk.training.narrow import Narrow


def sample_drawn(manifest: Manifest, budget: float) -> NeuronMask:
    """Return a mask as rounds at ``budget`` draw it: which neurons changes from round to round, how many does not."""
    return draw_neurons(manifest, NeuronDraw("sample", budget))


def drawn(job: Job) -> NeuronDraw:
    """Return the seed of the neurons that this assignment trains. Raises BundleError where it names none."""
    if job.assignment.work is None:
        raise BundleError("the assignment does not say how many neurons to train; update the coordinator, or this SDK")
    return NeuronDraw(**job.assignment.work.model_dump())


def train_plainly(job: Job) -> Trained:
    """Train the network that is loaded, and judge it by the rule of early stopping."""
    result = train_loaded(job, Freezing(job.model, job.manifest, None))
    return conclude(job, result, personal=None, update=None)


def train_narrow(
    job: Job,
    mask: NeuronMask,
    *,
    draw: NeuronDraw | None = None,
    sent: NeuronMask | None = None,
    train: Callable[[Job], Trained] = train_plainly,
) -> Trained:
    """Receive, train with ``train`` and send the network of ``mask``; count ``neurons_left_out`` of the whole model's.

    draw: the mask's seed form, if any. sent: what of it goes up, where that is less. ``train`` is given the same job of
    the narrow network: model, manifest and task are those of one that is so small; its FLOPs count. The state that
    comes back has the whole personal model, zero where neurons are dropped. Raises BundleError, CannotNarrow,
    TrainingDiverged.
    """
    start = merge(job.manifest, _nothing(job), job.received, mask)
    set_tensors(job.model, start)
    network = Narrow(job.model, job.manifest, mask, job.task.held_out)
    task = replace(job.task, model=network.model)
    trained = train(replace(job, task=task, model=network.model, manifest=network.manifest))
    network.write_back()
    personal = get_tensors(job.model, job.manifest)
    if sent is None:
        update = Update(pack(job.manifest, personal, mask), mask, draw)
    else:
        update = Update(pack(job.manifest, personal, sent), sent, base=start)
    left = count_neurons(job.manifest, None) - count_neurons(job.manifest, mask)
    counts = {**trained.counts, "neurons_left_out": left}
    return replace(trained, state=replace(trained.state, personal=personal), update=update, counts=counts)


def take_statistics(job: Job) -> int:
    """Give batch norms the means of the training batches' statistics; return how many samples that took.

    The model is run as it is, hooks included, and learns nothing. 0 where there is no batch norm that tracks any.
    """
    norms = [each for each in job.model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    passed, device = 0, device_of(job.model)
    with evaluating(job.model), torch.no_grad(), job.task.compute.precision():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all, in PyTorch's words
            norm.train()
        for inputs, targets in job.task.train if norms else ():
            job.model(inputs.to(device))
            passed += len(targets)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return passed


def adapt_narrow(job: Job, train: Callable[[Job], Trained]) -> DeviceState:
    """Train a narrow part of the finished global model, as ``fine_tuning`` says."""
    return train(fine_tuning(job).with_settings(early_stopping="off")).state


def _nothing(job: Job) -> Tensors:
    """Return zeros for what is shared; what never travels (local running statistics) is the device's own."""
    shared = {spec.name for spec in job.manifest.shared}
    own = job.state.personal or get_tensors(job.model, job.manifest)
    return {
        spec.name: np.zeros(spec.shape, np.float32) if spec.name in shared else own[spec.name]
        for spec in job.manifest.kept
    }
