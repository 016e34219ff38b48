"""FedSPU, the device half: each device trains the weights between randomly chosen neurons; the rest stays personal.

Niu, Dong, Qin, arXiv:2403.11464. The device's part of Algorithm 1, with m the parameters whose neurons are all active:

    ŵ = where(m, w^t, w_k^t)            merge: values not received stay personal
    w ← w - η·(m ⊙ ∇F_k(w)), E epochs   train; frozen parameters take part in the forward pass (Eq. 5)
    L_t = λ·L_train + (1-λ)·L_val       stop permanently if it exceeds that of the last participation
                                        (``early_stopping=paper``)

Differences between paper and released code, and choices beyond both:

- A device starts from the global model of its first participation (``start``).
- The mask follows Eq. 5 everywhere, also behind a flatten, where the code has bugs. The output layer's rows are always
  active.
- With any optimiser, frozen entries are restored after its step, and it starts anew each round.
- Running statistics of frozen channels move too, on the device only.
- L_val is measured in evaluation mode on separate data; the code measures it in training mode on the reported share.
- With ``alone`` a device also trains a local-only model (``methods.alone``).
- A device stops on L_t > L_last (the paper's formula; the code also stops on a tie). n_k counts samples (the code:
  batches).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

from sparrow.protocol.manifest import Tensors, initial_values
from sparrow.protocol.masks import FULL_RATIO, NeuronDraw, NeuronMask, draw_neurons, pack

from ..engines.training import Part
from . import ActiveNeurons, DeviceMethod, DeviceState, Job, MethodSettings, Trained, Update, own_settings
from .alone import AloneSettings, with_alone
from .merging import merge, whole_model
from .narrow import sample_drawn
from .rounds import adapt_as_in_a_round, conclude, evaluate_both, train_loaded, train_once_more

if TYPE_CHECKING:
    from ..engines.rehearsal import Effort, Rehearsal


class Settings(MethodSettings):
    """FedSPU's own settings."""

    start: Literal["current", "initial"] = "current"


def train(job: Job) -> Trained:
    """Train one round. A device that stops still sends this round's values."""
    draw, mask = _assigned(job)
    start = _starting_point(job, mask)
    job.engine.load(start)
    result = train_loaded(job, Part(mask))
    personal = job.engine.read()
    update = Update(pack(job.manifest, personal, mask), mask, draw)
    trained = conclude(job, result, personal=personal, update=update, counts=_frozen(job, update))
    return with_alone(job, start, trained, mask)


def _frozen(job: Job, update: Update) -> dict[str, int]:
    if not isinstance(update.mask, NeuronMask):
        return {}
    sizes = job.manifest.group_sizes
    neurons = sum(sizes.values()) - sum(len(active) for active in update.mask.active.values())
    return {"frozen_neurons": neurons, "frozen_values": job.manifest.shared_values - len(update.values)}


def adapt(job: Job) -> DeviceState:
    """Fine-tune the finished global model under the assignment's mask."""
    return adapt_as_in_a_round(job, _assigned(job)[1])


def finish(job: Job, tensors: Tensors) -> tuple[Tensors, int]:
    """Train a model once more, on neurons drawn by this device at its budget; return it and the FLOPs."""
    # An addition to the paper: with a small budget, frozen weights reduce overfitting to few samples.
    mask = None
    if job.budget < FULL_RATIO:
        key = hashlib.sha256(str(job.seed("finish")).encode()).hexdigest()[:32]
        mask = draw_neurons(job.manifest, NeuronDraw(key, job.budget))
    return train_once_more(job, tensors, mask)


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return the effort of rounds: twice the steps with a local-only model."""
    # Only devices that choose their budget rehearse.
    from ..engines.rehearsal import MaskedEffort

    mask = FEDSPU.sample_mask(rehearsal.manifest, budget)
    return MaskedEffort(rehearsal, mask, models=1 + own_settings(rehearsal.settings, AloneSettings).alone)


def _assigned(job: Job) -> tuple[NeuronDraw | None, NeuronMask | None]:
    if job.assignment.work is None:
        return None, None
    draw = NeuronDraw(**job.assignment.work.model_dump())
    return draw, draw_neurons(job.manifest, draw)


def _starting_point(job: Job, mask: NeuronMask | None) -> Tensors:
    """Return ŵ: the personal model with the received active values. At first it is the received model, or w^0 with the
    active values."""
    if job.state.personal is None:
        received = whole_model(job.manifest, job.received)
        if mask is None or job.own(Settings).start == "current":
            return received
        first = initial_values(job.manifest, job.assignment.settings.seed)
        return merge(job.manifest, {**job.engine.read(), **first}, job.received, mask)
    return merge(job.manifest, job.state.personal, job.received, mask)


FEDSPU = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=sample_drawn),
    mixes_global=True,
    finish=finish,
    effort=effort,
    adds_local_noise=True,
    acts=("frozen_neurons", "frozen_values"),
    sums=True,
)
