"""pFedGate, the device half: a private gating layer picks and scales blocks of the shared model, batch by batch.

Chen, Yao, Gao, Ding, Li, "Efficient Personalized Federated Learning via Sparse Model-Adaptation", ICML 2023,
arXiv:2305.02776. In each batch of a round (its Algorithm 1)

    (G, M) = gate(x);   I = knapsack(G) within the budget;   θ' = θ ⊛ M·I;   one step of gate and θ on f(θ'; x, y)

with a knapsack for linear layers and one for the others (``BlockTable.select``), and what goes up is θ of the blocks
that any batch has used. Gate, scales, importances and θ as trained here stay. What is kept: the personal model is θ
under the device's mean gates, a plain model that export and prediction without a gate take; beside it θ as trained, the
gate, and what was received of the blocks touched, from which the global model can be rebuilt, so that only what changed
need come down.

A device is judged as it would be used: on the newest θ, every sample with gates of its own. Beside that stand the
batch's gates, as in the paper; the same on θ as trained here, before it is averaged, which is what the paper reports;
and the mean gates.

Where paper and released code differ: gates of dropped blocks learn, too; importances
are not clipped; momentum begins anew each round, and moves touched blocks alone; a batch of one sample, which the code
skips, goes by the gate's running statistics.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import nn

from sparrow.protocol.blocks import BlockMask, BudgetPer, Costs, Importance
from sparrow.protocol.flops import block_flops, budget_groups
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import merge_in_place, pack, unpack_whole

from ..engines.rehearsal import Effort, Rehearsal
from ..engines.training import LocalResult, derive_seed
from ..publishing.modes import buffers_kept
from ..tasks import Batches
from ..training.gates.gated import PROBE, Budget, Gated, GatedOptimisation, Gates, gate_tensors, load_gate
from ..training.gates.gating import GatingLayer, Sees, fitting_pool
from ..training.gates.network import check_gated
from ..training.local import as_tensor, evaluate, take_steps
from ..training.rehearsal import TorchRehearsal, block_nanoseconds
from . import (
    BudgetTooSmall,
    DeviceMethod,
    DeviceState,
    Evaluated,
    Job,
    MethodSettings,
    Trained,
    Update,
    own_settings,
    torch_engine,
)
from .gradients import rehearsed
from .merging import is_whole, whole_model
from .rounds import conclude, train_loaded

ADAPT_EPOCHS = 5
"""Most epochs in which a late device trains its gate; it stops before where the validation loss rises."""

COUNTED_LAYERS = 12
"""Layers whose kept values a report has for themselves: it has room for 32 counts."""


class Settings(MethodSettings):
    """pFedGate's own settings."""

    smallest_budget: float
    cost: Literal["parameters", "flops", "seconds"]
    importance: Importance
    budget_per: BudgetPer
    touched_limit: float
    gate_learning_rate: float
    gate_gradients: Literal["exact", "estimated"]
    gate_paths: Literal[1, 2]
    gate_bias: float
    gate_pool: int
    gate_input_norm: bool
    gate_batch_norm: bool
    gate_sigmoid: bool
    gate_input: Sees
    gate_window: int
    dense_last: bool


