"""Helpers of methods that replace weights of a sparse model during training (FedDST, FedSGC)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.elements import ElementMask, Flags
from sparrow.protocol.errors import BundleError
from sparrow.protocol.masks import pack
from sparrow.protocol.sparsity import (
    At,
    Grown,
    LayerSparsity,
    Pruned,
    adjustment_steps,
    device_interval,
    grow,
    layer_densities,
    over_pruning,
    prune,
)

from . import Job, MethodSettings, Trained, Update
from .merging import whole_model
from .replacing import Flat, Replacing
from .rounds import conclude, train_loaded
from .whole import part_of, pull_of, pulled, sparse_mask

Directions = dict[str, NDArray[np.int8]]
"""The direction map of each layer, int8 [n] in -1..1."""


class SparseTrainingSettings(MethodSettings):
    """The own settings of methods that replace weights during training."""

    density: float
    layer_sparsity: LayerSparsity
    device_interval: int | Literal["auto"]
    of_rounds: int
    over_pruning: float
    adjust_at: At
    grow_batches: int
    exploration: float
    proximal_weight: float


def train_replacing(job: Job, replacing: Replacing, proximal_weight: float) -> Trained:
    """Train the received sparse model, replace weights on the way, and send the result."""
    job.engine.load(whole_model(job.manifest, job.received))
    result = train_loaded(job, part_of(sparse_mask(job)), pull=pull_of(proximal_weight), adjustment=replacing)
    update = Update(pack(job.manifest, job.engine.read(), replacing.mask), replacing.mask)
    counts = {**replacing.counts, **pulled(result, proximal_weight)}
    trained = conclude(job, result, personal=None, update=update, counts=counts)
    memory = {**trained.state.memory, "epochs": _epochs(job) + job.assignment.settings.local_epochs}
    state = replace(trained.state, memory=memory)
    return replace(trained, state=state, flops=trained.flops + replacing.flops)


def replacing_of(
    job: Job,
    rules: SparseTrainingSettings,
    share: float = 0.0,
    basis: Literal["total", "moved"] = "total",
) -> Replacing:
    """Return this round's adjustment: Eq. 1-4 of FedSGC. Raises BundleError if the payload does not fit the mask."""
    mask = sparse_mask(job)
    rule = _Rule(job, mask, rules, share, basis)
    return Replacing(job.engine, mask, steps=rule.times, rule=rule, batches=rules.grow_batches)


def _epochs(job: Job) -> int:
    """Return e_c, the number of epochs in this device's earlier rounds."""
    return int(job.state.memory.get("epochs", 0))


class _Rule:
    """Eq. 1-4 for a round. times: local step of a replacement -> the device's epochs, for the cosine."""

    def __init__(
        self,
        job: Job,
        mask: ElementMask,
        rules: SparseTrainingSettings,
        share: float,
        basis: Literal["total", "moved"],
    ) -> None:
        self._job = job
        self._rules = rules
        self._mask = mask
        self._share = share
        self._basis = basis
        self._expected = int(job.planned("expected_epochs", 2**40))
        settings = job.assignment.settings
        plan = adjustment_steps(
            _epochs(job),
            settings.local_epochs,
            len(job.task.train),
            device_interval(rules.device_interval, rules.of_rounds, settings.rounds, self._expected),
            self._expected,
            rules.adjust_at,
        )
        # A dense model has no weights to revive.
        self.times = dict(plan if mask.count < mask.size else [])
        if self.times:
            self._start = whole_model(job.manifest, job.received)
            self._directions = _expand(job.received.parts.get("signs") if job.received else None, mask)
            self._densities = layer_densities(job.manifest, rules.density, rules.layer_sparsity)

    def __call__(self, step: int, name: str, weights: Flat, gradient: Flat, exists: Flags) -> tuple[Pruned, Grown]:
        """Drop to D_l, revive to K_l."""
        share = self._share
        directions = self._directions[name]
        sigma = over_pruning(self.times[step], self._expected, self._rules.over_pruning)
        left = math.floor((1 - sigma) * self._densities[name] * weights.size + 1e-9)
        moved = np.subtract(weights, self._start[name].reshape(-1), dtype=np.float32)
        pruned = prune(weights, moved, exists, directions, left=left, share=share, basis=self._basis)
        explored = self._explored(step, name, weights.size)
        count = self._mask.counts[name]
        return pruned, grow(gradient, pruned, directions, count=count, share=share, candidates=explored)

    def _explored(self, step: int, name: str, size: int) -> Flags | None:
        """Draw the positions in which weights may grow, anew for each step; None for all."""
        share = self._rules.exploration
        if share == 1:
            return None
        chance = np.random.Generator(np.random.PCG64(self._job.seed(f"explore {step} {name}")))
        return chance.random(size, dtype=np.float32) < share


def _expand(signs: NDArray[np.int8] | None, mask: ElementMask) -> Directions:
    """Return the received direction map, or zeros."""
    directions = {name: np.zeros(flags.size, dtype=np.int8) for name, flags in mask.exists.items()}
    if signs is None:
        return directions
    if len(signs) not in (mask.count, mask.size):
        raise BundleError(f"the payload has {len(signs)} directions for {mask.count} weights; fetch it again")
    start = 0
    for name, layer in directions.items():
        where = mask.index[name] if len(signs) == mask.count else np.arange(layer.size)
        layer[where] = signs[start : start + len(where)]
        start += len(where)
    return directions
