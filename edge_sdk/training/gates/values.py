"""Layer outputs with some computed channels; the other channels are constants, equal for all samples.

Activations, pooling, batch norm and flatten map constant channels to constant channels, so that the next layer adds
their part once. But the loss's gradient for a constant channel differs between samples. An ``Echo`` propagates this
signal to the gate: it repeats the operations from the row to the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from .tensors import Channels, Flags, Index, index, true

Step = Callable[[torch.Tensor, Index], torch.Tensor]
"""An operation on the echo's channels [P, Q, ...], given their places among the constant channels."""


@dataclass(frozen=True)
class Echo:
    """The path from constant channels back to their rows.

    start(which): the constant output of inactive rows, with gradients to their gates.
    """

    start: Callable[[Index], torch.Tensor]
    rows: int
    # The operations since.
    steps: tuple[Step, ...] = ()

    def follow(self, heard: Flags) -> tuple[torch.Tensor, Index]:
        """Return the channels, and their places, of rows with a channel in ``heard``, after all steps."""
        rows = np.flatnonzero(heard.reshape(self.rows, -1).any(axis=1))
        value, channels = self.start(rows), rows
        for step in self.steps:
            value = step(value, channels)
            channels = owned(rows, value.shape[1] // len(rows)) if value.dim() == 2 else channels
        return value, channels


def owned(rows: Index, times: int) -> Index:
    """Return the entries of ``rows`` with ``times`` entries each."""
    return (rows[:, None] * times + np.arange(times)).ravel()


def like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an empty tensor of ``shape`` with the type and memory format of ``tensor``."""
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)


@dataclass(frozen=True)
class Partial:
    """A value [N, ..., channels, ...] with some computed channels along ``axis``.

    constants [others]: the values of the other channels, None for 0.
    """

    computed: torch.Tensor
    channels: Channels
    axis: int
    constants: torch.Tensor | None
    # Constants that may depend on a gate or weight.
    live: Flags
    # Values with a signal to the echo.
    heard: Flags
    # None if gates of off rows get no gradients.
    echo: Echo | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole value."""
        shape = list(self.computed.shape)
        shape[self.axis] = len(self.channels.flags)
        return torch.Size(shape)

    @property
    def matters(self) -> Flags:
        """Constants that the next layer needs, [others]: nonzero, or with a gradient."""
        moved = self.live | self.heard
        return moved if self.constants is None else moved | true(self.constants.detach() != 0)

    def known(self) -> torch.Tensor:
        """Return the constants, including zeros."""
        return self.computed.new_zeros(len(self.channels.off)) if self.constants is None else self.constants

    def each(self, operation: Callable[[torch.Tensor], torch.Tensor], *, rectifies: bool = False) -> Partial:
        """Apply an elementwise operation; for a ReLU (``rectifies``) the slope is known."""
        constants = self.constants
        passes = np.zeros(len(self.live), dtype=bool)
        if not rectifies:
            constants = operation(self.known())
            if torch.is_grad_enabled() and self.live.any():
                with torch.enable_grad():
                    point = self.known().detach().requires_grad_()
                    operation(point).sum().backward()  # type: ignore[no-untyped-call]
                passes = true(cast(torch.Tensor, point.grad) != 0)
        # No signal passes a ReLU after a constant <= 0, so such rows are not computed.
        elif constants is not None:
            passes = ~true(constants.detach() <= 0)
            constants = operation(constants) if passes.any() else None
        live = self.live & passes
        heard = self.heard & passes
        return replace(
            self,
            computed=operation(self.computed),
            constants=constants,
            live=live,
            heard=heard,
            echo=self.after(lambda echo, _: operation(echo)),
        )

    def pooled(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> Partial:
        """Apply an operation on each channel that keeps constants unchanged."""
        return replace(self, computed=operation(self.computed), echo=self.after(lambda echo, _: operation(echo)))

    def flattened(self) -> Partial:
        """Return [N, channels * positions]."""
        times = self.computed[0, 0].numel()
        return replace(
            self,
            computed=self.computed.flatten(1),
            channels=self.channels.repeated(times),
            constants=None if self.constants is None else self.constants.repeat_interleave(times),
            live=self.live.repeat(times),
            heard=self.heard.repeat(times),
            echo=self.after(lambda echo, _: echo.flatten(1)),
        )

    def after(self, step: Step) -> Echo | None:
        """Return the echo after one more step."""
        return None if self.echo is None else replace(self.echo, steps=(*self.echo.steps, step))

    def listened(self) -> tuple[torch.Tensor | None, Index]:
        """Return the echo at this point and its places among the constant channels; None without a signal."""
        if self.echo is None or not self.heard.any():
            return None, np.zeros(0, dtype=np.intp)
        echo, channels = self.echo.follow(self.heard)
        # All channels of a row are followed, though some may have lost their signal.
        kept = self.heard[channels]
        if not kept.all():
            echo = echo.index_select(self.axis, index(np.flatnonzero(kept), echo.device))
        return echo, channels[kept]

    def whole(self) -> torch.Tensor:
        """Return the full value, with all channels."""
        echo, channels = self.listened()
        return self._written(self.known(), echo, self.channels.on, self.channels.off, self.channels.off[channels])

    def widened(self, which: Flags) -> Partial:
        """Return the value with the constant channels ``which`` [others] written out, including all with a gradient."""
        if not which.any():
            return self
        old = self.channels
        device = old.device
        flags = old.flags.copy()
        flags[old.off[which]] = True
        place = np.cumsum(flags) - 1
        echo, channels = self.listened()
        written = index(np.flatnonzero(which), device)
        left = index(np.flatnonzero(~which), device)
        known = self.known().index_select(0, written)
        heard = place[old.off[channels]]
        return replace(
            self,
            computed=self._written(known, echo, place[old.on], place[old.off[which]], heard),
            channels=Channels(flags, device),
            constants=None if self.constants is None else self.constants.index_select(0, left),
            live=self.live[~which],
            heard=self.heard[~which],
            echo=None,
        )

    def _written(self, constants: torch.Tensor, echo: torch.Tensor | None, *places: Index) -> torch.Tensor:
        """Return the full value, with computed channels, constants and the echo at their positions."""
        tensors = (index(part, constants.device) for part in places)
        return cast(torch.Tensor, _Write.apply(self.computed, constants, echo, self.axis, *tensors))  # type: ignore[no-untyped-call]


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        computed: torch.Tensor,
        constants: torch.Tensor,
        echo: torch.Tensor | None,
        axis: int,
        *places: torch.Tensor,
    ) -> torch.Tensor:
        ctx.axis = axis
        ctx.places = places
        ctx.samples = 0 if echo is None else len(echo)
        shape = list(computed.shape)
        shape[axis] = len(places[0]) + len(places[1])
        written = like(computed, shape)
        written.index_copy_(axis, places[0], computed)
        wide = [1] * len(shape)
        wide[axis] = -1
        fill = list(shape)
        fill[axis] = len(constants)
        return written.index_copy_(axis, places[1], constants.view(wide).expand(fill))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        computed, constant, heard = ctx.places
        summed = [dim for dim in range(gradient.dim()) if dim != ctx.axis]
        return (
            gradient.index_select(ctx.axis, computed) if ctx.needs_input_grad[0] else None,
            gradient.index_select(ctx.axis, constant).sum(summed) if ctx.needs_input_grad[1] else None,
            gradient[: ctx.samples].index_select(ctx.axis, heard) if ctx.needs_input_grad[2] else None,
            *(None,) * 4,
        )
