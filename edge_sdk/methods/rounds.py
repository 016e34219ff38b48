"""Helpers that all methods share: training a round, concluding it, judging and adapting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from edge_sdk.methods import DeviceState, Evaluated, Job, Trained, Update
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import Tensors
from edge_sdk.protocol.masks import NeuronMask
from edge_sdk.training.early_stopping import judge_round
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.local import (
    Adjustment,
    LocalResult,
    evaluate,
    evaluate_held_out,
    get_tensors,
    set_tensors,
    train_locally,
)
from edge_sdk.training.merging import whole_model


def train_loaded(
    job: Job,
    freezing: Freezing,
    *,
    purpose: str = "train",
    proximal_weight: float = 0.0,
    proximal_centre: Tensors | None = None,
    adjustment: Adjustment | None = None,
) -> LocalResult:
    """Train ``job.model``, loaded with what the round starts from, as the federation's settings say for this round.

    purpose: what batches and dropout are drawn for. The rest is ``train_locally``'s, whose errors it raises.
    """
    settings = job.assignment.settings
    return train_locally(
        job.model,
        job.task,
        settings,
        learning_rate=settings.learning_rate_of(job.assignment.round),
        freezing=freezing,
        proximal_weight=proximal_weight,
        proximal_centre=proximal_centre,
        adjustment=adjustment,
        seed=job.seed(purpose),
        progress=job.progress,
    )


def fine_tune(job: Job, freezing: Freezing, *, purpose: str = "adapt") -> LocalResult:
    """Train ``job.model``, a global model loaded, as ``fine_tuning`` says. Raises what ``train_loaded`` does."""
    return train_loaded(fine_tuning(job), freezing, purpose=purpose)


def fine_tuning(job: Job) -> Job:
    """Return the same work, for ``finetune_epochs`` with ``finetune_learning_rate``; each as in a round where it is
    unset."""
    settings = job.assignment.settings
    epochs, rate = settings.finetune_epochs, settings.finetune_learning_rate
    return job.with_settings(
        **({"local_epochs": epochs, "local_steps": None} if epochs else {}),
        **({"learning_rate": rate, "learning_rate_decay": 1.0} if rate else {}),
    )


def conclude(
    job: Job,
    result: LocalResult,
    *,
    personal: Tensors | None,
    update: Update | None,
    counts: Mapping[str, int] | None = None,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Trained:
    """Return the outcome of a round whose training has left ``job.model`` as it is, judged by the stop rule.

    personal: the model that the device keeps until the next round, which is then ``job.model`` as it is; its own arrays
    stay as they are. The FLOPs are those of the samples seen, weight gradients only of what the update's mask lets
    train. forward: how the model is run, where that is not calling it.
    """
    settings = job.assignment.settings
    judged = judge_round(
        job.model,
        job.task,
        settings,
        job.state.memory,
        result.train_loss,
        forward,
        validate=personal is not None and settings.personal_model == "best",
    )
    return Trained(
        state=DeviceState(personal, judged.memory, job.state.own),
        update=update,
        num_examples=result.num_examples,
        steps=result.steps,
        flops=training_flops(job.manifest, result.samples, weight_gradients=update.mask if update else None),
        train_loss=result.train_loss,
        validation=judged.validation,
        personal_validation=judged.validation if personal is not None else None,
        stop_loss=judged.stop_loss,
        stopped=judged.stopped,
        counts=counts or {},
    )


def evaluate_both(job: Job) -> Evaluated:
    """Judge the personal model and, where the payload brings one, the global model on held-out data."""
    personal = global_model = validation = None
    if job.state.personal is not None:
        set_tensors(job.model, job.state.personal)
        personal, validation = evaluate_held_out(job.model, job.task)
    if job.received is not None:
        # Tensors that never travel (local running statistics) stay the personal model's: the global one has none.
        set_tensors(job.model, whole_model(job.manifest, job.received))
        if personal is None:
            return Evaluated(None, *evaluate_held_out(job.model, job.task))
        global_model = evaluate(job.model, job.task, job.task.held_out)
    return Evaluated(personal, global_model, validation)


def adapt_as_in_a_round(job: Job, mask: NeuronMask | None = None) -> DeviceState:
    """Fine-tune the received model under ``mask``, as ``fine_tuning`` says.

    Raises BundleError for a payload that is missing or partial, TrainingDiverged.
    """
    set_tensors(job.model, whole_model(job.manifest, job.received))
    fine_tune(job, Freezing(job.model, job.manifest, mask))
    return replace(job.state, personal=get_tensors(job.model, job.manifest))
