"""Parameters cut into blocks: an autograd leaf per block, and the adapted weights θ' = θ ⊛ M' of a batch.

A leaf is a view into its parameter's storage. An optimiser of leaves therefore updates the model in place, skips blocks
without a gradient, and allocates no whole parameter. θ' consists of the output rows that an active block touches;
inactive parts of such a row are zero (pFedGate, arXiv:2305.02776).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Index = NDArray[np.intp]
Flags = NDArray[np.bool_]


def index(places: Index, device: torch.device) -> torch.Tensor:
    """Return ``places`` as an index tensor on ``device``."""
    made = torch.from_numpy(places)
    return made if device.type == "cpu" else made.to(device)


def true(flags: torch.Tensor) -> Flags:
    """Return a tensor of booleans as a numpy array."""
    found: Flags = (flags if flags.device.type == "cpu" else flags.cpu()).numpy()
    return found


class Channels:
    """The set of channels of a value, or rows of a weight, that are computed, not skipped.

    source: name of the weight with these rows, and channels per row; None if they have another origin.
    """

    def __init__(self, flags: Flags, device: torch.device, source: tuple[str, int] | None = None) -> None:
        self.flags = flags
        self.device = device
        self.source = source
        self.on = np.flatnonzero(flags)
        self.off = np.flatnonzero(~flags)
        self._on = index(self.on, device)
        self._off = index(self.off, device)
        self._repeated: dict[int, Channels] = {}

    def repeated(self, times: int) -> Channels:
        """Return the channels with each repeated ``times``."""
        if times == 1:
            return self
        if times not in self._repeated:
            source = None if self.source is None else (self.source[0], self.source[1] * times)
            self._repeated[times] = Channels(self.flags.repeat(times), self.device, source)
        return self._repeated[times]

    @cached_property
    def order(self) -> Index:
        """Indices of computed channels, then of the others."""
        return np.concatenate([self.on, self.off])

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Computed channels as ranges (start, stop), usually few."""
        padded = np.zeros(len(self.flags) + 2, dtype=bool)
        padded[1:-1] = self.flags
        ends = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
        return list(zip(ends[::2], ends[1::2], strict=True))

    def computed(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the computed channels of ``tensor``, along ``dim``."""
        return tensor.index_select(dim, self._on) if len(self.off) else tensor

    def others(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the entries of ``tensor`` [size] of the other channels."""
        return tensor.index_select(0, self._off)

    def joined(self, computed: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        """Return the vector [size] of both parts; None means zeros."""
        whole = computed.new_zeros(len(self.flags)).index_copy_(0, self._on, computed)
        return whole if others is None else whole.index_copy_(0, self._off, others)

    def add(self, tensor: torch.Tensor, computed: torch.Tensor) -> None:
        """Add to the computed channels of ``tensor`` along axis 1, in ranges for speed."""
        parts = torch.split_with_sizes(computed, [stop - start for start, stop in self.runs], 1)
        for (start, stop), part in zip(self.runs, parts, strict=True):
            tensor.narrow(1, start, stop - start).add_(part)


@dataclass(frozen=True)
class Batch:
    """The gates of one batch."""

    # Float [L], M', 0 for off blocks.
    gates: torch.Tensor
    scales: NDArray[np.floating]
    # Bool [L].
    selected: Flags
    # Number of first samples that estimate gradients of gates of off rows.
    heard: int
    # Factor from these samples to the batch.
    factor: float


_KEPT = 32
"""Number of cached choices of a tensor's blocks."""


# On a small network a call of torch takes longer than its work, so all blocks of a tensor are processed at once.
class Segments(NamedTuple):
    """Rows of a parameter, one per block that has a part of it."""

    # Row of each value.
    sources: Index
    # Its place among the requested rows, None if no row is cut.
    rows: torch.Tensor | None
    # The number of its block in the model.
    blocks: torch.Tensor


class BlockedTensor:
    """A parameter and its blocks, with a 1-dimensional leaf per block. Raises ValueError if it is not contiguous."""

    def __init__(self, name: str, parameter: nn.Parameter, first: int, sizes: Sequence[int]) -> None:
        if not parameter.is_contiguous():
            raise ValueError(f"{name}: blocks are contiguous runs of values; make the parameter contiguous")
        self.name = name
        self.parameter = parameter
        self.first = first
        self.flat = parameter.detach().view(-1)
        self.rows = len(parameter) if parameter.dim() else 1
        self.row_size = self.flat.numel() // max(1, self.rows)
        self.leaves = [part.detach().requires_grad_() for part in torch.split(self.flat, list(sizes))]
        self.bounds = np.concatenate([[0], np.cumsum(sizes)])
        # A batch often has the same choice as a recent one.
        self._cut = lru_cache(maxsize=_KEPT)(self._cut_for)

    @cached_property
    def _by_row(self) -> torch.Tensor:
        return self.flat.view(self.rows, *self.parameter.shape[1:])

    @cached_property
    def _of_rows(self) -> tuple[Index, Index, bool]:
        """The first and last block of every row, and whether any row is cut."""
        starts = np.arange(self.rows) * self.row_size
        first = np.searchsorted(self.bounds, starts, side="right") - 1
        last = np.searchsorted(self.bounds, starts + self.row_size - 1, side="right") - 1
        return first, last, bool((first < last).any())

    def cut(self, batch: Batch) -> Cut:
        """Return the rows that an active block touches, at least one."""
        return self._cut(batch.selected[self.first : self.first + len(self.leaves)].tobytes())

    def _cut_for(self, selected: bytes) -> Cut:
        on = np.frombuffer(selected, dtype=bool)
        before = np.concatenate([[0], np.cumsum(on)])
        first, last, _ = self._of_rows
        flags = before[last + 1] > before[first]
        if not flags.any():
            flags[0] = True
        return Cut(self, on, Channels(flags, self.flat.device, (self.name, 1)))

    def segments(self, rows: Index) -> Segments:
        """Return the segments of ``rows``."""
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
        """Return θ at ``segments``, [T, ...], with zeros for parts of rows in other blocks; may be θ itself."""
        if segments.rows is None and len(segments.sources) == self.rows:
            return self._by_row
        values = self._by_row.index_select(0, index(segments.sources, self.flat.device))
        if segments.rows is not None:
            places = segments.blocks.cpu().numpy() - self.first
            flat = values.view(len(values), -1)
            starts = segments.sources * self.row_size
            begins = self.bounds[places] - starts
            ends = self.bounds[places + 1] - starts
            for row in np.flatnonzero(begins > 0).tolist():
                flat[row, : begins[row]] = 0
            for row in np.flatnonzero(ends < self.row_size).tolist():
                flat[row, ends[row] :] = 0
        return values

    def whole(self, batch: Batch) -> torch.Tensor:
        """Return θ' in the parameter's shape."""
        rows = Channels(np.ones(self.rows, dtype=bool), self.flat.device)
        cut = Cut(self, batch.selected[self.first : self.first + len(self.leaves)], rows)
        (made,) = adapt(batch, Needed([cut], [None], own=False))
        return made.view(self.parameter.shape)


class Cut:
    """The computed ``rows`` of a parameter for a choice of blocks, and the ``leaves`` of the chosen blocks."""

    def __init__(self, tensor: BlockedTensor, selected: Flags, rows: Channels) -> None:
        self.tensor = tensor
        self.rows = rows
        self.segments = tensor.segments(rows.on)
        on = np.flatnonzero(selected)
        first, start = np.divmod(tensor.bounds[on], max(1, tensor.row_size))
        starts = np.searchsorted(rows.on, first) * tensor.row_size + start
        spans = zip(starts.tolist(), (starts + tensor.bounds[on + 1] - tensor.bounds[on]).tolist(), strict=True)
        self._sizes = _sizes(list(spans), len(rows.on) * tensor.row_size)
        self._blocks = (on + tensor.first).tolist()
        self.leaves = [tensor.leaves[place] for place in on]

    def values(self) -> torch.Tensor:
        """Return θ of the rows' segments, [T, ...]."""
        return self.tensor.values(self.segments)

    def adapted(self, batch: Batch, values: torch.Tensor) -> torch.Tensor:
        """Return θ' of the rows, [rows, ...]."""
        made = values * self._scales(batch)
        if self.segments.rows is None:
            return made
        return made.new_zeros(len(self.rows.on), *made.shape[1:]).index_add_(0, self.segments.rows, made)

    def products(self, gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return <g, θ> per segment, [T], for g = ∂f/∂θ' [rows, ...]."""
        if self.segments.rows is not None:
            gradient = gradient.index_select(0, self.segments.rows)
        return (gradient * values).view(len(gradient), -1).sum(1)

    def gradients(self, batch: Batch, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return ∂f/∂θ_b = M'_b g_b of the ``leaves``; overwrites g."""
        if self.segments.rows is None:
            gradient *= self._scales(batch)
        parts = torch.split_with_sizes(gradient.view(-1), self._sizes)[1::2]
        if self.segments.rows is not None:
            for part, block in zip(parts, self._blocks, strict=True):
                part *= float(batch.scales[block])
        return parts

    def _scales(self, batch: Batch) -> torch.Tensor:
        scales = batch.gates.detach().index_select(0, self.segments.blocks)
        return scales.to(self.tensor.flat.dtype).view(-1, *(1,) * (self.tensor.parameter.dim() - 1))


def _sizes(spans: Sequence[tuple[int, int]], length: int) -> list[int]:
    """Return sizes that split ``length`` values at ``spans`` (start, stop): outside, inside, outside, ..."""
    ends = [0, *(end for span in spans for end in span), length]
    return [stop - start for start, stop in pairwise(ends)]


class Vectors:
    """Parameters with one axis (biases, scales of norms), adapted together and whole."""

    def __init__(self, tensors: Sequence[BlockedTensor]) -> None:
        self._leaves = [leaf for tensor in tensors for leaf in tensor.leaves]
        self._blocks = np.array([t.first + place for t in tensors for place in range(len(t.leaves))], dtype=np.intp)
        sizes = [len(leaf) for leaf in self._leaves]
        self._ends = np.cumsum(sizes).tolist()
        self._flat = [tensor.flat for tensor in tensors]
        self.sizes = {tensor.name: tensor.flat.numel() for tensor in tensors}
        self._starts = dict(zip(self.sizes, np.cumsum([0, *self.sizes.values()]).tolist(), strict=False))
        self.blocks = index(np.repeat(self._blocks, sizes), self._flat[0].device) if tensors else torch.zeros(0)

    def trained(self, batch: Batch) -> tuple[list[torch.Tensor], list[int]]:
        """Return the leaves of active blocks, and sizes that split ``values`` into leaves and gaps."""
        on = np.flatnonzero(batch.selected[self._blocks]).tolist()
        leaves = [self._leaves[place] for place in on]
        spans = [(self._ends[place] - len(leaf), self._ends[place]) for place, leaf in zip(on, leaves, strict=True)]
        return leaves, _sizes(spans, sum(self.sizes.values()))

    def values(self) -> torch.Tensor:
        """Return θ of all vectors, concatenated."""
        return torch.cat(self._flat)

    def order(self, biases: Sequence[tuple[str, Channels]]) -> torch.Tensor:
        """Return the places of ``biases`` in ``values``, computed rows first for each."""
        places = [rows.order + self._starts[name] for name, rows in biases]
        return index(np.concatenate(places) if places else np.zeros(0, dtype=np.intp), self.blocks.device)


@dataclass(frozen=True)
class Needed:
    """The θ' that a batch needs: cuts, columns of some cuts, all vectors, and their entries in ``order``."""

    cuts: Sequence[Cut]
    columns: Sequence[Channels | None]
    vectors: Vectors | None = None
    order: torch.Tensor | None = None
    own: bool = True


def adapt(batch: Batch, needed: Needed) -> tuple[torch.Tensor, ...]:
    """Return the θ' in ``needed``, in its order."""
    leaves = [leaf for cut in needed.cuts for leaf in cut.leaves]
    of_vectors, sizes = needed.vectors.trained(batch) if needed.vectors is not None else ([], [])
    made = _Adapt.apply(batch, batch.gates, needed, sizes, *leaves, *of_vectors)  # type: ignore[no-untyped-call]
    return cast(tuple[torch.Tensor, ...], made)


# One function for the whole model: between the large kernels of layers, the same code would always miss the processor's
# caches.
class _Adapt(torch.autograd.Function):
    """θ' from leaves and gates; backward ∂f/∂θ = M'·g and ∂f/∂M'_b = e_b = <g_b, θ_b>, also of off blocks (4.5)."""

    @staticmethod
    def forward(
        ctx: Any, batch: Batch, gates: torch.Tensor, needed: Needed, sizes: list[int], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.batch = batch
        ctx.needed = needed
        ctx.sizes = sizes
        saved = [cut.values() for cut in needed.cuts]
        made = [cut.adapted(batch, values) for cut, values in zip(needed.cuts, saved, strict=True)]
        made += [
            columns.computed(weight, 1)
            for columns, weight in zip(needed.columns, made, strict=True)
            if columns is not None
        ]
        if needed.vectors is not None:
            assert needed.order is not None
            values = needed.vectors.values()
            scales = gates.index_select(0, needed.vectors.blocks).to(values.dtype)
            scaled = values * scales
            made += [scaled, scaled.index_select(0, needed.order)]
            saved += [values, scales]
        ctx.save_for_backward(*saved)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        batch = ctx.batch
        needed = ctx.needed
        saved = ctx.saved_tensors
        blocks = []
        products = []
        parts = list[torch.Tensor | None]()
        further = iter(gradients[len(needed.cuts) :])
        for cut, columns, values, gradient in zip(needed.cuts, needed.columns, saved, gradients, strict=False):
            of_columns = None if columns is None else next(further)
            if gradient is not None:
                own = gradient.contiguous() if needed.own else gradient.clone(memory_format=torch.contiguous_format)
            elif of_columns is not None:
                own = of_columns.new_zeros(len(cut.rows.on), *cut.tensor.parameter.shape[1:])
            else:
                parts += [None] * len(cut.leaves)
                continue
            if of_columns is not None:
                columns.add(own, of_columns)
            blocks.append(cut.segments.blocks)
            products.append(cut.products(own, values))
            parts += cut.gradients(batch, own)
        if needed.vectors is not None:
            values, scales = saved[-2:]
            gradient, in_order = further
            if in_order is not None:
                gradient = torch.zeros_like(values) if gradient is None else gradient
                gradient = gradient.index_add(0, needed.order, in_order)
            if gradient is None:
                parts += [None] * (len(ctx.sizes) // 2)
            else:
                blocks.append(needed.vectors.blocks)
                products.append(gradient * values)
                parts += torch.split_with_sizes(gradient * scales, ctx.sizes)[1::2]
        for_gates = total(batch, torch.cat(blocks), torch.cat(products)) if blocks else None
        parts = [part if need else None for part, need in zip(parts, ctx.needs_input_grad[4:], strict=True)]
        return None, for_gates, None, None, *parts


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, columns: Channels) -> torch.Tensor:
        ctx.shape = weight.shape
        ctx.columns = columns
        return columns.computed(weight, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradient.new_zeros(ctx.shape)
        ctx.columns.add(whole, gradient)
        return whole, None


def columns_of(weight: torch.Tensor, columns: Channels) -> torch.Tensor:
    """Return the computed columns of ``weight``; differentiable."""
    return cast(torch.Tensor, _Columns.apply(weight, columns)) if len(columns.off) else weight  # type: ignore[no-untyped-call]


def total(batch: Batch, blocks: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Return the gradients of all gates, [L]: the sums of ``products`` per block of ``blocks``."""
    return torch.zeros_like(batch.gates).index_add_(0, blocks, products.to(batch.gates.dtype))
