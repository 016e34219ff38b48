"""Analyse the channels of an ONNX graph: coupled, constant and needed units.

A *unit* is one index of one axis of a value or weight, such as row 3 of ``conv1.weight``. Each operator has a rule for
three properties:

- Coupled units form a class and can only be removed together (``Flow.couple``): row 3 of a weight, entry 3 of its bias,
  channel 3 of the output, of its ReLU and of values added to it; after a flatten, all columns of a channel.
- Constant units have one value for every input and position (``Flow.constant``; NaN for other units).
- Needed units are those of the graph's outputs, and inputs with a nonzero weight for a needed unit of a convolution or
  matrix product, except constants that fit in a bias. Units without a rule are needed, so an unknown operator may
  prevent removal but never changes the result.

``Flow.kept`` returns the smallest set of classes with these properties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from sparrow.graphs import graph as plumbing
from sparrow.graphs.graph import Shape, attribute
from sparrow.protocol.manifest import Array

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Index = NDArray[np.intp]

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Contraction:
    """A weighted sum over the units of an axis of ``data``, plus a bias."""

    node: NodeProto
    data: str
    axis: int
    weight: str
    # That axis of the initialiser.
    inputs_axis: int
    # [outputs, inputs, taps...], a view of the initialiser ``weight``.
    weights: Array
    out_axis: int
    # Positions differ in their taps, so a nonzero constant does not add the same everywhere.
    padded: bool
    # Index of the node's bias input, None if the operator has none.
    bias: int | None
    # Whether a constant can be added to it.
    can_fold: bool

    def weight_of(self, inputs: Bools) -> Floats:
        """Return [outputs, inputs chosen]: the sums over all taps."""
        taken = self.weights[:, inputs]
        sums: Floats = taken.sum(axis=tuple(range(2, taken.ndim)), dtype=np.float64)
        return sums

    @cached_property
    def used(self) -> Bools:
        """Return [outputs, inputs]: True for a nonzero weight."""
        used: Bools = (self.weights != 0).any(axis=tuple(range(2, self.weights.ndim)))
        return used

    def absorbs(self, constant: Floats) -> Bools:
        """Return [inputs]: True if a bias can replace the input. constant: its value or NaN."""
        absorbed = constant == 0 if self.padded or not self.can_fold else ~np.isnan(constant)
        return np.asarray(absorbed, dtype=np.bool_)


class Flow:
    """The units of a model whose constants are folded (``graph.fold_constants_in_place``)."""

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self.version = plumbing.opset(model)
        self.shapes = plumbing.shapes(model)
        self.arrays = plumbing.constants(graph)
        self.contractions: list[Contraction] = []
        self._first: dict[tuple[str, int], int] = {}
        self._count = 0
        for name, shape in self.shapes.items():
            for axis, (size, fixed) in enumerate(zip(shape.sizes, shape.fixed, strict=True)):
                if fixed and size:
                    self._first[name, axis] = self._count
                    self._count += size
        self._constant: dict[tuple[str, int], Floats] = {}
        self._joined: list[tuple[Index, Index]] = []
        self._spoken_for: set[tuple[str, int]] = set()
        self._locked: list[Index] = []
        for value in (*graph.input, *graph.output):
            self._lock(value.name)
        for node in graph.node:
            self._pass(node)
        self._classes = _connected(self._count, self._joined)

    def _pass(self, node: NodeProto) -> None:
        self._spoken_for = set()
        rule = RULES.get(node.op_type) if plumbing.is_standard(node) else None
        names = list(dict.fromkeys([*plumbing.reads(node), *filter(None, node.output)]))
        if rule is not None and sum(map(bool, node.output)) == 1 and all(name in self.shapes for name in names):
            rule(node, self)
        for name in names:
            self._lock(name, self._spoken_for)

    def _lock(self, name: str, but: set[tuple[str, int]] | frozenset[tuple[str, int]] = frozenset()) -> None:
        rank = len(self.shapes[name].sizes) if name in self.shapes else 0
        self._locked += [
            self._units(name, axis) for axis in range(rank) if self.has(name, axis) and (name, axis) not in but
        ]

    def _units(self, name: str, axis: int) -> Index:
        first = self._first[name, axis]
        return np.arange(first, first + self.size(name, axis))

    # --- interface of the rules

    def has(self, name: str, axis: int) -> bool:
        """Return True if the axis exists and has a fixed length."""
        return (name, axis) in self._first

    def rank(self, name: str) -> int:
        """Return the number of axes."""
        return len(self.shapes[name].sizes)

    def size(self, name: str, axis: int) -> int:
        """Return the length of an axis."""
        return self.shapes[name].sizes[axis]

    def couple(
        self, one: str, axis: int, other: str, other_axis: int, index: Index | None = None, to: Index | None = None
    ) -> None:
        """Couple unit ``index[i]`` of one axis with unit ``to[i]`` of the other; None means all units.

        Both axes are marked as handled.
        """
        if not self.has(one, axis) or not self.has(other, other_axis):
            return
        first = self._units(one, axis)
        second = self._units(other, other_axis)
        self._joined.append((first if index is None else first[index], second if to is None else second[to]))
        self.speak_for(one, axis)
        self.speak_for(other, other_axis)

    def speak_for(self, name: str, axis: int) -> None:
        """Mark an axis as handled by a rule, so that its units are not needed by default."""
        self._spoken_for.add((name, axis))

    def constant(self, name: str, axis: int) -> Floats:
        """Return [size]: each slice's constant value, NaN if it has several or depends on the input."""
        if (name, axis) not in self._constant:
            vector = np.full(self.size(name, axis), np.nan)
            array = self.arrays.get(name)
            if array is not None and array.dtype.kind in "fi":
                slices = np.moveaxis(array, axis, 0).reshape(len(vector), -1)
                same = (slices == slices[:, :1]).all(axis=1)
                vector[same] = slices[same, 0]
            self._constant[name, axis] = vector
        return self._constant[name, axis]

    def uniform(self, name: str) -> float:
        """Return the constant value of all elements, or NaN."""
        array = self.arrays.get(name)
        if array is not None and array.size == 1 and array.dtype.kind in "fi":
            return float(array.reshape(()))
        for axis in range(self.rank(name)):
            if self.has(name, axis):
                vector = self.constant(name, axis)
                if not np.isnan(vector).any() and (vector == vector[0]).all():
                    return float(vector[0])
        return np.nan

    def set_constant(self, name: str, axis: int, vector: Floats) -> None:
        """Record constants of an output. Integers are ignored, because their arithmetic differs from floats."""
        if self.has(name, axis) and self.shapes[name].type in _FLOATS:
            self._constant[name, axis] = np.where(np.isfinite(vector), vector, np.nan)

    def contract(self, contraction: Contraction) -> None:
        """Record a weighted sum, whose weights determine the needed inputs."""
        self.contractions.append(contraction)
        self.couple(contraction.data, contraction.axis, contraction.weight, contraction.inputs_axis)

    def contracted(self, contraction: Contraction, bias: Floats) -> Floats:
        """Return [outputs]: the constants of a sum's outputs, NaN for others. bias: NaN if it varies."""
        constant = self.constant(contraction.data, contraction.axis)
        used = (constant != 0) & ~np.isnan(constant) & (not contraction.padded)
        varies = contraction.used[:, ~((constant == 0) | used)].any(axis=1)
        return np.where(varies, np.nan, bias + contraction.weight_of(used) @ constant[used])

    # --- result

    def kept(self) -> dict[tuple[str, int], Bools]:
        """Return (value, axis) -> the units to keep, at least one of every axis."""
        needed = np.zeros(self._count, dtype=np.bool_)
        for units in self._locked:
            needed[self._classes[units]] = True
        self._spread(needed)
        for key in self._first:
            classes = self._classes[self._units(*key)]
            if not needed[classes].any():
                # Prefer a constant unit: it needs no others.
                needed[classes[int(np.argmin(np.isnan(self.constant(*key))))]] = True
                self._spread(needed)
        return {key: needed[self._classes[self._units(*key)]] for key in self._first}

    def _spread(self, needed: Bools) -> None:
        """Add the inputs of all sums with needed outputs, until a fixed point is reached."""
        before = -1
        while (count := int(needed.sum())) != before:
            before = count
            for sum_ in reversed(self.contractions):
                rows = needed[self._classes[self._units(sum_.node.output[0], sum_.out_axis)]]
                inputs = self._classes[self._units(sum_.data, sum_.axis)]
                open_ = ~needed[inputs] & ~sum_.absorbs(self.constant(sum_.data, sum_.axis))
                needed[inputs[open_][sum_.used[rows][:, open_].any(axis=0)]] = True


