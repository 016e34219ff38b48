"""Parameters cut into blocks: a leaf of autograd for every block, and the weights that a batch's gates make of them.

A leaf is a view into its parameter's own storage. An optimiser over leaves therefore moves the model in place, a block
that is off in a batch has no gradient and is passed over, and nothing as large as the parameter is made anywhere. The
adapted weights θ' = θ ⊛ M' of a batch (pFedGate, arXiv:2305.02776; its method card, section 2) are made of the output
rows that some block touches which is on, one below the other; where such a row is cut, zeros stand for what is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Index = NDArray[np.intp]
Flags = NDArray[np.bool_]


class Spans(tuple[tuple[int, int], ...]):
    """Sorted indices as ranges (start, stop) that do not touch: rows of blocks are few runs, which slice fast."""

    @classmethod
    def covering(cls, ranges: Iterable[tuple[int, int]]) -> Spans:
        """The union of ``ranges``, which come sorted."""
        merged: list[tuple[int, int]] = []
        for start, stop in ranges:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return cls(merged)

    @property
    def size(self) -> int:
        """How many indices there are."""
        return sum(stop - start for start, stop in self)

    def indices(self) -> Index:
        """The indices one by one."""
        return np.concatenate([np.arange(start, stop) for start, stop in self] or [np.zeros(0, dtype=np.intp)])

    def others(self, size: int) -> Spans:
        """The indices below ``size`` that are not among these."""
        ends = [0, *(end for span in self for end in span), size]
        return Spans((start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop)

    def repeated(self, times: int) -> Spans:
        """Where every index owns ``times`` consecutive entries: theirs."""
        return Spans((start * times, stop * times) for start, stop in self)

    def take(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The entries of ``tensor`` at these indices along ``dim``; a view where they are one range."""
        if len(self) > 1 and tensor.dim() == 1:
            return tensor.index_select(0, torch.from_numpy(self.indices()))
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in self]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)

    def put(self, tensor: torch.Tensor, dim: int, values: torch.Tensor) -> None:
        """Write ``values`` to these indices of ``tensor`` along ``dim``."""
        done = 0
        for start, stop in self:
            tensor.narrow(dim, start, stop - start).copy_(values.narrow(dim, done, stop - start))
            done += stop - start


@dataclass(frozen=True)
class Batch:
    """What holds for one batch.

    gates: float [L], M' of the card, 0 at blocks that are off; scales: the same as numbers. selected: bool [L], which
    blocks are on. heard: samples, from the first on, from which gradients of gates of off rows are estimated; factor:
    what they are multiplied by, so that they stand for the whole batch. With heard 0 off blocks' gates get none.
    """

    gates: torch.Tensor
    scales: Sequence[float]
    selected: Flags
    heard: int
    factor: float


class _Piece(NamedTuple):
    """A run of values that belong to one block: block (of the model), where in the parameter, where in the copy."""

    block: int
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
        self._bounds = np.concatenate([[0], np.cumsum(sizes)])
        self.flat = parameter.detach().view(-1)
        self.rows = len(parameter) if parameter.dim() else 1
        self.row_size = self.flat.numel() // max(1, self.rows)
        self.leaves = [part.detach().requires_grad_() for part in torch.split(self.flat, list(sizes))]

    def computed(self, batch: Batch) -> Spans:
        """Rows that a block touches which is on. Without any it is the first, so that no layer is empty."""
        ranges = []
        for place in np.flatnonzero(batch.selected[self.first : self.first + len(self.leaves)]):
            start, stop = self._bounds[place : place + 2]
            ranges.append((int(start) // self.row_size, -(-int(stop) // self.row_size)))
        return Spans.covering(ranges or [(0, 1)])

    def whole(self, batch: Batch) -> torch.Tensor:
        """θ' in the parameter's own shape."""
        (values,) = self.at(batch, Spans([(0, self.rows)]))
        return values.view(self.parameter.shape)

    def at(
        self, batch: Batch, rows: Spans, columns: Spans | None = None, others: Index | None = None
    ) -> tuple[torch.Tensor, ...]:
        """θ' at ``rows`` (``computed`` or more). With ``columns`` and ``others``, which share no index: at these and at
        those indices of the second axis. Gates of off blocks learn from their values in these rows only."""
        pieces = self.pieces(rows)
        leaves = [self.leaves[piece.block - self.first] for piece in pieces if batch.selected[piece.block]]
        index = None if others is None else torch.from_numpy(others)
        made = _Assemble.apply(batch.gates, self, batch, pieces, rows.size, columns, index, *leaves)  # type: ignore[no-untyped-call]
        return cast(tuple[torch.Tensor, ...], made)

    def pieces(self, rows: Spans) -> list[_Piece]:
        """The runs of blocks in ``rows``, written one below the other."""
        found, target = [], 0
        for first, last in rows:
            start, end = first * self.row_size, last * self.row_size
            place = int(np.searchsorted(self._bounds, start, side="right")) - 1
            while start < end:
                stop = min(end, int(self._bounds[place + 1]))
                found.append(_Piece(self.first + place, start, stop, target))
                target += stop - start
                start, place = stop, place + 1
        return found

    def by_block(self, rows: Index) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """θ at ``rows``, a row for every block in it: values [T, row_size], which of ``rows``, which block (both [T]).

        A row that is cut comes as often as it has blocks, each time with zeros in place of the other blocks.
        """
        first = np.searchsorted(self._bounds, rows * self.row_size, side="right") - 1
        last = np.searchsorted(self._bounds, (rows + 1) * self.row_size - 1, side="right") - 1
        times = last - first + 1
        which = np.repeat(np.arange(len(rows)), times)
        block = np.concatenate([np.arange(one, other + 1) for one, other in zip(first, last, strict=True)])
        values = self.flat.view(self.rows, self.row_size)[torch.from_numpy(rows[which])]
        for place in np.flatnonzero(times[which] > 1):
            start, stop = self._bounds[block[place] : block[place] + 2] - rows[which[place]] * self.row_size
            values[place, : max(0, start)] = 0
            values[place, stop:] = 0
        return values, torch.from_numpy(which), torch.from_numpy(block + self.first)


class Vectors:
    """The parameters of one axis (biases, scales of norms), adapted all at once: a step for each block would cost more
    than the work in it, and what is off is not worth leaving out."""

    def __init__(self, tensors: Sequence[BlockedTensor]) -> None:
        self._tensors = tensors
        self.leaves = [leaf for tensor in tensors for leaf in tensor.leaves]
        self.blocks = [tensor.first + place for tensor in tensors for place in range(len(tensor.leaves))]
        sizes = [len(leaf) for leaf in self.leaves]
        self.block = torch.from_numpy(np.repeat(np.array(self.blocks, dtype=np.int64), sizes))

    def adapted(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Name -> θ' of every parameter."""
        if not self._tensors:
            return {}
        leaves = [leaf for block, leaf in zip(self.blocks, self.leaves, strict=True) if batch.selected[block]]
        values: torch.Tensor = _Scale.apply(batch.gates, self, batch, *leaves)  # type: ignore[no-untyped-call]
        parts = torch.split(values, [tensor.flat.numel() for tensor in self._tensors])
        return {tensor.name: part for tensor, part in zip(self._tensors, parts, strict=True)}


class _Scale(torch.autograd.Function):
    """θ' of vectors; gradients as in ``_Assemble``."""

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, vectors: Vectors, batch: Batch, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.vectors, ctx.batch = vectors, batch
        values = torch.cat(vectors.leaves)
        scales = gates[vectors.block]
        ctx.save_for_backward(values, scales)
        return values * scales

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, scales = ctx.saved_tensors
        batch, vectors, leaves = ctx.batch, ctx.vectors, iter(ctx.needs_input_grad[3:])
        for_gates = torch.zeros_like(batch.gates).index_add_(0, vectors.block, gradient * values)
        if not batch.heard:
            for_gates.masked_fill_(torch.from_numpy(~batch.selected), 0)
        parts = torch.split(gradient * scales, [len(leaf) for leaf in vectors.leaves])
        on = [part for block, part in zip(vectors.blocks, parts, strict=True) if batch.selected[block]]
        return for_gates, None, None, *(part if next(leaves) else None for part in on)


class _Assemble(torch.autograd.Function):
    """θ' from leaves and gates. Backward: ∂f/∂θ = M'·g and ∂f/∂M'_b = e_b = <g_b, θ_b>, also of off blocks (4.5)."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: torch.Tensor,
        tensor: BlockedTensor,
        batch: Batch,
        pieces: list[_Piece],
        rows: int,
        columns: Spans | None,
        others: torch.Tensor | None,
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tensor, ctx.batch, ctx.pieces, ctx.columns, ctx.others = tensor, batch, pieces, columns, others
        ctx.shape = (rows, *tensor.parameter.shape[1:])
        made = tensor.flat.new_empty(rows * tensor.row_size)
        for block, start, stop, target in pieces:
            part = made[target : target + stop - start]
            if batch.selected[block]:
                torch.mul(tensor.flat[start:stop], batch.scales[block], out=part)
            else:
                part.zero_()
        made = made.view(ctx.shape)
        if columns is None or others is None:
            return (made,)
        taken = columns.take(made, 1)
        return taken.clone() if len(columns) == 1 else taken, made.index_select(1, others)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensor, batch, leaves = ctx.tensor, ctx.batch, iter(ctx.needs_input_grad[7:])
        own = ctx.columns is not None
        gradient = _joined(ctx, gradients).view(-1)
        blocks, products, parts = [], [], []
        for block, start, stop, target in ctx.pieces:
            part = gradient[target : target + stop - start]
            if batch.selected[block] or batch.heard:
                blocks.append(block)
                products.append(torch.dot(part, tensor.flat[start:stop]))
            if batch.selected[block]:
                scale = batch.scales[block]
                parts.append((part.mul_(scale) if own else part * scale) if next(leaves) else None)
        for_gates = None
        if ctx.needs_input_grad[0]:
            for_gates = batch.gates.new_zeros(len(batch.gates))
            for_gates.index_add_(0, torch.tensor(blocks), torch.stack(products))
        return for_gates, None, None, None, None, None, None, *parts


def _joined(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The gradient of the rows, all columns, from those of the results."""
    first, *second = gradients
    if ctx.columns is None and first is not None:
        return first.contiguous()
    whole: torch.Tensor = ctx.tensor.flat.new_zeros(ctx.shape)
    if first is not None:
        ctx.columns.put(whole, 1, first)
    if second and second[0] is not None:
        whole.index_copy_(1, ctx.others, second[0])
    return whole
