"""Helpers of all methods: train a round, conclude it, evaluate and adapt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import NeuronMask
from sparrow.protocol.messages import Evaluation

from ..engines import evaluate_held_out
from ..engines.training import EVERYTHING, Adjustment, LocalResult, Part, Pull, TrainingDiverged
from . import DeviceState, Evaluated, Job, Trained, Update
from .early_stopping import judge_round
from .merging import GLOBAL_SHARES, mixed, whole_model

__all__ = ["adapt_as_in_a_round", "choose_copy", "conclude", "evaluate_both", "fine_tune", "train_loaded"]


def train_loaded(
    job: Job,
    part: Part = EVERYTHING,
    *,
    purpose: str = "train",
    pull: Pull | None = None,
    adjustment: Adjustment | None = None,
) -> LocalResult:
    """Train a part of the loaded model by this round's settings."""
    settings = job.assignment.settings
    return job.engine.train(
        job.task.train,
        settings,
        part,
        learning_rate=settings.learning_rate_of(job.assignment.round),
        pull=pull,
        adjustment=adjustment,
        seed=job.seed(purpose),
        progress=job.progress,
    )


def fine_tune(job: Job, part: Part = EVERYTHING, *, purpose: str = "adapt") -> LocalResult:
    """Train a part of the loaded global model, as in ``fine_tuning``."""
    return train_loaded(fine_tuning(job), part, purpose=purpose)


def fine_tuning(job: Job) -> Job:
    """Return the same job for ``finetune_epochs`` with ``finetune_learning_rate``; unset ones stay as in a round."""
    settings = job.assignment.settings
    epochs = settings.finetune_epochs
    rate = settings.finetune_learning_rate
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
    judge: Callable[[], Evaluation] | None = None,
) -> Trained:
    """Apply the stop rule to the engine's trained model; return the outcome of the round.

    personal: the model to keep, equal to the engine's. FLOPs count the samples seen, with weight gradients of the
    update's mask.
    """
    settings = job.assignment.settings
    judged = judge_round(
        judge or partial(job.engine.evaluate, job.task.validation),
        settings,
        job.state.memory,
        result.train_loss,
        validate=personal is not None and settings.keeps_best,
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
    """Evaluate the personal model and, if received, the global model on held-out data."""
    personal = global_model = validation = None
    if job.state.personal is not None:
        job.engine.load(job.state.personal)
        personal, validation = judge_held_out(job)
    if job.received is not None:
        # Tensors that never travel (local running statistics) stay the personal model's.
        job.engine.load(whole_model(job.manifest, job.received))
        if personal is None:
            return Evaluated(None, *judge_held_out(job))
        global_model = job.engine.evaluate(job.task.held_out, metrics=True)
    return Evaluated(personal, global_model, validation)


def train_once_more(job: Job, tensors: Tensors, mask: NeuronMask | None = None) -> tuple[Tensors, int]:
    """Train a part of a model once more, at the end; return the model and the FLOPs."""
    job.engine.load(tensors)
    result = fine_tune(job, Part(mask), purpose="finish")
    return job.engine.read(), training_flops(job.manifest, result.samples, weight_gradients=mask)


def choose_copy(job: Job, copy: Tensors, start: Tensors) -> Tensors:
    """Return a fine-tuned copy, its starting model, or one of their mixtures: the one with the least validation loss;
    ties prefer the copy. With ``personal_model=last``, as in the papers, the copy. Raises TrainingDiverged if the
    copy's loss is not finite.
    """
    if job.assignment.settings.personal_model == "last":
        return copy
    job.engine.load(copy)
    best = copy
    least = job.engine.evaluate(job.task.validation).loss
    # Integers, such as an order of classes, have no mixture.
    floats = {name: tensor for name, tensor in start.items() if np.issubdtype(tensor.dtype, np.floating)}
    for share in GLOBAL_SHARES:
        candidate = start if share == 1 else mixed(copy, floats, share)
        job.engine.load(candidate)
        try:
            loss = job.engine.evaluate(job.task.validation).loss
        except TrainingDiverged:
            continue
        if loss < least:
            best = candidate
            least = loss
    return best


def judge_choice_of_copy(
    job: Job, copy: Tensors, start: Tensors
) -> tuple[Evaluation, Evaluation, dict[str, Evaluation]]:
    """Evaluate the result of ``choose_copy``. If it is not the copy, also evaluate the copy, as ``copy``."""
    chosen = choose_copy(job, copy, start)
    others = {}
    if chosen is not copy:
        job.engine.load(copy)
        others["copy"] = job.engine.evaluate(job.task.held_out, metrics=True)
    job.engine.load(chosen)
    return *judge_held_out(job), others


def judge_held_out(job: Job) -> tuple[Evaluation, Evaluation]:
    """Evaluate the loaded model on test and validation data, once if they are the same."""
    return evaluate_held_out(job.engine, job.task.validation, job.task.test)


def adapt_as_in_a_round(job: Job, mask: NeuronMask | None = None) -> DeviceState:
    """Fine-tune the received model under ``mask``, and keep the result of ``choose_copy``."""
    job.engine.load(whole_model(job.manifest, job.received))
    start = job.engine.read()
    fine_tune(job, Part(mask))
    return replace(job.state, personal=choose_copy(job, job.engine.read(), start))
