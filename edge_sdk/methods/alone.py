"""A local-only model that a device trains in addition to the federation's, and may use at the end.

It starts as the first full model received. Each round trains it as long as the federation's model, with the same
settings and budget; it is never sent. It costs as much as the round's own training; ``alone=false`` turns it off.
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
    """The setting of methods that can also train a local-only model."""

    alone: bool = False


def alone_of(state: DeviceState) -> Tensors | None:
    """Return the device's local-only model, or None."""
    found = {name.removeprefix(PREFIX): array for name, array in state.own.items() if name.startswith(PREFIX)}
    return found or None


def with_alone(job: Job, start: Tensors, trained: Trained, mask: NeuronMask | None) -> Trained:
    """Train the local-only model, at first ``start``, under ``mask``; return the combined outcome."""
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