def _connected(count: int, joined: Sequence[tuple[Index, Index]]) -> Index:
    """Return [count]: the smallest unit of each unit's connected component."""
    label = np.arange(count)
    if not joined:
        return label
    one, other = (np.concatenate([pair[side] for pair in joined]) for side in (0, 1))
    while True:
        least = np.minimum(label[one], label[other])
        after = label.copy()
        for units in (one, other, label[one], label[other]):
            np.minimum.at(after, units, least)
        after = after[after]
        if np.array_equal(after, label):
            return label
        label = after


# --- a rule per operator: its couplings, constants and sums

Rule = Callable[[NodeProto, Flow], None]


def _elementwise(node: NodeProto, flow: Flow) -> None:
    # Values are coupled along every axis, under numpy's broadcasting.
    (out,) = node.output
    for axis in range(flow.rank(out)):
        if not flow.has(out, axis):
            continue
        operands: list[Array | None] = []
        for name in node.input:
            if not name:
                operands.append(None)
                continue
            own = axis - flow.rank(out) + flow.rank(name)
            if own >= 0 and flow.has(name, own) and flow.size(name, own) == flow.size(out, axis):
                flow.couple(name, own, out, axis)
                operands.append(flow.constant(name, own))
            else:
                same = np.asarray(flow.uniform(name))
                operands.append(same if flow.rank(name) == 0 else np.broadcast_to(same, flow.size(out, axis)))
        flow.set_constant(out, axis, _apply(node, operands, flow))


def _apply(node: NodeProto, operands: Sequence[Array | None], flow: Flow) -> Floats:
    given = [each for each in operands if each is not None]
    unknown = np.any(np.broadcast_arrays(*[np.isnan(each) for each in given]), axis=0)
    result = np.full(unknown.shape, np.nan)
    if not unknown.all():
        types = [flow.arrays[name].dtype if name in flow.arrays else np.dtype(np.float32) for name in node.input]
        safe = [
            None if each is None else np.asarray(np.where(np.isnan(each), 1, each)).astype(kind)
            for each, kind in zip(operands, types, strict=True)
        ]
        (value,) = plumbing.evaluate(node, safe, flow.version)
        result = np.where(unknown, np.nan, np.asarray(value, dtype=np.float64))
    if node.op_type == "Mul":
        zero = np.any(np.broadcast_arrays(*[each == 0 for each in given]), axis=0)
        result = np.where(zero, 0.0, result)
    return result


def _convolution(node: NodeProto, flow: Flow) -> None:
    data, weight, *_ = node.input
    out = node.output[0]
    if weight not in flow.arrays or not flow.has(data, 1):
        return
    values = flow.arrays[weight]
    groups = int(attribute(node, "group", 1))
    padded = any(attribute(node, "pads", [])) or attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")
    bias, bias_is_known = _bias(node, 2, out, 1, flow)
    if groups > 1:
        _grouped(node, flow, values, groups, padded, bias)
        return
    flow.couple(weight, 0, out, 1)
    contraction = Contraction(node, data, 1, weight, 1, values, 1, padded, 2, bias_is_known)
    flow.contract(contraction)
    flow.set_constant(out, 1, flow.contracted(contraction, bias))


def _grouped(node: NodeProto, flow: Flow, values: Array, groups: int, padded: bool, bias: Floats) -> None:
    # All inputs and outputs of a group are coupled, since groups must keep one size.
    data, weight, *_ = node.input
    out = node.output[0]
    inputs = np.arange(flow.size(data, 1)).reshape(groups, -1)
    outputs = np.arange(flow.size(out, 1)).reshape(groups, -1)
    flow.couple(weight, 0, out, 1)
    for units in (inputs, outputs):
        value = data if units is inputs else out
        flow.couple(value, 1, out, 1, units.reshape(-1), np.repeat(outputs[:, 0], units.shape[1]))
    constant = flow.constant(data, 1)
    found = np.empty(outputs.size)
    for ins, outs in zip(inputs, outputs, strict=True):
        known = (constant[ins] == 0) | (~np.isnan(constant[ins]) & (not padded))
        taken = values[outs].reshape(len(outs), len(ins), -1)
        varies = taken[:, ~known].any(axis=(1, 2))
        added = taken[:, known].sum(axis=2, dtype=np.float64) @ constant[ins][known]
        found[outs] = np.where(varies, np.nan, bias[outs] + added)
    flow.set_constant(out, 1, found)


def _transposed_convolution(node: NodeProto, flow: Flow) -> None:
    data, weight, *_ = node.input
    out = node.output[0]
    if weight not in flow.arrays or not flow.has(data, 1) or attribute(node, "group", 1) != 1:
        return
    bias, bias_is_known = _bias(node, 2, out, 1, flow)
    flow.couple(weight, 1, out, 1)
    values = flow.arrays[weight].swapaxes(0, 1)
    # Positions differ in their number of taps, as under padding.
    contraction = Contraction(node, data, 1, weight, 0, values, 1, True, 2, bias_is_known)
    flow.contract(contraction)
    flow.set_constant(out, 1, flow.contracted(contraction, bias))


def _bias(node: NodeProto, position: int, out: str, axis: int, flow: Flow) -> tuple[Floats, bool]:
    # A bias with one entry per output is coupled with the outputs.
    size = flow.size(out, axis)
    name = node.input[position] if len(node.input) > position else ""
    if not name:
        return np.zeros(size), True
    last = flow.rank(name) - 1
    if last >= 0 and flow.size(name, last) == size:
        flow.couple(name, last, out, axis)
        bias = flow.constant(name, last)
    else:
        bias = np.full(size, flow.uniform(name))
    return bias, name in flow.arrays


def _gemm(node: NodeProto, flow: Flow) -> None:
    data, weight, *_ = node.input
    out = node.output[0]
    if weight not in flow.arrays or attribute(node, "transA", 0) or not flow.has(data, 1):
        return
    transposed = bool(attribute(node, "transB", 0))
    values = flow.arrays[weight] if transposed else flow.arrays[weight].T
    bias, known = _bias(node, 2, out, 1, flow)
    flow.couple(weight, 0 if transposed else 1, out, 1)
    plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
    contraction = Contraction(node, data, 1, weight, 1 if transposed else 0, values, 1, False, 2, known and plain)
    flow.contract(contraction)
    if plain:
        flow.set_constant(out, 1, flow.contracted(contraction, bias))


def _matmul(node: NodeProto, flow: Flow) -> None:
    (data, weight), (out,) = node.input, node.output
    last = flow.rank(data) - 1
    if weight not in flow.arrays or flow.rank(weight) != 2 or last < 1 or not flow.has(data, last):
        return
    for axis in range(last):
        flow.couple(data, axis, out, axis)
    flow.couple(weight, 1, out, last)
    contraction = Contraction(node, data, last, weight, 0, flow.arrays[weight].T, last, False, None, True)
    flow.contract(contraction)
    flow.set_constant(out, last, flow.contracted(contraction, np.zeros(flow.size(out, last))))


def _batch_norm(node: NodeProto, flow: Flow) -> None:
    data, *parts = node.input
    out = node.output[0]
    if attribute(node, "training_mode", 0) or not all(part in flow.arrays for part in parts) or flow.rank(data) < 2:
        return
    for part in parts:
        flow.couple(part, 0, out, 1)
    for axis in range(flow.rank(data)):
        flow.couple(data, axis, out, axis)
    if flow.has(out, 1):
        scale, shift, mean, variance = (np.asarray(flow.arrays[part], dtype=np.float64) for part in parts)
        # set_constant drops values that are not finite
        with np.errstate(all="ignore"):
            factor = scale / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
            passed = (flow.constant(data, 1) - mean) * factor + shift
        flow.set_constant(out, 1, np.where(scale == 0, shift, passed))


def _group_norm(node: NodeProto, flow: Flow) -> None:
    # A group's channels are normalised together, so they are coupled. Groups of an instance norm are single channels.
    (data, scale, shift), (out,) = node.input, node.output
    if not flow.has(data, 1) or flow.size(scale, 0) != flow.size(data, 1):
        return
    groups = int(attribute(node, "num_groups", flow.size(data, 1)))
    units = np.arange(flow.size(data, 1))
    first = np.repeat(units.reshape(groups, -1)[:, 0], len(units) // groups)
    for name, axis in ((data, 1), (scale, 0), (shift, 0), (out, 1)):
        flow.couple(name, axis, out, 1, units, first)
        flow.couple(name, axis, out, 1)
    of_group = flow.constant(data, 1).reshape(groups, -1)
    # Only zeros are exact: the rounded mean of other constants is divided by almost 0.
    flat = np.repeat((of_group == 0).all(axis=1), len(units) // groups)
    flow.set_constant(out, 1, np.where((flow.constant(scale, 0) == 0) | flat, flow.constant(shift, 0), np.nan))


def _normalised_axes(node: NodeProto, flow: Flow) -> None:
    # The axes that are normalised over are not coupled, so all their units are needed.
    data = node.input[0]
    out = node.output[0]
    rank = flow.rank(data)
    first = int(attribute(node, "axis", -1)) % rank
    last = rank if node.op_type == "LayerNormalization" else first + 1
    for axis in range(rank):
        if not first <= axis < last:
            flow.couple(data, axis, out, axis)


def _pool(node: NodeProto, flow: Flow) -> None:
    data = node.input[0]
    out = node.output[0]
    flow.couple(data, 1, out, 1)
    if flow.has(out, 1):
        constant = flow.constant(data, 1)
        padded = any(attribute(node, "pads", [])) or attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")
        counted = (padded and attribute(node, "count_include_pad", 0)) or attribute(node, "ceil_mode", 0)
        if node.op_type == "AveragePool" and counted:
            constant = np.where(constant == 0, 0.0, np.nan)
        flow.set_constant(out, 1, constant)


def _reduce(node: NodeProto, flow: Flow) -> None:
    data = node.input[0]
    out = node.output[0]
    axes = attribute(node, "axes", None)
    if len(node.input) > 1 and node.input[1]:
        axes = flow.arrays[node.input[1]].tolist() if node.input[1] in flow.arrays else None
    if not axes:
        return
    reduced = {axis % flow.rank(data) for axis in axes}
    keep = bool(attribute(node, "keepdims", 1))
    to = 0
    for axis in range(flow.rank(data)):
        if axis not in reduced:
            flow.couple(data, axis, out, to)
            if flow.has(out, to) and flow.has(data, axis):
                constant = flow.constant(data, axis)
                flow.set_constant(
                    out, to, np.where(constant == 0, 0.0, np.nan) if node.op_type == "ReduceSum" else constant
                )
        to += keep or axis not in reduced


def _reshape(node: NodeProto, flow: Flow) -> None:
    # If an axis is split or several are merged, the first one of the several carries the channels.
    data = node.input[0]
    out = node.output[0]
    target = plumbing.reshape_target(flow.shapes[data], flow.shapes[out])
    told = node.op_type == "Flatten" or (len(node.input) > 1 and node.input[1] in flow.arrays)
    if target is None or not told:
        return
    for before, after in _blocks(flow.shapes[data], flow.shapes[out]):
        if len(before) > 1 and len(after) > 1:
            continue
        one = before[0]
        other = after[0]
        if not all(flow.has(data, axis) for axis in before) or not all(flow.has(out, axis) for axis in after):
            continue
        length = max(flow.size(data, one), flow.size(out, other))
        fine = np.arange(length)
        index, to = fine * flow.size(data, one) // length, fine * flow.size(out, other) // length
        flow.couple(data, one, out, other, index, to)
        runs = flow.constant(data, one)[index].reshape(flow.size(out, other), -1)
        flow.set_constant(out, other, np.where((runs == runs[:, :1]).all(axis=1), runs[:, 0], np.nan))


def _blocks(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Group the axes of a reshape (except length 1) into the shortest runs with equal numbers of values."""
    sides = [[axis for axis, size in enumerate(shape.sizes) if size > 1] for shape in (before, after)]
    blocks: list[tuple[list[int], list[int]]] = []
    left, right = iter(sides[0]), iter(sides[1])
    for axis in left:
        block = ([axis], [next(right)])
        sizes = [before.sizes[axis], after.sizes[block[1][0]]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                block[0].append(next(left))
                sizes[0] *= before.sizes[block[0][-1]]
            else:
                block[1].append(next(right))
                sizes[1] *= after.sizes[block[1][-1]]
        blocks.append(block)
    return blocks


def _transpose(node: NodeProto, flow: Flow) -> None:
    (data,), (out,) = node.input, node.output
    for axis, origin in enumerate(attribute(node, "perm", range(flow.rank(data))[::-1])):
        flow.couple(data, origin, out, axis)
        if flow.has(out, axis):
            flow.set_constant(out, axis, flow.constant(data, origin))


def _concat(node: NodeProto, flow: Flow) -> None:
    (out,) = node.output
    along = int(attribute(node, "axis", 0)) % flow.rank(out)
    for axis in range(flow.rank(out)):
        if axis != along:
            for name in node.input:
                flow.couple(name, axis, out, axis)
            if flow.has(out, axis):
                vectors = [flow.constant(name, axis) for name in node.input]
                same = np.all([vector == vectors[0] for vector in vectors], axis=0)
                flow.set_constant(out, axis, np.where(same, vectors[0], np.nan))
    if not flow.has(out, along):
        return
    start = 0
    for name in node.input:
        to = np.arange(start, start := start + flow.size(name, along))
        flow.couple(name, along, out, along, None, to)
    flow.set_constant(out, along, np.concatenate([flow.constant(name, along) for name in node.input]))


def _pad(node: NodeProto, flow: Flow) -> None:
    data = node.input[0]
    out = node.output[0]
    rank = flow.rank(data)
    mode = attribute(node, "mode", b"constant")
    pads = padding(node, flow.arrays, rank)
    if pads is None:
        return
    value = flow.uniform(node.input[2]) if len(node.input) > 2 and node.input[2] else 0.0
    for axis in range(rank):
        if not flow.has(data, axis) or not flow.has(out, axis):
            continue
        others_grow = any(pads[side][each] for side in (0, 1) for each in range(rank) if each != axis)
        constant = flow.constant(data, axis)
        if mode == b"constant" and others_grow:
            constant = np.where(constant == value, constant, np.nan)
        if not pads[0][axis] and not pads[1][axis]:
            flow.couple(data, axis, out, axis)
            flow.set_constant(out, axis, constant)
        elif mode == b"constant" and min(pads[0][axis], pads[1][axis]) >= 0 and not others_grow and axis == 1:
            inside = np.arange(flow.size(data, axis)) + pads[0][axis]
            flow.couple(data, axis, out, axis, None, inside)
            padded = np.full(flow.size(out, axis), value)
            padded[inside] = constant
            flow.set_constant(out, axis, padded)


def padding(node: NodeProto, arrays: dict[str, Array], rank: int) -> tuple[list[int], list[int]] | None:
    """Return the widths that a Pad adds before and after each axis, None if they are not constant."""
    if len(node.input) < 2 or node.input[1] not in arrays:
        return None
    given = arrays[node.input[1]].tolist()
    axes = list(range(rank))
    if len(node.input) > 3 and node.input[3]:
        if node.input[3] not in arrays:
            return None
        axes = [axis % rank for axis in arrays[node.input[3]].tolist()]
    before = [0] * rank
    behind = [0] * rank
    for place, axis in enumerate(axes):
        before[axis] = given[place]
        behind[axis] = given[len(axes) + place]
    return before, behind


def _gather(node: NodeProto, flow: Flow) -> None:
    # An embedding: its columns are the output's last axes.
    (data, index), (out,) = node.input, node.output
    if data not in flow.arrays or attribute(node, "axis", 0) != 0:
        return
    for axis in range(1, flow.rank(data)):
        to = flow.rank(index) + axis - 1
        flow.couple(data, axis, out, to)
        if flow.has(out, to):
            flow.set_constant(out, to, flow.constant(data, axis))


def _shape(node: NodeProto, flow: Flow) -> None:
    # A Shape usually reads only the batch size; it needs no other axis.
    (data,) = node.input
    asked = range(flow.rank(data))[attribute(node, "start", 0) : attribute(node, "end", None)]
    for axis in set(range(flow.rank(data))) - set(asked):
        flow.speak_for(data, axis)


def _slice(node: NodeProto, flow: Flow) -> None:
    data = node.input[0]
    out = node.output[0]
    if len(node.input) < 4 or node.input[3] not in flow.arrays:
        return
    cut = {axis % flow.rank(data) for axis in flow.arrays[node.input[3]].tolist()}
    for axis in range(flow.rank(data)):
        if axis not in cut:
            flow.couple(data, axis, out, axis)
            if flow.has(out, axis):
                flow.set_constant(out, axis, flow.constant(data, axis))


# fmt: off
_ELEMENTWISE = (
    "Abs", "Add", "Cast", "Ceil", "Celu", "Clip", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "Identity", "LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "Reciprocal",
    "Relu", "Round", "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Tanh",
    "ThresholdedRelu",
)
# fmt: on

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"), _pool),
    **dict.fromkeys(("ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum"), _reduce),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization"), _group_norm),
    **dict.fromkeys(("Softmax", "LogSoftmax", "LayerNormalization"), _normalised_axes),
    "BatchNormalization": _batch_norm,
    "Concat": _concat,
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Pad": _pad,
    "Shape": _shape,
    "Slice": _slice,
    "Transpose": _transpose,
}
