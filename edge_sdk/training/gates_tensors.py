"""Parameters cut into blocks: a leaf of autograd for every block, and the weights that a batch's gates make of them.

A leaf is a view into its parameter's own storage. An optimiser over leaves therefore moves the model in place, a block
that is off in a batch has no gradient and is passed over, and nothing as large as the parameter is made anywhere. The
adapted weights θ' = θ ⊛ M' of a batch (pFedGate, arXiv:2305.02776; its method card, section 2) are made of the output
rows that some block touches which is on, one below the other; where such a row is cut, zeros stand for what is off.

On a small network a batch takes a few milliseconds and each call of torch some microseconds, more than its work. So
what can be is done to all blocks of a tensor at once, by ``Segments``, choices are made in numpy, and what is the same
for all batches is worked out once.
"""

from __future__ import annotations

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
    made = torch.from_numpy(places)
    return made if device.type == "cpu" else made.to(device)


def true(flags: torch.Tensor) -> Flags:
    """``flags``, a tensor of booleans, as numpy has them."""
    found: Flags = (flags if flags.device.type == "cpu" else flags.cpu()).numpy()
    return found


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

    def drawn(self, whole: torch.Tensor, computed: torch.Tensor, others: torch.Tensor | None, share: float) -> None:
        """Move ``whole`` [size] by ``share`` of the way to what both parts are; ``others`` None stands for zeros."""
        whole.mul_(1 - share).index_add_(0, self._on, computed, alpha=share)
        if others is not None:
            whole.index_add_(0, self._off, others, alpha=share)

    def put(self, tensor: torch.Tensor, dim: int, computed: torch.Tensor) -> None:
        """Write the computed channels into ``tensor``, which has all; by ranges, far faster than one by one."""
        parts = torch.split_with_sizes(computed, [stop - start for start, stop in self.runs], dim)
        for (start, stop), part in zip(self.runs, parts, strict=True):
            tensor.narrow(dim, start, stop - start).copy_(part)


@dataclass(frozen=True)
class Batch:
    """What holds for one batch.

    gates: float [L], M' of the card, 0 at blocks that are off; scales: the same in numpy. selected: bool [L], which
    blocks are on; before: how many of the first so many are, [L+1]. heard: samples, from the first on, from which
    gradients of gates of off rows are estimated; factor: what they are multiplied by, so that they stand for the whole
    batch. With heard 0 off blocks' gates get none: ``gates`` passes no gradients to them.
    """

    gates: torch.Tensor
    scales: NDArray[np.floating]
    selected: Flags
    before: Index
    heard: int
    factor: float


