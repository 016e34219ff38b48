"""A model that a device trains alone, beside the federation's, which it may take at the end.

It begins as the first model that the device has received whole, and in each of its rounds is trained as long as the
round's, by the same settings and within the budget. Nothing of it is sent. Where devices share little it is the best
that there is; elsewhere it costs as much as the round's own training, and is left out with ``alone=false``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import NeuronMask

from ..engines.training import Part
from . import DeviceState, Job, MethodSettings, Trained
from .rounds import train_loaded

PREFIX = "alone:"


class AloneSettings(MethodSettings):
    """The setting of methods that can train a model alone, too."""

    alone: bool = False


def alone_of(state: DeviceState) -> Tensors | None:
    """Return the model that a device has trained alone; None where it has none."""
    found = {name.removeprefix(PREFIX): array for name, array in state.own.items() if name.startswith(PREFIX)}
    return found or None


def with_alone(job: Job, start: Tensors, trained: Trained, mask: NeuronMask | None) -> Trained:
    """Return the outcome of a round with another round of the model that is trained alone, from ``start`` on, under
    ``mask``."""
    if not job.own(AloneSettings).alone:
        return trained
    before = alone_of(job.state)
    job.engine.load(start if before is None else before)
    result = train_loaded(job, Part(mask), purpose="alone")
    arrays = {f"{PREFIX}{name}": np.array(tensor) for name, tensor in job.engine.read().items()}
    return replace(
        trained,
        state=replace(trained.state, own={**trained.state.own, **arrays}),
        steps=trained.steps + result.steps,
        flops=trained.flops + training_flops(job.manifest, result.samples, weight_gradients=mask),
    )
