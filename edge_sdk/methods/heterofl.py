"""HeteroFL, the device half: a narrow network of each layer's first neurons, trained to be part of a wider one.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, arXiv:2010.01264:

- a device of width ratio r has the first ceil(r n_l) neurons of each hidden layer, all inputs and all classes;
- *scaler*: what a hidden layer answers is divided by r while the narrow network trains and is judged for early
  stopping, by its weights and biases; the global model is not scaled;
- *masked loss*: scores of classes that a device has no training sample of count as 0 in the training loss;
- the output layer's rows of these classes are not sent (the released code's ``label_split``): the mask of an update
  names the rows that it brings, and so tells which classes the device has. With ``rows`` = all, all are sent;
- batch norm knows no running averages while it trains. Each round ends with one pass over the device's data without
  gradients, behind the scaler, and the means of its batches' statistics are sent and averaged like weights. The paper
  asks for them with the finished model.

Counts: ``neurons_left_out`` of the network, and ``rows_left_out`` of the update. What is judged is the global model.
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
    ratio, seen = drawn(job).ratio, _seen(job)
    mask = first_neurons_up(job.manifest, ratio)
    sent = NeuronMask({**mask.active, CLASSES: seen}) if CLASSES in mask.active else mask
    divisor = 1.0 if ratio >= FULL_RATIO else ratio
    trained = train_narrow(job, mask, sent=sent, train=partial(_train, ratio=divisor, seen=seen))
    left = job.manifest.group_sizes[CLASSES] - len(seen) if CLASSES in mask.active else 0
    counts = {**trained.counts, "rows_left_out": left}
    return replace(trained, state=replace(trained.state, personal=None), counts=counts)


def _seen(job: Job) -> NDArray[np.int64]:
    """Return the classes that the device has a training sample of, sorted; of other tasks all outputs."""
    outputs = np.arange(job.manifest.output_shape[0])
    if not job.task.classification:
        return outputs
    described = job.manifest.targets
    labels = collect_targets(job.task.train)
    return np.intersect1d(outputs, labels if described is None else labels[labels != described.ignored])


def _train(job: Job, ratio: float, seen: NDArray[np.int64]) -> Trained:
    """Train the narrow network that is loaded."""
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
