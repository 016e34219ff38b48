"""The models that a device may take at the end, and what each gains (``protocol.evidence``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from sparrow.protocol.evidence import CANDIDATES, GLOBAL, LARGEST_GAIN, MOST_PARTS, Evidence
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.messages import Evaluation

from ..engines import Engine
from ..engines.training import Batch, TrainingDiverged
from ..methods import DeviceMethod, Job
from ..methods.alone import alone_of
from ..methods.merging import mixed, whole_model
from ..tasks import Batches, as_arrays, count_examples

SHARE = 0.5
"""Of the global model in a mixture, and in that which is trained once more."""
SHARES = {GLOBAL: 1.0, "mixture": SHARE, "finished": SHARE}
"""Candidate -> the share of the global model that it began with; the others have none."""


@dataclass(frozen=True)
class Ending:
    """The end of a device's models. flops: what it trained for that. others: each of its candidates
    on held-out data. taken: which of them it keeps; usual: which is best for all. None where it did not choose so."""

    flops: int = 0
    others: Mapping[str, Evaluation] = field(default_factory=dict)
    taken: str | None = None
    usual: str | None = None


@dataclass(frozen=True)
class Candidates:
    """models: name -> tensors, of ``GLOBAL`` and of those of ``evidence.CANDIDATES`` that the device has. flops: what
    making them took."""

    models: dict[str, Tensors]
    flops: int = 0

    @classmethod
    def of(cls, method: DeviceMethod, job: Job) -> Candidates:
        """Return what a device may take of the whole model that it received, and of its own. Raises BundleError for a
        payload that is not the whole model."""
        received = whole_model(job.manifest, job.received)
        own = job.engine.read() if job.state.personal is None else job.state.personal
        shared = {**own, **received}
        personal = shared if job.state.personal is None else own
        mixture = mixed(personal, received, SHARE)
        models, flops = {GLOBAL: shared, "personal": personal, "mixture": mixture}, 0
        if method.finish is not None and job.assignment.settings.finetune_epochs:
            # If it diverges there is no such model.
            with suppress(TrainingDiverged):
                models["finished"], flops = method.finish(job, mixture)
        alone = alone_of(job.state)
        if alone is not None:
            models["alone"] = alone
        return cls(models, flops)

    def evidence(self, engine: Engine, validation: Batches) -> Evidence | None:
        """Return what each gains over the global model on validation data; None of a single sample, or if the global
        model has no finite loss. One that there is not gains nothing, one without a finite loss loses all."""
        parts = list(_parts(validation))
        shared = _losses(engine, self.models[GLOBAL], parts)
        if shared is None:
            return None
        losses = {GLOBAL: shared}
        for name in CANDIDATES:
            found = _losses(engine, self.models[name], parts) if name in self.models else shared
            losses[name] = [loss + LARGEST_GAIN for loss in shared] if found is None else found
        return Evidence.of(losses)

    def judged(self, engine: Engine, held_out: Batches) -> dict[str, Evaluation]:
        """Return each on held-out data, but for those without a finite loss."""
        found = {}
        for name, tensors in self.models.items():
            engine.load(tensors)
            with suppress(TrainingDiverged):
                found[name] = engine.evaluate(held_out, metrics=True)
        return found


def _losses(engine: Engine, tensors: Tensors, parts: list[Batch]) -> list[float] | None:
    """Return a model's loss on each part; None if one is not finite."""
    engine.load(tensors)
    try:
        return [engine.evaluate([part]).loss for part in parts]
    except TrainingDiverged:
        return None


def _parts(batches: Batches) -> Iterator[Batch]:
    """Yield the samples in at most ``MOST_PARTS`` parts and one more for each batch."""
    each = -(-count_examples(batches) // MOST_PARTS)
    for inputs, targets in map(as_arrays, batches):
        for start in range(0, len(targets), each):
            yield np.asarray(inputs[start : start + each]), np.asarray(targets[start : start + each])
