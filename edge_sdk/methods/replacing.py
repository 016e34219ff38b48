"""Replace weights of a sparse model during training: drop some of each layer, and add as many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.elements import ElementMask, Flags
from sparrow.protocol.flops import growth_flops
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.sparsity import Grown, Pruned

from ..engines import Engine
from ..engines.training import GRADIENTS, Batch, Change, TrainingDiverged

Flat = NDArray[np.float32]

Rule = Callable[[int, str, Flat, Flat, Flags], tuple[Pruned, Grown]]
"""(local step, tensor's name, weights [n], gradient of all of them [n], existing [n]) -> dropped, added."""


class Replacing:
    """An ``Adjustment`` that applies ``rule`` after ``steps`` in every layer that is not dense. mask: the current one.
    counts: weights dropped, revived, guided, and new positions. flops: FLOPs of full gradients."""

    def __init__(
        self, engine: Engine, mask: ElementMask, *, steps: Collection[int], rule: Rule, batches: int = 1
    ) -> None:
        self.mask = mask
        self.steps = steps
        self.batches = batches
        self.counts: Counter[str] = Counter()
        self.flops = 0
        self._engine = engine
        self._rule = rule

    def decide(self, step: int, batches: Sequence[Batch]) -> Change:
        """Drop and revive."""
        sparse = [name for name, count in self.mask.counts.items() if count < self.mask.exists[name].size]
        exists: dict[str, Any] = dict(self.mask.exists)
        renewed: dict[str, Flags] = {}
        weights = self._engine.read()
        left = Tensors()

        def visit(name: str, gradient: NDArray[Any]) -> None:
            before = self.mask.exists[name].reshape(-1)
            shape = weights[name].shape
            values, steepness = (np.asarray(each, np.float32).reshape(-1) for each in (weights[name], gradient))
            if not (np.isfinite(values).all() and np.isfinite(steepness).all()):
                raise TrainingDiverged(f"{name} or its gradient is not finite after step {step}", failure=GRADIENTS)
            pruned, grown = self._rule(step, name, values, steepness, before)
            kept = grown.exists.copy()
            # A guided weight that was dropped and revived starts at 0.
            kept[pruned.guided] = False
            left[name] = np.where(kept.reshape(shape), weights[name], np.float32(0))
            exists[name] = grown.exists.reshape(shape)
            renewed[name] = (~pruned.exists & (before | grown.exists)).reshape(shape)
            self.counts.update(
                dropped=len(pruned.guided) + len(pruned.magnitude),
                dropped_guided=len(pruned.guided),
                grown_guided=len(grown.guided),
                replaced=int(np.count_nonzero(grown.exists & ~before)),
            )

        self._engine.differentiate(batches, sparse, visit)
        # After differentiating, because the backward pass reads the old weights.
        self._engine.load(left)
        self.counts.update(adjusted=1)
        self.flops += growth_flops(self._engine.manifest, sum(len(targets) for _, targets in batches), self.mask)
        self.mask = ElementMask(exists)
        return Change(self.mask.exists, renewed)
