"""Training and prediction with a gating layer and a budget: pFedGate (arXiv:2305.02776).

For each batch, the gating layer gives importances G and scales M, a knapsack chooses blocks I, and the model runs on
θ ⊛ M·I. Predictions make one choice per batch, as in the paper; one per sample, for a device in use; or use a fixed one
by the mean gates over the training batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sparrow.protocol.blocks import BlockTable, Costs, Groups, Importance, Rule, Selection
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.settings import FederationSettings

from ...publishing.modes import evaluating
from ..layout import gains
from ..local import device_of
from ..optimisation import optimizer_of
from .gating import GatingLayer, over_window
from .network import GatedModel
from .per_sample import ScaledRows

PROBE = 0.125
"""Share of a batch that estimates the gradients of inactive blocks' gates."""

WIDE = 32
"""Smallest number of output channels for which gated convolutions are faster in channels last (``layout``)."""

Gates = NDArray[np.floating]


@dataclass(frozen=True)
class Budget:
    """A device's limit: every batch may use ``share`` of the sum of ``costs`` [L], by default of the values."""

    share: float
    costs: Costs | None = None
    # Share of the values that all batches of a round may use together; the first batch is free.
    limit: float = 1.0
    rule: Rule | None = None
    importance: Importance = "per_block"
    groups: Groups | None = None


