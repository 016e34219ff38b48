"""APFL, the device half: a mixture of a personal and a global model with a learned weight.

Deng, Kamani, Mahdavi, arXiv:2003.13461, Algorithm 1. In each step, with v̄ = αv + (1-α)w,

    w ← w - η∇F(w)          sent and averaged
    v ← v - ηα∇F(v̄)         kept

and at the end of a round α ← clip(α - η⟨v - w, ∇F(v̄)⟩, 0, 1) on the last batch. v̄ is the personal model. v starts as
the model received, α as ``mixing_weight``. A step costs twice FedAvg's.
"""

from __future__ import annotations

from dataclasses import replace

from sparrow.protocol.masks import pack

from . import DeviceMethod, Job, MethodSettings, Trained, Update
from .merging import whole_model
from .mixing import train_mixture
from .rounds import adapt_as_in_a_round, conclude, evaluate_both


class Settings(MethodSettings):
    """APFL's own settings."""

    mixing_weight: float


def train(job: Job) -> Trained:
    """Train one round."""
    received = whole_model(job.manifest, job.received)
    weight = float(job.state.memory.get("mixing_weight", job.own(Settings).mixing_weight))
    job.engine.load(received)
    trained = train_mixture(job, dict(job.state.own) or received, weight)
    update = Update(pack(job.manifest, job.engine.read(), None))
    # The weight itself in millionths: the sum over a round divided by the updates is the mean.
    counts = {"weight_moved": int(trained.weight != weight), "weight_millionths": round(1e6 * trained.weight)}
    concluded = conclude(job, trained.result, personal=None, update=update, counts=counts)
    memory = {**concluded.state.memory, "mixing_weight": trained.weight}
    state = replace(concluded.state, personal=trained.mixture, memory=memory, own=trained.own)
    return replace(concluded, state=state, flops=2 * concluded.flops)


APFL = DeviceMethod(
    train=train, evaluate=evaluate_both, adapt=adapt_as_in_a_round, mixes_global=True, acts=("weight_moved",), sums=True
)
