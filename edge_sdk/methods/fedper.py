"""FedPer, the device half: a shared body and a head of one's own, trained together.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv:1912.00818. Of its
Algorithm 2: (W_B, W_Pj) ← SGD on both for some epochs, from the body received and one's own personal layers; send W_B.

Which layers are personal the server half says: their tensors are ``personal`` in the federation's manifest, so that
nothing that packs a payload or an update ever sees them. A device's personal part starts as its task initialises it,
from the federation's seed. A device is judged by its model as a round has left it.
"""

from __future__ import annotations

from dataclasses import replace

from edge_sdk.methods import (
    DeviceMethod,
    DeviceState,
    Evaluated,
    Job,
    Trained,
    Update,
    conclude,
    evaluate_both,
    fine_tune,
    train_loaded,
)
from edge_sdk.protocol.manifest import Tensors
from edge_sdk.protocol.masks import pack
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import LocalResult, get_tensors, set_tensors
from edge_sdk.training.merging import whole_model
from edge_sdk.training.parts import only


class FedPer(DeviceMethod):
    """A personal model of which one part comes from the server in each round."""

    def train(self, job: Job) -> Trained:
        """One round. Raises BundleError for a payload that does not fit, TrainingDiverged when the round failed."""
        set_tensors(job.model, joined(job))
        result = self.train_parts(job)
        personal = get_tensors(job.model, job.manifest)
        return conclude(job, result, personal=personal, update=Update(pack(job.manifest, personal, None)))

    def train_parts(self, job: Job) -> LocalResult:
        """Train the model that is loaded: all of it together."""
        return train_loaded(job, Freezing(job.model, job.manifest, None))

    def evaluate(self, job: Job) -> Evaluated:
        """The personal model, as a round has left it, where there is one."""
        return evaluate_both(job)

    def adapt(self, job: Job) -> DeviceState:
        """A device that came too late trains a part of its own for the shared one, which stays as it is."""
        set_tensors(job.model, joined(job))
        fine_tune(job, Freezing(job.model, job.manifest, None, trained=only(job.manifest, shared=False)))
        return replace(job.state, personal=get_tensors(job.model, job.manifest))


def joined(job: Job) -> Tensors:
    """The device's model with what was received in its place. Raises BundleError for a payload that does not fit."""
    return {**(job.state.personal or {}), **whole_model(job.manifest, job.received)}
