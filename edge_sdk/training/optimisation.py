"""The optimisation of one round: trained values, optimiser and proximal term."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from sparrow.protocol.settings import FederationSettings

from ..engines.training import Change
from .elements import tensors_of
from .freezing import Freezing


class Optimisation:
    """Optimiser of the values that ``freezing`` trains; a context manager around training.

    proximal_weight: μ >= 0. proximal_centre: parameter name -> weights; by default the weights at the start.
    """

    def __init__(
        self,
        freezing: Freezing,
        settings: FederationSettings,
        *,
        learning_rate: float,
        proximal_weight: float = 0.0,
        proximal_centre: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._freezing = freezing
        self._settings = settings
        self._learning_rate = learning_rate
        self._proximal_weight = proximal_weight
        self._centre = proximal_centre
        self._start: Mapping[str, torch.Tensor] = {}

    def __enter__(self) -> Optimisation:
        if self._proximal_weight:
            here = self._freezing.model.named_parameters()
            self._start = self._centre or {name: value.detach().clone() for name, value in here}
        self._begin({})
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            # Gradients are as large as the model: free them until the next round.
            self.forget_gradients()
        self._freezing.__exit__(*raised)

    def _begin(self, changed: Mapping[str, torch.Tensor]) -> None:
        self._freezing.__enter__()
        self._parameters = self._freezing.parameters
        self._optimizer = optimizer_of(self._parameters, self._settings, self._learning_rate)
        self._pull: Pull | None = None
        if self._proximal_weight:
            # Removed elements are pulled to zero, or masked gradients would revive them.
            starts = {
                name: start * changed[name].to(start.device) if name in changed else start
                for name, start in self._start.items()
            }
            centres = [self._freezing.take(name, starts[name]) for name in self._freezing.names]
            self._pull = Pull(self._parameters, centres, self._proximal_weight)

    def forget_gradients(self) -> None:
        """Free the gradients before a step's backward pass."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        """Move the parameters, after a step's backward pass."""
        self._freezing.collect_gradients()
        if self._pull is not None:
            self._pull.add_to_gradients()
        if self._settings.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._settings.clip)
        self._optimizer.step()
        self._freezing.write_back()

    def change(self, decide: Callable[[], Change]) -> None:
        """Let ``decide`` change the model's weights, and continue with the existing elements that it returns.

        Remaining elements keep their optimiser state.
        """
        before = self._freezing
        memory = [dict(self._optimizer.state.get(leaf, {})) for leaf in self._parameters]
        self.forget_gradients()
        before.__exit__()
        change = decide()
        elements = tensors_of(change.elements)
        renewed = tensors_of(change.renewed)
        self._freezing = before.with_elements(elements)
        self._begin(elements)
        for name, leaf, slots in zip(before.names, self._parameters, memory, strict=True):
            if slots:
                fresh = renewed.get(name)
                self._optimizer.state[leaf] = {
                    slot: self._carried(before, name, value, fresh) for slot, value in slots.items()
                }

    def _carried(self, before: Freezing, name: str, value: Any, renewed: torch.Tensor | None) -> Any:
        # A count of steps.
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        whole = before.spread(name, value)
        if renewed is not None:
            whole = whole.masked_fill(renewed.to(whole.device), 0.0)
        return self._freezing.take(name, whole)


class _Optimizer(Protocol):
    state: Any

    def step(self) -> Any:
        """Move the parameters by their gradients."""


# A process's first optimiser of torch.optim imports torch's compiler, which takes 1.5 to 2 seconds: more than a round
# of a small device.
class _PlainSGD:
    """w <- w - lr(g + weight_decay·w), bit-identical to torch.optim.SGD without momentum."""

    def __init__(self, parameters: list[torch.Tensor], learning_rate: float, weight_decay: float) -> None:
        self._parameters = parameters
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters that have a gradient."""
        moving: list[torch.Tensor] = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        if self._weight_decay:
            torch._foreach_add_(gradients, moving, alpha=self._weight_decay)
        torch._foreach_add_(moving, gradients, alpha=-self._learning_rate)


def optimizer_of(parameters: list[torch.Tensor], settings: FederationSettings, learning_rate: float) -> _Optimizer:
    """Return a new optimiser by the settings."""
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=learning_rate, weight_decay=settings.weight_decay)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=settings.weight_decay)
    if settings.momentum:
        return torch.optim.SGD(
            parameters, lr=learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    return _PlainSGD(parameters, learning_rate, settings.weight_decay)


class Pull:
    """Gradient of the proximal term μ/2·|w - w^t|² of FedProx (arXiv:1812.06127, Eq. 2).

    weight: μ > 0. centres: w^t for each of ``parameters``.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], centres: Sequence[torch.Tensor], weight: float) -> None:
        self._weight = weight
        self._pairs = list(zip(parameters, centres, strict=True))

    @torch.no_grad()
    def add_to_gradients(self) -> None:
        """Add μ(w - w^t) to the gradients, after the backward pass."""
        for parameter, centre in self._pairs:
            # Without a gradient the forward pass does not use it.
            if parameter.grad is not None:
                parameter.grad.add_(parameter - centre, alpha=self._weight)
