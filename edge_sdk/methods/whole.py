"""Helpers of methods with one global model: train, evaluate, and adapt it after the end."""

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
    """The setting of methods that can pull local training towards the received model."""

    proximal_weight: float


def train_whole(job: Job, proximal_weight: float = 0.0) -> Trained:
    """Train and send the received model; of a sparse one, its existing weights."""
    job.engine.load(whole_model(job.manifest, job.received))
    mask = existing(job)
    result = train_loaded(job, part_of(mask), pull=pull_of(proximal_weight))
    update = Update(pack(job.manifest, job.engine.read(), mask), mask)
    return conclude(job, result, personal=None, update=update, counts=pulled(result, proximal_weight))


def part_of(mask: ElementMask | None) -> Part:
    """Return the existing part of a model."""
    return Part(elements=mask.exists if mask else None)


def pull_of(weight: float, centre: Tensors | None = None) -> Pull | None:
    """Return a pull to ``centre``, or to the start of training; None for weight 0."""
    return Pull(weight, centre) if weight else None


def pulled(result: LocalResult, proximal_weight: float) -> dict[str, int]:
    """Return the count of steps under a pull, {} without one."""
    return {"pulled_steps": result.steps} if proximal_weight else {}


def train_pulled(job: Job) -> Trained:
    """Train and send the received model, pulled towards it by ``proximal_weight``."""
    return train_whole(job, job.own(PullSettings).proximal_weight)


def evaluate_global(job: Job) -> Evaluated:
    """Evaluate the global model and, with ``finetune_epochs``, the result of ``choose_copy``.

    ``others`` has the ``copy`` if it was not chosen, and as ``adaptive`` DM-PFL+'s choice between copy and global
    model.
    """
    task = job.task
    manifest = job.manifest
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
    """Keep the finished global model or, with ``finetune_epochs``, the result of ``choose_copy``."""
    job.engine.load(whole_model(job.manifest, job.received))
    whole = job.engine.read()
    if not job.assignment.settings.finetune_epochs:
        return replace(job.state, personal=whole)
    _fine_tune(job)
    return replace(job.state, personal=choose_copy(job, job.engine.read(), whole))


def existing(job: Job) -> ElementMask | None:
    """Return the mask of the received model; None if it is dense."""
    mask = job.received.mask if job.received else None
    return mask if isinstance(mask, ElementMask) else None


def sparse_mask(job: Job) -> ElementMask:
    """Return the mask of the received model. Raises BundleError if it is dense."""
    mask = existing(job)
    if mask is None:
        raise BundleError("the payload has no mask of elements; update the coordinator, or this SDK")
    return mask


def _fine_tune(job: Job) -> LocalResult:
    # Called repeatedly in a round, this makes the same copy each time.
    return fine_tune(job, part_of(existing(job)), purpose="finetune")
