"""FedMask, the device half: weights stay fixed, and a device learns a binary mask of the last layers' weights.

Li, Sun, Li, Pu, Chen, SenSys 2021, as compared in pFedGate's section 7.1. Each maskable weight w of the last layers has
a real score s. The network computes with

    ŵ = b w,   b = [σ(s) ≥ 1/2],   and   ∂L/∂s = ∂L/∂ŵ · w · σ(s) (1 - σ(s)):

the threshold is a straight-through estimator. Weights, biases and norms never change; running statistics stay on the
device. Before its first upload a device prunes once: in each layer it keeps the share ``density`` of largest scores.

Devices send a sign per maskable weight: 1 and -1 for bits 1 and 0, and 0 for a pruned weight. A device gives its kept
weights' scores the sign of the server's mean, and keeps their magnitude.

Departures: the paper has no code for scores, threshold and pruning. Here single weights are pruned, and the loss has no
term for structured sparsity. All scores start at ``first_score``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import unpack_whole
from sparrow.protocol.parts import Part, Signs, all_maskable

from ..engines.optimiser import Array
from ..engines.training import Batch, LocalResult
from . import DeviceMethod, DeviceState, Job, MethodSettings, Trained, Update
from .gradients import Gradients, optimiser_of, take_steps
from .merging import is_whole, whole_model
from .parts import own_tensors
from .rounds import conclude, evaluate_both, fine_tuning

LEAST = np.float32(1e-12)
"""The least magnitude of a score whose sign comes from the server, because 0 counts as positive."""


class Settings(MethodSettings):
    """FedMask's own settings."""

    density: float
    first_score: float


@dataclass
class Masks:
    """The masks of a model's last layers, each a dict by layer name: the fixed weights w, the scores s, and the
    unpruned positions."""

    weights: dict[str, Array]
    scores: dict[str, Array]
    kept: dict[str, NDArray[np.bool_]] | None = None

    def bits(self, name: str) -> NDArray[np.bool_]:
        """Return b of one tensor."""
        # σ(s) ≥ 1/2
        on: NDArray[np.bool_] = self.scores[name] >= 0
        return on if self.kept is None else on & self.kept[name]

    def masked(self) -> Tensors:
        """Return ŵ."""
        return {name: np.where(self.bits(name), weight, np.float32(0)) for name, weight in self.weights.items()}

    def gradient(self, name: str, outer: NDArray[Any]) -> Array:
        """Return ∂L/∂s of one tensor from ``outer``, ∂L/∂ŵ; 0 for pruned weights."""
        # σ(s), without overflow
        share = (1 + np.tanh(self.scores[name] / 2)) / 2
        slope: Array = (outer * self.weights[name] * share * (1 - share)).astype(np.float32)
        return slope if self.kept is None else slope * self.kept[name]

    def take(self, signs: Signs) -> int:
        """Give scores of kept weights the signs other than 0; return the number of changed bits."""
        wanted = sum(score.size for score in self.scores.values())
        if len(signs) != wanted:
            raise BundleError(f"the payload has {len(signs)} signs for {wanted} weights; fetch it again")
        turned = 0
        start = 0
        for name, score in self.scores.items():
            sign = signs[start : start + score.size].reshape(score.shape)
            start += score.size
            before = self.bits(name)
            agreed = sign * np.maximum(np.abs(score), LEAST)
            score[...] = np.where((sign != 0) & (True if self.kept is None else self.kept[name]), agreed, score)
            turned += int(np.count_nonzero(self.bits(name) != before))
        return turned

    def prune(self, density: float) -> int:
        """Keep the share ``density`` of each tensor, at least one weight; return the number of pruned weights."""
        self.kept = {}
        for name, score in self.scores.items():
            count = max(1, round(density * score.size))
            flags = np.zeros(score.size, bool)
            flags[np.argsort(-score.reshape(-1), kind="stable")[:count]] = True
            self.kept[name] = flags.reshape(score.shape)
        return sum(int(np.count_nonzero(~flags)) for flags in self.kept.values())

    def signs(self) -> Signs:
        """Return the packed signs to send: 1 or -1 for bits 1 or 0, and 0 for pruned weights."""
        return np.concatenate(
            [
                np.where(self.kept[name] if self.kept else True, np.where(self.bits(name), 1, -1), 0).reshape(-1)
                for name in self.scores
            ]
        ).astype(np.int8)


