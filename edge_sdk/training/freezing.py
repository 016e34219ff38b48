"""Training with frozen parameters: w <- w - lr * (m ⊙ ∇F(w)) (FedSPU, arXiv:2403.11464, Eq. 5).

Within a ``Freezing``, a *leaf* with the active values replaces each partly frozen parameter in the optimiser, so
momentum, weight decay and clipping affect only these values. Frozen values stay bit-identical. Masked elements (FedSGC,
DM-PFL, fine-tuning of a sparse model) are and stay zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from sparrow.protocol.errors import ManifestError
from sparrow.protocol.manifest import InputError, Layer, Manifest
from sparrow.protocol.masks import Block, NeuronMask, neuron_block

from .active import ActiveBlock, Kernel, kernel_of
from .elements import Bits, Elements, run_of

_LARGE = 2**16
"""Gradients of parameters from this size on move to leaves at once, to free memory. Smaller ones move at the end of the
backward pass, because a callback takes longer than the copy."""


@dataclass
class _Part:
    """A parameter and its trained part."""

    parameter: nn.Parameter
    # The layer that has it as ``weight``.
    module: nn.Module | None = None
    trained: ActiveBlock | Elements | None = None
    kernel: Kernel | None = None
    bits: Bits | None = None
    # The parameter itself, or its values by ``trained``.
    leaf: torch.Tensor = field(init=False)

    @property
    def gathers(self) -> bool:
        """Whether the leaf's gradient is taken from the full gradient."""
        return self.trained is not None and self.kernel is None


