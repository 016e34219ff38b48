"""Rules for operators without weights: elementwise, along axes, parts of a tensor, and reshapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .graph import operation
from .neurons import Axis, Run
from .operations import Operation, Rule, Value

Lies = tuple[Axis | None, ...]
FILLED = (
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("zeros", "ones", "full"),
)
"""Operators whose results have equal entries, so that these may change places."""


def unknown(op: Operation) -> Any:
    """Complete all neurons of an unknown operator."""
    op.neurons.lose(axis for value in op.values for axis in value.known)
    if not op.several:
        return ((),) * len(op.shape)
    if not isinstance(op.result, (tuple, list)):
        return None
    return [op.value(each.shape, ((),) * each.dim()) if isinstance(each, torch.Tensor) else None for each in op.result]


# --- every entry by itself, and along axes ----------------------------------------------------------------------------


def broadcast(op: Operation, given: Sequence[Value] | None = None) -> Lies:
    """Return the axes of broadcast values, by default the inputs: axes of equal length are united."""
    shape = op.shape
    values = given or op.values
    result: list[Axis | None] = [None] * len(shape)
    for value in values:
        offset = len(shape) - len(value.shape)
        for place, (axis, length) in enumerate(zip(value.axes, value.shape, strict=True), start=offset):
            if length == shape[place] and axis is not None:
                known = result[place]
                result[place] = axis if known is None or length == 1 else op.neurons.join(known, axis)
    flows = not all(value.fixed for value in values)
    return tuple(() if axis is None and flows else axis for axis in result)


def pool(op: Operation) -> Any:
    """Pool: the last one to three axes are mixed, so neurons along them become complete."""
    value = op.values[0]
    rank = len(value.shape)
    mixed = min(next((int(each) for each in op.name if each.isdigit()), rank - 2), rank)
    op.neurons.complete(*value.known[rank - mixed :])
    axes = (*value.axes[: rank - mixed], *((),) * mixed)
    return [op.value(op.result[0].shape, axes)] * 2 if op.several else axes


def _pad(op: Operation) -> Lies:
    value = op.values[0]
    changed = [old != new for old, new in zip(value.shape, op.shape, strict=True)]
    op.neurons.complete(*(axis for axis, far in zip(value.known, changed, strict=True) if far))
    return tuple(() if far else axis for axis, far in zip(value.axes, changed, strict=True))


def _reduce(op: Operation) -> Lies:
    value = op.values[0]
    dims = op.given.get("dim")
    rank = len(value.shape)
    gone = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
    # Hand-written norms divide by a mean that keeps its axis; they treat neurons as layer norm does.
    if len(op.shape) != rank or not op.name.startswith(("mean", "var")):
        op.neurons.complete(*(value.known[dim] for dim in gone))
    if len(op.shape) == rank:
        return tuple(() if dim in gone else axis for dim, axis in enumerate(value.axes))
    return tuple(axis for dim, axis in enumerate(value.axes) if dim not in gone)


def _move(op: Operation) -> Lies:
    """Move axes: run the operator on a stand-in whose strides identify the axes."""
    axes = op.values[0].axes
    strides = [2**place for place in range(len(axes))]
    stand_in = torch.empty_strided([1] * len(axes), strides, device="meta")
    others = list(op.given.values())[1:]
    moved = op.node.target(stand_in, *others)  # type: ignore[operator]
    return tuple(axes[strides.index(stride)] for stride in moved.stride())


def _expand(op: Operation) -> Lies:
    value = op.values[0]
    front = len(op.shape) - len(value.shape)
    same = zip(value.axes, value.shape, op.shape[front:], strict=True)
    return (*(value.blank,) * front, *(axis if old == new else value.blank for axis, old, new in same))


def _repeat(op: Operation) -> Lies:
    value = op.values[0]
    front = len(op.shape) - len(value.shape)
    lengths = zip(value.axes, value.shape, op.shape[front:], strict=True)
    return (*(value.blank,) * front, *(axis * (new // old) if axis else axis for axis, old, new in lengths))


def _mixed(op: Operation, dims: Iterable[int]) -> Lies:
    value = op.values[0]
    gone = {dim % len(value.shape) for dim in dims}
    op.neurons.lose(value.known[dim] for dim in gone)
    return tuple(() if dim in gone else axis for dim, axis in enumerate(value.axes))


# --- parts ------------------------------------------------------------------------------------------------------------


def _cat(op: Operation) -> Lies:
    rank = len(op.shape)
    parts = [(node, part) for node in op.at(0) if (part := op.state.of(node)) is not None and len(part.shape) == rank]
    dim = op.dim(rank)
    result: list[Axis | None] = [None] * rank
    joined: Axis = ()
    for node, part in parts:
        for place, axis in enumerate(part.axes):
            if place != dim:
                result[place] = op.neurons.join(result[place], axis)
        joined += op.neurons.resolve(part.axes[dim] or ()) or _without(op, node, part.shape[dim])
    result[dim] = op.neurons.resolve(joined)
    return tuple(axis or () for axis in result)


def _without(op: Operation, node: Any, length: int) -> Axis:
    """Return the axis of a part without neurons; the first state of a recurrent cell takes those of later states."""
    if operation(node) in FILLED and op.state.of(node) is not None:
        return op.neurons.add(op.node.name, length) or (Run(0, length),)
    return (Run(0, length),)


def _stack(op: Operation) -> Lies:
    result: list[Axis | None] = [None] * (len(op.shape) - 1)
    for part in map(op.state.of, op.at(0)):
        for place, axis in enumerate(part.axes if part is not None else ()):
            result[place] = op.neurons.join(result[place], axis)
    result.insert(op.dim(len(op.shape)), ())
    return tuple(axis or () for axis in result)


def _part(op: Operation, dim: int, start: int, stop: int) -> Lies:
    axes = list(op.values[0].axes)
    axis = axes[dim]
    if axis:
        _, behind = op.neurons.cut(axis, start) if start else ((), axis)
        mine, _ = op.neurons.cut(behind, stop - start) if stop < op.neurons.length(axis) else (behind, ())
        axes[dim] = op.neurons.resolve(mine)
    return tuple(axes)


def _slice(op: Operation) -> Lies:
    value = op.values[0]
    dim = op.dim(len(value.shape))
    start, stop, step = (op.given[name] for name in ("start", "end", "step"))
    if op.shape == value.shape:
        return value.axes
    if step != 1 or not isinstance(start or 0, int) or not isinstance(stop or 0, int):
        return _mixed(op, [dim])
    start, stop, _ = slice(start, stop).indices(value.shape[dim])
    return _part(op, dim, start, stop)


def _select(op: Operation) -> Lies:
    value = op.values[0]
    dim = op.dim(len(value.shape))
    index = op.given["index"] % value.shape[dim]
    part = list(_part(op, dim, index, index + 1))
    op.neurons.complete(part.pop(dim) or ())
    return tuple(part)


def _unbind(op: Operation) -> list[Value]:
    value = op.values[0]
    dim = op.dim(len(value.shape))
    op.neurons.complete(value.known[dim])
    axes, shape = ((*each[:dim], *each[dim + 1 :]) for each in (value.axes, value.shape))
    return [op.value(shape, axes)] * value.shape[dim]


def _split(op: Operation) -> list[Value]:
    value = op.values[0]
    dim = op.dim(len(value.shape))
    parts = []
    start = 0
    for each in op.result:
        stop = start + each.shape[dim]
        parts.append(op.value(each.shape, _part(op, dim, start, stop)))
        start = stop
    return parts


def _gate(op: Operation) -> Lies:
    """Unite the neurons of the gates with those of the gated half."""
    dim = op.dim(len(op.shape))
    half = op.shape[dim]
    first, second = (_part(op, dim, place * half, (place + 1) * half) for place in range(2))
    return tuple(op.neurons.join(one, other) for one, other in zip(first, second, strict=True))


def _index(op: Operation) -> Any:
    """Select rows by an index: the other axes keep their neurons."""
    value = op.of(0)
    picked = [place for place, each in enumerate(op.at(1)) if each is not None]
    if value is None or picked != list(range(picked[0], picked[-1] + 1)):
        return unknown(op)
    op.neurons.complete(*(value.known[place] for place in picked))
    left = value.axes[: picked[0]]
    right = value.axes[picked[-1] + 1 :]
    middle = len(op.shape) - len(left) - len(right)
    return (*left, *(value.blank,) * middle, *right)


# --- reshapes ---------------------------------------------------------------------------------------------------------


def _reshape(op: Operation) -> Lies:
    """Flatten, split or squeeze: match the axes of both shapes in the smallest blocks of equal size."""
    # Axes of length 1 are left out, since a single neuron is always active; so a squeeze is handled like a flatten.
    value = op.values[0]
    new = op.shape
    sources = [(length, axis) for length, axis in zip(value.shape, value.axes, strict=True) if length > 1]
    targets = [place for place, length in enumerate(new) if length > 1]
    result: list[Axis | None] = [value.blank] * len(new)
    while sources and targets:
        block = [sources.pop(0)]
        places = [targets.pop(0)]
        while (have := math.prod(length for length, _ in block)) != (want := math.prod(new[p] for p in places)):
            if have < want:
                block.append(sources.pop(0))
            else:
                places.append(targets.pop(0))
        if len(block) == len(places) == 1:
            result[places[0]] = block[0][1]
        elif flat := _flattened(op, block):
            place, axis = _kept(op, flat, [new[p] for p in places])
            result[places[place]] = axis
    return tuple(result)


def _flattened(op: Operation, block: list[tuple[int, Axis | None]]) -> Axis:
    """Return the neurons along several axes flattened into one."""
    # Entry order is row-major: earlier axes repeat the whole axis, later axes repeat each entry.
    owners = [place for place, (_, axis) in enumerate(block) if axis and op.neurons.resolve(axis)]
    if len(owners) != 1:
        return op.neurons.complete(*(axis or () for _, axis in block))
    before = math.prod(length for length, _ in block[: owners[0]])
    behind = math.prod(length for length, _ in block[owners[0] + 1 :])
    runs = op.neurons.resolve(block[owners[0]][1] or ())
    return op.neurons.resolve(tuple(Run(run.set, run.repeat * behind) for run in runs) * before)


def _kept(op: Operation, flat: Axis, lengths: list[int]) -> tuple[int, Axis]:
    """Split an axis into parts of these lengths; return the index of the part that keeps the neurons, and its axis."""
    if len(lengths) == 1:
        return 0, flat
    exact = next((place for place in range(len(lengths)) if _fits(op, flat, lengths, place)), None)
    if exact is None:
        kind = tuple(lengths)
        op.state.splits[kind] = len(lengths)
        exact = op.state.choices.setdefault(kind, len(lengths) - 2)
    before = math.prod(lengths[:exact])
    behind = math.prod(lengths[exact + 1 :])
    return exact, _folded(op, flat, before, lengths[exact] * behind, behind)


def _fits(op: Operation, flat: Axis, lengths: list[int], place: int) -> bool:
    behind = math.prod(lengths[place + 1 :])
    size = math.prod(lengths[place:])
    if any(run.repeat % behind for run in flat):
        return False
    count = 0
    times = 0
    # The first copy must consist of whole runs.
    for run in flat:
        if count == size:
            break
        count += op.neurons.length((run,))
        times += 1
    return count == size and flat == flat[:times] * math.prod(lengths[:place])


def _folded(op: Operation, flat: Axis, copies: int, size: int, behind: int) -> Axis:
    """Return the neurons of ``copies`` equal parts of ``size`` entries, with every ``behind`` entries merged."""
    mine, rest = op.neurons.cut(flat, size) if copies > 1 else (flat, ())
    for _ in range(copies - 1):
        if not rest:
            break
        other, rest = op.neurons.cut(rest, size)
        op.neurons.unite(mine, other)
    return op.neurons.coarsen(op.neurons.resolve(mine), behind)


_SAME = (
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "native_dropout",
    "contiguous",
    "clone",
    "detach",
    "alias",
    "to",
    "_to_copy",
    "lift_fresh_copy",
    "type_as",
    "softmax",
    "_softmax",
    "log_softmax",
    "_log_softmax",
    "view_as",
    "lift_fresh",
    "tril",
    "triu",
)
_ELEMENTWISE = (
    "hardswish",
    "log_sigmoid",
    "rsub",
    "copy",
    "special_expit",
    "masked_fill",
    "where",
    "__and",
    "__or",
    "__xor",
)
"""Elementwise operators that torch does not tag as such."""
_REDUCED = ("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "prod", "norm", "linalg_vector_norm", "any")
_SHAPED = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy", "ravel")
POOLS = (
    "max_pool",
    "avg_pool",
    "adaptive_max_pool",
    "adaptive_avg_pool",
    "lp_pool",
    "upsample_nearest",
    "upsample_bilinear",
    "upsample_linear",
    "upsample_bicubic",
    "upsample_trilinear",
)
"""Prefixes of operators that mix the last axes."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, lambda op: op.values[0].axes),
    **dict.fromkeys(_ELEMENTWISE, broadcast),
    **dict.fromkeys(_REDUCED, _reduce),
    **dict.fromkeys(_SHAPED, _reshape),
    **dict.fromkeys(("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad2d"), _pad),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "t", "numpy_T", "mT", "movedim"), _move),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split"), _split),
    **dict.fromkeys(("index_select", "cumsum"), lambda op: _mixed(op, [op.at(1)])),
    "roll": lambda op: _mixed(op, op.given["dims"] or range(len(op.shape))),
    "flip": lambda op: _mixed(op, op.at(1)),
    "cat": _cat,
    "stack": _stack,
    "slice": _slice,
    "narrow": lambda op: _part(op, op.dim(len(op.shape)), op.given["start"], op.given["start"] + op.given["length"]),
    "select": _select,
    "unbind": _unbind,
    "glu": _gate,
    "index": _index,
}
"""Operator -> rule."""
