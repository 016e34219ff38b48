"""Weights with unstructured sparsity, with the fastest kernel for their density:

    ``SparseRows``   linear, density up to 0.1   compressed rows, in the forward pass and for both gradients
    ``ActiveBlock``  rows or columns are empty   dense, on the rest (``packed_linear``, ``packed_convolution``)
    ``Elements``     density up to 0.25          dense; the optimiser holds only the existing elements
    bits             above                       dense; the gradient is masked in place

Dense kernels are faster than sparse ones unless nine weights in ten are zero (measured in docs/architecture.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow.protocol.elements import Flags

from .active import FEW_INPUTS, FEW_PRODUCTS, ActiveBlock, Kernel, gather_channels, spread_channels

DENSEST_ROWS = 0.1
"""Highest density at which compressed rows are faster than dense ones (measured on one core, batches of 32 and 128: a
step of a linear layer takes 0.2 to 0.4 of the dense time at 0.05, 0.5 to 0.8 at 0.1, over 1 at 0.2)."""

DENSEST_INDEX = 0.25
"""Highest density at which gathering and scattering elements costs no more than masking the whole gradient."""

_WORTH_PACKING = 0.7
"""Highest share of rows times columns at which packing pays; gathering and spreading them take time too."""


@dataclass(frozen=True)
class Elements:
    """The existing elements of ``parameter``;"""

    parameter: nn.Parameter
    # Flat, row-major, sorted, int64 [n].
    index: Tensor

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy of the elements of a tensor of the parameter's shape, [n]."""
        return tensor.reshape(-1).index_select(0, self.index)

    def put(self, values: Tensor) -> None:
        """Overwrite the parameter's elements in place."""
        whole = self.parameter.detach()
        if whole.is_contiguous():
            whole.view(-1).index_copy_(0, self.index, values)
        # A convolution in channels last.
        else:
            whole.copy_(whole.contiguous().view(-1).index_copy_(0, self.index, values).view(whole.shape))


class SparseRows(Elements):
    """Elements of a linear layer's weight as compressed rows, and columns for the input's gradient."""

    def __init__(self, parameter: nn.Parameter, index: Tensor) -> None:
        _warned()
        super().__init__(parameter, index)
        outputs, inputs = parameter.shape
        rows = index // inputs
        columns = index % inputs
        self._size = (outputs, inputs)
        # Products are faster with indices of four bytes.
        self._by_row = (_ends(rows, outputs), columns.int())
        # A stable sort keeps the rows of each column in order.
        self._order = columns.sort(stable=True).indices
        self._by_column = (_ends(columns, inputs), rows[self._order].int())

    def matrix(self, values: Tensor) -> Tensor:
        """Return the sparse weight [outputs, inputs] with these values."""
        return _compressed(*self._by_row, values, self._size)

    def transposed(self, values: Tensor) -> Tensor:
        """Return the sparse transposed weight [inputs, outputs]."""
        return _compressed(*self._by_column, values.index_select(0, self._order), self._size[::-1])


@cache
def _warned() -> None:
    """Silence torch's warning that compressed rows are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()


def _compressed(ends: Tensor, indices: Tensor, values: Tensor, size: tuple[int, ...]) -> Tensor:
    return torch.sparse_csr_tensor(ends, indices, values, size, check_invariants=False)


def _ends(lines: Tensor, count: int) -> Tensor:
    """Return the bounds of ``count`` compressed lines, int32, for entries on ``lines``."""
    return F.pad(torch.bincount(lines, minlength=count).cumsum(0), (1, 0)).int()


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: nn.Linear, x: Tensor, values: Tensor, bias: Tensor | None, rows: SparseRows) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(values.dtype)
        ctx.rows = rows
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        ctx.save_for_backward(flat, values)
        result = torch.mm(rows.matrix(values.detach()), flat.t())
        if bias is not None:
            result += bias.unsqueeze(1)
        return result.t().reshape(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        flat, values = ctx.saved_tensors
        across = error.reshape(-1, error.shape[-1]).to(values.dtype).t().contiguous()
        into_x = None
        if ctx.needs_input_grad[1]:
            into_x = torch.mm(ctx.rows.transposed(values), across).t().reshape(ctx.shape).to(ctx.dtype)
        products = torch.sparse.sampled_addmm(ctx.rows.matrix(values), across, flat, beta=0.0)
        return None, into_x, products.values(), across.sum(1) if ctx.needs_input_grad[3] else None, None


def packed_linear(layer: nn.Linear, x: Tensor, leaf: Tensor, bias: Tensor | None, block: ActiveBlock) -> Tensor:
    """Return ``layer(x)``, x [..., in_features], for a weight of ``leaf`` at the block and 0 elsewhere."""
    flat = x.reshape(-1, x.shape[-1])
    result = spread_channels(F.linear(gather_channels(flat, block.columns), leaf), block.rows, layer.out_features)
    return (result if bias is None else result + bias).view(*x.shape[:-1], -1)


def packed_convolution(
    layer: nn.Conv1d | nn.Conv2d, x: Tensor, leaf: Tensor, bias: Tensor | None, block: ActiveBlock
) -> Tensor:
    """Return ``layer(x)``, x [N, C, ...], for a weight of ``leaf`` at the block and 0 elsewhere."""
    convolve = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
    part = convolve(gather_channels(x, block.columns), leaf, None, layer.stride, layer.padding, layer.dilation)
    result = spread_channels(part, block.rows, layer.out_channels)
    return result if bias is None else result + bias.view(-1, *(1,) * (result.dim() - 2))


def run_of(
    layer: nn.Module | None, parameter: nn.Parameter, exists: Tensor, positions: int
) -> tuple[Kernel | None, ActiveBlock | Elements | None]:
    """Return a weight's kernel (None for autograd's) and its trained part (None for all, with a masked gradient).

    exists: bool, of the parameter's shape. layer: None unless the parameter is its ``weight``.
    """
    density = float(exists.sum()) / exists.numel()
    linear = type(layer) is nn.Linear and parameter.numel() * positions >= FEW_PRODUCTS
    # Only Intel's library multiplies compressed rows at this speed.
    if linear and density <= DENSEST_ROWS and parameter.device.type == "cpu" and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return _SparseLinear.apply, SparseRows(parameter, _flat(exists))
    convolution = (
        type(layer) in (nn.Conv1d, nn.Conv2d)
        and cast(nn.Conv2d, layer).groups == 1
        and cast(nn.Conv2d, layer).padding_mode == "zeros"
        and parameter[0].numel() >= FEW_INPUTS
    )
    if linear or convolution:
        rows, columns = (
            exists.flatten(2).any(2).any(axis) if exists.dim() > 2 else exists.any(axis) for axis in (1, 0)
        )
        if 0 < float(rows.sum() * columns.sum()) <= _WORTH_PACKING * len(rows) * len(columns):
            block = ActiveBlock(parameter, tuple(parameter.shape), _where(rows), _where(columns))
            return packed_linear if linear else packed_convolution, block
    # This limits memory too: above 1/8, an index of eight bytes per element is larger than a byte per value.
    if density <= DENSEST_INDEX:
        return None, Elements(parameter, _flat(exists))
    return None, None


def _flat(exists: Tensor) -> Tensor:
    return exists.reshape(-1).nonzero().flatten()


def _where(flags: Tensor) -> Tensor | None:
    return None if bool(flags.all()) else flags.nonzero().flatten()


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes."""


class Bits:
    """Zero gradients in place at missing elements, including infinite ones."""

    def __init__(self, exists: Tensor) -> None:
        self._bits = -exists.to(torch.int8)

    # A bitwise and with one byte per value, all bits set or none, is twice as fast as multiplying by booleans, and has
    # no inf * 0.
    def mask(self, gradient: Tensor) -> None:
        """Zero ``gradient`` in place at missing elements."""
        # The gradient of a convolution in channels last.
        if self._bits.stride() != gradient.stride():
            self._bits = torch.empty_like(gradient, dtype=torch.int8).copy_(self._bits)
        gradient.view(_INTEGERS[gradient.element_size()]).bitwise_and_(self._bits)


def tensors_of(flags: Mapping[str, Flags]) -> dict[str, Tensor]:
    """Return flags as tensors for ``Freezing``: name -> bool of the parameter's shape."""
    return {name: torch.from_numpy(np.array(each)) for name, each in flags.items()}
