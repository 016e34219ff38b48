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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge_sdk.methods import Job, Trained, Update, conclude
from edge_sdk.methods.fedavg import FedAvg
from edge_sdk.protocol.elements import ElementMask
from edge_sdk.protocol.errors import BundleError
from edge_sdk.protocol.flops import growth_flops
from edge_sdk.protocol.masks import pack
from edge_sdk.protocol.sparsity import adjustment_steps, grow, layer_densities, over_pruning, prune
from edge_sdk.training.elements import flags_of
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.gradients import Batch, visit_gradients
from edge_sdk.training.local import TrainingDiverged, get_tensors, set_tensors, train_locally
from edge_sdk.training.merging import whole_model
from edge_sdk.training.optimizer import Change


class FedSGC(FedAvg):
    """Sparse local training; between rounds a device keeps how many epochs it has trained, and the mask by name."""

    def train(self, job: Job) -> Trained:
        """One round. Raises BundleError for a payload that does not fit, TrainingDiverged when the round failed."""
        settings = job.assignment.settings
        set_tensors(job.model, whole_model(job.manifest, job.received))
        replacing = Replacing(job)
        result = train_locally(
            job.model,
            job.task,
            settings,
            learning_rate=settings.learning_rate_of(job.assignment.round),
            freezing=Freezing(job.model, job.manifest, None, flags_of(replacing.mask)),
            proximal_weight=self.proximal_weight(job),
            adjustment=replacing,
            seed=job.seed("train"),
            progress=job.progress,
        )
        values = pack(job.manifest, get_tensors(job.model, job.manifest), replacing.mask)
        update = Update(values, replacing.mask)
        trained = conclude(job, result, personal=None, update=update, counts=replacing.counts)
        memory = {**trained.state.memory, "epochs": replacing.epochs_before + settings.local_epochs}
        return replace(trained, state=replace(trained.state, memory=memory), flops=trained.flops + replacing.flops)

    def proximal_weight(self, job: Job) -> float:
        """μ, a setting."""
        return float(job.assignment.settings.method_settings["proximal_weight"])


class Replacing:
    """Replaces weights during one round, where its plan and the device's epochs ask for it.

    mask: what exists now. counts: how many weights were dropped, revived and how many of them guided. flops: of the
    batches whose whole gradients were taken.
    """

    def __init__(self, job: Job) -> None:
        if job.received is None or not isinstance(job.received.mask, ElementMask):
            raise BundleError("the payload has no mask of elements; update the coordinator, or this SDK")
        self.mask = job.received.mask
        self.counts: Counter[str] = Counter()
        self.flops = 0
        self.epochs_before = int(job.state.memory.get("epochs", 0))
        self._job = job
        own: Mapping[str, Any] = job.assignment.settings.method_settings
        self._own = own
        self.batches = int(own["grow_batches"])
        self._expected = int(job.assignment.plan.get("expected_epochs", 0))
        plan = adjustment_steps(
            self.epochs_before,
            job.assignment.settings.local_epochs,
            len(job.task.train),
            own["device_interval"],
            self._expected,
            own["adjust_at"],
        )
        self._times = dict(plan if self.mask.count < self.mask.size else [])  # where all exists, nothing is replaced
        self.steps = self._times.keys()
        if self._times:
            self._start = whole_model(job.manifest, job.received)
            self._directions = self._expand(job.received.signs)
            self._densities = layer_densities(job.manifest, own["density"], own["layer_sparsity"])

    def _expand(self, signs: NDArray[np.int8] | None) -> dict[str, NDArray[np.int8]]:
        """The direction map of each layer, int8 [n], of what was received: for weights that exist, or for all."""
        directions = {name: np.zeros(flags.size, dtype=np.int8) for name, flags in self.mask.exists.items()}
        if signs is None:
            return directions
        if len(signs) not in (self.mask.count, self.mask.size):
            raise BundleError(f"the payload has {len(signs)} directions for {self.mask.count} weights; fetch it again")
        start = 0
        for name, layer in directions.items():
            where = self.mask.index[name] if len(signs) == self.mask.count else np.arange(layer.size)
            layer[where] = signs[start : start + len(where)]
            start += len(where)
        return directions

    def decide(self, step: int, batches: Sequence[Batch]) -> Change:
        """Drop and revive in every layer that is not dense; Eq. 1-4. Raises TrainingDiverged."""
        sigma = over_pruning(self._times[step], self._expected, self._own["over_pruning"])
        sparse = [name for name, count in self.mask.counts.items() if count < self.mask.exists[name].size]
        exists: dict[str, Any] = dict(self.mask.exists)
        renewed: dict[str, torch.Tensor] = {}
        parameters = dict(self._job.model.named_parameters())
        chance = np.random.Generator(np.random.PCG64(self._job.seed(f"explore {step}")))

        def visit(name: str, gradient: torch.Tensor) -> None:
            before = self.mask.exists[name].reshape(-1)
            weights = _flat(parameters[name])
            if not (np.isfinite(weights).all() and np.isfinite(_flat(gradient)).all()):
                raise TrainingDiverged(
                    f"{name} or its gradient is not finite after step {step}; lower the learning rate"
                )
            share, directions = float(self._own.get("guided_share", 0.0)), self._directions[name]
            left = math.floor((1 - sigma) * self._densities[name] * weights.size + 1e-9)
            moved = np.subtract(weights, self._start[name].reshape(-1), dtype=np.float32)
            basis = self._own.get("guided_basis", "total")
            pruned = prune(weights, moved, before, directions, left=left, share=share, basis=basis)
            explored = float(self._own["exploration"])
            candidates = None if explored == 1 else chance.random(weights.size, dtype=np.float32) < explored
            grown = grow(
                _flat(gradient),
                pruned,
                directions,
                count=self.mask.counts[name],
                share=share,
                candidates=candidates,
            )
            shape = parameters[name].shape
            kept = grown.exists.copy()
            kept[pruned.guided] = False  # were one of them taken back, it would start at 0
            changes.append(partial(_multiply, parameters[name], kept.reshape(shape)))
            exists[name] = grown.exists.reshape(shape)
            renewed[name] = torch.from_numpy((~pruned.exists & (before | grown.exists)).reshape(shape))
            self.counts.update(
                dropped=len(pruned.guided) + len(pruned.magnitude),
                dropped_guided=len(pruned.guided),
                grown_guided=len(grown.guided),
                replaced=int(np.count_nonzero(grown.exists & ~before)),
            )

        changes: list[partial[None]] = []
        visit_gradients(self._job.model, self._job.task, batches, sparse, visit)
        for change in changes:  # not before: the backward pass goes through weights as they were
            change()
        self.counts.update(adjusted=1)
        self.flops += growth_flops(self._job.manifest, sum(len(targets) for _, targets in batches), self.mask)
        self.mask = ElementMask(exists)
        return Change(flags_of(self.mask) or {}, renewed)


def _flat(tensor: torch.Tensor) -> NDArray[np.float32]:
    """A copy-free flat view where the tensor lies row by row on the CPU, else a copy."""
    flat: NDArray[np.float32] = tensor.detach().cpu().contiguous().numpy().reshape(-1)
    return flat


@torch.no_grad()
def _multiply(parameter: torch.Tensor, kept: NDArray[np.bool_]) -> None:
    parameter.mul_(torch.from_numpy(kept).to(parameter.device))
