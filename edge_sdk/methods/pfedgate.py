"""pFedGate, the device half: a private gating layer selects and scales blocks of the shared model for each batch.

Chen, Yao, Gao, Ding, Li, ICML 2023, arXiv:2305.02776. For each batch of a round (Algorithm 1)

    (G, M) = gate(x);   I = knapsack(G) within the budget;   θ' = θ ⊛ M·I;   one step of gate and θ on f(θ'; x, y)

with a knapsack for linear layers and one for the others (``BlockTable.select``). Updates hold θ of the blocks that any
batch used. The device keeps: as personal model θ under its mean gates; θ as trained; the gate; and the received values
of touched blocks, to rebuild the global model.

A device is evaluated on the newest θ with gates per sample. Also reported: gates per batch, as in the paper; both on θ
as trained here, which the paper reports; and mean gates.

Differences between paper and released code: gates of dropped blocks learn too; importances are not clipped; momentum
starts anew each round and moves only touched blocks; a batch of one sample, which the code skips, uses the gate's
running statistics.
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
"""Largest number of epochs for a late device's gate; it stops earlier if the validation loss rises."""

COUNTED_LAYERS = 12
"""Number of layers with their own counts of kept values, since a report has room for 32 counts."""


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
    """Raise CannotGate if torch.fx cannot trace the model."""
    check_gated(model, example)


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return the effort of steps under a new gate within ``budget``. Raises BudgetTooSmall if no gate fits it."""
    assert isinstance(rehearsal, TorchRehearsal), "its engine is PyTorch's"
    return _GatedEffort(rehearsal, budget)


def train(job: Job) -> Trained:
    """Train one round. Raises BudgetTooSmall if no gate fits the budget."""
    if job.planned("dense", 1):
        return _train_dense(job)
    received = newest_model(job)
    settings = job.assignment.settings
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
    """Train θ without gates for one epoch (Table 10); the device's state stays."""
    received = newest_model(job)
    job.engine.load({**(job.state.personal or {}), **received})
    once = job.with_settings(local_epochs=1, local_steps=None)
    result = train_loaded(once, purpose="dense")
    whole = job.received is not None and is_whole(job.manifest, job.received)
    values = pack(job.manifest, job.engine.read(), None)
    concluded = conclude(job, result, personal=None, update=Update(values, base=None if whole else received))
    return replace(concluded, state=replace(job.state, memory=concluded.state.memory))