def check(model: nn.Module, manifest: Manifest, example: torch.Tensor) -> None:
    """Raise CannotGate for a model that cannot be run block by block: torch.fx must be able to trace it."""
    check_gated(model, example)


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return steps under a new gate, which picks blocks within ``budget``. Raises BudgetTooSmall."""
    assert isinstance(rehearsal, TorchRehearsal), "its engine is PyTorch's"
    return _GatedEffort(rehearsal, budget)


def train(job: Job) -> Trained:
    """Train one round. Raises BudgetTooSmall."""
    if job.planned("dense", 1):
        return _train_dense(job)
    received, settings = newest_model(job), job.assignment.settings
    gated = gated_model(job, received)
    result = take_gated_steps(job, gated, model_rate=settings.learning_rate_of(job.assignment.round))
    touched = BlockMask(gated.touched)
    trained = job.engine.read()
    whole = job.received is not None and is_whole(job.manifest, job.received)
    update = Update(pack(job.manifest, trained, touched), touched, base=None if whole else received)
    judge = partial(evaluate, torch_engine(job).model, torch_engine(job).task, job.task.validation, gated.each)
    concluded = conclude(job, result, personal=None, update=update, counts=_counts(job, gated), judge=judge)
    state = _state(job, gated, gated.static(), trained, received)
    state = replace(state, memory=concluded.state.memory)
    return replace(concluded, state=state, flops=_flops(job, gated, result))


def _train_dense(job: Job) -> Trained:
    """Train θ without gates for one epoch, for a global model (Table 10); what the device keeps stays."""
    received = newest_model(job)
    job.engine.load({**(job.state.personal or {}), **received})
    once = job.with_settings(local_epochs=1, local_steps=None)
    result = train_loaded(once, purpose="dense")
    whole = job.received is not None and is_whole(job.manifest, job.received)
    values = pack(job.manifest, job.engine.read(), None)
    concluded = conclude(job, result, personal=None, update=Update(values, base=None if whole else received))
    return replace(concluded, state=replace(job.state, memory=concluded.state.memory))


def _counts(job: Job, gated: Gated) -> dict[str, int]:
    """Return a round's counts: values (all, of touched blocks, kept by a batch on average; also of the largest layers),
    and what the gate chose."""
    sizes, samples = gated.table.sizes, int(gated.used.max())  # first blocks are always on
    counts = {
        "values": int(sizes.sum()),
        "values_touched": int(sizes[gated.touched].sum()),
        "values_kept": int(gated.used @ sizes) // samples,
        "batch_masks": len(gated.masks),
        "batches_decided": gated.decided,
    }
    layers = sorted(job.manifest.block_groups("layer").items(), key=lambda layer: -sizes[layer[1]].sum())
    for place, (name, blocks) in enumerate(layers):
        name = name[-50:] if place < COUNTED_LAYERS else "other layers"  # names have at most 64 characters
        for what, count in (("values", sizes[blocks].sum()), ("kept", gated.used[blocks] @ sizes[blocks] // samples)):
            counts[f"{what} of {name}"] = counts.get(f"{what} of {name}", 0) + int(count)
    return counts


def evaluate_gated(job: Job) -> Evaluated:
    """Judge the newest θ with the device's gate, in four ways; nothing before there is a gate. After a last round
    without gates θ by itself is the global model."""
    if job.own(Settings).dense_last and job.assignment.round >= job.assignment.settings.rounds:
        return _evaluate_dense(job)
    if job.state.personal is None:
        return Evaluated(None, None)
    job = _reaching(job)
    newest = {name: np.array(tensor) for name, tensor in newest_model(job).items()}
    gated, held_out = gated_model(job, newest), job.task.held_out
    judge = partial(evaluate, torch_engine(job).model, torch_engine(job).task)
    fresh, batch = judge(held_out, gated.each), judge(held_out, gated)
    validation = fresh if job.task.test is None else judge(job.task.validation, gated.each)
    job.engine.load(_trained(job))
    others = {"batch": batch, "local": judge(held_out, gated.each), "local batch": judge(held_out, gated)}
    gated.table.scale_in_place(newest, job.state.own["static"])
    job.engine.load(newest)
    others["static"] = judge(held_out)
    return Evaluated(fresh, None, validation, others)


def _evaluate_dense(job: Job) -> Evaluated:
    job.engine.load({**(job.state.personal or {}), **newest_model(job)})
    global_model = job.engine.evaluate(job.task.held_out, metrics=True)
    if job.state.personal is None:
        return Evaluated(None, global_model)
    job = _reaching(job)
    gated, judge = gated_model(job, _trained(job)), partial(evaluate, torch_engine(job).model, torch_engine(job).task)
    local = judge(job.task.held_out, gated.each)
    validation = local if job.task.test is None else judge(job.task.validation, gated.each)
    return Evaluated(local, global_model, validation, {"local": local, "local batch": judge(job.task.held_out, gated)})


def adapt(job: Job) -> DeviceState:
    """Train a gate for the finished θ, which stays as it is. A device whose budget is too small has a gate of the
    federation's smallest budget, which θ is cut for."""
    job = _reaching(job)
    received = newest_model(job)
    gated = gated_model(job, received)
    best = float("inf")
    kept: tuple[Tensors, Gates] = gate_tensors(gated.gate), np.zeros(0)
    epochs = job.assignment.settings.finetune_epochs or ADAPT_EPOCHS
    once = job.with_settings(local_epochs=1, local_steps=None)
    for epoch in range(epochs):
        with buffers_kept(
            torch_engine(job).model
        ):  # running statistics of the model are no more the device's than its weights
            take_gated_steps(once, gated, model_rate=None, purpose=f"adapt {epoch}")
        gates = gated.static()
        loss = evaluate(torch_engine(job).model, job.task, job.task.validation, gated.each).loss
        if loss > best:
            break
        best, kept = loss, (gate_tensors(gated.gate), gates)
    load_gate(gated.gate, kept[0])
    return _state(job, gated, kept[1], job.engine.read(), received)


