"""Helpers of methods that train some neurons of each layer, in a narrow network without the others.

Weights of dropped neurons are zero in every full model that is kept, evaluated or exported, so that it computes the
same as the narrow one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.errors import BundleError
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import NeuronDraw, NeuronMask, draw_neurons, pack
from sparrow.protocol.neurons import count_neurons

from ..engines import Engine
from . import DeviceState, Job, Trained, Update
from .merging import merge
from .rounds import conclude, fine_tuning, train_loaded


def sample_drawn(manifest: Manifest, budget: float) -> NeuronMask:
    """Return a mask as rounds at ``budget`` draw it."""
    return draw_neurons(manifest, NeuronDraw("sample", budget))


def drawn(job: Job) -> NeuronDraw:
    """Return the seed of this assignment's neurons."""
    if job.assignment.work is None:
        raise BundleError("the assignment does not say how many neurons to train; update the coordinator, or this SDK")
    return NeuronDraw(**job.assignment.work.model_dump())


def train_plainly(job: Job) -> Trained:
    """Train the loaded network, and apply the stop rule."""
    result = train_loaded(job)
    return conclude(job, result, personal=None, update=None)


def train_narrow(
    job: Job,
    mask: NeuronMask,
    *,
    draw: NeuronDraw | None = None,
    sent: NeuronMask | None = None,
    train: Callable[[Job], Trained] = train_plainly,
) -> Trained:
    """Receive, train with ``train`` and send the network of ``mask``; count ``neurons_left_out``.

    draw: the mask's seed form. sent: the smaller mask to send, if any. ``train`` gets the same job on the narrow
    network.
    """
    start = merge(job.manifest, _nothing(job), job.received, mask)
    job.engine.load(start)
    network = job.engine.narrow(mask, job.task.held_out)
    trained = train(replace(job, engine=network.engine, manifest=network.engine.manifest))
    network.write_back()
    personal = job.engine.read()
    if sent is None:
        update = Update(pack(job.manifest, personal, mask), mask, draw)
    else:
        update = Update(pack(job.manifest, personal, sent), sent, base=start)
    left = count_neurons(job.manifest, None) - count_neurons(job.manifest, mask)
    counts = {**trained.counts, "neurons_left_out": left}
    return replace(trained, state=replace(trained.state, personal=personal), update=update, counts=counts)


@contextmanager
def multiplied(engine: Engine, factors: Mapping[str, NDArray[np.float32]]) -> Iterator[None]:
    """Multiply tensors of the model by ``factors``, name -> factor; restore them on exit."""
    tensors: dict[str, NDArray[Any]] = engine.read()
    engine.load({name: tensors[name] * factor for name, factor in factors.items()})
    try:
        yield
    finally:
        engine.load({name: tensors[name] for name in factors})


def adapt_narrow(job: Job, train: Callable[[Job], Trained]) -> DeviceState:
    """Train a narrow part of the finished global model, as in ``fine_tuning``."""
    return train(fine_tuning(job).with_settings(early_stopping="off")).state


def _nothing(job: Job) -> Tensors:
    """Return zeros for shared tensors, and the device's own for those that never travel (local running statistics)."""
    shared = {spec.name for spec in job.manifest.shared}
    own = job.state.personal or job.engine.read()
    return {
        spec.name: np.zeros(spec.shape, np.float32) if spec.name in shared else own[spec.name]
        for spec in job.manifest.kept
    }
