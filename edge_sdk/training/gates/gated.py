"""A model, its gating layer and a budget together: training and prediction under pFedGate (arXiv:2305.02776).

Every batch: importances G and scales M from the gating layer, the knapsack's choice I of blocks, and the model run on
θ ⊛ M·I. Gradients reach the importances of all blocks as if I were G (straight through, section 5.2.3). Blocks
that are always on have no such choice, nor has a device whose budget is everything.

There are three ways to predict: with one choice for a batch, as the paper does; with one for every sample, as a device
in use must; and with one for good, by the mean gates over the batches trained on, which needs no gating layer any more.
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
"""Share of a batch that gates of off blocks learn from where their gradients are estimated."""

WIDE = 32
"""Channels of a convolution from which on some of them are computed faster in channels last (``layout``)."""

Gates = NDArray[np.floating]


@dataclass(frozen=True)
class Budget:
    """The limit of what a device may use: ``share`` of the sum of ``costs`` [L] (of the values, where None) in
    every batch.

    limit: share of the values that the batches of a round may use together, the first batch's choice being free. rule,
    importance, groups: how blocks are chosen, see ``BlockTable.select``.
    """

    share: float
    costs: Costs | None = None
    limit: float = 1.0
    rule: Rule | None = None
    importance: Importance = "per_block"
    groups: Groups | None = None


class Gated:
    """``model`` under the gates that ``gate`` gives, within ``budget``.

    Called with inputs it gives the model's outputs, one choice of blocks for them all, ``chosen``. In training it
    counts: ``used`` [L] are the samples for which each block was on, ``masks`` the different choices, and ``decided``
    the batches whose choice followed from the gate: it is not the one that equal importances would have led to, or
    there was room for everything, so that the gate only scaled. window: of so many inputs the gates are averaged where
    each input has a choice of its own. Raises ValueError where the budget is too small, or the gate's table
    is not this model's.
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
        self.model, self.gate, self.table = model, gate, table
        self.budget, self._flops, self._window = budget, flops, window
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
        self._seen, self._sums = 0, torch.zeros(2, len(table.sizes), device=device_of(model))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs for a batch."""
        # A batch of one has no variance: the norms then go by what they remember.
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
            self.decided += bool(on.all() or (on != self._undecided).any())
        laid_out = inputs.to(memory_format=torch.channels_last) if self._channels_last and inputs.dim() == 4 else inputs
        return self.network(laid_out, self._through(importances, scales, on), on)

    @property
    def touched(self) -> Selection:
        """The blocks that any batch used, [L]."""
        return self.used > 0

    @property
    def worked(self) -> int:
        """The sum over samples of what ``flops`` says of the blocks that were on."""
        return int(self.used @ self._flops)

    def select(self, importances: torch.Tensor, among: Selection | None = None) -> Selection:
        """Return the blocks that are on, [..., L], for importances [..., L]; no others than those of ``among``."""
        values, budget = importances.detach().cpu().double().numpy(), self.budget
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
        """Return whether a batch with these blocks, not the first, would touch more than the round may."""
        most = self.budget.limit * self.table.sizes.sum() + 1e-9
        return bool(self.masks and self.table.sizes[self.touched | on].sum() > most)

    def _through(self, importances: torch.Tensor, scales: torch.Tensor, on: Selection) -> torch.Tensor:
        """Return M' [L], with gradients straight through the choice."""
        if on.all():
            return scales
        chosen = torch.from_numpy(on).to(scales)
        straight = chosen + (importances - importances.detach())
        return scales * torch.where(self._forced.to(scales.device), chosen, straight)

    def each(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs with a choice of blocks for every sample, in evaluation mode; with a window the inputs
        are in the order in which they came."""
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
        """Return M' [L] for good: a choice by the mean gates of the samples trained on since this was last asked."""
        importances, scales = self._sums / self._seen
        self._seen, self._sums = 0, torch.zeros_like(self._sums)
        gates: Gates = np.where(self.select(importances), scales.cpu().numpy(), 0.0)
        return gates


class GatedOptimisation:
    """One round's joint steps of model and gate, each with a learning rate and, where the settings clip, a norm of its
    own.

    Optimisers begin afresh, so that momentum lives on touched blocks alone; a block that is off in a batch is passed
    over, with momentum and weight decay. model_rate None trains the gate alone.
    """

    def __init__(
        self, gated: Gated, settings: FederationSettings, *, model_rate: float | None, gate_rate: float
    ) -> None:
        self._gate: list[torch.Tensor] = list(gated.gate.parameters())
        self._leaves = gated.leaves
        self._clip = settings.clip
        self._optimizers = [optimizer_of(self._gate, settings.model_copy(update={"weight_decay": 0.0}), gate_rate)]
        if model_rate is not None:
            self._optimizers.append(optimizer_of(self._leaves, settings, model_rate))

    def __enter__(self) -> GatedOptimisation:
        return self

    def __exit__(self, *raised: object) -> None:
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Prepare a step's backward pass."""
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
    """Return every tensor of a gating layer by name, copied."""
    gate.settle()
    return {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in gate.state_dict().items()}


def load_gate(gate: GatingLayer, tensors: Mapping[str, NDArray[np.generic]]) -> bool:
    """Give ``gate`` these tensors; False, and nothing done, where they are another gate's."""
    state = gate.state_dict()
    if {name: tuple(tensor.shape) for name, tensor in state.items()} != {name: t.shape for name, t in tensors.items()}:
        return False
    gate.load_state_dict({name: torch.tensor(tensor) for name, tensor in tensors.items()})
    return True
