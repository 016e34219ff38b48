"""Replacing weights of a sparse model while it trains: some of each layer go, as many others come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_sdk.protocol.elements import ElementMask, Flags
from edge_sdk.protocol.flops import growth_flops
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.sparsity import Grown, Pruned
from edge_sdk.tasks import Task
from edge_sdk.training.elements import flags_of
from edge_sdk.training.gradients import Batch, visit_gradients
from edge_sdk.training.local import TrainingDiverged
from edge_sdk.training.optimisation import Change

Flat = NDArray[np.float32]
Rule = Callable[[int, str, Flat, Flat, Flags], tuple[Pruned, Grown]]
"""(local step, tensor's name, weights [n], gradient of all of them [n], what exists [n]) -> what goes, what comes."""


class Replacing:
    """An ``Adjustment`` that replaces weights by ``rule`` after ``steps``, in every layer that is not dense.

    mask: what exists now. counts: how many weights were dropped, revived, how many of them guided, and how many
    positions are new. flops: of the batches whose whole gradients were taken.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        manifest: Manifest,
        mask: ElementMask,
        *,
        steps: Collection[int],
        rule: Rule,
        batches: int = 1,
    ) -> None:
        self.mask = mask
        self.steps = steps
        self.batches = batches
        self.counts: Counter[str] = Counter()
        self.flops = 0
        self._model, self._task, self._manifest, self._rule = model, task, manifest, rule

    def decide(self, step: int, batches: Sequence[Batch]) -> Change:
        """Drop and revive. Raises TrainingDiverged for weights or gradients that are not finite."""
        sparse = [name for name, count in self.mask.counts.items() if count < self.mask.exists[name].size]
        exists: dict[str, Any] = dict(self.mask.exists)
        renewed: dict[str, torch.Tensor] = {}
        parameters = dict(self._model.named_parameters())
        changes: list[partial[None]] = []

        def visit(name: str, gradient: torch.Tensor) -> None:
            before, shape = self.mask.exists[name].reshape(-1), parameters[name].shape
            weights, steepness = (array_of(each).reshape(-1) for each in (parameters[name], gradient))
            if not (np.isfinite(weights).all() and np.isfinite(steepness).all()):
                raise TrainingDiverged(
                    f"{name} or its gradient is not finite after step {step}; lower the learning rate"
                )
            pruned, grown = self._rule(step, name, weights, steepness, before)
            kept = grown.exists.copy()
            kept[pruned.guided] = False  # were one of them taken back, it would start at 0
            changes.append(partial(multiply, parameters[name], kept.reshape(shape)))
            exists[name] = grown.exists.reshape(shape)
            renewed[name] = torch.from_numpy((~pruned.exists & (before | grown.exists)).reshape(shape))
            self.counts.update(
                dropped=len(pruned.guided) + len(pruned.magnitude),
                dropped_guided=len(pruned.guided),
                grown_guided=len(grown.guided),
                replaced=int(np.count_nonzero(grown.exists & ~before)),
            )

        visit_gradients(self._model, self._task, batches, sparse, visit)
        for change in changes:  # not before: the backward pass goes through weights as they were
            change()
        self.counts.update(adjusted=1)
        self.flops += growth_flops(self._manifest, sum(len(targets) for _, targets in batches), self.mask)
        self.mask = ElementMask(exists)
        return Change(flags_of(self.mask) or {}, renewed)


def array_of(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Return a view where the tensor lies row by row on the CPU, else a copy."""
    array: NDArray[np.float32] = tensor.detach().cpu().contiguous().numpy()
    return array


@torch.no_grad()
def multiply(parameter: torch.Tensor, kept: Flags) -> None:
    """Make zero what is not kept."""
    parameter.mul_(torch.from_numpy(kept).to(parameter.device))
