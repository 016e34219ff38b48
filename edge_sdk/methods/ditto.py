"""Ditto, the device half: FedAvg, plus a personal model that is pulled towards the global one.

Li, Hu, Beirami, Smith, ICML 2021, arXiv:2012.04221, Algorithm 1. In each round a device trains and sends the global
model w^t, and for as many epochs trains its own, which starts as the first global model received:

    v_k ← v_k - η(∇F_k(v_k) + λ(v_k - w^t))

A round costs twice FedAvg's.
"""

from __future__ import annotations

from dataclasses import replace

from . import DeviceMethod, Job, MethodSettings, Trained
from .merging import whole_model
from .rounds import adapt_as_in_a_round, evaluate_both, train_loaded, train_once_more
from .whole import pull_of, pulled, train_whole


class Settings(MethodSettings):
    """Ditto's own settings."""

    proximal_weight: float


def train(job: Job) -> Trained:
    """Train both models for one round. Early stopping uses the sent model."""
    received = whole_model(job.manifest, job.received)
    # For tensors that never travel (local running statistics).
    job.engine.load(job.state.personal or {})
    trained = train_whole(job)
    job.engine.load(received if job.state.personal is None else job.state.personal)
    weight = job.own(Settings).proximal_weight
    own = train_loaded(job, purpose="personal", pull=pull_of(weight, received))
    state = replace(trained.state, personal=job.engine.read())
    return replace(
        trained,
        state=state,
        flops=2 * trained.flops,
        steps=trained.steps + own.steps,
        counts=pulled(own, weight),
    )


DITTO = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt_as_in_a_round,
    mixes_global=True,
    # An addition to the paper.
    finish=train_once_more,
    acts=("pulled_steps",),
    sums=True,
)
