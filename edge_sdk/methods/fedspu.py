"""FedSPU, the device half: each device trains the weights that join randomly chosen neurons, the rest stays personal.

*FedSPU: Personalized Federated Learning for Resource-constrained Devices with Stochastic Parameter Update.*
Ziru Niu, Hai Dong, A. K. Qin. arXiv:2403.11464. Of its Algorithm 1 this is the part that runs on a device:

    ŵ = where(m, w^t, w_k^t)            merge: what is not received keeps its personal value
    w ← w - η·(m ⊙ ∇F_k(w)), E epochs   train, frozen parameters taking part in the forward pass (Eq. 5)
    L_t = λ·L_train + (1-λ)·L_val       leave for good when it exceeds that of the last participation

with m the parameters whose neurons are all active. The server half draws the neurons and averages.

Where paper and released code differ, or are silent:

- The mask follows Eq. 5 everywhere, also behind a flatten and on the output layer's columns, where the code has bugs.
  The output layer's rows are always active: every device needs every class.
- The error signal passes through frozen neurons (Eq. 5 and the code; the paper's prose suggests otherwise).
- The paper trains with plain SGD. Whatever the optimiser, frozen entries are put back after its step, and it starts
  afresh each round.
- Batch norm runs in training mode: running statistics of frozen channels move too, on the device only.
- L_val is measured in evaluation mode on data of its own; the code does so in training mode on the reported share.
- A device stops on L_t > L_last (the paper's formula; the code: also on a tie). n_k counts samples (the code: batches).
"""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from edge_sdk.methods import DeviceState, Evaluated, Job, Trained
from edge_sdk.protocol.bundle import Bundle
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.manifest import Array, Manifest, Tensors
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask, draw_neurons, merge_in_place, pack, same_mask, unpack
from edge_sdk.training.early_stopping import StopState, judge, stop_loss
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import LocalResult, derive_seed, evaluate, get_tensors, set_tensors, train_locally


class FedSPU:
    """Merge, masked local training, early stopping."""

    def train(self, job: Job) -> Trained:
        """One round. Raises BundleError for a payload that does not fit, TrainingDiverged when the round failed."""
        draw, mask = _assigned(job)
        set_tensors(job.model, _merge(job, mask))
        result = _train(job, mask, "train")
        personal = get_tensors(job.model, job.manifest)
        settings, memory = job.assignment.settings, job.state.memory
        validation_loss, loss, stopped = None, None, False
        if settings.early_stopping:
            validation_loss = evaluate(job.model, job.task, job.task.validation).loss
            loss = stop_loss(result.train_loss, validation_loss, settings.stop_weight)
            stop, stopped = judge(StopState(**memory), loss, settings.patience, settings.min_improvement)
            memory = asdict(stop)
        return Trained(
            state=DeviceState(personal, memory),
            values=pack(job.manifest, personal, mask),
            mask=mask,
            draw=draw,
            num_examples=result.num_examples,
            steps=result.steps,
            train_loss=result.train_loss,
            validation_loss=validation_loss,
            stop_loss=loss,
            stopped=stopped,
        )

    def evaluate(self, job: Job) -> Evaluated:
        """The personal model and the global one, where there are any, on held-out data."""
        personal = global_model = None
        if job.state.personal is not None:
            set_tensors(job.model, job.state.personal)
            personal = evaluate(job.model, job.task, job.task.held_out)
        if job.received is not None:
            # Tensors that never travel (local running statistics) stay the personal model's: the global one has none.
            set_tensors(job.model, _whole(job.manifest, job.received))
            global_model = evaluate(job.model, job.task, job.task.held_out)
        return Evaluated(personal, global_model)

    def adapt(self, job: Job) -> DeviceState:
        """The finished global model, fine-tuned like one more round under the assignment's mask."""
        _, mask = _assigned(job)
        set_tensors(job.model, _whole(job.manifest, _received(job)))
        _train(job, mask, "adapt")
        return replace(job.state, personal=get_tensors(job.model, job.manifest))


def _assigned(job: Job) -> tuple[NeuronDraw | None, NeuronMask | None]:
    """The draw and the mask of this assignment; None and None where everything is trained."""
    if job.assignment.work is None:
        return None, None
    draw = NeuronDraw(**job.assignment.work.model_dump())
    return draw, draw_neurons(job.manifest, draw)


def _merge(job: Job, mask: NeuronMask | None) -> Tensors:
    """ŵ: the personal model with the active values received; before the first download, all that was received."""
    received = _received(job)
    if job.state.personal is None:
        return get_tensors(job.model, job.manifest) | _whole(job.manifest, received)
    values: Array = received.values
    if _is_whole(job.manifest, received):  # sent again: only the active part is this round's business
        values = pack(job.manifest, _whole(job.manifest, received), mask)
    elif not same_mask(received.mask, mask):
        raise BundleError("the payload's mask is not the assignment's; fetch the assignment and its payload again")
    merged = {name: np.array(tensor) for name, tensor in job.state.personal.items()}
    merge_in_place(job.manifest, merged, values, mask)
    return merged


def _train(job: Job, mask: NeuronMask | None, purpose: str) -> LocalResult:
    """E epochs on the model as loaded, under ``mask``."""
    settings, work, number = job.assignment.settings, job.assignment.work, job.assignment.round
    who = (work.job, work.device) if work else (settings.seed,)
    return train_locally(
        job.model,
        job.task,
        settings,
        learning_rate=settings.learning_rate_of(number),
        freezing=Freezing(job.model, job.manifest, mask),
        seed=derive_seed(*who, number, purpose),
        progress=job.progress,
    )


def _received(job: Job) -> Bundle:
    if job.received is None:
        raise BundleError("the assignment came without its payload; fetch the payload and try again")
    return job.received


def _whole(manifest: Manifest, received: Bundle) -> Tensors:
    """A full payload as tensors by name, views into it. Raises BundleError for a partial one."""
    if not _is_whole(manifest, received):
        wanted = "hand the assignment back, so that the coordinator sends the whole model"
        raise BundleError(f"the payload holds a part of the model, with nothing here to merge it into; {wanted}")
    return {spec.name: values.reshape(spec.shape) for spec, _, values in unpack(manifest, received.values, None)}


def _is_whole(manifest: Manifest, received: Bundle) -> bool:
    """Whether nothing is left out: no mask, or one whose neurons are all active."""
    return received.values.size == manifest.shared_values
