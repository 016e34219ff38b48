"""HeteroFL, the device half: a narrow network of each layer's first neurons, trained as part of a wider one.

Diao, Ding, Tarokh, ICLR 2021, arXiv:2010.01264:

- a device of width ratio r has the first ceil(r n_l) neurons of each hidden layer, all inputs and all classes;
- *scaler*: a hidden layer's weights and biases are divided by r during training and evaluation of the narrow network;
  the global model is not scaled;
- *masked loss*: scores of classes without a training sample on the device count as 0 in the training loss;
- the output layer's rows of these classes are not sent (the released code's ``label_split``). The update's mask names
  its rows, and so reveals the device's classes. With ``rows`` = all, all are sent;
- batch norm has no running averages during training. Each round ends with a pass over the device's data without
  gradients, with the scaler; the mean of the batches' statistics is sent and averaged like weights. The paper computes
  them for the finished model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.flops import forward_flops
from sparrow.protocol.manifest import MULTIPLYING
from sparrow.protocol.masks import FULL_RATIO, NeuronMask
from sparrow.protocol.neurons import CLASSES, first_neurons_up

from ..engines.training import Part
from ..tasks import collect_targets
from . import ActiveNeurons, DeviceMethod, Job, Trained
from .narrow import drawn, multiplied, train_narrow
from .rounds import conclude, train_loaded
from .whole import adapt_global, evaluate_global


def train(job: Job) -> Trained:
    """Train one round."""
    ratio = drawn(job).ratio
    seen = _seen(job)
    mask = first_neurons_up(job.manifest, ratio)
    sent = NeuronMask({**mask.active, CLASSES: seen}) if CLASSES in mask.active else mask
    divisor = 1.0 if ratio >= FULL_RATIO else ratio
    trained = train_narrow(job, mask, sent=sent, train=partial(_train, ratio=divisor, seen=seen))
    left = job.manifest.group_sizes[CLASSES] - len(seen) if CLASSES in mask.active else 0
    counts = {**trained.counts, "rows_left_out": left}
    return replace(trained, state=replace(trained.state, personal=None), counts=counts)


def _seen(job: Job) -> NDArray[np.int64]:
    """Return the sorted classes of the device's training samples; all outputs for other tasks."""
    outputs = np.arange(job.manifest.output_shape[0])
    if not job.task.classification:
        return outputs
    described = job.manifest.targets
    labels = collect_targets(job.task.train)
    return np.intersect1d(outputs, labels if described is None else labels[labels != described.ignored])


def _train(job: Job, ratio: float, seen: NDArray[np.int64]) -> Trained:
    """Train the loaded narrow network."""
    engine = job.engine
    hidden = {
        spec.name
        for spec in job.manifest.tensors
        if any(segment.group != CLASSES for segments in spec.axes[:1] for segment in segments)
    }
    factors = {
        name: np.array(1 / ratio, np.float32)
        for layer in job.manifest.layers
        if ratio < 1 and layer.kind in MULTIPLYING and hidden.intersection(layer.tensors)
        for name in layer.tensors
    }
    if job.task.classification:
        engine = engine.scaled(np.isin(np.arange(job.manifest.output_shape[0]), seen).astype(np.float32))
    result = train_loaded(replace(job, engine=engine), Part(factors=factors))
    with multiplied(job.engine, factors):
        passed = job.engine.take_statistics(job.task.train)
        trained = conclude(job, result, personal=None, update=None)
    return replace(trained, flops=trained.flops + passed * forward_flops(job.manifest))


HETEROFL = DeviceMethod(
    train=train,
    evaluate=evaluate_global,
    adapt=adapt_global,
    active=ActiveNeurons(sample=first_neurons_up, narrow=True),
    acts=("neurons_left_out",),
    sums=True,
)
