"""Training that leaves frozen parameters alone: w <- w - lr * (m ⊙ ∇F(w)) (FedSPU, arXiv:2403.11464, Eq. 5).

The reference: gradients of frozen entries are zeroed before clipping, so that they do not count in the norm, and the
entries themselves are put back after the optimiser's step, because momentum, weight decay and Adam move entries whose
gradient is zero. The forward pass uses the whole network and nothing is hooked into it, so the error signal still
flows back through frozen neurons (method card, 4.4), and no mask outlives its round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from edge_sdk.protocol.errors import ManifestError
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronMask, block_of


@dataclass(frozen=True)
class _Frozen:
    """A parameter that is frozen in part: where, and the values it had before the round."""

    parameter: nn.Parameter
    frozen: torch.Tensor
    before: torch.Tensor


class Freezing:
    """One round's frozen entries of a model's parameters, and the values to keep them at.

    Made after the round's weights are loaded. Frozen is what ``mask`` does not name (None freezes nothing) and, with
    ``keep_zeros``, every weight of two or more axes that is exactly zero: the pattern of an element-sparse model, which
    leaves biases and norms alone. Parameters that are active as a whole cost nothing. Raises ManifestError, naming the
    parameter, when the model is not the manifest's.
    """

    def __init__(
        self, model: nn.Module, manifest: Manifest, mask: NeuronMask | None, *, keep_zeros: bool = False
    ) -> None:
        specs = {spec.name: spec for spec in manifest.tensors}
        self._partly: list[_Frozen] = []
        for name, parameter in model.named_parameters():
            if name not in specs or specs[name].shape != tuple(parameter.shape):
                raise ManifestError(
                    f"{name}: the model's parameter of shape {tuple(parameter.shape)} is not the manifest's; "
                    f"publish and train the same model"
                )
            block = block_of(manifest, specs[name], mask)
            zeros = keep_zeros and parameter.dim() > 1 and not bool(parameter.all())
            if block.rows is None and block.columns is None and not zeros:
                continue
            frozen = np.ones(specs[name].shape, dtype=bool)
            block.put(frozen, np.zeros(block.shape, dtype=bool))
            where = torch.from_numpy(frozen).to(parameter.device)
            if zeros:
                where |= parameter.detach() == 0
            self._partly.append(_Frozen(parameter, where, parameter.detach().clone()))

    def zero_gradients(self) -> None:
        """Zero the gradient of every frozen entry in place: after backward, before clipping."""
        for part in self._partly:
            if part.parameter.grad is not None:
                # Filled, not multiplied by 0: a frozen entry's gradient may be infinite, and inf * 0 is NaN.
                part.parameter.grad.masked_fill_(part.frozen, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        """Put every frozen entry back, bit for bit: after the optimiser's step."""
        for part in self._partly:
            part.parameter.copy_(torch.where(part.frozen, part.before, part.parameter))
