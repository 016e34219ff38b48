"""Helpers of methods with one global model: train it, judge it, and adapt it after the end."""

from __future__ import annotations

from dataclasses import replace

from sparrow.protocol.elements import ElementMask
from sparrow.protocol.errors import BundleError
from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import pack

from ..engines.training import LocalResult, Part, Pull
from . import DeviceState, Evaluated, Job, MethodSettings, Trained, Update
from .adaptive import base_entropies, judge_choice
from .merging import whole_model
from .rounds import choose_copy, conclude, fine_tune, judge_choice_of_copy, judge_held_out, train_loaded

__all__ = ["adapt_global", "evaluate_global", "train_whole"]


class PullSettings(MethodSettings):
    """The setting of methods that can pull local training back to the model received."""

    proximal_weight: float


def train_whole(job: Job, proximal_weight: float = 0.0) -> Trained:
    """Train the model received, and send it; of a sparse one what exists. proximal_weight: μ of the pull back."""
    job.engine.load(whole_model(job.manifest, job.received))
    mask = existing(job)
    result = train_loaded(job, part_of(mask), pull=pull_of(proximal_weight))
    update = Update(pack(job.manifest, job.engine.read(), mask), mask)
    return conclude(job, result, personal=None, update=update, counts=pulled(result, proximal_weight))


def part_of(mask: ElementMask | None) -> Part:
    """Return the part of a model that exists."""
    return Part(elements=mask.exists if mask else None)


def pull_of(weight: float, centre: Tensors | None = None) -> Pull | None:
    """Return a pull to ``centre``, or to where training begins; None where it has no weight."""
    return Pull(weight, centre) if weight else None


def pulled(result: LocalResult, proximal_weight: float) -> dict[str, int]:
    """Return what to report of a pull: the steps under it, nothing where there is none."""
    return {"pulled_steps": result.steps} if proximal_weight else {}


def train_pulled(job: Job) -> Trained:
    """Train the model received, pulled back to it by ``proximal_weight``, and send it."""
    return train_whole(job, job.own(PullSettings).proximal_weight)


def evaluate_global(job: Job) -> Evaluated:
    """Judge the global model and, with ``finetune_epochs``, what ``choose_copy`` chooses of it and a fine-tuned copy.

    ``others`` has a ``copy`` that was not chosen and, of a classification, as ``adaptive`` DM-PFL+'s choice between
    copy and global model, sample by sample (FedAvg+FT+).
    """
    task, manifest = job.task, job.manifest
    job.engine.load(whole_model(manifest, job.received))
    if not job.assignment.settings.finetune_epochs:
        return Evaluated(None, *judge_held_out(job))
    whole = job.engine.read()
    global_model = job.engine.evaluate(task.held_out, metrics=True)
    samples = _fine_tune(job).samples
    copy = job.engine.read()
    flops = training_flops(manifest, samples, weight_gradients=existing(job))
    personal, validation, others = judge_choice_of_copy(job, copy, whole)
    if not task.classification:
        return Evaluated(personal, global_model, validation, others, flops)
    base = base_entropies(job.engine, task.train, personal=copy, global_model=whole)
    chosen = judge_choice(job.engine, task.held_out, personal=copy, global_model=whole, base=base)
    return Evaluated(personal, global_model, validation, {**others, "adaptive": chosen}, flops)


def adapt_global(job: Job) -> DeviceState:
    """Keep the finished global model or, with ``finetune_epochs``, what ``choose_copy`` makes of it."""
    job.engine.load(whole_model(job.manifest, job.received))
    whole = job.engine.read()
    if not job.assignment.settings.finetune_epochs:
        return replace(job.state, personal=whole)
    _fine_tune(job)
    return replace(job.state, personal=choose_copy(job, job.engine.read(), whole))


def existing(job: Job) -> ElementMask | None:
    """Return what exists of the model received; None where all does."""
    mask = job.received.mask if job.received else None
    return mask if isinstance(mask, ElementMask) else None


def sparse_mask(job: Job) -> ElementMask:
    """Return what exists of a model that must be sparse."""
    mask = existing(job)
    if mask is None:
        raise BundleError("the payload has no mask of elements; update the coordinator, or this SDK")
    return mask


def _fine_tune(job: Job) -> LocalResult:
    """Fine-tune the loaded global model; the same copy whenever it is asked for in this round."""
    return fine_tune(job, part_of(existing(job)), purpose="finetune")
