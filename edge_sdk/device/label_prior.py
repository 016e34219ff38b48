"""Logit adjustment: a device's class frequencies are added to its outputs, so that the model need not learn them.

Menon, Jayasumana, Rawat, Jain, Veit, Kumar, "Long-tail learning via logit adjustment", ICLR 2021, arXiv:2007.07314,
Eq. 10; between devices: Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits
Calibration", ICML 2022, and Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image
Classification" (FedRoD), ICLR 2022, arXiv:2107.00778. With π_k(y) the share of class y in device k's training samples,
smoothed by ``PSEUDO_COUNT``, and τ the federation's ``logit_adjustment``, device k trains and predicts with

    z + τ (log π_k + log C)

in place of the outputs z [C]. Without it a device that has few classes pushes the bias of all others down and that of
its own up, and the average forgets both; with it the shared model stays one of equal classes, and a device's own
frequencies are part of its predictions from the first round on.

Here they are added to the last layer's bias when values come in, and taken off it when values go out: training,
personal models and exports need nothing else, and nothing of them is sent.
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

PSEUDO_COUNT = 0.5
"""Added to the samples of every class: a class without any has a prior, too."""
TOLERANCE = 1e-3
"""Difference from the outputs expected, relative to the largest, from which a bias is not the outputs'."""


@dataclass(frozen=True)
class LabelPrior:
    """A device's prior of its classes. bias: the tensor that has it; offset: float32 [classes]; sketch: what is told of
    the frequencies, None of fewer than two samples."""

    manifest: Manifest
    bias: str
    offset: NDArray[np.float32]
    sketch: LabelSketch | None = None

    @classmethod
    def of(cls, task: Task, manifest: Manifest, settings: FederationSettings) -> LabelPrior | None:
        """Return the prior of a device's training samples; None where the federation adjusts nothing.

        Raises CannotTrain for a task or a model that it cannot be added to.
        """
        if not settings.logit_adjustment:
            return None
        spec = manifest.output_bias
        if spec is None or not task.classification:
            raise CannotTrain(
                "logit_adjustment is for classifications by models whose last layer has a bias for each class; join a "
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
        """Raise CannotTrain unless the model's outputs follow the bias; its tensors stay as they are."""
        batch = [next(iter(batches))]
        tensors = engine.read()
        before, _ = engine.scores(batch)
        engine.load({self.bias: np.add(tensors[self.bias], self.offset)})
        after, _ = engine.scores(batch)
        engine.load({self.bias: tensors[self.bias]})
        moved = _centred(after - before) - _centred(self.offset[None])
        if np.abs(moved).max() > TOLERANCE * max(1.0, float(np.abs(self.offset).max())):
            raise CannotTrain(
                f"logit_adjustment needs a model whose outputs are those of its last layer: adding to {self.bias} does "
                f"not move them alike; publish the model without what comes behind"
            )

    def received(self, job: Job) -> Job:
        """Return the work with the prior in its payload, where this round adjusts outputs."""
        if job.received is None or not adjusts(job):
            return job
        values = self._moved(job.received.values, job.received.mask, 1)
        return replace(job, received=replace(job.received, values=values))

    def sent(self, job: Job, update: Update) -> Update:
        """Return the update of a job without the prior."""
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
    """Return whether a round of a federation with ``logit_adjustment`` adjusts outputs: where that depends on the label
    skew, its assignments say so."""
    return not job.assignment.settings.logit_adjustment_from or job.assignment.plan.get(ADJUSTS) is True


def asks_for_labels(job: Job) -> bool:
    """Return whether devices are to tell of their labels, because it is not decided whether outputs are adjusted."""
    settings = job.assignment.settings
    return bool(settings.logit_adjustment and settings.logit_adjustment_from) and ADJUSTS not in job.assignment.plan


def _centred(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scores [N, C] less their means: what is left of them where outputs are logarithms of a softmax."""
    centred: NDArray[np.float32] = scores - scores.mean(axis=1, keepdims=True)
    return centred
