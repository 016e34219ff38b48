"""pFedMe, the device half: personal models near a global one, which follows them through Moreau envelopes.

T. Dinh, Tran, Nguyen, NeurIPS 2020, arXiv:2006.08848. In each local step of Algorithm 1 a device takes a batch D,
approximates its personal model, and moves its local model w_i, which starts as the received model, along the gradient
of the Moreau envelope, λ(w_i - θ_i):

    θ_i ≈ argmin f(θ; D) + λ/2·|θ - w_i|²        K steps: ``inner_steps``, λ: ``proximal_weight``
    w_i ← w_i - ηλ(w_i - θ_i)                    η: ``outer_rate``

w_i is sent; θ_i is kept as the personal model. A late device trains a θ for the finished model, pulled to it, for
``finetune_epochs`` or else a round's epochs.

Departures and choices beyond the paper:

- The federation's optimiser moves θ; its memory lasts a round. The pull counts in the norm of ``clip``. η decays as the
  learning rate does; the paper's is constant.
- θ starts a round as the received model and continues from batch to batch, as in the released code.
- The released code adds 0.001·θ to the gradient, and evaluates w_i as personal; here it is θ, as in the paper.
- Only the cohort trains. Running statistics come from the first of the K steps of θ.
- Losses are those of θ when a batch comes, without the pull.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from sparrow.protocol.masks import pack

from ..engines.optimiser import Optimiser
from ..engines.training import Batch, LocalResult
from . import DeviceMethod, DeviceState, Job, MethodSettings, Trained, Update, own_settings
from .gradients import Gradients, StepsEffort, Weights, optimiser_of, take_steps, trained_weights
from .merging import whole_model
from .rounds import conclude, evaluate_both, fine_tuning, train_loaded
from .whole import pull_of

if TYPE_CHECKING:
    from ..engines.rehearsal import Effort, Rehearsal


class Settings(MethodSettings):
    """pFedMe's own settings."""

    proximal_weight: float
    inner_steps: int
    outer_rate: float


@dataclass
class Envelope:
    """A round's local steps."""

    # W_i, moved in place.
    local: Weights
    # Θ, moved by ``optimiser``.
    personal: Weights
    optimiser: Optimiser
    weight: float
    inner_steps: int
    # Ηλ.
    share: float
    # Steps of w_i.
    moved: int = field(default=0, init=False)

    def step(self, gradients: Gradients, batches: Iterator[Batch]) -> tuple[float, int]:
        """Take a local step; afterwards the engine holds θ."""
        batch = next(batches)
        first = 0.0
        for inner in range(self.inner_steps):
            loss, found = gradients.of(batch, self.personal, moves=inner == 0)
            first = first if inner else loss
            for name, gradient in found.items():
                gradient += np.float32(self.weight) * (self.personal[name] - self.local[name])
            self.optimiser.step(found)
        gradients.engine.load(self.personal)
        moved = False
        for name, local in self.local.items():
            after = local - np.float32(self.share) * (local - self.personal[name])
            moved = moved or not np.array_equal(after, local)
            local[:] = after
        self.moved += moved
        return first, len(batch[1])


def take_envelope_steps(job: Job) -> tuple[LocalResult, Envelope]:
    """Take a round's steps from the loaded model; afterwards the engine holds θ."""
    settings = job.assignment.settings
    own = job.own(Settings)
    rate = own.outer_rate * settings.learning_rate_of(job.assignment.round) / settings.learning_rate
    local = trained_weights(job.engine)
    personal = trained_weights(job.engine)
    weight = own.proximal_weight
    envelope = Envelope(local, personal, optimiser_of(job, personal), weight, own.inner_steps, rate * weight)
    return take_steps(job, envelope.step), envelope


def train(job: Job) -> Trained:
    """Train one round."""
    job.engine.load({**(job.state.personal or {}), **whole_model(job.manifest, job.received)})
    result, envelope = take_envelope_steps(job)
    personal = job.engine.read()
    update = Update(pack(job.manifest, {**personal, **envelope.local}, None))
    counts = {"pulled_steps": result.steps * envelope.inner_steps, "envelope_steps": envelope.moved}
    return conclude(job, result, personal=personal, update=update, counts=counts)


def adapt(job: Job) -> DeviceState:
    """Train a personal model for the finished global one, pulled towards it."""
    job.engine.load(whole_model(job.manifest, job.received))
    train_loaded(fine_tuning(job), purpose="adapt", pull=pull_of(job.own(Settings).proximal_weight))
    return replace(job.state, personal=job.engine.read())


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return the effort of rounds."""
    return StepsEffort(rehearsal, take_envelope_steps, own_settings(rehearsal.settings, Settings).inner_steps)


PFEDME = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    effort=effort,
    mixes_global=True,
    acts=("envelope_steps",),
    sums=True,
)