class Gated:
    """``model`` under the gates of ``gate``, within ``budget``.

    Training counts ``used`` [L], the samples for which each block was on; ``masks``, the different choices; and
    ``decided``, the batches whose choice depended on the gate. window: number of inputs over which ``each`` averages
    gates. Raises ValueError if the budget is too small or the table does not match.
    """

    def __init__(
        self,
        model: nn.Module,
        table: BlockTable,
        gate: GatingLayer,
        budget: Budget,
        *,
        flops: Costs,
        probe: float = 1.0,
        window: int = 1,
    ) -> None:
        for name, blocks in (budget.groups or {"": np.arange(len(table.sizes))}).items():
            table.capacity(budget.share, budget.costs, blocks, name)
        self.model = model
        self.gate = gate
        self.table = table
        self.budget = budget
        self._flops = flops
        self._window = window
        self.network = GatedModel(model, table, probe=probe)
        self._forced = torch.from_numpy(table.forced)
        self._rows = ScaledRows.of(model, table)
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        self._channels_last = gains(model) and max(module.out_channels for module in convolutions) >= WIDE
        self.leaves = self.network.leaves
        self.chosen: Selection = table.forced
        self.used = np.zeros(len(table.sizes), dtype=np.int64)
        self.masks: set[bytes] = set()
        self.decided = 0
        self._undecided = self.select(torch.full((len(table.sizes),), 0.5))
        self._seen = 0
        self._sums = torch.zeros(2, len(table.sizes), device=device_of(model))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs for a batch."""
        # A batch of one has no variance: the norms then use running statistics.
        self.gate.train(self.model.training and len(inputs) > 1)
        importances, scales = self.gate(inputs)
        on = self.select(importances)
        if self.model.training and self._exceeds_limit(on):
            on = self.select(importances, among=self.touched)
        self.chosen = on
        if self.model.training:
            self._seen += len(inputs)
            self._sums += len(inputs) * torch.stack((importances, scales)).detach()
            self.used[on] += len(inputs)
            self.masks.add(on.tobytes())
            # The choice depended on the gate if it is not that of equal importances, or if there was room for all
            # blocks.
            self.decided += bool(on.all() or (on != self._undecided).any())
        laid_out = inputs.to(memory_format=torch.channels_last) if self._channels_last and inputs.dim() == 4 else inputs
        return self.network(laid_out, self._through(importances, scales, on), on)

    @property
    def touched(self) -> Selection:
        """Blocks that at least one batch used, [L]."""
        return self.used > 0

    @property
    def worked(self) -> int:
        """Total ``flops`` of the active blocks, over all samples."""
        return int(self.used @ self._flops)

    def select(self, importances: torch.Tensor, among: Selection | None = None) -> Selection:
        """Return the chosen blocks, [..., L], for importances [..., L]; only from ``among``, if given."""
        values = importances.detach().cpu().double().numpy()
        budget = self.budget
        return self.table.select(
            values,
            budget.share,
            budget.costs,
            among,
            budget.rule,
            importance=budget.importance,
            groups=budget.groups,
        )

    def _exceeds_limit(self, on: Selection) -> bool:
        most = self.budget.limit * self.table.sizes.sum() + 1e-9
        return bool(self.masks and self.table.sizes[self.touched | on].sum() > most)

    def _through(self, importances: torch.Tensor, scales: torch.Tensor, on: Selection) -> torch.Tensor:
        """Return M' [L], with straight-through gradients."""
        if on.all():
            return scales
        # The gradients reach all importances as if I were G (section 5.2.3), except those of blocks that are always on.
        chosen = torch.from_numpy(on).to(scales)
        straight = chosen + (importances - importances.detach())
        return scales * torch.where(self._forced.to(scales.device), chosen, straight)

    def each(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs in evaluation mode with a choice of blocks per sample; a window needs ordered inputs."""
        with evaluating(self.model), evaluating(self.gate):
            importances, scales = (over_window(each, self._window) for each in self.gate.each(inputs))
            on = self.select(importances)
            gates = scales * torch.from_numpy(on).to(scales)
            if self._rows is not None:
                outputs = self._rows(inputs, gates)
                if outputs is not None:
                    return outputs
            return torch.cat([self.network(inputs[i : i + 1], gates[i], on[i]) for i in range(len(inputs))])

    def static(self) -> Gates:
        """Return fixed gates M' [L]: a choice by the mean gates of the samples since the last call."""
        importances, scales = self._sums / self._seen
        self._seen = 0
        self._sums = torch.zeros_like(self._sums)
        gates: Gates = np.where(self.select(importances), scales.cpu().numpy(), 0.0)
        return gates


class GatedOptimisation:
    """The joint steps of model and gate in one round, with separate learning rates and clipping.

    model_rate: None trains only the gate.
    """

    def __init__(
        self, gated: Gated, settings: FederationSettings, *, model_rate: float | None, gate_rate: float
    ) -> None:
        self._gate: list[torch.Tensor] = list(gated.gate.parameters())
        self._leaves = gated.leaves
        self._clip = settings.clip
        # New optimisers, so that only touched blocks have momentum. A block that is off is skipped, with weight decay.
        self._optimizers = [optimizer_of(self._gate, settings.model_copy(update={"weight_decay": 0.0}), gate_rate)]
        if model_rate is not None:
            self._optimizers.append(optimizer_of(self._leaves, settings, model_rate))

    def __enter__(self) -> GatedOptimisation:
        return self

    def __exit__(self, *raised: object) -> None:
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Free the gradients before a step's backward pass."""
        for parameter in (*self._gate, *self._leaves):
            parameter.grad = None

    def step(self) -> None:
        """Move gate and model, after a step's backward pass."""
        if self._clip is not None:
            for group in (self._gate, self._leaves):
                nn.utils.clip_grad_norm_(group, self._clip)
        for optimizer in self._optimizers:
            optimizer.step()


def gate_tensors(gate: GatingLayer) -> Tensors:
    """Return copies of a gating layer's tensors by name."""
    gate.settle()
    return {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in gate.state_dict().items()}


def load_gate(gate: GatingLayer, tensors: Mapping[str, NDArray[np.generic]]) -> bool:
    """Load tensors into ``gate``; return False if they do not match."""
    state = gate.state_dict()
    if {name: tuple(tensor.shape) for name, tensor in state.items()} != {name: t.shape for name, t in tensors.items()}:
        return False
    gate.load_state_dict({name: torch.tensor(tensor) for name, tensor in tensors.items()})
    return True