class Freezing:
    """Frozen entries of a model's parameters in one round; a context manager around training.

    Create it after the round's weights are loaded. elements: name -> bool of the parameter's shape; the others must be
    zero, and stay zero. trained: name -> bool; the others are frozen unchanged. Raises ManifestError if they do not fit
    the model, ValueError if weights outside the elements are not zero.
    """

    def __init__(
        self,
        model: nn.Module,
        manifest: Manifest,
        mask: NeuronMask | None,
        elements: Mapping[str, torch.Tensor] | None = None,
        trained: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = model
        self._manifest = manifest
        self._mask = mask
        self._trained = trained
        self._still: list[nn.Parameter] = []
        self._undo: list[Callable[[], object]] = []
        self._parts: dict[str, _Part] = {}
        specs = {spec.name: spec for spec in manifest.tensors}
        layers = {name: layer for layer in manifest.layers for name in layer.tensors}
        exist = dict(elements or {})
        only = dict(trained or {})
        modules = {f"{path}.weight".lstrip("."): module for path, module in model.named_modules()}
        for name, parameter in model.named_parameters():
            if name not in specs or specs[name].shape != tuple(parameter.shape):
                raise ManifestError(
                    f"{name}: the model's parameter of shape {tuple(parameter.shape)} is not the manifest's; "
                    f"publish and train the same model"
                )
            exists = _checked(name, parameter, exist.pop(name, None))
            moving = _of_shape(name, parameter, only.pop(name, None))
            if not parameter.requires_grad:
                continue
            if moving is None:
                block = neuron_block(manifest, specs[name], mask)
                self._parts[name] = _part_of(parameter, modules.get(name), block, layers.get(name), exists)
                continue
            index = (moving if exists is None else moving & exists).reshape(-1).nonzero().flatten()
            if len(index):
                self._parts[name] = _Part(parameter, trained=Elements(parameter, index))
            else:
                self._still.append(parameter)
        if exist or only:
            unknown = ", ".join(sorted({*exist, *only}))
            raise ValueError(f"elements for {unknown}, which the model does not have")

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters."""
        return list(self._parts)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Tensors for the optimiser: whole parameters, and the leaves of partly frozen ones."""
        return [part.leaf for part in self._parts.values()]

    def with_elements(self, elements: Mapping[str, torch.Tensor]) -> Freezing:
        """Return a new freezing with other existing elements."""
        return Freezing(self.model, self._manifest, self._mask, elements, self._trained)

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of ``tensor``, which has the parameter's shape, that belongs to the leaf."""
        trained = self._parts[name].trained
        return tensor if trained is None else trained.take(tensor)

    def spread(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the parameter's shape with ``values`` at the leaf, zeros elsewhere."""
        part = self._parts[name]
        if part.trained is None:
            return values
        positions = torch.arange(part.parameter.numel(), device=values.device).view(part.parameter.shape)
        whole = values.new_zeros(part.parameter.numel())
        whole[part.trained.take(positions).reshape(-1)] = values.reshape(-1)
        return whole.view(part.parameter.shape)

    def __enter__(self) -> Freezing:
        for parameter in self._still:
            parameter.requires_grad_(False)
            self._undo.append(partial(parameter.requires_grad_, True))
        for part in self._parts.values():
            part.leaf = part.parameter
            if part.trained is not None:
                part.leaf = part.trained.take(part.parameter.detach()).requires_grad_()
            if part.kernel is not None:
                module: Any = part.module
                part.parameter.requires_grad_(False)
                module.forward = partial(_run, module, part)
                self._undo += [partial(part.parameter.requires_grad_, True), partial(delattr, module, "forward")]
            elif part.gathers and part.parameter.numel() >= _LARGE:
                hook = part.parameter.register_post_accumulate_grad_hook(partial(_hand_over, part))  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)
        return self

    def __exit__(self, *raised: object) -> None:
        while self._undo:
            self._undo.pop()()
        for part in self._parts.values():
            # Missing if a change of elements failed.
            vars(part).pop("leaf", None)

    def collect_gradients(self) -> None:
        """Move all gradients to the leaves, after backward and before clipping."""
        # A new optimiser that sees only zero gradients moves no zero, with momentum or weight decay.
        for part in self._parts.values():
            if part.gathers and part.parameter.grad is not None:
                _hand_over(part, part.parameter)
            if part.bits is not None and part.leaf.grad is not None:
                part.bits.mask(part.leaf.grad)

    def write_back(self) -> None:
        """Copy the leaves into the model, after a step of the optimiser."""
        for part in self._parts.values():
            if part.trained is not None:
                part.trained.put(part.leaf.detach())


def _part_of(
    parameter: nn.Parameter,
    module: nn.Module | None,
    block: Block,
    layer: Layer | None,
    exists: torch.Tensor | None,
) -> _Part:
    part = _Part(parameter, module)
    positions = 1 if layer is None else layer.positions
    if block.rows is not None or block.columns is not None:
        rows, columns = (_index(index, parameter.device) for index in (block.rows, block.columns))
        error: InputError = "all" if layer is None else layer.input_error
        part.trained = ActiveBlock(parameter, block.view, rows, columns, error, positions)
        part.kernel = None if module is None else kernel_of(module, part.trained)
    elif exists is not None:
        part.kernel, part.trained = run_of(module, parameter, exists, positions)
    if exists is not None and not isinstance(part.trained, Elements):
        left = exists if part.trained is None else part.trained.take(exists)
        part.bits = None if bool(left.all()) else Bits(left)
    return part


def _of_shape(name: str, parameter: nn.Parameter, flags: torch.Tensor | None) -> torch.Tensor | None:
    """Return checked flags; None if all are set."""
    if flags is None:
        return None
    if flags.shape != parameter.shape or flags.dtype != torch.bool:
        raise ValueError(
            f"{name}: elements of type {flags.dtype} and shape {tuple(flags.shape)} for a parameter of shape "
            f"{tuple(parameter.shape)}; pass booleans of its shape"
        )
    return None if bool(flags.all()) else flags.to(parameter.device)


def _checked(name: str, parameter: nn.Parameter, exists: torch.Tensor | None) -> torch.Tensor | None:
    exists = _of_shape(name, parameter, exists)
    if exists is not None and bool((parameter.detach() != 0).logical_and_(~exists).any()):
        raise ValueError(f"{name}: masked weights must be zero; multiply it by its mask first")
    return exists


def _index(index: Any, device: torch.device) -> torch.Tensor | None:
    return None if index is None else torch.from_numpy(np.array(index, dtype=np.int64)).to(device)


def _run(module: Any, part: _Part, x: torch.Tensor) -> torch.Tensor:
    assert part.kernel is not None
    return part.kernel(module, x, part.leaf, getattr(module, "bias", None), part.trained)


def _hand_over(part: _Part, parameter: torch.Tensor) -> None:
    """Move the trained part of a parameter's gradient to its leaf."""
    assert part.trained is not None
    gradient = part.trained.take(cast(torch.Tensor, parameter.grad))
    part.leaf.grad = gradient if part.leaf.grad is None else part.leaf.grad.add_(gradient)
    parameter.grad = None
