"""FedSGC, the device half: train the weights that exist, and now and then replace some of them.

Tian, Liu, Li, Cheung, Wang, "Gradient-Congruity Guided Federated Sparse Training", arXiv:2405.01189. In re-adjusting
rounds, when as many of its own epochs have passed, a device drops from each layer, for a moment, all but D_l of its
weights, and revives as many as are missing to K_l:

    drop    those that moved against the direction map, sign(θ_c - θ_c0) = -d, smallest |θ_c| first          (Eq. 1)
            and the smallest |θ_c| of the others                                                              (Eq. 2)
    revive  those whose descent agrees with it, sign(-G) = d, largest |G| first                               (Eq. 3)
            and the largest |G| of the others                                                                 (Eq. 4)

where λ is the share that directions guide, σ(t) = α/2·(1 + cos(πt/T_c)) how many are dropped beyond sparsity, and G the
gradient of the whole layer, taken before. The rules are in ``protocol.sparsity``, the server half keeps the map.

Where the paper is silent or errs (the method card has the reasons):

- Eq. 3 compares the map with a movement that positions without a weight do not have: -G takes its place.
- What is due after a round's last epoch is done one epoch earlier: new weights that nobody trains are zeros, which the
  server's prune removes first, and the mask would stay as it is.
- Full local epochs; a new optimiser each round, without memory of what is new; G of the plain loss on the last batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.methods import Job, Trained
from edge_sdk.methods.fedavg import sparse_mask
from edge_sdk.methods.fedprox import FedProx
from edge_sdk.protocol.elements import ElementMask, Flags
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.sparsity import (
    Grown,
    Pruned,
    adjustment_steps,
    grow,
    layer_densities,
    over_pruning,
    prune,
)
from edge_sdk.training.merging import whole_model
from edge_sdk.training.replacing import Flat, Replacing


class FedSGC(FedProx):
    """Sparse local training; between rounds a device keeps how many epochs it has trained, and the mask by name."""

    def train(self, job: Job) -> Trained:
        """FedAvg's of what exists. Raises what that does."""
        trained = super().train(job)
        memory = {**trained.state.memory, "epochs": _epochs(job) + job.assignment.settings.local_epochs}
        return replace(trained, state=replace(trained.state, memory=memory))

    def replacing(self, job: Job) -> Replacing:
        """Eq. 1-4, in rounds where they are due."""
        return replacing_of(job)


def replacing_of(job: Job) -> Replacing:
    """What replaces weights in this round. Raises BundleError for a payload without a mask of elements."""
    mask = sparse_mask(job)
    rules = _Rules(job, mask)
    batches = int(job.assignment.settings.method_settings["grow_batches"])
    return Replacing(job.model, job.task, job.manifest, mask, steps=rules.times, rule=rules, batches=batches)


def _epochs(job: Job) -> int:
    """Epochs that this device has trained in earlier rounds, e_c."""
    return int(job.state.memory.get("epochs", 0))


class _Rules:
    """Eq. 1-4, for a round of which the plan and the device's epochs say when weights are replaced.

    times: local step after which they are -> epochs of the device, by the cosine's clock.
    """

    def __init__(self, job: Job, mask: ElementMask) -> None:
        own: Mapping[str, Any] = job.assignment.settings.method_settings
        self._job, self._own, self._mask = job, own, mask
        self._expected = int(job.assignment.plan.get("expected_epochs", 0))
        plan = adjustment_steps(
            _epochs(job),
            job.assignment.settings.local_epochs,
            len(job.task.train),
            own["device_interval"],
            self._expected,
            own["adjust_at"],
        )
        self.times = dict(plan if mask.count < mask.size else [])  # where all exists, nothing is replaced
        if self.times:
            self._start = whole_model(job.manifest, job.received)
            self._directions = self._expand(job.received.signs if job.received else None)
            self._densities = layer_densities(job.manifest, own["density"], own["layer_sparsity"])

    def _expand(self, signs: NDArray[np.int8] | None) -> dict[str, NDArray[np.int8]]:
        """The direction map of each layer, int8 [n], of what was received: for weights that exist, or for all."""
        mask = self._mask
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

    def __call__(self, step: int, name: str, weights: Flat, gradient: Flat, exists: Flags) -> tuple[Pruned, Grown]:
        """Drop to D_l, revive to K_l."""
        own, directions = self._own, self._directions[name]
        sigma = over_pruning(self.times[step], self._expected, own["over_pruning"])
        left = math.floor((1 - sigma) * self._densities[name] * weights.size + 1e-9)
        moved = np.subtract(weights, self._start[name].reshape(-1), dtype=np.float32)
        share, basis = float(own.get("guided_share", 0.0)), own.get("guided_basis", "total")
        pruned = prune(weights, moved, exists, directions, left=left, share=share, basis=basis)
        explored = self._explored(step, name, weights.size)
        count = self._mask.counts[name]
        return pruned, grow(gradient, pruned, directions, count=count, share=share, candidates=explored)

    def _explored(self, step: int, name: str, size: int) -> Flags | None:
        """The positions among which weights grow, drawn anew each time; None for all."""
        share = float(self._own["exploration"])
        if share == 1:
            return None
        chance = np.random.Generator(np.random.PCG64(self._job.seed(f"explore {step} {name}")))
        return chance.random(size, dtype=np.float32) < share
