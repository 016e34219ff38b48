"""DM-PFL, the device half: a personal and a global sparse model that share the weights in both masks.

Zhang, Zhou, Wang, Tong, KDD 2023. With global mask m_g and weights w_g, the device's own m_c and w_c,

    θ_c = w_g in m_g and m_c;  w_c in m_c only;  0 elsewhere                                               (Eq. 4)

A round's plan names its stage:

    masks     w_c ← w_g in both masks; train θ_c; at times drop the smallest weights of each layer and revive as many
              by gradient; send w_c and m_c                                                         (Algorithm 1)
    global    train a copy of w_g under m_g; send it; keep θ_c                                      (Algorithm 2)
    personal  w_c ← w_g in both masks; train the weights in m_c only; send nothing                  (Algorithm 3)

DM-PFL+ chooses a model per sample (Algorithm 4, ``adaptive``).

Choices beyond the paper: weights are replaced one epoch before the round's end; biases and norms are shared until stage
``personal``, which trains them too (``personal_unmasked``); a device without a state begins with m_c = m_g, filled up
at random to K_l weights; base entropies use training data, similarity uses scores before the softmax.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from sparrow.protocol.elements import ElementMask, Flags
from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import pack
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.sparsity import At, Grown, LayerSparsity, Pruned, adjustment_steps, grow, layer_counts, prune

from ..engines.training import LocalResult, Part
from ..tasks import count_examples
from . import DeviceMethod, DeviceState, Evaluated, Job, MethodSettings, Trained, Update
from .adaptive import BaseEntropies, Similarity, base_entropies, judge_choice
from .dual import Dual
from .merging import whole_model
from .replacing import Flat, Replacing
from .rounds import conclude, judge_held_out, train_loaded
from .whole import part_of, sparse_mask


class Settings(MethodSettings):
    """DM-PFL's own settings."""

    density: float
    layer_sparsity: LayerSparsity
    adjust_at: At
    personal_unmasked: bool
    similarity: Similarity


def train(job: Job) -> Trained:
    """Train one round of the stage ``masks`` or ``global``."""
    m_g = sparse_mask(job)
    if job.assignment.plan.get("stage") == "global":
        return _refine(job, m_g)
    dual = _composed(job, m_g)
    job.engine.load({**dual.personal, **dual.unmasked})
    replacing = _replacing(job, dual.mask)
    result = _train(job, part_of(dual.mask), replacing)
    personal = job.engine.read()
    update = Update(pack(job.manifest, personal, replacing.mask), replacing.mask)
    dual = Dual.of(job.manifest, personal, replacing.mask, whole_model(job.manifest, job.received), m_g)
    counts = {**replacing.counts, **_sizes(dual)}
    trained = _concluded(job, result, personal=personal, update=update, counts=counts)
    state = replace(trained.state, own=dual.stored())
    return replace(trained, state=state, flops=trained.flops + replacing.flops)


def _refine(job: Job, m_g: ElementMask) -> Trained:
    """Train one round of the stage ``global``."""
    state = job.state
    if state.personal is None:
        first = _composed(job, m_g)
        state = replace(state, personal=first.personal, own=first.stored())
    job.engine.load(_global_model(job))
    result = _train(job, part_of(m_g))
    values = pack(job.manifest, job.engine.read(), m_g)
    job = replace(job, state=state)
    return _concluded(job, result, personal=state.personal, update=Update(values, m_g))


def personalise(job: Job) -> Trained:
    """Train private weights for the planned epochs (stage ``personal``), and measure base entropies."""
    dual = _composed(job, sparse_mask(job))
    personal_unmasked = job.own(Settings).personal_unmasked
    trains = dict(dual.private.exists)
    if not personal_unmasked:
        rest = [spec for spec in job.manifest.tensors if spec.trainable and spec.name not in trains]
        trains |= {spec.name: np.zeros(spec.shape, np.bool_) for spec in rest}
    job.engine.load({**dual.personal, **dual.unmasked})
    part = Part(elements=dual.mask.exists, trained=trains)
    epochs = int(job.planned("epochs", 10_000)) or job.assignment.settings.finetune_epochs or None
    longer = {} if epochs is None else {"local_epochs": epochs, "local_steps": None}
    result = _train(job.with_settings(**longer), part)
    dual = replace(dual, personal=job.engine.read())
    counts = {**_sizes(dual), "personal_steps": result.steps}
    trained = _concluded(job, result, personal=dual.personal, update=None, counts=counts)
    memory = trained.state.memory
    if job.task.classification:
        base = base_entropies(job.engine, job.task.train, personal=dual.personal, global_model=dual.global_model())
        memory = {**memory, "entropy_personal": base.personal, "entropy_global": base.global_model}
    flops = training_flops(job.manifest, result.samples, weight_gradients=dual.mask)
    return replace(trained, state=DeviceState(dual.personal, memory, dual.stored()), flops=flops)


