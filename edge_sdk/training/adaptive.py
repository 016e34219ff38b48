"""Choosing between a personal and a global model, sample by sample (DM-PFL+, KDD 2023, Algorithm 4).

Any pair of models will do: DM-PFL's own, or a global model and its fine-tuned copy.

A model that knows an input is surer of it than usual: its entropy lies below its base entropy, the mean over data of
the device's own. Personal is chosen where

    H_c - (1 - Sim)·BE_c < H_g - (1 - Sim)·BE_g

so that base entropies count the more, the less the two models agree; ties go to the global one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from edge_sdk.protocol.manifest import Tensors
from edge_sdk.protocol.messages import Evaluation
from edge_sdk.publishing.modes import evaluating
from edge_sdk.tasks import Batches, Task
from edge_sdk.training.layout import Layout
from edge_sdk.training.local import device_of, set_tensors

Similarity = Literal["logits", "probabilities"]

SMALLEST_NORM = 1e-12
"""Scores of a smaller 2-norm are like nothing: a similarity of 0."""


@dataclass(frozen=True)
class BaseEntropies:
    """Mean entropy, in nats, of the personal and of the global model on the device's own data."""

    personal: float
    global_model: float


def entropy(scores: torch.Tensor) -> torch.Tensor:
    """Return -Σ p ln p of the softmax of ``scores`` [N, C], nats [N]."""
    logs = scores.log_softmax(dim=1)
    return -(logs.exp() * logs).sum(dim=1)


def prefers_personal(
    personal: torch.Tensor, global_scores: torch.Tensor, base: BaseEntropies, similarity: Similarity = "logits"
) -> torch.Tensor:
    """Return for which samples the personal model's scores [N, C] are chosen over the global one's [N, C]."""
    one, other = (
        (personal, global_scores) if similarity == "logits" else (personal.softmax(1), global_scores.softmax(1))
    )
    norms = one.norm(dim=1) * other.norm(dim=1)
    small = torch.minimum(one.norm(dim=1), other.norm(dim=1)) < SMALLEST_NORM
    alike = torch.where(small, 0.0, (one * other).sum(dim=1) / norms.clamp_min(SMALLEST_NORM**2))
    doubt = 1 - alike
    return entropy(personal) - doubt * base.personal < entropy(global_scores) - doubt * base.global_model


def scores_of(model: nn.Module, task: Task, batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's class scores [N, C] on ``batches``, in evaluation mode, and their targets [N]."""
    device = device_of(model)
    scores, labels = [], []
    with evaluating(model), Layout(model, task) as layout, torch.inference_mode(), task.compute.precision():
        for inputs, targets in batches:
            inputs, targets = inputs.to(device), targets.to(device)
            scores.append(model(layout(inputs, targets)).float())
            labels.append(targets)
    return torch.cat(scores), torch.cat(labels)


def base_entropies(model: nn.Module, task: Task, *, personal: Tensors, global_model: Tensors) -> BaseEntropies:
    """Return both models' mean entropies on the device's training data; ``model`` runs them."""
    means = []
    for tensors in (global_model, personal):
        set_tensors(model, tensors)
        means.append(float(entropy(scores_of(model, task, task.train)[0]).mean()))
    return BaseEntropies(personal=means[1], global_model=means[0])


def judge_choice(
    model: nn.Module,
    task: Task,
    *,
    personal: Tensors,
    global_model: Tensors,
    base: BaseEntropies,
    similarity: Similarity = "logits",
) -> Evaluation:
    """Return loss and accuracy on held-out data of the choice between both models, sample by sample."""
    scores = []
    for tensors in (personal, global_model):
        set_tensors(model, tensors)
        scores.append(scores_of(model, task, task.held_out))
    (own, targets), (shared, _) = scores
    chosen = torch.where(prefers_personal(own, shared, base, similarity).unsqueeze(1), own, shared)
    return judge(task, chosen, targets)


def judge(task: Task, scores: torch.Tensor, targets: torch.Tensor) -> Evaluation:
    """Return loss and accuracy of scores [N, C]."""
    correct = int((scores.argmax(dim=1) == targets).sum())
    loss = float(task.loss(scores, targets))
    return Evaluation(num_examples=len(targets), loss=loss, accuracy=correct / len(targets))
