"""Choose between a personal and a global model, sample by sample (DM-PFL+, KDD 2023, Algorithm 4).

A model's base entropy is its mean entropy on the device's training data. The personal model is chosen if

    H_c - (1 - Sim)·BE_c < H_g - (1 - Sim)·BE_g

Ties go to the global model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Tensors
from sparrow.protocol.messages import Evaluation

from ..engines import Engine
from ..tasks import Batches

Similarity = Literal["logits", "probabilities"]
Scores = NDArray[np.float32]

SMALLEST_NORM = 1e-12
"""Scores of a smaller 2-norm have a similarity of 0."""


@dataclass(frozen=True)
class BaseEntropies:
    """Mean entropy, in nats, of the personal and of the global model on the device's own data."""

    personal: float
    global_model: float


def entropy(scores: Scores) -> NDArray[np.float32]:
    """Return -Σ p ln p of the softmax of ``scores`` [N, C], nats [N]."""
    logs = _log_softmax(scores)
    entropies: NDArray[np.float32] = -(np.exp(logs) * logs).sum(axis=1)
    return entropies


def prefers_personal(
    personal: Scores, global_scores: Scores, base: BaseEntropies, similarity: Similarity = "logits"
) -> NDArray[np.bool_]:
    """Return for each sample whether the personal scores [N, C] are chosen over the global ones [N, C]."""
    one, other = (each if similarity == "logits" else np.exp(_log_softmax(each)) for each in (personal, global_scores))
    norms = [np.linalg.norm(each, axis=1) for each in (one, other)]
    product = np.maximum(norms[0] * norms[1], np.float32(SMALLEST_NORM**2))
    alike = np.where(np.minimum(*norms) < SMALLEST_NORM, np.float32(0), (one * other).sum(axis=1) / product)
    doubt = 1 - alike
    chosen: NDArray[np.bool_] = (
        entropy(personal) - doubt * base.personal < entropy(global_scores) - doubt * base.global_model
    )
    return chosen


def base_entropies(engine: Engine, batches: Batches, *, personal: Tensors, global_model: Tensors) -> BaseEntropies:
    """Return both models' mean entropies on training data."""
    means = []
    for tensors in (global_model, personal):
        engine.load(tensors)
        means.append(float(entropy(engine.scores(batches)[0]).mean()))
    return BaseEntropies(personal=means[1], global_model=means[0])


def judge_choice(
    engine: Engine,
    batches: Batches,
    *,
    personal: Tensors,
    global_model: Tensors,
    base: BaseEntropies,
    similarity: Similarity = "logits",
) -> Evaluation:
    """Return loss and accuracy of the sample-wise choice between both models."""
    scores: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for tensors in (personal, global_model):
        engine.load(tensors)
        scores.append(engine.scores(batches))
    (own, targets), (shared, _) = scores
    chosen = np.where(prefers_personal(own, shared, base, similarity)[:, None], own, shared)
    right = int((chosen.argmax(axis=1) == targets).sum())
    return Evaluation(num_examples=len(targets), loss=engine.loss(chosen, targets), accuracy=right / len(targets))


def _log_softmax(scores: Scores) -> Scores:
    shifted = scores - scores.max(axis=1, keepdims=True)
    logs: Scores = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs
