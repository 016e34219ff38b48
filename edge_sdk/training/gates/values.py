"""A layer's output of which only some channels are computed: the others are constants, the same for every sample.

An off row of a weight gives its bias wherever it is applied. What follows (activations, pooling, batch norm, flatten)
turns a constant channel into a constant channel, so that the next layer adds its part once and not per sample. As
seen from the loss a constant channel differs from sample to sample, though: the gate of its row learns from the signal
that comes back along it. An ``Echo`` follows that signal: it repeats the steps from the row to the next layer on the
constants, for those channels alone along which any signal passes, which after a ReLU are those above zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from .tensors import Channels, Flags, Index, index, true

Step = Callable[[torch.Tensor, Index], torch.Tensor]
"""What an operation does to the echo's channels [P, Q, ...], given which of the constant channels they are."""


@dataclass(frozen=True)
class Echo:
    """The way back from constant channels to the rows that would have made them.

    start(which) gives the rows' output as it is, constant, for the rows ``which`` of those that are off, but takes
    gradients to the gates of their blocks; steps are the operations since.
    """

    start: Callable[[Index], torch.Tensor]
    rows: int
    steps: tuple[Step, ...] = ()

    def follow(self, heard: Flags) -> tuple[torch.Tensor, Index]:
        """Return the channels of the rows of which ``heard`` names any channel, after all steps; and which they are."""
        rows = np.flatnonzero(heard.reshape(self.rows, -1).any(axis=1))
        value, channels = self.start(rows), rows
        for step in self.steps:
            value = step(value, channels)
            channels = owned(rows, value.shape[1] // len(rows)) if value.dim() == 2 else channels
        return value, channels


def owned(rows: Index, times: int) -> Index:
    """Return the entries that ``rows`` own, ``times`` each."""
    return (rows[:, None] * times + np.arange(times)).ravel()


def like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an empty tensor of ``shape``, with the type and memory layout of ``tensor``."""
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)


@dataclass(frozen=True)
class Partial:
    """A value [N, ..., channels, ...] of which only some channels are computed.

    computed holds those that ``channels`` says are on, along ``axis``; constants [others] is what the others are,
    everywhere, None where that is 0 for all. live: which of the others' constants depend on a gate or weight, as far as
    is known; heard: along which the echo's signal passes (never more than live); echo is None where gates of off rows
    get no gradients.
    """

    computed: torch.Tensor
    channels: Channels
    axis: int
    constants: torch.Tensor | None
    live: Flags
    heard: Flags
    echo: Echo | None

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole value."""
        shape = list(self.computed.shape)
        shape[self.axis] = len(self.channels.flags)
        return torch.Size(shape)

    @property
    def matters(self) -> Flags:
        """The constants that the next layer cannot leave out, [others]: those that are not 0, or that gradients
        reach."""
        moved = self.live | self.heard
        return moved if self.constants is None else moved | true(self.constants.detach() != 0)

    def known(self) -> torch.Tensor:
        """Return the constants, zeros too."""
        return self.computed.new_zeros(len(self.channels.off)) if self.constants is None else self.constants

    def each(self, operation: Callable[[torch.Tensor], torch.Tensor], *, rectifies: bool = False) -> Partial:
        """Return ``operation``, which works on every entry alone, done to this value; whether it is a ReLU
        saves finding its slope."""
        constants, passes = self.constants, np.zeros(len(self.live), dtype=bool)
        if not rectifies:
            constants = operation(self.known())
            if torch.is_grad_enabled() and self.live.any():
                with torch.enable_grad():
                    point = self.known().detach().requires_grad_()
                    operation(point).sum().backward()  # type: ignore[no-untyped-call]
                passes = true(cast(torch.Tensor, point.grad) != 0)
        elif constants is not None:
            passes = ~true(constants.detach() <= 0)
            constants = operation(constants) if passes.any() else None
        live, heard = self.live & passes, self.heard & passes
        return replace(
            self,
            computed=operation(self.computed),
            constants=constants,
            live=live,
            heard=heard,
            echo=self.after(lambda echo, _: operation(echo)),
        )

    def pooled(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> Partial:
        """Return ``operation``, which works on every channel alone and leaves constants what they are."""
        return replace(self, computed=operation(self.computed), echo=self.after(lambda echo, _: operation(echo)))

    def flattened(self) -> Partial:
        """Return [N, channels * positions], channel after channel."""
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
        """Return the echo, one step on."""
        return None if self.echo is None else replace(self.echo, steps=(*self.echo.steps, step))

    def listened(self) -> tuple[torch.Tensor | None, Index]:
        """Return the echo at this point and which of the constant channels it has; None where no signal passes."""
        if self.echo is None or not self.heard.any():
            return None, np.zeros(0, dtype=np.intp)
        echo, channels = self.echo.follow(self.heard)
        kept = self.heard[channels]  # a row's channels are followed together, though some may have gone silent
        if not kept.all():
            echo = echo.index_select(self.axis, index(np.flatnonzero(kept), echo.device))
        return echo, channels[kept]

    def whole(self) -> torch.Tensor:
        """Return the value itself, every channel written out."""
        echo, channels = self.listened()
        return self._written(self.known(), echo, self.channels.on, self.channels.off, self.channels.off[channels])

    def widened(self, which: Flags) -> Partial:
        """Return the same value with those constant channels written out that ``which`` [others] names: all
        heard, or more."""
        if not which.any():
            return self
        old, device = self.channels, self.channels.device
        flags = old.flags.copy()
        flags[old.off[which]] = True
        place = np.cumsum(flags) - 1
        echo, channels = self.listened()
        written, left = index(np.flatnonzero(which), device), index(np.flatnonzero(~which), device)
        return replace(
            self,
            computed=self._written(
                *(self.known().index_select(0, written), echo),
                *(place[part] for part in (old.on, old.off[which], old.off[channels])),
            ),
            channels=Channels(flags, device),
            constants=None if self.constants is None else self.constants.index_select(0, left),
            live=self.live[~which],
            heard=self.heard[~which],
            echo=None,
        )

    def _written(self, constants: torch.Tensor, echo: torch.Tensor | None, *places: Index) -> torch.Tensor:
        """Return computed channels and ``constants`` at the first two ``places``; at the third ``echo`` is heard."""
        where = (index(part, constants.device) for part in places)
        return cast(torch.Tensor, _Write.apply(self.computed, constants, echo, self.axis, *where))  # type: ignore[no-untyped-call]


class _Write(torch.autograd.Function):
    """Computed channels and constants side by side; backward also hands the echo its part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        computed: torch.Tensor,
        constants: torch.Tensor,
        echo: torch.Tensor | None,
        axis: int,
        *places: torch.Tensor,
    ) -> torch.Tensor:
        ctx.axis, ctx.places, ctx.samples = axis, places, 0 if echo is None else len(echo)
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
