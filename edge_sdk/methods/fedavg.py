"""FedAvg, the device half: train the whole global model for some epochs, send it back, keep nothing.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, arXiv:1602.05629. Of its Algorithm 1, ClientUpdate(k, w):

    w_k ← w^t;   w_k ← w_k - η ∇F_k(w_k; b) for each batch b of E epochs;   send w_k and n_k

Methods that train one sparse model for everybody build on it: what does not exist of the model received is neither
trained nor sent.

With ``finetune_epochs`` this is FedAvg-FT (pFedGate's method card, section 5): for each evaluation the device trains a
*copy* of the global model on its own data, judges it beside the global one, and throws it away; when the federation has
ended, ``adapt`` makes the one that it keeps.
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
    fine_tune,
    train_loaded,
)
from edge_sdk.protocol.elements import ElementMask
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.masks import pack
from edge_sdk.training.elements import flags_of
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import evaluate, evaluate_held_out, get_tensors, set_tensors
from edge_sdk.training.merging import whole_model
from edge_sdk.training.replacing import Replacing


class FedAvg(DeviceMethod):
    """Local training of the whole model; no personal model between rounds, so early stopping means that the device
    contributes no more, and gets the last global model like everybody else."""

    def train(self, job: Job) -> Trained:
        """One round. Raises BundleError for a payload that does not fit, TrainingDiverged when the round failed."""
        set_tensors(job.model, whole_model(job.manifest, job.received))
        replacing, mask = self.replacing(job), existing(job)
        freezing = Freezing(job.model, job.manifest, None, flags_of(mask))
        weight = self.proximal_weight(job)
        result = train_loaded(job, freezing, proximal_weight=weight, adjustment=replacing)
        mask = replacing.mask if replacing else mask
        update = Update(pack(job.manifest, get_tensors(job.model, job.manifest), mask), mask)
        trained = conclude(job, result, personal=None, update=update, counts=replacing.counts if replacing else None)
        return replace(trained, flops=trained.flops + (replacing.flops if replacing else 0))

    def replacing(self, job: Job) -> Replacing | None:
        """What replaces weights of a sparse model on the way: nothing."""
        return None

    def proximal_weight(self, job: Job) -> float:
        """μ of the pull back to the weights received: none."""
        return 0.0

    def evaluate(self, job: Job) -> Evaluated:
        """The global model on held-out data and, with ``finetune_epochs``, a fine-tuned copy of it beside it."""
        set_tensors(job.model, whole_model(job.manifest, job.received))
        if not job.assignment.settings.finetune_epochs:
            return Evaluated(None, *evaluate_held_out(job.model, job.task))
        global_model = evaluate(job.model, job.task, job.task.held_out)
        _fine_tune(job)
        personal, validation = evaluate_held_out(job.model, job.task)
        return Evaluated(personal, global_model, validation)

    def adapt(self, job: Job) -> DeviceState:
        """The finished global model, fine-tuned for ``finetune_epochs``, or as it is where there are none."""
        set_tensors(job.model, whole_model(job.manifest, job.received))
        if job.assignment.settings.finetune_epochs:
            _fine_tune(job)
        return replace(job.state, personal=get_tensors(job.model, job.manifest))


def existing(job: Job) -> ElementMask | None:
    """What exists of the model received; None where all does."""
    mask = job.received.mask if job.received else None
    return mask if isinstance(mask, ElementMask) else None


def sparse_mask(job: Job) -> ElementMask:
    """What exists of a model that must be sparse. Raises BundleError where all does."""
    mask = existing(job)
    if mask is None:
        raise BundleError("the payload has no mask of elements; update the coordinator, or this SDK")
    return mask


def _fine_tune(job: Job) -> None:
    """Train the loaded global model for ``finetune_epochs``; the same copy whenever it is asked for in this round."""
    fine_tune(job, Freezing(job.model, job.manifest, None, flags_of(existing(job))), purpose="finetune")
