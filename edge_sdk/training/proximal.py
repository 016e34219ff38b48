"""The proximal term μ/2·|w - w^t|² of FedProx (arXiv:1812.06127, Eq. 2), as what it adds to the gradients."""

from __future__ import annotations

import torch
from torch import nn


class Pull:
    """Pulls a model's parameters back to where they are now, with ``weight`` μ >= 0; 0 does nothing at all.

    Made after the round's weights are loaded. Its memory is a second copy of the parameters.
    """

    def __init__(self, model: nn.Module, weight: float) -> None:
        self._weight = weight
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad and weight]
        self._centre = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def add_to_gradients(self) -> None:
        """g <- g + μ(w - w^t), after the backward pass."""
        for parameter, centre in zip(self._parameters, self._centre, strict=True):
            if parameter.grad is not None:  # one that the forward pass does not use never moves
                parameter.grad.add_(parameter - centre, alpha=self._weight)
