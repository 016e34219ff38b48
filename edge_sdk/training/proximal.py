"""The proximal term μ/2·|w - w^t|² of FedProx (arXiv:1812.06127, Eq. 2), as what it adds to the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Pull:
    """Pulls each of ``parameters`` back to its tensor of ``centres``, with ``weight`` μ > 0."""

    def __init__(self, parameters: Sequence[torch.Tensor], centres: Sequence[torch.Tensor], weight: float) -> None:
        self._weight = weight
        self._pairs = list(zip(parameters, centres, strict=True))

    @torch.no_grad()
    def add_to_gradients(self) -> None:
        """g <- g + μ(w - w^t), after the backward pass."""
        for parameter, centre in self._pairs:
            if parameter.grad is not None:  # one that the forward pass does not use never moves
                parameter.grad.add_(parameter - centre, alpha=self._weight)
