"""Logit adjustment: adding a device's class frequencies to its outputs, so that the model need not learn them.

Menon, Jayasumana, Rawat, Jain, Veit, Kumar, ICLR 2021, arXiv:2007.07314, Eq. 10; between devices: Zhang, Li, Li, Xu,
Wu, Ding, Wu, ICML 2022, and Chen, Chao (FedRoD), ICLR 2022, arXiv:2107.00778. With π_k(y) the share of class y in
device k's training samples, smoothed by ``PSEUDO_COUNT``, and τ the federation's ``logit_adjustment``, device k trains
and predicts with

    z + τ (log π_k + log C)

in place of the outputs z [C]. The shared model is then trained as if classes were equally frequent, and each device
predicts with its own frequencies from the first round on.

The offset is added to the last layer's bias in received values and subtracted from sent ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Array, Manifest
from sparrow.protocol.masks import Mask, unpack
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.skew import ADJUSTS, LabelSketch

from ..engines import Engine
from ..methods import Job, Update
from ..tasks import Batches, Task, collect_targets
from .trainable import CannotTrain

# Added to each class's count, so that empty classes have a prior.
PSEUDO_COUNT = 0.5
# Largest accepted deviation of outputs after moving the bias, relative to the largest offset.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class LabelPrior:
    """A device's class prior."""

    manifest: Manifest
    # Name of the last layer's bias.
    bias: str
    # Float32 [classes].
    offset: NDArray[np.float32]
    # Reported summary of the frequencies, None for fewer than two samples.
    sketch: LabelSketch | None = None

    @classmethod
    def of(cls, task: Task, manifest: Manifest, settings: FederationSettings) -> LabelPrior | None:
        """Return the prior of the training samples; None without ``logit_adjustment``.

        Raises CannotTrain if the task is not a classification or the last layer has no bias per class.
        """
        if not settings.logit_adjustment:
            return None
        spec = manifest.output_bias
        if spec is None or not task.classification:
            raise CannotTrain(
                "logit_adjustment needs a classification model whose last layer has a bias per class; join a "
                "federation without it"
            )
        labels = collect_targets(task.train).astype(np.int64)
        ignored = None if manifest.targets is None else manifest.targets.ignored
        labels = labels[(labels >= 0) & (labels != ignored)]
        seen = np.bincount(labels, minlength=spec.shape[0])[: spec.shape[0]]
        counts = seen + PSEUDO_COUNT
        offset = settings.logit_adjustment * np.log(counts / counts.mean())
        return cls(manifest, spec.name, offset.astype(np.float32), LabelSketch.of(seen))

    def check(self, engine: Engine, batches: Batches) -> None:
        """Raise CannotTrain unless the model's outputs follow the bias; restore its tensors."""
        batch = [next(iter(batches))]
        tensors = engine.read()
        before, _ = engine.scores(batch)
        engine.load({self.bias: np.add(tensors[self.bias], self.offset)})
        after, _ = engine.scores(batch)
        engine.load({self.bias: tensors[self.bias]})
        moved = _centred(after - before) - _centred(self.offset[None])
        if np.abs(moved).max() > TOLERANCE * max(1.0, float(np.abs(self.offset).max())):
            raise CannotTrain(
                f"logit_adjustment needs a model whose outputs are those of its last layer: they do not follow "
                f"{self.bias}; publish the model without the operations after it"
            )

    def received(self, job: Job) -> Job:
        """Return the job with the prior added to its payload, if needed."""
        if job.received is None or not adjusts(job):
            return job
        values = self._moved(job.received.values, job.received.mask, 1)
        return replace(job, received=replace(job.received, values=values))

    def sent(self, job: Job, update: Update) -> Update:
        """Return the update with the prior subtracted."""
        if not adjusts(job):
            return update
        base = (
            None
            if update.base is None
            else {**update.base, self.bias: np.subtract(update.base[self.bias], self.offset)}
        )
        return replace(update, values=self._moved(update.values, update.mask, -1), base=base)

    def _moved(self, values: Array, mask: Mask | None, sign: int) -> NDArray[np.float32]:
        moved = np.array(values, np.float32)
        for spec, block, view in unpack(self.manifest, moved, mask):
            if spec.name == self.bias:
                part = np.empty(block.size, np.float32)
                block.take_into(self.offset, part)
                np.add(view, sign * part.reshape(view.shape), out=view)
        return moved


def adjusts(job: Job) -> bool:
    """Return True if a round adjusts outputs."""
    return not job.assignment.settings.logit_adjustment_from or job.assignment.plan.get(ADJUSTS) is True


def asks_for_labels(job: Job) -> bool:
    """Return True if devices should report a sketch of their labels."""
    settings = job.assignment.settings
    return bool(settings.logit_adjustment and settings.logit_adjustment_from) and ADJUSTS not in job.assignment.plan


def _centred(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scores [N, C] minus their row means, which log-softmax outputs leave undetermined."""
    centred: NDArray[np.float32] = scores - scores.mean(axis=1, keepdims=True)
    return centred
