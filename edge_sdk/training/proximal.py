"""The proximal term μ/2·|w - w^t|² of FedProx (arXiv:1812.06127, Eq. 2), as what it adds to the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Pull:
    """Pulls what is trained back to where it is now, with ``weight`` μ >= 0; 0 does nothing at all.

    Its memory is a second copy of ``parameters``.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], weight: float) -> None:
        self._weight = weight
        self._parameters = list(parameters) if weight else []
        self._centre = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def add_to_gradients(self) -> None:
        """g <- g + μ(w - w^t), after the backward pass."""
        for parameter, centre in zip(self._parameters, self._centre, strict=True):
            if parameter.grad is not None:  # one that the forward pass does not use never moves
                parameter.grad.add_(parameter - centre, alpha=self._weight)
