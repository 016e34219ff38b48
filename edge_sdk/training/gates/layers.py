"""Linear layers, convolutions and batch norm on values of which only some channels are computed.

A weight is cut to its active rows and to the columns of computed input channels. The contribution of constant
channels is computed once, and added to the bias, or to a bias per position if a convolution pads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .tensors import Batch, BlockedTensor, Channels, Cut, Index, columns_of, index, total
from .values import Echo, Partial

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Matrix:
    """A linear layer; channels are the last axis."""

    pads = False
    dims = 2

    def axis(self, inputs: torch.Tensor) -> int:
        """Return the channels' axis."""
        return inputs.dim() - 1

    def run(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output."""
        return F.linear(inputs, weight, bias)

    def gradients(
        self, output: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, needed: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return gradients of inputs, weight and bias, if ``needed``, from the output's."""
        flat = output.flatten(0, -2)
        return (
            output @ weight if needed[0] else None,
            flat.t() @ inputs.flatten(0, -2) if needed[1] else None,
            flat.sum(0) if needed[2] else None,
        )

    def still(self, constants: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return one sample of ``constants`` [channels], with as many positions as their output differs in."""
        return constants.unsqueeze(0)


@dataclass(frozen=True)
class Convolution:
    """A convolution in one group with zero padding; channels are axis 1."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Convolution | None:
        """Return the operation of ``module``; None for groups, other padding, or padding on one side."""
        taken = tuple(step * (taps - 1) for step, taps in zip(module.dilation, module.kernel_size, strict=True))
        padding = module.padding
        if isinstance(padding, str):
            padding = tuple(length // 2 if padding == "same" else 0 for length in taken)
            if module.padding == "same" and any(length % 2 for length in taken):
                return None
        if module.groups > 1 or module.padding_mode != "zeros":
            return None
        return cls(module.kernel_size, module.stride, padding, module.dilation)

    @property
    def dims(self) -> int:
        """Number of axes of an input, including samples."""
        return len(self.kernel) + 2

    @property
    def pads(self) -> bool:
        """Whether the convolution pads."""
        return any(self.padding)

    def axis(self, inputs: torch.Tensor) -> int:
        """Return the channels' axis."""
        return 1

    def run(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output."""
        return torch.convolution(
            inputs, weight, bias, self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), 1
        )

    def gradients(
        self, output: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, needed: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return gradients of inputs, weight and bias, if ``needed``, from the output's."""
        found = torch.ops.aten.convolution_backward.default(
            output,
            inputs,
            weight,
            [len(weight)],
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0,) * len(self.stride),
            1,
            needed,
        )
        return cast(Gradients, found)

    def still(self, constants: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return one sample of ``constants`` [channels], with as many positions as their output differs in."""
        seen = (step * (taps - 1) + 1 for step, taps in zip(self.dilation, self.kernel, strict=True))
        size = tuple(inputs.shape[2:]) if self.pads else tuple(seen)
        return constants.view(1, -1, *(1,) * len(size)).expand(1, len(constants), *size)


Operator = Matrix | Convolution


def operator_of(module: object) -> Operator | None:
    """Return the operation of ``module``; None unless it is a linear layer or convolution that can be cut."""
    if type(module) is nn.Linear:
        return Matrix()
    return Convolution.of(module) if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Adapted:
    """A layer's θ' in one batch."""

    cut: Cut
    # The rows of ``cut``.
    weight: torch.Tensor
    columns: Channels | None
    # Predicted columns of the layer.
    of_columns: torch.Tensor | None
    # Bias of the rows.
    bias: torch.Tensor | None
    # Fixed of the other rows.
    fixed: torch.Tensor | None

    def computed(self, columns: Channels) -> torch.Tensor:
        """Return columns of the weight; predicted ones are cheaper (``_Adapt``)."""
        if self.columns is not None and self.columns.source == columns.source:
            return cast(torch.Tensor, self.of_columns)
        return columns_of(self.weight, columns)


def apply(operator: Operator, adapted: Adapted, value: torch.Tensor | Partial, batch: Batch) -> torch.Tensor | Partial:
    """Return a layer's output under a batch's gates."""
    rows = adapted.cut.rows
    bias = adapted.bias
    fixed = adapted.fixed
    layer = _Layer(operator, adapted.cut.tensor, batch, rows, None, _NONE, _NONE)
    inputs = value
    weight = adapted.weight
    constants = None
    along = None
    if isinstance(value, Partial):
        inputs = value.computed
        weight = adapted.computed(value.channels)
        seen = np.flatnonzero(value.matters)
        heard = _NONE
        if len(seen):
            constants = value.known()
            along, heard = value.listened()
        layer = replace(layer, columns=value.channels, seen=seen, heard=heard)
    inputs = cast(torch.Tensor, inputs)
    if constants is None:
        output = operator.run(inputs, weight, bias)
    else:
        output = _Apply.apply(layer, weight, adapted.weight, bias, inputs, constants, along)  # type: ignore[no-untyped-call]
    if not len(rows.off):
        return output
    learns = torch.is_grad_enabled()
    echo = None
    if learns:
        off = _OffRows(layer, rows.off, fixed, inputs, constants, output.shape)
        echo = Echo(off.start, len(rows.off))
    live = np.full(len(rows.off), learns)
    return Partial(output, rows, operator.axis(output), fixed, live, live, echo)


_NONE: Index = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True)
class _Layer:
    """A layer in one batch."""

    operator: Operator
    weight: BlockedTensor
    batch: Batch
    rows: Channels
    # Computed channels of the input, None for all.
    columns: Channels | None
    # The input's constants in use.
    seen: Index
    # Layers with gradients per sample.
    heard: Index

    @cached_property
    def channels(self) -> torch.Tensor:
        """Columns of the used constants."""
        assert self.columns is not None
        return index(self.columns.off[self.seen], self.columns.device)


# A single function, because with one per cut, sum and copy autograd's overhead would dominate in a small layer.
class _Apply(torch.autograd.Function):
    """The computed rows of a layer whose input has used constants, and the echo's signal in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: _Layer,
        computed: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        inputs: torch.Tensor,
        constants: torch.Tensor,
        echo: torch.Tensor | None,
    ) -> torch.Tensor:
        operator = layer.operator
        known = constants.index_select(0, index(layer.seen, constants.device))
        seen = weight.index_select(1, layer.channels)
        shift = operator.run(operator.still(known, inputs), seen, None)
        ctx.layer = layer
        ctx.echo = None if echo is None else echo.detach()
        ctx.save_for_backward(inputs, computed, seen, known)
        if operator.pads:
            if bias is not None:
                shift += bias.view(1, -1, *(1,) * (shift.dim() - 2))
            return operator.run(inputs, computed, None).add_(shift)
        return operator.run(inputs, computed, shift.flatten() if bias is None else shift.flatten() + bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer = ctx.layer
        inputs, computed, seen, known = ctx.saved_tensors
        operator = layer.operator
        columns = layer.columns
        _, _, _, needs_bias, needs_inputs, needs_constants, needs_echo = ctx.needs_input_grad
        needed = (needs_inputs, True, not operator.pads)
        inward, for_computed, for_bias = operator.gradients(gradient, inputs, computed, needed)
        still = operator.still(known, inputs)
        wide = known.new_zeros(len(columns.flags))
        if operator.pads:
            signal = gradient.sum(0, keepdim=True)
            for_bias = signal.flatten(2).sum((0, 2))
        else:
            signal = for_bias.view(1, -1, *(1,) * (still.dim() - 2))
        # As if from one sample that is 0 at computed channels: writing many single columns is far slower.
        sample = operator.still(wide.index_copy_(0, layer.channels, known), inputs)
        # Only the shape is read.
        like_weight = layer.weight.parameter[: len(layer.rows.on)]
        for_weight = operator.gradients(signal, sample, like_weight, _WEIGHT)[1]
        for_constants = along = None
        if needs_constants:
            found = operator.gradients(signal, still, seen, _INPUTS)[0].view(len(known), -1).sum(1)
            places = index(layer.seen, known.device)
            for_constants = known.new_zeros(len(columns.off)).index_copy_(0, places, found)
        if needs_echo:
            among = index(np.searchsorted(layer.seen, layer.heard), known.device)
            heard = seen.index_select(1, among)
            along = operator.gradients(gradient[: len(ctx.echo)], ctx.echo, heard, _INPUTS)[0]
        return None, for_computed, for_weight, for_bias if needs_bias else None, inward, for_constants, along


_INPUTS = (True, False, False)
_WEIGHT = (False, True, False)


@dataclass(frozen=True)
class _OffRows:
    """A layer's inactive rows, for the gradients of their gates."""

    layer: _Layer
    rows: Index
    # Constant output of other rows, [rows], None for 0.
    fixed: torch.Tensor | None
    # Computed channels of the layer's input.
    inputs: torch.Tensor
    constants: torch.Tensor | None
    shape: torch.Size

    def start(self, which: Index) -> torch.Tensor:
        """Return the output of a selection of the rows for the samples with gradients (``Echo``)."""
        chosen = self
        if len(which) < len(self.rows):
            fixed = self.fixed
            if fixed is not None:
                fixed = fixed.detach().index_select(0, index(which, fixed.device))
            chosen = replace(self, rows=self.rows[which], fixed=fixed)
        return cast(torch.Tensor, _Start.apply(self.layer.batch.gates, chosen))  # type: ignore[no-untyped-call]

    def products(self, signal: torch.Tensor) -> torch.Tensor:
        """Return <δ, z_b> for every block b of the model, [L]; δ is ``signal``, z_b the output of block b's weights."""
        layer = self.layer
        operator = layer.operator
        columns = layer.columns
        layer, operator, columns = self.layer, self.layer.operator, self.layer.columns
        batch = layer.batch
        weight = layer.weight
        segments = weight.segments(self.rows)
        values = weight.values(segments)
        inputs = self.inputs[: batch.heard]
        result = operator.run(inputs, values if columns is None else columns.computed(values, 1), None)
        if self.constants is not None:
            known = self.constants.index_select(0, index(layer.seen, inputs.device))
            result += operator.run(operator.still(known, inputs), values.index_select(1, layer.channels), None)
        axis = operator.axis(result)
        if segments.rows is not None:
            signal = signal.index_select(axis, segments.rows)
        # This equals e_b (``gates.network``), because z_b is linear in θ_b, without a gradient of the weight's size.
        products = (signal * result).sum([dim for dim in range(result.dim()) if dim != axis])
        return total(batch, segments.blocks, products * batch.factor)


class _Start(torch.autograd.Function):
    """Constant output of inactive rows, with gradients to their gates."""

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, off: _OffRows) -> torch.Tensor:
        ctx.off = off
        axis = off.layer.operator.axis(off.inputs)
        shape = [off.layer.batch.heard, *off.shape[1:]]
        shape[axis] = len(off.rows)
        fixed = off.inputs.new_zeros(len(off.rows)) if off.fixed is None else off.fixed.detach()
        return fixed.view(-1, *(1,) * (len(shape) - axis - 1)).expand(shape)

    @staticmethod
    def backward(ctx: Any, signal: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.off.products(signal), None


def normalise(
    module: nn.modules.batchnorm._BatchNorm,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    value: torch.Tensor | Partial,
) -> torch.Tensor | Partial:
    """Apply batch norm with θ' ``weight`` and ``bias`` [channels]; update running statistics as for a whole value."""
    of_batch = module.training or module.running_mean is None
    statistics: tuple[Any, Any] = (module.running_mean, module.running_var)
    moves = module.training and module.track_running_stats and module.running_mean is not None
    share = _share(module) if moves else 0.0
    if not isinstance(value, Partial):
        mean, variance = statistics if moves or not of_batch else (None, None)
        return F.batch_norm(value, mean, variance, weight, bias, of_batch, share, module.eps)
    channels = value.channels
    weight = value.computed.new_ones(len(channels.flags)) if weight is None else weight
    bias = value.computed.new_zeros(len(channels.flags)) if bias is None else bias
    computed: torch.Tensor
    constants: torch.Tensor
    deviation: torch.Tensor | None = None
    if of_batch:
        if value.computed.numel() == len(channels.on):
            raise ValueError("in training mode batch norm needs more than one value of every channel")
        computed, constants, own = _Normalise.apply(value.computed, weight, bias, channels, moves, module.eps)  # type: ignore[no-untyped-call]
        if moves:
            still = None if value.constants is None else value.constants.detach()
            statistics[0].lerp_(channels.joined(own[0], still), share)
            statistics[1].lerp_(channels.joined(own[1], None), share)
    else:
        scaled = (channels.computed(weight), channels.computed(bias))
        mean = channels.computed(statistics[0])
        variance = channels.computed(statistics[1])
        still = channels.others(statistics[0])
        others = channels.others(statistics[1])
        computed = F.batch_norm(value.computed, mean, variance, *scaled, False, 0.0, module.eps)
        deviation = (others + module.eps).sqrt()
        constants = (value.known() - still) / deviation * channels.others(weight) + channels.others(bias)

    def step(echo: torch.Tensor, rows: Index) -> torch.Tensor:
        which = index(rows, echo.device)
        wide = (-1, *(1,) * (echo.dim() - 2))
        fixed = constants.detach()
        gain = channels.others(weight.detach())
        gain = gain * module.eps**-0.5 if deviation is None else gain / deviation
        # Exactly 0, because deviations of a constant are rounding errors, which eps^-1/2 would amplify.
        signal = echo - echo.detach()
        if of_batch:
            signal = signal - signal.mean([dim for dim in range(signal.dim()) if dim != 1], keepdim=True)
        return fixed.index_select(0, which).view(wide) + gain.index_select(0, which).view(wide) * signal

    live = np.full(len(channels.off), torch.is_grad_enabled())
    return replace(value, computed=computed, constants=constants, live=live, echo=value.after(step))


class _Normalise(torch.autograd.Function):
    """Batch norm by batch statistics: computed channels, constants of the others, mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        channels: Channels,
        moves: bool,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        own = values.new_zeros(2, len(channels.on)) if moves else None
        # With momentum 1 the statistics become those of the batch.
        mean, variance = (None, None) if own is None else own
        scale = channels.computed(weight)
        constants = channels.others(bias)
        found = torch.native_batch_norm(values, scale, channels.computed(bias), mean, variance, True, 1.0, eps)
        output, *saved = found
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, scale, *saved)
        ctx.channels = channels
        ctx.eps = eps
        if own is not None:
            ctx.mark_non_differentiable(own)
        return output, constants, own

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, for_constants: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        values, scale, mean, deviation = ctx.saved_tensors
        gradient = torch.zeros_like(values) if gradient is None else gradient
        inward, for_scale, for_bias = torch.ops.aten.native_batch_norm_backward.default(
            gradient, values, scale, None, None, mean, deviation, True, ctx.eps, [True, True, True]
        )
        joined = ctx.channels.joined
        return inward, joined(for_scale, None), joined(for_bias, for_constants), None, None, None


def _share(module: nn.modules.batchnorm._BatchNorm) -> float:
    """Return the momentum of running statistics, and count the batch."""
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            return 1.0 / float(module.num_batches_tracked)
    return module.momentum or 0.0