class Segments(NamedTuple):
    """Rows of a parameter, each as often as it has blocks: what one block has of one row is a segment, T in all.

    sources: the row of each [T]; rows: its place among the rows asked for [T], None where no row is cut and the two
    count alike; blocks: its block's number in the model [T].
    """

    sources: Index
    rows: torch.Tensor | None
    blocks: torch.Tensor


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
        self.leaves = [part.detach().requires_grad_() for part in torch.split(self.flat, list(sizes))]
        self._bounds = np.concatenate([[0], np.cumsum(sizes)])

    @cached_property
    def _by_row(self) -> torch.Tensor:
        return self.flat.view(self.rows, *self.parameter.shape[1:])

    @cached_property
    def _of_rows(self) -> tuple[Index, Index, bool]:
        """The first and the last block of every row, by their places in the parameter; whether any row is cut."""
        starts = np.arange(self.rows) * self.row_size
        first = np.searchsorted(self._bounds, starts, side="right") - 1
        last = np.searchsorted(self._bounds, starts + self.row_size - 1, side="right") - 1
        return first, last, bool((first < last).any())

    def computed(self, batch: Batch) -> Channels:
        """Rows that a block touches which is on. Without any it is the first, so that no layer is empty."""
        first, last, _ = self._of_rows
        before = batch.before[self.first :]
        flags = before[last + 1] > before[first]
        if not flags.any():
            flags[0] = True
        return Channels(flags, self.flat.device)

    def segments(self, rows: Index) -> Segments:
        """What the blocks have of ``rows``."""
        first, last, cut = self._of_rows
        device = self.flat.device
        if not cut:
            return Segments(rows, None, index(first[rows] + self.first, device))
        times = (last - first + 1)[rows]
        places = np.repeat(np.arange(len(rows)), times)
        begins = np.cumsum(times) - times
        blocks = first[rows][places] + np.arange(len(places)) - begins[places]
        return Segments(rows[places], index(places, device), index(blocks + self.first, device))

    def values(self, segments: Segments) -> torch.Tensor:
        """θ at ``segments``, with zeros in place of what other blocks have of their rows: [T, ...]. May be θ itself."""
        if segments.rows is None and len(segments.sources) == self.rows:
            return self._by_row
        values = self._by_row.index_select(0, index(segments.sources, self.flat.device))
        if segments.rows is not None:
            places, flat = segments.blocks.cpu().numpy() - self.first, values.view(len(values), -1)
            starts = segments.sources * self.row_size
            begins, ends = self._bounds[places] - starts, self._bounds[places + 1] - starts
            for row in np.flatnonzero(begins > 0).tolist():
                flat[row, : begins[row]] = 0
            for row in np.flatnonzero(ends < self.row_size).tolist():
                flat[row, ends[row] :] = 0
        return values

    def trained(self, batch: Batch, rows: Channels) -> tuple[list[int], list[int]]:
        """Which blocks are on, by place, and where each begins in ``rows``, written one below the other."""
        on = np.flatnonzero(batch.selected[self.first : self.first + len(self.leaves)])
        first, start = np.divmod(self._bounds[on], max(1, self.row_size))
        return on.tolist(), (np.searchsorted(rows.on, first) * self.row_size + start).tolist()

    def whole(self, batch: Batch) -> torch.Tensor:
        """θ' in the parameter's own shape."""
        rows = Channels(np.ones(self.rows, dtype=bool), self.flat.device)
        cut = Cut(self, batch, rows)
        made: torch.Tensor = _Whole.apply(batch.gates, cut, *cut.leaves)  # type: ignore[no-untyped-call]
        return made.view(self.parameter.shape)


class Cut:
    """The ``rows`` of a parameter that a batch computes, and the ``leaves`` in them that it trains."""

    def __init__(self, tensor: BlockedTensor, batch: Batch, rows: Channels) -> None:
        self.tensor = tensor
        self.batch = batch
        self.rows = rows
        self.segments = tensor.segments(rows.on)
        self._on, self._starts = tensor.trained(batch, rows)
        self.leaves = [tensor.leaves[place] for place in self._on]

    @cached_property
    def scales(self) -> torch.Tensor:
        """M' of every segment, [T, 1, ...]."""
        scales = self.batch.gates.detach().index_select(0, self.segments.blocks)
        return scales.to(self.tensor.flat.dtype).view(-1, *(1,) * (self.tensor.parameter.dim() - 1))

    def adapted(self, values: torch.Tensor) -> torch.Tensor:
        """θ' of the rows, [rows, ...], made of some or all columns of θ at their segments, [T, ...]."""
        made = values * self.scales
        if self.segments.rows is None:
            return made
        return made.new_zeros(len(self.rows.on), *made.shape[1:]).index_add_(0, self.segments.rows, made)

    def products(self, gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """<g, θ> of every segment, [T]: both at some or all columns, g [rows, ...] = ∂f/∂θ' and θ [T, ...]."""
        if self.segments.rows is not None:
            gradient = gradient.index_select(0, self.segments.rows)
        return (gradient * values).flatten(1).sum(1)

    def gradients(self, gradient: torch.Tensor, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """∂f/∂θ_b = M'_b g_b of the ``leaves``, where ``needed``, from g at all columns; overwrites it."""
        if self.segments.rows is None:
            gradient *= self.scales
        flat, found = gradient.view(-1), list[torch.Tensor | None]()
        for place, start, leaf, need in zip(self._on, self._starts, self.leaves, needed, strict=True):
            part = flat[start : start + len(leaf)] if need else None
            if part is not None and self.segments.rows is not None:
                part *= float(self.batch.scales[self.tensor.first + place])
            found.append(part)
        return found


class Vectors:
    """The parameters of one axis (biases, scales of norms), adapted all at once: a step for each tensor would cost more
    than the work in it, and what is off is not worth leaving out."""

    def __init__(self, tensors: Sequence[BlockedTensor]) -> None:
        self._tensors = tensors
        self._leaves = [leaf for tensor in tensors for leaf in tensor.leaves]
        self._blocks = np.array([t.first + place for t in tensors for place in range(len(t.leaves))], dtype=np.intp)
        sizes = [len(leaf) for leaf in self._leaves]
        self._ends = np.cumsum(sizes).tolist()
        self.of_values = torch.from_numpy(np.repeat(self._blocks, sizes))
        if tensors:
            self.of_values = self.of_values.to(tensors[0].flat.device)

    def adapted(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Name -> θ' of every parameter."""
        if not self._tensors:
            return {}
        on = np.flatnonzero(batch.selected[self._blocks]).tolist()
        leaves = [self._leaves[place] for place in on]
        ends = [self._ends[place] for place in on]
        values: torch.Tensor = _Scale.apply(batch, batch.gates, self, ends, *leaves)  # type: ignore[no-untyped-call]
        parts = torch.split(values, [tensor.flat.numel() for tensor in self._tensors])
        return {tensor.name: part for tensor, part in zip(self._tensors, parts, strict=True)}

    def values(self) -> torch.Tensor:
        """θ of all, one after the other."""
        return torch.cat([tensor.flat for tensor in self._tensors])


class _Scale(torch.autograd.Function):
    """θ' of vectors; gradients as of ``Cut``."""

    @staticmethod
    def forward(
        ctx: Any, batch: Batch, gates: torch.Tensor, vectors: Vectors, ends: list[int], *leaves: torch.Tensor
    ) -> torch.Tensor:
        values = vectors.values()
        scales = gates.index_select(0, vectors.of_values).to(values.dtype)
        ctx.batch, ctx.vectors, ctx.spans = (
            batch,
            vectors,
            [(e - len(leaf), e) for e, leaf in zip(ends, leaves, strict=True)],
        )
        ctx.save_for_backward(values, scales)
        return values * scales

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, scales = ctx.saved_tensors
        for_gates = total(ctx.batch, ctx.vectors.of_values, gradient * values)
        parts, needed = gradient * scales, ctx.needs_input_grad[4:]
        leaves = (parts[start:stop] if need else None for (start, stop), need in zip(ctx.spans, needed, strict=True))
        return None, for_gates, None, None, *leaves


class _Whole(torch.autograd.Function):
    """θ' of a whole parameter. Backward: ∂f/∂θ = M'·g and ∂f/∂M'_b = e_b = <g_b, θ_b>, also of off blocks (4.5)."""

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, cut: Cut, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.cut = cut
        return cut.adapted(cut.tensor.values(cut.segments))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cut = ctx.cut
        products = cut.products(gradient, cut.tensor.values(cut.segments))
        own = gradient.clone(memory_format=torch.contiguous_format)
        for_gates = total(cut.batch, cut.segments.blocks, products)
        return for_gates, None, *cut.gradients(own, ctx.needs_input_grad[2:])


def total(batch: Batch, blocks: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Gradients of all gates, [L]: of each the sum of its ``products``, of which ``blocks`` names whose they are."""
    return torch.zeros_like(batch.gates).index_add_(0, blocks, products.to(batch.gates.dtype))
