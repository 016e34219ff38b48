"""GraSP, the device half: keep the weights that gradient flow needs, then train them as FedAvg does.

Wang, Zhang, Grosse, "Picking Winning Tickets Before Training by Preserving Gradient Flow", ICLR 2020, arXiv:2002.07376.
To take weight i away, δ = -θ_i, changes the squared norm of the gradient, by which training lowers the loss, by
2 δ (H g)_i to first order. So the device that prepares the model scores all weights on its training data's loss F,

    g = ∇F(θ),     H = ∇²F(θ),     score = θ ⊙ H g          with the outputs (logits) divided by a temperature, 200,

keeps the K = floor(density·n_w) largest scores over the whole network, and sends the weights it received under that
mask. Ordinary rounds are FedAvg's, or with a ``proximal_weight`` FedProx's.

Where the paper is silent, or its released code differs:

- F is the mean over all local samples, or over those of ``score_batches`` batches; the code draws as many of each class
  for it, which a device may not have. g is complete before H g begins: two passes over the same batches.
- The temperature divides any task's outputs. For a loss that is not of logits give 1.
- The network scores in training mode, as in the code, and in float32. Its running statistics stay as they were.
- A layer that would be left without a weight keeps its best one (``protocol.sparsity``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from edge_sdk.methods import DeviceMethod, Job, MethodSettings, Trained, UnknownWork, Update
from edge_sdk.methods.whole import adapt_global, evaluate_global, train_pulled
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.masks import pack
from edge_sdk.protocol.sparsity import keep_by_score, weight_budget
from edge_sdk.publishing.modes import buffers_kept
from edge_sdk.training.local import TrainingDiverged, count_examples, set_tensors
from edge_sdk.training.merging import whole_model

PASSES = 4
"""What scoring a sample computes, in training passes: one for g, one for the gradient that H g is differentiated from,
and two for that, since each of its products has two factors."""


class Settings(MethodSettings):
    """GraSP's own settings."""

    density: float
    temperature: float
    score_batches: int


def prepare(job: Job) -> Trained:
    """Score the weights and choose. Raises BundleError for a payload that does not fit, TrainingDiverged, and
    UnknownWork for a model that cannot be differentiated twice."""
    received = whole_model(job.manifest, job.received)
    set_tensors(job.model, received)
    scored = Scoring(job).scores()
    density = job.own(Settings).density
    mask = keep_by_score(scored.scores, weight_budget(job.manifest, density))
    return Trained(
        state=job.state,
        update=Update(pack(job.manifest, received, mask), mask),
        num_examples=count_examples(job.task.train),
        steps=0,
        flops=PASSES * training_flops(job.manifest, scored.samples),
        train_loss=scored.loss,
        validation=None,
        stop_loss=None,
        stopped=False,
        counts={"prepare_pruned": mask.size - mask.count},
    )


@dataclass(frozen=True)
class Scored:
    """scores: name -> float32, of every maskable tensor. loss: of the model as it is, without a temperature."""

    scores: dict[str, NDArray[np.float32]]
    samples: int
    loss: float


class Scoring:
    """Scores of the weights of a job's model, which is left as it is."""

    def __init__(self, job: Job) -> None:
        own = job.own(Settings)
        self._job = job
        self._temperature = own.temperature
        self._batches = min(own.score_batches or len(job.task.train), len(job.task.train))
        if self._batches == 0:
            raise ValueError("the task's training data has no batches; give it at least one sample")
        parameters = dict(job.model.named_parameters())
        self._weights = {spec.name: parameters[spec.name] for spec in job.manifest.maskable}
        self._samples, self._done, self._loss = 0, 0, 0.0

    def scores(self) -> Scored:
        """Return θ ⊙ H g."""
        model = self._job.model
        model.train()
        with buffers_kept(model):
            gradient = self._mean(self._gradient)
            flow = self._mean(lambda loss: self._product(loss, gradient))
        scores = {}
        for (name, weight), product in zip(self._weights.items(), flow, strict=True):
            score = weight.detach() * product
            if not torch.isfinite(score).all():
                raise TrainingDiverged(f"{name}: a score is not finite; publish a sound model, or raise temperature")
            scores[name] = score.cpu().contiguous().numpy()
        return Scored(scores, self._samples, self._loss / self._samples)

    def _mean(self, of_loss: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return what ``of_loss`` makes of each batch's loss, averaged over samples; the same batches each time."""
        job, task = self._job, self._job.task
        sums = [torch.zeros_like(weight) for weight in self._weights.values()]
        self._samples, self._loss = 0, 0.0
        torch.manual_seed(job.seed("score"))
        for inputs, targets in islice(task.train, self._batches):
            inputs, targets = inputs.to(sums[0].device), targets.to(sums[0].device)
            outputs = job.model(inputs)
            loss = task.loss(outputs.detach(), targets).item()
            if not math.isfinite(loss):
                raise TrainingDiverged(f"the loss is {loss} before any training; publish a sound model")
            for total, part in zip(sums, of_loss(task.loss(outputs / self._temperature, targets)), strict=True):
                total.add_(part, alpha=len(targets))
            self._samples += len(targets)
            self._loss += loss * len(targets)
            self._done += 1
            job.progress(self._done, 2 * self._batches, self._loss / self._samples)
        return [total.div_(self._samples) for total in sums]

    def _gradient(self, loss: torch.Tensor, *, differentiable: bool = False) -> Sequence[torch.Tensor]:
        weights = list(self._weights.values())
        return torch.autograd.grad(
            loss, weights, create_graph=differentiable, allow_unused=True, materialize_grads=True
        )

    def _product(self, loss: torch.Tensor, vector: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return H v, as the gradient of gᵀv.

        Asked for the gradients of weights alone, torch would pass over functions that are differentiable once, and be
        wrong without a word.
        """
        gradient = self._gradient(loss, differentiable=True)
        along = torch.stack([(part * other).sum() for part, other in zip(gradient, vector, strict=True)]).sum()
        try:
            along.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise UnknownWork(
                f"GraSP differentiates the loss twice, which this model does not take: {error}"
            ) from error
        else:
            return [torch.zeros_like(each) if each.grad is None else each.grad for each in self._weights.values()]
        finally:
            self._job.model.zero_grad(set_to_none=True)


GRASP = DeviceMethod(
    train=train_pulled, prepare=prepare, evaluate=evaluate_global, adapt=adapt_global, acts=("prepare_pruned",)
)
"""FedAvg of what one device kept; between rounds a device keeps nothing but the mask by name."""
