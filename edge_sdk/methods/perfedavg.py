"""Per-FedAvg, the device half: a global model trained so that one gradient step on a device's data makes it personal.

Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, arXiv:2002.07948. Each local step of Algorithm 1 takes batches D, D' and D'',
and moves w along the gradient of f(w - α∇f(w)):

    u = w - α∇f(w; D)                                        α: ``inner_rate``
    w ← w - β(I - α∇²f(w; D''))∇f(u; D')                     β: ``learning_rate``

``hessian`` = first_order omits the Hessian and D'' (FO-MAML): two gradients a step. With hessian_free (HF-MAML) its
product with g = ∇f(u; D') is

    [∇f(w + δg; D'') - ∇f(w - δg; D'')] / 2δ                 δ: ``difference``

w is sent. A device is evaluated with, and at the end keeps, w after ``adaptation_steps`` steps of α on its training
data.

Departures and choices beyond the paper:

- A local step takes consecutive batches. There are as many local steps as in FedAvg, so a round passes over the data
  two or three times as often.
- The federation's optimiser takes the step of β; β decays as the learning rate does, α is constant.
- Both gradients of the difference use the same dropout. Running statistics move only in ∇f(w; D).
- Losses are f(u; D'). Early stopping uses the adapted w.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from sparrow.protocol.flops import training_flops
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Evaluation

from ..engines.optimiser import Optimiser
from ..engines.training import Batch, LocalResult, derive_seed
from . import DeviceMethod, DeviceState, Evaluated, Job, MethodSettings, Trained, Update, own_settings
from .gradients import Gradients, StepsEffort, Weights, in_silence, optimiser_of, take_steps, trained_weights
from .merging import whole_model
from .rounds import conclude, judge_held_out

if TYPE_CHECKING:
    from ..engines.rehearsal import Effort, Rehearsal


class Settings(MethodSettings):
    """Per-FedAvg's own settings."""

    hessian: Literal["first_order", "hessian_free"]
    inner_rate: float
    difference: float
    adaptation_steps: int


@dataclass
class Meta:
    """A round's local steps."""

    # W, moved by ``optimiser``.
    weights: Weights
    optimiser: Optimiser
    own: Settings
    # Seed for dropout of differences.
    seed: int
    # Steps with u ≠ w.
    moved: int = field(default=0, init=False)
    # Gradients with a Hessian term.
    curved: int = field(default=0, init=False)

    def step(self, gradients: Gradients, batches: Iterator[Batch]) -> tuple[float, int]:
        """Take a local step; afterwards the engine holds w."""
        rate = self.own.inner_rate
        _, inner = gradients.of(next(batches), self.weights, moves=True)
        ahead = moved(self.weights, inner, -rate)
        self.moved += any(not np.array_equal(each, self.weights[name]) for name, each in ahead.items())
        judged = next(batches)
        loss, outer = gradients.of(judged, ahead)
        if self.own.hessian == "hessian_free":
            product = self._product(gradients, next(batches), outer)
            outer = moved(outer, product, -rate)
            self.curved += any(each.any() for each in product.values())
        self.optimiser.step(outer)
        gradients.engine.load(self.weights)
        return loss, len(judged[1])

    def _product(self, gradients: Gradients, batch: Batch, direction: Weights) -> Weights:
        """Return the Hessian's product with ``direction`` as a difference of two gradients."""
        length = self.own.difference
        seed = derive_seed(self.seed, gradients.step)
        (_, above), (_, below) = (
            # The batch passes through ``epochs`` again, which seeds its random inputs.
            gradients.of(next(gradients.engine.epochs([batch], seed)), moved(self.weights, direction, each))
            for each in (length, -length)
        )
        return {name: (each - below[name]) / np.float32(2 * length) for name, each in above.items()}


def moved(weights: Weights, direction: Weights, length: float) -> Weights:
    """Return weights + length·direction; weights without a direction stay."""
    return {
        name: each + np.float32(length) * direction[name] if name in direction else each
        for name, each in weights.items()
    }


def take_meta_steps(job: Job) -> tuple[LocalResult, Meta]:
    """Take a round's steps from the loaded model."""
    weights = trained_weights(job.engine)
    meta = Meta(weights, optimiser_of(job, weights), job.own(Settings), job.seed("train"))
    return take_steps(job, meta.step), meta


def train(job: Job) -> Trained:
    """Train one round."""
    job.engine.load(whole_model(job.manifest, job.received))
    result, meta = take_meta_steps(job)
    trained = job.engine.read()
    adapting = 0

    def judge() -> Evaluation:
        nonlocal adapting
        adapting = take_inner_steps(job, job.own(Settings).adaptation_steps, job.own(Settings).inner_rate).samples
        found = job.engine.evaluate(job.task.validation)
        job.engine.load(trained)
        return found

    update = Update(pack(job.manifest, trained, None))
    counts = {"meta_steps": meta.moved, "hessian_steps": meta.curved}
    concluded = conclude(job, result, personal=None, update=update, counts=counts, judge=judge)
    return replace(concluded, flops=concluded.flops + training_flops(job.manifest, adapting))


def take_inner_steps(job: Job, steps: int, rate: float) -> LocalResult:
    """Take plain gradient steps from the loaded model, the same in repeated calls."""
    inner = in_silence(job.with_settings(local_steps=steps, learning_rate=rate, learning_rate_decay=1.0))
    weights = trained_weights(job.engine)

    def step(gradients: Gradients, batches: Iterator[Batch]) -> tuple[float, int]:
        batch = next(batches)
        loss, found = gradients.of(batch, weights, moves=True)
        weights.update(moved(weights, found, -rate))
        gradients.engine.load(weights)
        return loss, len(batch[1])

    return take_steps(inner, step, purpose="finetune")


def adapt_loaded(job: Job) -> LocalResult:
    """Adapt the loaded global model to the device's data."""
    settings = job.assignment.settings
    own = job.own(Settings)
    steps = settings.finetune_epochs * len(job.task.train) or own.adaptation_steps
    return take_inner_steps(job, steps, settings.finetune_learning_rate or own.inner_rate)


def evaluate(job: Job) -> Evaluated:
    """Evaluate the global model on held-out data, and its copy adapted to the device's training data."""
    job.engine.load(whole_model(job.manifest, job.received))
    global_model = job.engine.evaluate(job.task.held_out, metrics=True)
    result = adapt_loaded(job)
    personal, validation = judge_held_out(job)
    return Evaluated(personal, global_model, validation, flops=training_flops(job.manifest, result.samples))


def adapt(job: Job) -> DeviceState:
    """Adapt the finished global model to the device, and keep the result."""
    job.engine.load(whole_model(job.manifest, job.received))
    adapt_loaded(job)
    return replace(job.state, personal=job.engine.read())


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return the effort of rounds."""
    own = own_settings(rehearsal.settings, Settings)
    return StepsEffort(rehearsal, take_meta_steps, 4 if own.hessian == "hessian_free" else 2)


PERFEDAVG = DeviceMethod(train=train, evaluate=evaluate, adapt=adapt, effort=effort, acts=("meta_steps",), sums=True)