def evaluate_all(job: Job) -> Evaluated:
    """Evaluate the personal model, the global one, and the choice between them (``adaptive``), if present."""
    global_model = None
    if job.received is not None:
        job.engine.load(_global_model(job))
        if job.state.personal is None:
            return Evaluated(None, *judge_held_out(job))
        global_model = job.engine.evaluate(job.task.held_out, metrics=True)
    if job.state.personal is None:
        return Evaluated(None, None)
    job.engine.load(job.state.personal)
    personal, validation = judge_held_out(job)
    return Evaluated(personal, global_model, validation, _adaptive(job))


def _adaptive(job: Job) -> dict[str, Evaluation]:
    """Evaluate DM-PFL+ on held-out data; {} without base entropies or classes."""
    memory, personal = job.state.memory, job.state.personal
    if personal is None or "entropy_personal" not in memory or not job.task.classification:
        return {}
    chosen = judge_choice(
        job.engine,
        job.task.held_out,
        personal=personal,
        global_model=Dual.load(job.manifest, personal, job.state.own).global_model(),
        base=BaseEntropies(memory["entropy_personal"], memory["entropy_global"]),
        similarity=job.own(Settings).similarity,
    )
    return {"adaptive": chosen}


def adapt(job: Job) -> DeviceState:
    """Run the stage ``personal`` after the end; only biases and norms are private then."""
    return personalise(job).state


def _concluded(job: Job, result: LocalResult, **outcome: Any) -> Trained:
    # Losses of different stages are not comparable, so no early stopping and no choice among rounds.
    return conclude(job.with_settings(early_stopping="off", personal_model="last"), result, **outcome)


def _train(job: Job, part: Part, adjustment: Replacing | None = None) -> LocalResult:
    if _moves(job, part):
        return train_loaded(job, part, adjustment=adjustment)
    examples = count_examples(job.task.train)
    return LocalResult(examples, 0, 0, job.engine.evaluate(job.task.train).loss)


def _moves(job: Job, part: Part) -> bool:
    """Return True if any weight of the model is trained."""
    trained = part.trained or {}
    exist = part.elements or {}
    names = [spec.name for spec in job.manifest.tensors if spec.trainable]
    return any(name not in trained or (trained[name] & exist.get(name, True)).any() for name in names)


def _global_model(job: Job) -> Tensors:
    """Return θ_g as received, with the personal model's local running statistics."""
    return {**(job.state.personal or {}), **whole_model(job.manifest, job.received)}


def _composed(job: Job, m_g: ElementMask) -> Dual:
    """Return both models after receiving: w_c ← w_g in both masks."""
    received = whole_model(job.manifest, job.received)
    if job.state.personal is None:
        # Tensors that never travel start as the task has them.
        kept = job.engine.read() | received
        return Dual.of(job.manifest, kept, _filled(job, m_g), received, m_g)
    before = Dual.load(job.manifest, job.state.personal, job.state.own)
    shared = {
        name: np.where(m_g.exists[name] & mine, received[name], before.personal[name])
        for name, mine in before.mask.exists.items()
    }
    return Dual.of(job.manifest, {**before.personal, **shared}, before.mask, received, m_g)


def _filled(job: Job, m_g: ElementMask) -> ElementMask:
    """Return a device's first mask: the global one, filled up at random to K_l weights."""
    own = job.own(Settings)
    counts = layer_counts(job.manifest, own.density, own.layer_sparsity)
    chance = np.random.Generator(np.random.PCG64(job.seed("fill")))
    exists = {}
    for name, flags in m_g.exists.items():
        exists[name] = flags.copy()
        missing = counts[name] - m_g.counts[name]
        exists[name].reshape(-1)[chance.choice(np.flatnonzero(~flags), missing, replace=False)] = True
    return ElementMask(exists)


def _sizes(dual: Dual) -> dict[str, int]:
    return {"private": dual.private.count, "personal": dual.mask.count}


def _replacing(job: Job, mask: ElementMask) -> Replacing:
    """Replace the ceil(share · K_l) smallest weights of each layer by as many of steepest gradient."""
    share = job.planned("replace", 1)
    epochs = job.assignment.settings.local_epochs
    at = job.own(Settings).adjust_at
    steps = [step for step, _ in adjustment_steps(0, epochs, len(job.task.train), epochs, epochs + 1, at)]

    def rule(step: int, name: str, weights: Flat, gradient: Flat, exists: Flags) -> tuple[Pruned, Grown]:
        count = mask.counts[name]
        nothing = np.zeros(weights.size, dtype=np.int8)
        left = count - math.ceil(share * count - 1e-9)
        pruned = prune(weights, np.zeros_like(weights), exists, nothing, left=left, share=0.0)
        return pruned, grow(gradient, pruned, nothing, count=count, share=0.0)

    due = steps if share and mask.count < mask.size else []
    return Replacing(job.engine, mask, steps=due, rule=rule)


DMPFL = DeviceMethod(
    train=train,
    personalise=personalise,
    evaluate=evaluate_all,
    adapt=adapt,
    # Only the last stage trains a separate personal model.
    picks_best=False,
    acts=("replaced", "private", "personal_steps"),
    act_on={"private": "personal"},
)
"""Between rounds the device keeps both models and their base entropies."""
