"""Helpers of methods that share a part of the model; the manifest marks the shared tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Manifest, Tensors, own_initial_values
from sparrow.protocol.masks import pack

from ..engines.training import Flags, LocalResult, Part
from . import DeviceState, Evaluated, Job, Trained, Update
from .merging import whole_model
from .rounds import conclude, evaluate_both, fine_tune, judge_choice_of_copy, train_loaded


def only(manifest: Manifest, *, shared: bool) -> dict[str, Flags]:
    """Return ``Part.trained`` for training only the shared part, or only the device's own."""
    return _flags(manifest, {spec.name for spec in manifest.tensors if (spec.policy == "shared") == shared})


def _flags(manifest: Manifest, names: Collection[str]) -> dict[str, Flags]:
    return {spec.name: np.full(spec.shape, spec.name in names) for spec in manifest.tensors if spec.trainable}


def joined(job: Job) -> Tensors:
    """Return the device's model updated with the received tensors."""
    return {**(job.state.personal or {}), **whole_model(job.manifest, job.received)}


def own_tensors(job: Job) -> Tensors:
    """Return the device's model, or its initial own part, which is the same on all devices."""
    if job.state.personal is not None:
        return job.state.personal
    return own_initial_values(job.manifest, job.assignment.settings.seed, job.engine.read())


def train_together(job: Job) -> Trained:
    """Train both parts together for one round, and send the shared part."""
    job.engine.load(joined(job))
    return send_shared(job, train_loaded(job))


def train_part(job: Job, *, shared: bool) -> LocalResult:
    """Train one part of the loaded model with a separate optimiser."""
    return train_loaded(job, Part(trained=only(job.manifest, shared=shared)), purpose="body" if shared else "head")


def send_shared(job: Job, result: LocalResult) -> Trained:
    """Return the outcome of a round that keeps the full model and sends its shared part."""
    personal = job.engine.read()
    private = sum(spec.size for spec in job.manifest.tensors if spec.trainable and spec.policy == "personal")
    update = Update(pack(job.manifest, personal, None))
    return conclude(job, result, personal=personal, update=update, counts={"private_values": private})


def evaluate_tuned(job: Job) -> Evaluated:
    """Evaluate the device's model and, with ``finetune_epochs``, the result of ``choose_copy``."""
    untuned = evaluate_both(job)
    if not job.assignment.settings.finetune_epochs or job.state.personal is None or untuned.personal is None:
        return untuned
    job.engine.load(job.state.personal)
    result = fine_tune(job, purpose="finetune")
    personal, validation, others = judge_choice_of_copy(job, job.engine.read(), job.state.personal)
    flops = training_flops(job.manifest, result.samples)
    return Evaluated(personal, None, validation, {"untuned": untuned.personal, **others}, flops)


def adapt_own_part(job: Job) -> DeviceState:
    """Train the device's own part for the finished shared one, which stays fixed."""
    return adapt_part(job, {spec.name for spec in job.manifest.tensors if spec.policy != "shared"})


def adapt_part(job: Job, names: Collection[str]) -> DeviceState:
    """Train the named tensors; the others stay fixed at the finished model."""
    job.engine.load(joined(job))
    fine_tune(job, Part(trained=_flags(job.manifest, names)))
    return replace(job.state, personal=job.engine.read())