def _counts(job: Job, gated: Gated) -> dict[str, int]:
    """Return a round's counts (docs/methods.md)."""
    sizes = gated.table.sizes
    # First blocks are always on.
    samples = int(gated.used.max())
    counts = {
        "values": int(sizes.sum()),
        "values_touched": int(sizes[gated.touched].sum()),
        "values_kept": int(gated.used @ sizes) // samples,
        "batch_masks": len(gated.masks),
        "batches_decided": gated.decided,
    }
    layers = sorted(job.manifest.block_groups("layer").items(), key=lambda layer: -sizes[layer[1]].sum())
    for place, (name, blocks) in enumerate(layers):
        # Names of counts have at most 64 characters.
        name = name[-50:] if place < COUNTED_LAYERS else "other layers"
        for what, count in (("values", sizes[blocks].sum()), ("kept", gated.used[blocks] @ sizes[blocks] // samples)):
            counts[f"{what} of {name}"] = counts.get(f"{what} of {name}", 0) + int(count)
    return counts


def evaluate_gated(job: Job) -> Evaluated:
    """Evaluate the newest θ with the device's gate, in four ways; nothing without a gate. After a dense last round θ
    is also the global model."""
    if job.own(Settings).dense_last and job.assignment.round >= job.assignment.settings.rounds:
        return _evaluate_dense(job)
    if job.state.personal is None:
        return Evaluated(None, None)
    job = _reaching(job)
    newest = {name: np.array(tensor) for name, tensor in newest_model(job).items()}
    gated = gated_model(job, newest)
    held_out = job.task.held_out
    judge = partial(evaluate, torch_engine(job).model, torch_engine(job).task)
    fresh = judge(held_out, gated.each)
    batch = judge(held_out, gated)
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
    gated = gated_model(job, _trained(job))
    judge = partial(evaluate, torch_engine(job).model, torch_engine(job).task)
    local = judge(job.task.held_out, gated.each)
    validation = local if job.task.test is None else judge(job.task.validation, gated.each)
    return Evaluated(local, global_model, validation, {"local": local, "local batch": judge(job.task.held_out, gated)})


def adapt(job: Job) -> DeviceState:
    """Train a gate for the finished θ, which stays fixed."""
    job = _reaching(job)
    received = newest_model(job)
    gated = gated_model(job, received)
    best = float("inf")
    kept: tuple[Tensors, Gates] = gate_tensors(gated.gate), np.zeros(0)
    epochs = job.assignment.settings.finetune_epochs or ADAPT_EPOCHS
    once = job.with_settings(local_epochs=1, local_steps=None)
    for epoch in range(epochs):
        # Running statistics stay fixed like the weights.
        with buffers_kept(torch_engine(job).model):
            take_gated_steps(once, gated, model_rate=None, purpose=f"adapt {epoch}")
        gates = gated.static()
        loss = evaluate(torch_engine(job).model, job.task, job.task.validation, gated.each).loss
        if loss > best:
            break
        best = loss
        kept = (gate_tensors(gated.gate), gates)
    load_gate(gated.gate, kept[0])
    return _state(job, gated, kept[1], job.engine.read(), received)


def _reaching(job: Job) -> Job:
    """Return the same job with at least the federation's smallest budget."""
    return replace(job, budget=max(job.budget, job.own(Settings).smallest_budget))


def newest_model(job: Job) -> Tensors:
    """Return the newest θ: the payload, or its changes applied to the device's copy."""
    if job.received is None or is_whole(job.manifest, job.received) or job.state.model is None:
        return whole_model(job.manifest, job.received)
    held = _trained(job)
    touched = BlockMask(job.state.own["touched"].astype(bool))
    merge_in_place(job.manifest, held, job.state.own["received"], touched)
    merge_in_place(job.manifest, held, job.received.values, job.received.mask)
    return held


def _trained(job: Job) -> Tensors:
    """Return a copy of θ after this device's last round."""
    return {name: np.array(tensor) for name, tensor in unpack_whole(job.manifest, job.state.own["model"]).items()}


def _state(job: Job, gated: Gated, gates: Gates, trained: Tensors, received: Tensors) -> DeviceState:
    """Return the state to keep: θ as ``trained``, the ``received`` values of touched blocks, the gate, and the model
    under the mean ``gates``, which overwrites ``trained``."""
    touched = BlockMask(gated.touched)
    own: Tensors = {f"gate:{name}": tensor for name, tensor in gate_tensors(gated.gate).items()}
    own["model"] = pack(job.manifest, trained, None)
    own["received"] = pack(job.manifest, received, touched)
    own["touched"] = gated.touched.astype(np.uint8)
    own["static"] = gates
    if job.own(Settings).cost == "seconds" and gated.budget.costs is not None:
        own["nanoseconds"] = gated.budget.costs
    gated.table.scale_in_place(trained, gates)
    return DeviceState(trained, job.state.memory, own, job.assignment.model_sha256)


def gated_model(job: Job, tensors: Tensors) -> Gated:
    """Return the model with ``tensors``, under the device's gate and within its budget.

    Raises BudgetTooSmall if no gate fits it.
    """
    rules = job.own(Settings)
    manifest = job.manifest
    job.engine.load({**(job.state.personal or {}), **tensors})
    table = manifest.block_table
    paths = rules.gate_paths
    length = len(table.sizes)
    shape = manifest.input_shape
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
    total = torch.zeros(())
    count = 0
    for inputs, _ in batches:
        total = total + as_tensor(inputs).float().sum(0)
        count += len(inputs)
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
    """Take a round's steps of the gate and, unless ``model_rate`` is None, of the model."""
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
    def __init__(self, rehearsal: TorchRehearsal, budget: float) -> None:
        self._rehearsal = rehearsal
        self._budget = budget
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
    """Return the FLOPs of active blocks: forward, and both gradients."""
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
    # The gate belongs to the newest θ.
    picks_best=False,
    engines=("torch",),
    acts=("batches_decided",),
)
"""Between rounds ``own`` has the gate, θ as trained, and θ as received."""
