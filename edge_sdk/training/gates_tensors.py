"""Parameters cut into blocks: a leaf of autograd for every block, and the weights that a batch's gates make of them.

A leaf is a view into its parameter's own storage. An optimiser over leaves therefore moves the model in place, a block
that is off in a batch has no gradient and is passed over, and nothing as large as the parameter is made anywhere. The
adapted weights θ' = θ ⊛ M' of a batch (pFedGate, arXiv:2305.02776; its method card, section 2) are made of the output
rows that some block touches which is on, one below the other; where such a row is cut, zeros stand for what is off.

On a small network a batch takes a few milliseconds and a call of torch some microseconds, so what is the same for all
batches is worked out once, choices of rows and channels are made in numpy, and vectors are adapted all at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Index = NDArray[np.intp]
Flags = NDArray[np.bool_]


def index(places: Index, device: torch.device) -> torch.Tensor:
    """``places`` as torch wants them to index a tensor on ``device``."""
    return torch.from_numpy(places).to(device)


class Channels:
    """Which channels of a value, or rows of a weight, are computed: ``flags`` [size], ``on`` and ``off`` by number."""

    def __init__(self, flags: Flags, device: torch.device) -> None:
        self.flags = flags
        self.device = device
        self.on, self.off = np.flatnonzero(flags), np.flatnonzero(~flags)
        self._on, self._off = index(self.on, device), index(self.off, device)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The computed ones as ranges (start, stop): rows of blocks are few."""
        padded = np.zeros(len(self.flags) + 2, dtype=bool)
        padded[1:-1] = self.flags
        ends = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
        return list(zip(ends[::2], ends[1::2], strict=True))

    def computed(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The part of ``tensor`` that is of computed channels, which lie along ``dim``."""
        return tensor.index_select(dim, self._on) if len(self.off) else tensor

    def others(self, tensor: torch.Tensor) -> torch.Tensor:
        """The entries of ``tensor`` [size] of the other channels."""
        return tensor.index_select(0, self._off)

    def joined(self, computed: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The vector [size] of both parts."""
        if not len(self.off):
            return computed
        whole = computed.new_empty(len(self.flags))
        return whole.index_copy_(0, self._on, computed).index_copy_(0, self._off, others)

    def put(self, tensor: torch.Tensor, dim: int, computed: torch.Tensor) -> None:
        """Write the computed channels into ``tensor``, which has all; by ranges, far faster than one by one."""
        parts = torch.split(computed, [stop - start for start, stop in self.runs], dim)
        for (start, stop), part in zip(self.runs, parts, strict=True):
            tensor.narrow(dim, start, stop - start).copy_(part)


@dataclass(frozen=True)
class Batch:
    """What holds for one batch.

    gates: float [L], M' of the card, 0 at blocks that are off; scales: the same as numbers. selected: bool [L], which
    blocks are on; before: how many of the first so many are, [L+1]. heard: samples, from the first on, from which
    gradients of gates of off rows are estimated; factor: what they are multiplied by, so that they stand for the whole
    batch. With heard 0 off blocks' gates get none: ``gates`` passes no gradients to them.
    """

    gates: torch.Tensor
    scales: Sequence[float]
    selected: Flags
    before: Index
    heard: int
    factor: float


class Piece(NamedTuple):
    """A run of values in computed rows that belong to one block: the block's place in the parameter and whether it is
    on (then the run is the whole block), where in the parameter, where in the copy."""

    place: int
    on: bool
    start: int
    stop: int
    target: int


class BlockedTensor:
    """One parameter and its blocks.

    ``first`` is the number in the model of its first block, ``sizes`` are the blocks' sizes. ``leaves`` has one tensor
    per block, 1-dimensional. Raises ValueError where the parameter is not contiguous, so that no block could be a view.
    """

    def __init__(self, name: str, parameter: nn.Parameter, first: int, sizes: Sequence[int]) -> None:
        if not parameter.is_contiguous():
            raise ValueError(f"{name}: blocks are runs of values in memory; make the parameter contiguous")
        self.name = name
        self.parameter = parameter
        self.first = first
        self.flat = parameter.detach().view(-1)
        self.rows = len(parameter) if parameter.dim() else 1
        self.row_size = self.flat.numel() // max(1, self.rows)
        self._bounds: list[int] = [0, *np.cumsum(sizes).tolist()]
        self._values = torch.split(self.flat, list(sizes))
        self.leaves = [part.detach().requires_grad_() for part in self._values]

    @cached_property
    def _of_rows(self) -> tuple[Index, Index]:
        """The first and the last block of every row, by their places in the parameter."""
        bounds, starts = np.array(self._bounds), np.arange(self.rows) * self.row_size
        first = np.searchsorted(bounds, starts, side="right") - 1
        return first, np.searchsorted(bounds, starts + self.row_size - 1, side="right") - 1

    def computed(self, batch: Batch) -> Channels:
        """Rows that a block touches which is on. Without any it is the first, so that no layer is empty."""
        first, last = self._of_rows
        before = batch.before[self.first :]
        flags = before[last + 1] > before[first]
        if not flags.any():
            flags[0] = True
        return Channels(flags, self.flat.device)

    def whole(self, batch: Batch) -> torch.Tensor:
        """θ' in the parameter's own shape."""
        pieces = self.pieces(batch, [(0, self.rows)])
        made: torch.Tensor = _Whole.apply(batch.gates, self, batch, pieces, *self.trained(pieces))  # type: ignore[no-untyped-call]
        return made

    def pieces(self, batch: Batch, rows: Sequence[tuple[int, int]]) -> list[Piece]:
        """The runs of blocks in ``rows``, ranges of ``computed`` ones or more, written one below the other."""
        found, target = [], 0
        on = batch.selected[self.first : self.first + len(self.leaves)].tolist()
        for first, last in rows:
            start, end = first * self.row_size, last * self.row_size
            place = bisect_right(self._bounds, start) - 1
            while start < end:
                stop = min(end, self._bounds[place + 1])
                found.append(Piece(place, on[place], start, stop, target))
                target += stop - start
                start, place = stop, place + 1
        return found

    def trained(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The leaves of blocks that are on."""
        return [self.leaves[piece.place] for piece in pieces if piece.on]

    def adapted(self, batch: Batch, pieces: Sequence[Piece], rows: int) -> torch.Tensor:
        """θ' at the ``rows`` rows of ``pieces``; not followed by autograd."""
        made = self.flat.new_empty(rows * self.row_size)
        for place, on, start, stop, target in pieces:
            part = made[target : target + stop - start]
            if on:
                torch.mul(self._values[place], batch.scales[self.first + place], out=part)
            else:
                part.zero_()
        return made.view(rows, *self.parameter.shape[1:])

    def gradients(
        self, batch: Batch, pieces: Sequence[Piece], gradient: torch.Tensor, needed: Sequence[bool]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """From g = ∂f/∂θ' at the rows of ``pieces``: ∂f/∂M' [L], which is e_b = <g_b, θ_b>, also of off blocks (card,
        4.5), and of every one of the ``trained`` leaves ∂f/∂θ_b = M'_b g_b, where ``needed``. Overwrites ``gradient``.
        """
        products, parts, wanted = [], [], iter(needed)
        runs = torch.split(gradient.view(-1), [piece.stop - piece.start for piece in pieces])
        for (place, on, start, stop, _), run in zip(pieces, runs, strict=True):
            products.append(torch.dot(run, self._values[place] if on else self.flat[start:stop]))
            if on:
                parts.append(run.mul_(batch.scales[self.first + place]) if next(wanted) else None)
        blocks = index(np.array([self.first + piece.place for piece in pieces]), self.flat.device)
        return total(batch, blocks, torch.stack(products)), parts

    def by_block(self, rows: Index) -> tuple[torch.Tensor, Index, Index]:
        """θ at ``rows``, a row for every block in it: values [T, row_size], which of ``rows``, which block (both [T]).

        A row that is cut comes as often as it has blocks, each time with zeros in place of the other blocks.
        """
        first, last = (blocks[rows] for blocks in self._of_rows)
        times = last - first + 1
        which = np.repeat(np.arange(len(rows)), times)
        begins = np.cumsum(times) - times
        block = first[which] + np.arange(len(which)) - begins[which]
        values = self.flat.view(self.rows, self.row_size).index_select(0, index(rows[which], self.flat.device))
        for copy in np.flatnonzero(times[which] > 1).tolist():
            start, stop = (self._bounds[block[copy] + end] - rows[which[copy]] * self.row_size for end in (0, 1))
            values[copy, : max(0, start)] = 0
            values[copy, stop:] = 0
        return values, which, block + self.first


class Vectors:
    """The parameters of one axis (biases, scales of norms), adapted all at once: a step for each block would cost more
    than the work in it, and what is off is not worth leaving out."""

    def __init__(self, tensors: Sequence[BlockedTensor]) -> None:
        self._tensors = tensors
        self._leaves = [leaf for tensor in tensors for leaf in tensor.leaves]
        self._blocks = np.array([t.first + place for t in tensors for place in range(len(t.leaves))], dtype=np.intp)
        self.sizes = [len(leaf) for leaf in self._leaves]
        self.of_values = torch.from_numpy(np.repeat(self._blocks, self.sizes))
        if tensors:
            self.of_values = self.of_values.to(tensors[0].flat.device)

    def adapted(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Name -> θ' of every parameter."""
        if not self._tensors:
            return {}
        on = np.flatnonzero(batch.selected[self._blocks]).tolist()
        leaves = [self._leaves[place] for place in on]
        values: torch.Tensor = _Scale.apply(batch.gates, self, batch, on, *leaves)  # type: ignore[no-untyped-call]
        parts = torch.split(values, [tensor.flat.numel() for tensor in self._tensors])
        return {tensor.name: part for tensor, part in zip(self._tensors, parts, strict=True)}

    def values(self) -> torch.Tensor:
        """θ of all, one after the other."""
        return torch.cat([tensor.flat for tensor in self._tensors])


class _Scale(torch.autograd.Function):
    """θ' of vectors; gradients as of ``BlockedTensor``."""

    @staticmethod
    def forward(
        ctx: Any, gates: torch.Tensor, vectors: Vectors, batch: Batch, on: list[int], *leaves: torch.Tensor
    ) -> torch.Tensor:
        ctx.vectors, ctx.batch, ctx.on = vectors, batch, on
        values = vectors.values()
        scales = gates.index_select(0, vectors.of_values).to(values.dtype)
        ctx.save_for_backward(values, scales)
        return values * scales

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, scales = ctx.saved_tensors
        vectors, needed = ctx.vectors, ctx.needs_input_grad[4:]
        for_gates = total(ctx.batch, vectors.of_values, gradient * values)
        parts = (gradient * scales).split(vectors.sizes)
        on = (parts[place] if need else None for place, need in zip(ctx.on, needed, strict=True))
        return for_gates, None, None, None, *on


class _Whole(torch.autograd.Function):
    """θ' of a whole parameter."""

    @staticmethod
    def forward(
        ctx: Any, gates: torch.Tensor, tensor: BlockedTensor, batch: Batch, pieces: list[Piece], *leaves: torch.Tensor
    ) -> torch.Tensor:
        ctx.tensor, ctx.batch, ctx.pieces = tensor, batch, pieces
        return tensor.adapted(batch, pieces, tensor.rows).view(tensor.parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = gradient.clone(memory_format=torch.contiguous_format)
        for_gates, parts = ctx.tensor.gradients(ctx.batch, ctx.pieces, own, ctx.needs_input_grad[4:])
        return for_gates, None, None, None, *parts


def total(batch: Batch, blocks: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Gradients of all gates, [L]: of each the sum of its ``products``, of which ``blocks`` names whose they are."""
    return torch.zeros_like(batch.gates).index_add_(0, blocks, products.to(batch.gates.dtype))
