"""Ditto, the device half: FedAvg for everybody, and beside it a personal model that is pulled to the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
arXiv:2012.04221. In each round of its Algorithm 1 a device trains the global model received, w^t, and sends it, and for
as many epochs its own:

    v_k ← v_k - η(∇F_k(v_k) + λ(v_k - w^t))

so that a round costs twice FedAvg's. A device's first personal model is the global one that it received.
"""

from __future__ import annotations

from dataclasses import replace

from edge_sdk.methods import DeviceState, Evaluated, Job, Trained, adapt_as_in_a_round, evaluate_both, train_loaded
from edge_sdk.methods.fedavg import FedAvg
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import get_tensors, set_tensors
from edge_sdk.training.merging import whole_model


class Ditto(FedAvg):
    """FedAvg, and a personal model; early stopping goes by FedAvg's losses."""

    mixes_global = True

    def train(self, job: Job) -> Trained:
        """One round of both. Raises BundleError for a payload that does not fit, TrainingDiverged when it failed."""
        settings, received = job.assignment.settings, whole_model(job.manifest, job.received)
        set_tensors(job.model, job.state.personal or {})  # what never travels (local running statistics)
        trained = super().train(job)
        set_tensors(job.model, received if job.state.personal is None else job.state.personal)
        own = train_loaded(
            job,
            Freezing(job.model, job.manifest, None),
            purpose="personal",
            proximal_weight=float(settings.method_settings["proximal_weight"]),
            proximal_centre=received,
        )
        state = replace(trained.state, personal=get_tensors(job.model, job.manifest))
        return replace(trained, state=state, flops=2 * trained.flops, steps=trained.steps + own.steps)

    def evaluate(self, job: Job) -> Evaluated:
        """The personal model and the global one, where there are any, on held-out data."""
        return evaluate_both(job)

    def adapt(self, job: Job) -> DeviceState:
        """A device that came too late trains the global model as in one round, or for ``finetune_epochs``."""
        return adapt_as_in_a_round(job)
