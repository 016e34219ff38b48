"""Training that leaves frozen parameters alone: w <- w - lr * (m ⊙ ∇F(w)) (FedSPU, arXiv:2403.11464, Eq. 5).

While a ``Freezing`` is entered, each parameter that is frozen in part is represented by a *leaf*: a tensor of its
active values alone. The optimiser moves leaves, so its state exists for active values only, momentum and weight decay
move nothing else, and clipping counts nothing else. Layers run on the whole parameters, into which ``write_back`` puts
the leaves after each step; what is frozen is never written, so it stays bit for bit. The backward pass computes the
gradients of the leaves alone (``active``). The forward pass uses the whole network and the error signal still flows
back through frozen neurons (method card, 4.4), and no mask outlives its round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from edge_sdk.protocol.errors import ManifestError
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronMask, block_of
from edge_sdk.training.active import ActiveBlock, kernel_of, whole


@dataclass
class _Part:
    """A parameter and what is trained of it.

    leaf: the parameter itself, where all its neurons are active, else the values of ``block``. zeros: where the leaf is
    to stay zero, and ``kept`` what it was there, for a zero has a sign.
    """

    name: str
    parameter: nn.Parameter
    block: ActiveBlock | None
    leaf: torch.Tensor
    zeros: torch.Tensor | None = None
    kept: torch.Tensor | None = None


class Freezing:
    """One round's frozen entries of a model's parameters; entered while the model trains.

    Made after the round's weights are loaded. Frozen is what ``mask`` does not name (None freezes nothing) and, with
    ``keep_zeros``, every weight of two or more axes that is exactly zero: the pattern of an element-sparse model, which
    leaves biases and norms alone. Parameters that are active as a whole cost nothing. Raises ManifestError, naming the
    parameter, when the model is not the manifest's.
    """

    def __init__(
        self, model: nn.Module, manifest: Manifest, mask: NeuronMask | None, *, keep_zeros: bool = False
    ) -> None:
        self._model = model
        self._undo: list[Callable[[], object]] = []
        self._keep_zeros = keep_zeros
        self._blocks: dict[str, ActiveBlock] = {}
        self._parts: list[_Part] = []
        specs = {spec.name: spec for spec in manifest.tensors}
        for name, parameter in model.named_parameters():
            if name not in specs or specs[name].shape != tuple(parameter.shape):
                raise ManifestError(
                    f"{name}: the model's parameter of shape {tuple(parameter.shape)} is not the manifest's; "
                    f"publish and train the same model"
                )
            block = block_of(manifest, specs[name], mask)
            if parameter.requires_grad and (block.rows is not None or block.columns is not None):
                rows, columns = (_index(index, parameter.device) for index in (block.rows, block.columns))
                self._blocks[name] = ActiveBlock(parameter, block.view, rows, columns)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What is trained, for the optimiser: whole parameters, and leaves of those that are frozen in part."""
        return [part.leaf for part in self._parts]

    def __enter__(self) -> Freezing:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                block = self._blocks.get(name)
                leaf = parameter if block is None else block.take(parameter.detach()).requires_grad_()
                part = _Part(name, parameter, block, leaf)
                if self._keep_zeros and parameter.dim() > 1 and not bool(leaf.detach().all()):
                    part.zeros, part.kept = leaf.detach() == 0, leaf.detach().clone()
                self._parts.append(part)
        partly = [part for part in self._parts if part.block is not None]
        for part in partly:
            part.parameter.requires_grad_(False)
            self._undo.append(partial(part.parameter.requires_grad_, True))
        if partly:
            self._replace({part.name: part for part in partly})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        self._parts.clear()

    def _replace(self, partly: dict[str, _Part]) -> None:
        """Let every layer that has a partly frozen parameter run on it, for the time being."""
        composed: list[tuple[nn.Module, dict[str, _Part]]] = []
        for path, module in self._model.named_modules():
            own = {
                name: partly[full]
                for name, _ in module.named_parameters(recurse=False)
                if (full := f"{path}.{name}".lstrip(".")) in partly
            }
            if not own:
                continue
            kernel = kernel_of(module) if "weight" in own else None
            if kernel is None:
                composed.append((module, own))
                parameters = module._parameters
                self._undo.append(partial(setattr, module, "_parameters", parameters))
            else:
                module.forward = partial(_run, kernel, module, own)
                self._undo.append(partial(delattr, module, "forward"))
        if composed:
            # Before each pass, because a graph is gone after its backward pass; and from the root, because a layer's
            # parameters may be read by the layer that it is part of.
            hook = self._model.register_forward_pre_hook(partial(_compose, composed))
            self._undo.append(hook.remove)

    def zero_gradients(self) -> None:
        """Zero the gradients of entries that are to stay zero, in place: after backward, before clipping."""
        for part in self._parts:
            if part.zeros is not None and part.leaf.grad is not None:
                # Filled, not multiplied by 0: a gradient may be infinite, and inf * 0 is NaN.
                part.leaf.grad.masked_fill_(part.zeros, 0.0)

    @torch.no_grad()
    def restore_zeros(self) -> None:
        """Put back, bit for bit, what is to stay zero: after a step of an optimiser that moves it all the same."""
        for part in self._parts:
            if part.zeros is not None:
                part.leaf.copy_(torch.where(part.zeros, cast(torch.Tensor, part.kept), part.leaf))

    def write_back(self) -> None:
        """Bring the leaves into the model: after the optimiser's step."""
        for part in self._parts:
            if part.block is not None:
                part.block.put(part.leaf.detach())


def _index(index: Any, device: torch.device) -> torch.Tensor | None:
    return None if index is None else torch.from_numpy(np.array(index, dtype=np.int64)).to(device)


def _run(kernel: Any, module: Any, own: dict[str, _Part], x: torch.Tensor) -> torch.Tensor:
    """The forward pass of a layer with a kernel."""
    weight, bias = own["weight"], getattr(module, "bias", None)
    if "bias" in own:
        bias = whole(own["bias"].leaf, cast(ActiveBlock, own["bias"].block))
    result: torch.Tensor = kernel(module, x, weight.leaf, bias, weight.block)
    return result


def _compose(composed: list[tuple[nn.Module, dict[str, _Part]]], model: nn.Module, inputs: Any) -> None:
    for module, own in composed:
        wholes = {name: whole(part.leaf, cast(ActiveBlock, part.block)) for name, part in own.items()}
        module._parameters = cast(dict[str, nn.Parameter | None], {**module._parameters, **wholes})
