"""A mixture of models as one ``nn.Module``; ``sparrow.protocol.mixture`` names its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from sparrow.protocol.errors import ManifestError
from sparrow.protocol.mixture import SMALLEST_WEIGHT, WEIGHTS

Loss = Callable[[Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """Copies of a classifier, mixed with weights π [M].

    The outputs [N, C] are ln Σ_m π_m softmax(z_m), of the components' outputs z_m.
    """

    def __init__(self, model: nn.Module, components: int, aliases: Mapping[str, str] | None = None) -> None:
        """Copy ``model``. aliases: name of a shared tensor -> its name in the component that owns it."""
        super().__init__()
        self.components = nn.ModuleList(copy.deepcopy(model) for _ in range(components))
        for alias, name in (aliases or {}).items():
            self._share(alias, name)
        self.register_buffer(WEIGHTS, torch.full((components,), 1 / components))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ln p of every class."""
        return self._mixed(self._scores(inputs))

    def likelihoods(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return ln p(y | x) under each component [N, M]."""
        found = [scores.log_softmax(1).gather(1, targets[:, None].long()) for scores in self._scores(inputs)]
        return torch.cat(found, dim=1)

    def weighed(self, loss: Loss, responsibilities: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixture's loss and outputs, with the gradients of the components' weighted losses."""
        scores = self._scores(inputs)
        parts = [
            loss(each.detach() + share[:, None] * (each - each.detach()), targets)
            for each, share in zip(scores, responsibilities.T, strict=True)
        ]
        total = torch.stack(parts).sum()
        with torch.no_grad():
            outputs = self._mixed(scores)
            value = loss(outputs, targets)
        return value + total - total.detach(), outputs

    def _share(self, alias: str, name: str) -> None:
        path, _, own = alias.rpartition(".")
        other, _, last = name.rpartition(".")
        setattr(self.get_submodule(path), own, getattr(self.get_submodule(other), last))

    def _scores(self, inputs: Tensor) -> list[Tensor]:
        return [component(inputs) for component in self.components]

    def _mixed(self, scores: list[Tensor]) -> Tensor:
        logs = self.get_buffer(WEIGHTS).clamp(min=SMALLEST_WEIGHT).log()
        terms = [each.float().log_softmax(1) + log for each, log in zip(scores, logs, strict=True)]
        return torch.stack(terms).logsumexp(0)


def mixture_in(model: nn.Module) -> Mixture:
    """Return the model as a mixture. Raises ManifestError if it is not a mixture."""
    if not isinstance(model, Mixture):
        raise ManifestError(f"a {type(model).__name__} is not a mixture; join the federation again")
    return model