def train(job: Job) -> Trained:
    """Train scores for one round, and send the bits."""
    masks, result, counts = _train_scores(job)
    nothing = BlockMask(np.zeros(len(job.manifest.block_table.sizes), bool))
    update = Update(np.zeros(0, np.float32), nothing, parts={"signs": masks.signs()})
    trained = conclude(job, result, personal=job.engine.read(), update=update, counts=counts)
    state = replace(trained.state, own=_packed(masks), model=job.assignment.model_sha256)
    return replace(trained, state=state, flops=training_flops(job.manifest, result.samples))


def adapt(job: Job) -> DeviceState:
    """Train and prune the device's own mask, starting from the finished bits."""
    masks, _, _ = _train_scores(fine_tuning(job), purpose="adapt")
    return replace(job.state, personal=job.engine.read(), own=_packed(masks))


def _train_scores(job: Job, *, purpose: str = "train") -> tuple[Masks, LocalResult, dict[str, int]]:
    """Train scores, prune on the first call, and leave the masked model in the engine."""
    masks = _masks_of(job)
    signs = job.received.parts.get("signs") if job.received is not None else None
    counts = {"bits_taken": 0 if signs is None else masks.take(signs)}
    before = {name: masks.bits(name) for name in masks.weights}
    job.engine.load({**own_tensors(job), **masks.masked()})
    result = _learn(job, masks, purpose)
    counts["bits_learned"] = sum(int(np.count_nonzero(masks.bits(name) != bits)) for name, bits in before.items())
    counts["pruned"] = masks.prune(job.own(Settings).density) if masks.kept is None else 0
    counts["bits"] = sum(int(np.count_nonzero(masks.bits(name))) for name in masks.weights)
    job.engine.load(masks.masked())
    return masks, result, counts


def _learn(job: Job, masks: Masks, purpose: str) -> LocalResult:
    """Train the scores for a round's steps."""
    optimiser = optimiser_of(job, masks.scores)
    scores = {f"the score of {name}": score for name, score in masks.scores.items()}

    def step(gradients: Gradients, batches: Iterator[Batch]) -> tuple[float, int]:
        batch = next(batches)
        loss, found = gradients.of(batch, {}, moves=True)
        optimiser.step({name: masks.gradient(name, outer) for name, outer in found.items()})
        job.engine.load(masks.masked())
        return loss, len(batch[1])

    return take_steps(job, step, purpose=purpose, names=list(masks.weights), trained=scores)


def _masks_of(job: Job) -> Masks:
    """Return writable copies of this device's masks."""
    manifest = job.manifest
    own = job.state.own
    if job.received is not None and is_whole(manifest, job.received):
        weights = whole_model(manifest, job.received)
    elif "weights" in own:
        weights = unpack_whole(manifest, own["weights"])
    else:
        raise BundleError("the payload has no weights, and none are kept here; fetch the assignment again")
    names = [spec.name for spec in manifest.maskable]
    flat = {name: np.array(weights[name], np.float32) for name in names}
    if "scores" not in own:
        first = np.float32(job.own(Settings).first_score)
        return Masks(flat, {name: np.full(weight.shape, first) for name, weight in flat.items()})
    scores = {name: np.array(each, np.float32) for name, each in unpack_whole(manifest, own["scores"]).items()}
    bits = np.unpackbits(own["kept"].astype(np.uint8), count=manifest.shared_values).astype(bool)
    return Masks(flat, scores, {name: np.array(each) for name, each in unpack_whole(manifest, bits).items()})


def _packed(masks: Masks) -> Tensors:
    assert masks.kept is not None, "pruned before"
    weights, scores, kept = (
        np.concatenate([each.reshape(-1) for each in of.values()]) for of in (masks.weights, masks.scores, masks.kept)
    )
    return {"weights": weights, "scores": scores, "kept": np.packbits(kept)}


FEDMASK = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    payload_parts=(Part(name="signs", dtype="sign", count=all_maskable),),
    acts=("bits_taken", "bits_learned", "pruned", "overlapping"),
)