def _reaching(job: Job) -> Job:
    """Return the same work with the federation's smallest budget where the device's own is below it."""
    return replace(job, budget=max(job.budget, job.own(Settings).smallest_budget))


def newest_model(job: Job) -> Tensors:
    """Return the newest θ: what came, or what changed of it on top of what the device holds."""
    if job.received is None or is_whole(job.manifest, job.received) or job.state.model is None:
        return whole_model(job.manifest, job.received)
    held = _trained(job)
    touched = BlockMask(job.state.own["touched"].astype(bool))
    merge_in_place(job.manifest, held, job.state.own["received"], touched)
    merge_in_place(job.manifest, held, job.received.values, job.received.mask)
    return held


def _trained(job: Job) -> Tensors:
    """Return θ as this device's last round left it, copied."""
    return {name: np.array(tensor) for name, tensor in unpack_whole(job.manifest, job.state.own["model"]).items()}


def _state(job: Job, gated: Gated, gates: Gates, trained: Tensors, received: Tensors) -> DeviceState:
    """Return the state to keep: θ as ``trained``, what was ``received`` where it has changed since, the gate, and the
    model under the mean ``gates``, for which ``trained`` is overwritten."""
    touched = BlockMask(gated.touched)
    own: Tensors = {f"gate:{name}": tensor for name, tensor in gate_tensors(gated.gate).items()}
    own["model"], own["received"] = pack(job.manifest, trained, None), pack(job.manifest, received, touched)
    own["touched"], own["static"] = gated.touched.astype(np.uint8), gates
    if job.own(Settings).cost == "seconds" and gated.budget.costs is not None:
        own["nanoseconds"] = gated.budget.costs
    gated.table.scale_in_place(trained, gates)
    return DeviceState(trained, job.state.memory, own, job.assignment.model_sha256)


def gated_model(job: Job, tensors: Tensors) -> Gated:
    """Return the model with ``tensors``, under the device's gate and within its budget. Raises BudgetTooSmall."""
    rules, manifest = job.own(Settings), job.manifest
    job.engine.load({**(job.state.personal or {}), **tensors})
    table, paths = manifest.block_table, rules.gate_paths
    length, shape = len(table.sizes), manifest.input_shape
    gate = GatingLayer(
        shape,
        length,
        seed=derive_seed(f"{job.federation}:{job.assignment.settings.seed}", "gate"),
        paths=paths,
        bias=rules.gate_bias,
        pool=rules.gate_pool or fitting_pool(shape, length, paths, manifest.trainable_values),
        input_norm=rules.gate_input_norm,
        batch_norm=rules.gate_batch_norm,
        squashes=rules.gate_sigmoid,
        sees=rules.gate_input,
    )
    stored = {name.removeprefix("gate:"): t for name, t in job.state.own.items() if name.startswith("gate:")}
    if not load_gate(gate, stored) and rules.gate_input == "device":
        gate.mean.copy_(_mean_input(job.task.train))
    budget = Budget(
        job.budget,
        _costs(job),
        rules.touched_limit,
        importance=rules.importance,
        groups=budget_groups(manifest, rules.budget_per, rules.smallest_budget, rules.cost),
    )
    probe = 1.0 if rules.gate_gradients == "exact" else PROBE
    try:
        return Gated(
            torch_engine(job).model,
            table,
            gate,
            budget,
            flops=block_flops(manifest),
            probe=probe,
            window=rules.gate_window,
        )
    except ValueError as error:
        raise BudgetTooSmall(str(error)) from None


