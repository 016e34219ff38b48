"""Layers that use their whole weight in the forward pass, and train only the weights between active neurons.

A weight's *block* is the outer product of active rows (output neurons) and active columns (input neurons). It trains
with the gradient

    dW[A, B] = sum over samples and positions of delta[:, A]^T h[:, B]             (FedSPU, Eq. 5)

from the saved active columns of the input: r·c multiplications instead of n·m.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow.protocol.manifest import InputError

FEW_INPUTS = 100
"""Convolutions with fewer weights per filter do not gain from gathering (measured on one core: with 54 weights a tenth
of the gradient costs as much as all of it, with 800 a twentieth)."""

FEW_PRODUCTS = 2**16
"""Linear layers with fewer multiplications per sample do not gain from gathering (measured on one core at batches of 32
and 128: half as many cost 0.95 to 1.15 of the dense gradient, twice as many 0.83 to 1)."""

FEW_SAVED = 2**18
"""Convolutions that save fewer multiplications per sample do not gain from gathering. Measured step times relative to
dense: with 120,000 saved 1.07 and 1.02 with gathering, 1.04 and 1.03 without; with a million 0.90 and 0.97, against
1.08 and 1.01."""

_KEEP_WHOLE = 0.7
"""From this share of active columns on, the whole input is saved, which others may save anyway, and gathered later."""

_WORTH_SCATTERING = 0.5
"""Up to this share of active columns, the gradient of only these inputs is cheaper than the whole (measured on one core
in channels last: a convolution takes 0.5 to 0.7 of the time at 0.2, 0.7 to 0.9 at 0.5, over 1 at 0.6)."""


@dataclass(frozen=True)
class ActiveBlock:
    """Active rows and columns of ``parameter``'s first two axes, int64; None for all."""

    parameter: nn.Parameter
    # The parameter's shape, with columns behind a flatten as [channels, entries] (``masks.neuron_view``).
    view: tuple[int, ...]
    rows: Tensor | None
    columns: Tensor | None
    input_error: InputError = "all"
    positions: int = 1

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy of the block of a tensor of the parameter's shape."""
        taken = tensor.reshape(self.view)
        if self.rows is not None:
            taken = taken.index_select(0, self.rows)
        if self.columns is not None:
            taken = taken.index_select(1, self.columns)
        return taken.clone() if self.rows is None and self.columns is None else taken

    def put(self, block: Tensor) -> None:
        """Overwrite the parameter's active values in place."""
        whole = self.parameter.detach()
        if self.columns is None and self.rows is not None:
            whole.view(self.view).index_copy_(0, self.rows, block)
        elif whole.is_contiguous():
            # One flat index over contiguous runs (a channel's columns, a kernel's taps) is several times faster.
            run = math.prod(self.view[2:])
            whole.view(-1, run).index_copy_(0, self.runs, block.reshape(-1, run))
        else:
            rows = slice(None) if self.rows is None else self.rows.unsqueeze(1)
            whole[rows, self.columns] = block

    @cached_property
    def runs(self) -> Tensor:
        """Flat indices of the block's contiguous runs, int64."""
        assert self.columns is not None
        rows = torch.arange(self.view[0], device=self.columns.device) if self.rows is None else self.rows
        return (rows.unsqueeze(1) * self.view[1] + self.columns).flatten()

    @property
    def share(self) -> float:
        """Share of active values."""
        return self.column_share * (1.0 if self.rows is None else len(self.rows) / self.view[0])

    @property
    def column_share(self) -> float:
        """Share of active columns."""
        return 1.0 if self.columns is None else len(self.columns) / self.view[1]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: nn.Linear, x: Tensor, leaf: Tensor, bias: Tensor | None, block: ActiveBlock) -> Tensor:
        ctx.block = block
        ctx.late = block.column_share > _KEEP_WHOLE
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat if ctx.late else _columns(flat, block))
        return F.linear(x, block.parameter, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        block = ctx.block
        # Under autocast the error is bfloat16.
        x = x.to(error.dtype)
        weight = block.parameter.to(error.dtype)
        flat = error.reshape(-1, error.shape[-1])
        into_x = None
        if ctx.needs_input_grad[1]:
            into_x = _scattered(flat @ _columns(weight, block), block) if _scatters(block) else flat @ weight
            into_x = into_x.view(*error.shape[:-1], -1)
        into_bias = flat.sum(0) if ctx.needs_input_grad[3] else None
        rows = flat if block.rows is None else flat.index_select(1, block.rows)
        inputs = _columns(x, block) if ctx.late else x
        columns = block.view[1] if block.columns is None else len(block.columns)
        into_leaf = (rows.t() @ inputs).view(-1, columns, *block.view[2:])
        return None, into_x, into_leaf, into_bias, None


# Nothing below reads the gradient of inactive inputs unless the layer's input error is "all".
def _scatters(block: ActiveBlock) -> bool:
    return block.input_error != "all" and block.column_share <= _WORTH_SCATTERING


def _scattered(part: Tensor, block: ActiveBlock) -> Tensor:
    """Return the gradient of a linear layer's input, [samples, features], from that of its active columns."""
    channels = part.new_zeros(len(part), block.view[1], math.prod(block.view[2:]))
    return channels.index_copy_(1, cast(Tensor, block.columns), part.view(len(part), -1, channels.shape[2])).flatten(1)


def _columns(flat: Tensor, block: ActiveBlock) -> Tensor:
    """Return the active columns of [samples, features]."""
    if block.columns is None:
        return flat
    if len(block.view) == 2:
        return flat.index_select(1, block.columns)
    channels = flat.view(len(flat), block.view[1], block.view[2])
    return channels.index_select(1, block.columns).flatten(1)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: nn.Conv1d | nn.Conv2d, x: Tensor, leaf: Tensor, bias: Tensor | None, block: ActiveBlock
    ) -> Tensor:
        ctx.block = block
        ctx.layer = layer
        ctx.shape = x.shape
        ctx.late = block.column_share > _KEEP_WHOLE
        ctx.save_for_backward(x if ctx.late else _channels(x, block.columns))
        convolve: Callable[..., Tensor] = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
        return convolve(x, layer.weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        block = ctx.block
        layer = ctx.layer
        into_x = _into_input(layer, error, ctx.shape, block) if ctx.needs_input_grad[1] else None
        into_bias = error.sum([0, *range(2, error.dim())]) if ctx.needs_input_grad[3] else None
        inputs = _channels(x, block.columns) if ctx.late else x
        errors = _channels(error, block.rows)
        into_leaf = _gradients(layer, errors, inputs, block.take(block.parameter.detach()), (False, True))[1]
        return None, into_x, into_leaf, into_bias, None


def _into_input(layer: nn.Conv1d | nn.Conv2d, error: Tensor, shape: torch.Size, block: ActiveBlock) -> Tensor:
    """Return the gradient of the input, or zero if no layer needs it."""
    weight = block.parameter.detach()
    some = _scatters(block)
    if some:
        weight = _channels(weight, block.columns)
    # Only the shape of the input is read.
    stand_in = error.new_empty(1).expand(shape[0], weight.shape[1], *shape[2:])
    part = _gradients(layer, error, stand_in, weight, (True, False))[0]
    return _spread(part, cast(Tensor, block.columns), shape[1]) if some else part


def _gradients(
    layer: nn.Conv1d | nn.Conv2d, error: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    gradients = torch.ops.aten.convolution_backward(
        error,
        x.to(error.dtype),
        weight.to(error.dtype),
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0] * len(layer.kernel_size),
        1,
        [*wanted, False],
    )
    return gradients[0], gradients[1]


def _channels(x: Tensor, index: Tensor | None) -> Tensor:
    """Return channels of [N, C, ...] in its memory layout."""
    if index is None:
        return x
    if _is_channels_last(x):
        pixels = x.permute(0, 2, 3, 1)
        # As a matrix: index_select along the last of several axes is five times slower.
        taken = pixels.reshape(-1, x.shape[1]).index_select(1, index)
        return taken.view(*pixels.shape[:3], len(index)).permute(0, 3, 1, 2)
    return x.index_select(1, index)


def _spread(part: Tensor, index: Tensor, channels: int) -> Tensor:
    """Return [N, ``channels``, ...] with ``part`` at ``index``, zeros elsewhere, in the memory layout of ``part``."""
    if not _is_channels_last(part):
        return part.new_zeros(len(part), channels, *part.shape[2:]).index_copy_(1, index, part)
    pixels = part.permute(0, 2, 3, 1)
    whole = part.new_zeros(pixels.shape[:3].numel(), channels).index_copy_(1, index, pixels.reshape(-1, len(index)))
    return whole.view(*pixels.shape[:3], channels).permute(0, 3, 1, 2)


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index = index
        ctx.channels = x.shape[1]
        return _channels(x, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        return _spread(error, ctx.index, ctx.channels), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, index: Tensor, channels: int) -> Tensor:
        ctx.index = index
        return _spread(part, index, channels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        return _channels(error, ctx.index), None, None


def gather_channels(x: Tensor, index: Tensor | None) -> Tensor:
    """Return channels of x [N, C, ...] by ``index``, int64, or all of them; differentiable."""
    return x if index is None else cast(Tensor, _Gather.apply(x, index))  # type: ignore[no-untyped-call]


def spread_channels(part: Tensor, index: Tensor | None, channels: int) -> Tensor:
    """Return [N, ``channels``, ...] with ``part`` at ``index``, zeros elsewhere; differentiable."""
    return part if index is None else cast(Tensor, _Spread.apply(part, index, channels))  # type: ignore[no-untyped-call]


Kernel = Callable[..., Tensor]
"""(layer, inputs, leaf, bias, part of the weight in the leaf) -> outputs; the leaf gets the weight's gradient."""


# Subclasses of torch.nn's layers get no kernel, because they may use the weight differently.
def kernel_of(layer: nn.Module, block: ActiveBlock) -> Kernel | None:
    """Return the kernel of a layer that trains only ``block``; None if unsupported or not faster."""
    if type(layer) is nn.Linear:
        return _Linear.apply if layer.weight.numel() * block.positions >= FEW_PRODUCTS else None
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)) and type(layer) in (nn.Conv1d, nn.Conv2d):
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        saved = layer.weight.numel() * block.positions * (1 - block.share)
        gains = layer.weight[0].numel() >= FEW_INPUTS and saved >= FEW_SAVED
        return _Convolution.apply if plain and gains else None
    return None
