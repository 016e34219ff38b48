"""Candidates for a device's final model, and their gain over the global model (``protocol.evidence``)."""

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

# Share of the global model in a mixture.
SHARE = 0.5
# Candidate -> share of the global model in its initial values; 0 for others.
SHARES = {GLOBAL: 1.0, "mixture": SHARE, "finished": SHARE}


@dataclass(frozen=True)
class Ending:
    """The choice of a device's final model."""

    # Spent on training candidates.
    flops: int = 0
    # Candidate -> evaluation on held-out data.
    others: Mapping[str, Evaluation] = field(default_factory=dict)
    # The candidate it keeps.
    taken: str | None = None
    # The best one over all devices; both None without a common choice.
    usual: str | None = None


@dataclass(frozen=True)
class Candidates:
    """Models: name -> tensors, for ``GLOBAL`` and the available ones of ``evidence.CANDIDATES``."""

    models: dict[str, Tensors]
    # Spent on training them.
    flops: int = 0

    @classmethod
    def of(cls, method: DeviceMethod, job: Job) -> Candidates:
        """Return the candidates of a device. Raises BundleError if the payload is incomplete."""
        received = whole_model(job.manifest, job.received)
        own = job.engine.read() if job.state.personal is None else job.state.personal
        shared = {**own, **received}
        personal = shared if job.state.personal is None else own
        mixture = mixed(personal, received, SHARE)
        models = {GLOBAL: shared, "personal": personal, "mixture": mixture}
        flops = 0
        if method.finish is not None and job.assignment.settings.finetune_epochs:
            # Omitted if it diverges.
            with suppress(TrainingDiverged):
                models["finished"], flops = method.finish(job, mixture)
        alone = alone_of(job.state)
        if alone is not None:
            models["alone"] = alone
        return cls(models, flops)

    def evidence(self, engine: Engine, validation: Batches) -> Evidence | None:
        """Return each candidate's gain over the global model on validation data.

        None for a single sample, or if the global model's loss is not finite.
        """
        # A missing candidate gains 0; one without a finite loss gets the largest penalty.
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
        """Evaluate the candidates on held-out data; omit those without a finite loss."""
        found = {}
        for name, tensors in self.models.items():
            engine.load(tensors)
            with suppress(TrainingDiverged):
                found[name] = engine.evaluate(held_out, metrics=True)
        return found


def _losses(engine: Engine, tensors: Tensors, parts: list[Batch]) -> list[float] | None:
    engine.load(tensors)
    try:
        return [engine.evaluate([part]).loss for part in parts]
    except TrainingDiverged:
        return None


def _parts(batches: Batches) -> Iterator[Batch]:
    each = -(-count_examples(batches) // MOST_PARTS)
    for inputs, targets in map(as_arrays, batches):
        for start in range(0, len(targets), each):
            yield np.asarray(inputs[start : start + each]), np.asarray(targets[start : start + each])
