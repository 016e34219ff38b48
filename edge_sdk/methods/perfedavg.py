"""Per-FedAvg, the device half: a global model trained so that one gradient step on a device's data makes it personal.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, arXiv:2002.07948. Each local step of its Algorithm 1 takes batches D, D' and D'', and moves w
along the gradient of f(w - α∇f(w)):

    u = w - α∇f(w; D)                                        α: ``inner_rate``
    w ← w - β(I - α∇²f(w; D''))∇f(u; D')                     β: ``learning_rate``

``hessian`` = first_order leaves the Hessian and D'' out (FO-MAML): two gradients a step. With hessian_free (HF-MAML)
its product with g = ∇f(u; D') is

    [∇f(w + δg; D'') - ∇f(w - δg; D'')] / 2δ                 δ: ``difference``

which makes four. w goes up. A device is judged by w after ``adaptation_steps`` steps of α on its training data, and
keeps that at the end; w itself is judged as the global model.

Departures, and choices where the paper is silent:

- A local step takes batches one after the other. Local steps are as many as FedAvg's, so a round goes through the data
  two or three times as often.
- The step of β is the federation's optimiser's; β decays as the learning rate does, α is constant.
- Both gradients of the difference see the same dropout. Running statistics move in ∇f(w; D) alone.
- Losses are f(u; D'). Early stopping goes by w adapted, on validation data.
- With ``finetune_epochs`` w is adapted for so many epochs, at ``finetune_learning_rate`` if that is set.

Counts: ``meta_steps``, the local steps whose u was not w; ``hessian_steps``, those with a Hessian's part.
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
    """A round's local steps. weights: w, which ``optimiser`` moves. seed: for dropout of differences. moved: steps
    whose u was not w; curved: those with a Hessian's part."""

    weights: Weights
    optimiser: Optimiser
    own: Settings
    seed: int
    moved: int = field(default=0, init=False)
    curved: int = field(default=0, init=False)

    def step(self, gradients: Gradients, batches: Iterator[Batch]) -> tuple[float, int]:
        """Take a local step; the engine has w then."""
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
        """Return the Hessian's product with ``direction``, by the difference of two gradients."""
        length, seed = self.own.difference, derive_seed(self.seed, gradients.step)
        (_, above), (_, below) = (
            # The batch comes from ``epochs`` again, because that decides what is drawn for it.
            gradients.of(next(gradients.engine.epochs([batch], seed)), moved(self.weights, direction, each))
            for each in (length, -length)
        )
        return {name: (each - below[name]) / np.float32(2 * length) for name, each in above.items()}


def moved(weights: Weights, direction: Weights, length: float) -> Weights:
    """Return weights + length·direction, where ``direction`` has them."""
    return {
        name: each + np.float32(length) * direction[name] if name in direction else each
        for name, each in weights.items()
    }


def take_meta_steps(job: Job) -> tuple[LocalResult, Meta]:
    """Take a round's steps from the model that is loaded."""
    weights = trained_weights(job.engine)
    meta = Meta(weights, optimiser_of(job, weights), job.own(Settings), job.seed("train"))
    return take_steps(job, meta.step), meta


def train(job: Job) -> Trained:
    """Train one round."""
    job.engine.load(whole_model(job.manifest, job.received))
    result, meta = take_meta_steps(job)
    trained, adapting = job.engine.read(), 0

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
    """Take so many plain gradient steps from the model that is loaded; the same ones whenever a round asks."""
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
    """Adapt the global model, which the engine holds, to the device's data."""
    settings, own = job.assignment.settings, job.own(Settings)
    steps = settings.finetune_epochs * len(job.task.train) or own.adaptation_steps
    return take_inner_steps(job, steps, settings.finetune_learning_rate or own.inner_rate)


def evaluate(job: Job) -> Evaluated:
    """Judge the global model on held-out data, and a copy of it that is adapted to the device's training data."""
    job.engine.load(whole_model(job.manifest, job.received))
    global_model = job.engine.evaluate(job.task.held_out, metrics=True)
    result = adapt_loaded(job)
    personal, validation = judge_held_out(job)
    return Evaluated(personal, global_model, validation, flops=training_flops(job.manifest, result.samples))


def adapt(job: Job) -> DeviceState:
    """Keep the finished global model, adapted as it is to be judged."""
    job.engine.load(whole_model(job.manifest, job.received))
    adapt_loaded(job)
    return replace(job.state, personal=job.engine.read())


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return steps as rounds take them."""
    own = own_settings(rehearsal.settings, Settings)
    return StepsEffort(rehearsal, take_meta_steps, 4 if own.hessian == "hessian_free" else 2)


PERFEDAVG = DeviceMethod(train=train, evaluate=evaluate, adapt=adapt, effort=effort, acts=("meta_steps",), sums=True)
