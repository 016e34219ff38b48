"""Linear layers, convolutions and batch norm on values of which only some channels are computed, and for off rows.

A layer's weight is cut down to the rows that are on and to the columns of its input's computed channels. What the
constant channels add is the same for every sample: computed once, it goes into the bias, or, where a convolution pads
and a position near the border sees less of the constant, into a bias per position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from edge_sdk.training.gates_tensors import Batch, BlockedTensor, Index, Spans
from edge_sdk.training.gates_values import Echo, Partial

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Matrix:
    """What a linear layer does with its weight; its channels are its last axis."""

    pads = False

    def axis(self, inputs: torch.Tensor) -> int:
        """The axis of the channels."""
        return inputs.dim() - 1

    def run(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer's output."""
        return F.linear(inputs, weight, bias)

    def gradients(
        self, output: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, needed: tuple[bool, bool, bool]
    ) -> Gradients:
        """Gradients of inputs, weight and bias, where ``needed``, from that of the output."""
        flat = output.flatten(0, -2)
        return (
            output @ weight if needed[0] else None,
            flat.t() @ inputs.flatten(0, -2) if needed[1] else None,
            flat.sum(0) if needed[2] else None,
        )

    def still(self, constants: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """One sample of ``constants`` [channels], as large as their part of the output differs between positions."""
        return constants.unsqueeze(0)


@dataclass(frozen=True)
class Convolution:
    """What a convolution in one group, padded with zeros, does with its weight; its channels are axis 1."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Convolution | None:
        """How ``module`` convolves; None where it does so in groups or pads with anything but zeros on both sides."""
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
    def pads(self) -> bool:
        """Whether positions near the border see less of the input."""
        return any(self.padding)

    def axis(self, inputs: torch.Tensor) -> int:
        """The axis of the channels."""
        return 1

    def run(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer's output."""
        return torch.convolution(
            inputs, weight, bias, self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), 1
        )

    def gradients(
        self, output: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, needed: tuple[bool, bool, bool]
    ) -> Gradients:
        """Gradients of inputs, weight and bias, where ``needed``, from that of the output."""
        none = (0,) * len(self.stride)
        found = torch.ops.aten.convolution_backward(
            *(output, inputs, weight, [len(weight)], self.stride, self.padding, self.dilation, False, none, 1, needed)
        )
        return cast(Gradients, found)

    def still(self, constants: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """One sample of ``constants`` [channels], as large as their part of the output differs between positions."""
        seen = (step * (taps - 1) + 1 for step, taps in zip(self.dilation, self.kernel, strict=True))
        size = tuple(inputs.shape[2:]) if self.pads else tuple(seen)
        return constants.view(1, -1, *(1,) * len(size)).expand(1, len(constants), *size)


Operator = Matrix | Convolution


def apply(
    operator: Operator, weight: BlockedTensor, bias: torch.Tensor | None, value: torch.Tensor | Partial, batch: Batch
) -> torch.Tensor | Partial:
    """A layer's output under a batch's gates. ``bias`` is its whole θ' [rows], or None.

    ``value`` is the layer's input; where it is partial, its channels lie on the operator's axis.
    """
    rows = weight.computed(batch)
    others = rows.others(weight.rows)
    shift = None if bias is None else rows.take(bias, 0)
    if isinstance(value, Partial):
        inputs, columns = value.computed, value.spans
        matters = np.flatnonzero(value.matters)
        channels, constants = value.others.indices()[matters], value.constants[torch.from_numpy(matters)]
        cut, seen = weight.at(batch, rows, columns, channels)
        if len(matters):
            added = operator.run(operator.still(constants, inputs), seen, None)
            if not operator.pads:
                added = added.flatten()
            elif shift is not None:
                shift = shift.view(1, -1, *(1,) * (added.dim() - 2))
            shift = added if shift is None else shift + added
        echo, heard = value.listened()
        heard_weight = seen.detach().index_select(1, torch.from_numpy(np.searchsorted(matters, heard)))
    else:
        inputs, columns, channels, constants, echo, heard_weight = value, None, None, None, None, None
        (cut,) = weight.at(batch, rows)
    output: torch.Tensor = _Apply.apply(operator, inputs, cut, shift, echo, heard_weight)  # type: ignore[no-untyped-call]
    if not others:
        return output
    fixed = others.take(bias, 0) if bias is not None else output.new_zeros(others.size)
    learns, hears = torch.is_grad_enabled(), torch.is_grad_enabled() and batch.heard > 0
    source = _Source(
        operator,
        weight,
        batch,
        others.indices(),
        fixed.detach(),
        inputs.detach(),
        columns,
        channels,
        None if constants is None else constants.detach(),
        output.shape,
    )
    return Partial(
        computed=output,
        spans=rows,
        channels=weight.rows,
        axis=operator.axis(output),
        constants=fixed,
        live=np.full(others.size, learns),
        heard=np.full(others.size, hears),
        echo=Echo(source.start, others.size) if hears else None,
    )


class _Apply(torch.autograd.Function):
    """The layer itself; backward also takes the signal back along the echo's channels, which add nothing forward."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor | None,
        echo: torch.Tensor | None,
        heard_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.operator, ctx.per_position = operator, shift is not None and shift.dim() > 1
        ctx.save_for_backward(inputs, weight, heard_weight)
        ctx.echo = None if echo is None else echo.detach()
        if ctx.per_position:
            return operator.run(inputs, weight, None).add_(shift)  # type: ignore[arg-type]
        return operator.run(inputs, weight, shift)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, heard_weight = ctx.saved_tensors
        _, *needed, needs_echo, _ = ctx.needs_input_grad
        in_bias = needed[2] and not ctx.per_position
        inward, for_weight, for_shift = ctx.operator.gradients(gradient, inputs, weight, (*needed[:2], in_bias))
        if needed[2] and ctx.per_position:
            for_shift = gradient.sum(0, keepdim=True)
        along = None
        if needs_echo:
            signal = gradient[: len(ctx.echo)]
            along, _, _ = ctx.operator.gradients(signal, ctx.echo, heard_weight, (True, False, False))
        return None, inward, for_weight, for_shift, along, None


@dataclass(frozen=True)
class _Source:
    """A layer's off rows: what would have to be computed to know how their gates matter.

    rows: which they are; fixed: their output as it is, [rows]. inputs, columns: the computed channels of the layer's
    input, and which they are; channels, constants: those that are constant and not 0. shape: of the layer's output.
    """

    operator: Operator
    weight: BlockedTensor
    batch: Batch
    rows: Index
    fixed: torch.Tensor
    inputs: torch.Tensor
    columns: Spans | None
    channels: Index | None
    constants: torch.Tensor | None
    shape: torch.Size

    def start(self, which: Index) -> torch.Tensor:
        """The output of the rows ``which`` of these for the samples that are heard (see ``Echo``)."""
        chosen = replace(self, rows=self.rows[which], fixed=self.fixed[torch.from_numpy(which)])
        return cast(torch.Tensor, _Start.apply(self.batch.gates, chosen))  # type: ignore[no-untyped-call]

    def products(self, signal: torch.Tensor) -> torch.Tensor:
        """<δ, z_b> for every block b of the model, [L]: δ is ``signal``, and z_b what block b's weights alone give.

        That is e_b of the card, 4.5, since z_b is linear in θ_b; it needs no gradient as large as the weight.
        """
        values, which, block = self.weight.by_block(self.rows)
        weight = values.view(len(values), *self.weight.parameter.shape[1:])
        inputs = self.inputs[: self.batch.heard]
        result = self.operator.run(inputs, weight if self.columns is None else self.columns.take(weight, 1), None)
        if self.channels is not None and self.constants is not None and len(self.channels):
            seen = weight.index_select(1, torch.from_numpy(self.channels))
            result += self.operator.run(self.operator.still(self.constants, inputs), seen, None)
        axis = self.operator.axis(result)
        if len(values) > len(self.rows):
            signal = signal.index_select(axis, which)
        products = (signal * result).sum([dim for dim in range(result.dim()) if dim != axis])
        return self.batch.gates.new_zeros(len(self.batch.gates)).index_add_(0, block, products * self.batch.factor)


class _Start(torch.autograd.Function):
    """Off rows' constant output; backward turns the signal that arrives into gradients of their blocks' gates."""

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, source: _Source) -> torch.Tensor:
        ctx.source = source
        axis = source.operator.axis(source.inputs)
        shape = [source.batch.heard, *source.shape[1:]]
        shape[axis] = len(source.rows)
        return source.fixed.view(-1, *(1,) * (len(shape) - axis - 1)).expand(shape)

    @staticmethod
    def backward(ctx: Any, signal: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.source.products(signal), None


def normalise(
    module: nn.modules.batchnorm._BatchNorm,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    value: Partial,
) -> Partial:
    """Batch norm under θ' ``weight`` and ``bias`` [channels]; its running statistics move as if all were computed.

    Over a batch a constant channel has no variance: its output is the bias. Still a signal passes, through the mean.
    """
    weight = value.constants.new_ones(value.channels) if weight is None else weight
    bias = value.constants.new_zeros(value.channels) if bias is None else bias
    spans, others = value.spans, value.others
    of_batch = module.training or module.running_mean is None
    share = 0.0 if module.momentum is None else module.momentum
    if module.training and module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            share = 1.0 / float(module.num_batches_tracked)
    kept = module.running_mean is not None and (not module.training or module.track_running_stats)
    statistics = [
        spans.take(cast(torch.Tensor, s), 0).clone() for s in (module.running_mean, module.running_var) if kept
    ]
    mean_of, variance_of = statistics or (None, None)
    scaled = (spans.take(weight, 0), spans.take(bias, 0))
    computed = F.batch_norm(value.computed, mean_of, variance_of, *scaled, of_batch, share, module.eps)
    scale, shift = others.take(weight, 0), others.take(bias, 0)
    if of_batch:
        constants, gain = shift, scale.detach() * module.eps**-0.5
    else:
        mean, variance = (others.take(cast(torch.Tensor, s), 0) for s in (module.running_mean, module.running_var))
        deviation = (variance + module.eps).sqrt()
        constants, gain = (value.constants - mean) / deviation * scale + shift, scale.detach() / deviation
    if of_batch and kept:
        still = value.constants.detach()
        for running, moved, constant in zip(
            (module.running_mean, module.running_var), statistics, (still, torch.zeros_like(still)), strict=True
        ):
            spans.put(cast(torch.Tensor, running), 0, moved)
            others.put(
                cast(torch.Tensor, running), 0, others.take(cast(torch.Tensor, running), 0).lerp(constant, share)
            )
    fixed = constants.detach()

    def step(echo: torch.Tensor, channels: Index) -> torch.Tensor:
        which, wide = torch.from_numpy(channels), (-1, *(1,) * (echo.dim() - 2))
        signal = (
            echo - echo.detach()
        )  # 0, exactly: deviations from a constant are rounding errors, and grow by eps^-1/2
        if of_batch:
            signal = signal - signal.mean([dim for dim in range(signal.dim()) if dim != 1], keepdim=True)
        result: torch.Tensor = fixed[which].view(wide) + gain[which].view(wide) * signal
        return result

    return replace(
        value,
        computed=computed,
        constants=constants,
        live=np.full(others.size, torch.is_grad_enabled()),
        heard=value.heard & (gain != 0).numpy(force=True),
        echo=value.after(step),
    )
