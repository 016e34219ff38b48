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
from edge_sdk.training.active import ActiveBlock, Kernel, kernel_of


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
        layers = {name: layer for layer in manifest.layers for name in layer.tensors}
        for name, parameter in model.named_parameters():
            if name not in specs or specs[name].shape != tuple(parameter.shape):
                raise ManifestError(
                    f"{name}: the model's parameter of shape {tuple(parameter.shape)} is not the manifest's; "
                    f"publish and train the same model"
                )
            block = block_of(manifest, specs[name], mask)
            if parameter.requires_grad and (block.rows is not None or block.columns is not None):
                rows, columns = (_index(index, parameter.device) for index in (block.rows, block.columns))
                told = layers[name].model_dump(include={"input_error", "positions"}) if name in layers else {}
                self._blocks[name] = ActiveBlock(parameter, block.view, rows, columns, **told)

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
        partly = {part.name: part for part in self._parts if part.block is not None}
        for path, module in self._model.named_modules():
            name = f"{path}.weight".lstrip(".")
            if name in partly and (kernel := kernel_of(module, self._blocks[name])):
                part = partly.pop(name)
                part.parameter.requires_grad_(False)
                module.forward = partial(_run, kernel, module, part)
                self._undo += [partial(part.parameter.requires_grad_, True), partial(delattr, module, "forward")]
        for part in partly.values():
            # Autograd's own kernels make the whole gradient, which is gone before the next parameter's is made.
            hook = part.parameter.register_post_accumulate_grad_hook(partial(_hand_over, part))  # type: ignore[no-untyped-call]
            self._undo.append(hook.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        self._parts.clear()

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


def _run(kernel: Kernel, module: Any, part: _Part, x: torch.Tensor) -> torch.Tensor:
    """The forward pass of a layer with a kernel."""
    return kernel(module, x, part.leaf, getattr(module, "bias", None), cast(ActiveBlock, part.block))


def _hand_over(part: _Part, parameter: torch.Tensor) -> None:
    """Move the active values of a parameter's gradient to its leaf, adding to what is there."""
    gradient = cast(ActiveBlock, part.block).take(cast(torch.Tensor, parameter.grad))
    part.leaf.grad = gradient if part.leaf.grad is None else part.leaf.grad.add_(gradient)
    parameter.grad = None