def _mean_input(batches: Batches) -> torch.Tensor:
    """Return the mean of all inputs."""
    total, count = torch.zeros(()), 0
    for inputs, _ in batches:
        total, count = total + as_tensor(inputs).float().sum(0), count + len(inputs)
    return total / count


def _costs(job: Job) -> Costs | None:
    match job.own(Settings).cost:
        case "parameters":
            return None
        case "flops":
            return block_flops(job.manifest)
    if "nanoseconds" in job.state.own:
        return job.state.own["nanoseconds"].astype(np.int64)
    inputs, _ = next(iter(job.task.train))
    return block_nanoseconds(torch_engine(job).model, job.manifest, as_tensor(inputs))


def take_gated_steps(job: Job, gated: Gated, *, model_rate: float | None, purpose: str = "train") -> LocalResult:
    """Take a round's steps of the gate and, at ``model_rate``, of the model."""
    settings = job.assignment.settings
    rate = job.own(Settings).gate_learning_rate
    decay = settings.learning_rate_of(job.assignment.round) / settings.learning_rate
    optimisation = GatedOptimisation(gated, settings, model_rate=model_rate, gate_rate=rate * decay)

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return gated(inputs)

    return take_steps(
        torch_engine(job).model,
        job.task,
        settings,
        optimisation,
        forward,
        learning_rate=settings.learning_rate_of(job.assignment.round),
        seed=job.seed(purpose),
        progress=job.progress,
    )


class _GatedEffort:
    """Steps of the model under a gate that has learned nothing yet: how many blocks are on follows from the budget."""

    def __init__(self, rehearsal: TorchRehearsal, budget: float) -> None:
        self._rehearsal, self._budget = rehearsal, budget
        rules = own_settings(rehearsal.settings, Settings)
        if budget < rules.smallest_budget - 1e-9:
            raise BudgetTooSmall(f"the federation's smallest budget is {rules.smallest_budget:g}; raise the budget")
        self._gated(self._job(1, None))
        self.values = round(rules.touched_limit * rehearsal.manifest.trainable_values)

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        job = self._job(steps, samples)
        gated = self._gated(job)
        return self._rehearsal.timed(
            lambda progress: take_gated_steps(replace(job, progress=progress), gated, model_rate=0.0)
        )

    def flops(self) -> int:
        job = self._job(1, None)
        gated = self._gated(job)
        with torch.random.fork_rng(devices=[]):
            result = take_gated_steps(job, gated, model_rate=0.0)
        return _flops(job, gated, result)

    def judge(self, samples: int) -> None:
        gated = self._gated(self._job(1, samples))
        evaluate(self._rehearsal.model, self._rehearsal.task, [self._rehearsal.batch(samples)], gated.each)

    def _gated(self, job: Job) -> Gated:
        return gated_model(job, job.engine.read())

    def _job(self, steps: int, samples: int | None) -> Job:
        rehearsal = self._rehearsal
        return rehearsed(rehearsal, rehearsal.engine(), steps, samples, self._budget)


def _flops(job: Job, gated: Gated, result: LocalResult) -> int:
    """Return the FLOPs of blocks that were on: forward, and both gradients; the gate's input needs none."""
    rules = job.own(Settings)
    seen = {"batch": result.samples, "device": result.steps, "nothing": 0}[rules.gate_input]
    features = gated.gate.linear.in_features if seen else 0
    return 3 * gated.worked + 4 * seen * features * len(gated.table.sizes) * rules.gate_paths


PFEDGATE = DeviceMethod(
    train=train,
    evaluate=evaluate_gated,
    adapt=adapt,
    check=check,
    effort=effort,
    picks_best=False,  # the gate belongs to the newest θ
    engines=("torch",),
    acts=("batches_decided",),
)
"""Between rounds the gate is in ``own``, with θ as it was left and as it came."""
