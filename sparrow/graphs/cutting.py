"""Graphs of narrow networks: training steps for only the active neurons, derived from the full network's step.

The narrow graph computes the full network's results if weights, biases, scales and shifts of dropped neurons are zero.
Values are *cut* along axes to the places of active neurons, by rules for operators:

    operators that treat neurons independently (activations, pooling, batch norm) have fewer neurons;
    operators that sum over neurons (layers, their errors) omit the dropped ones if one factor is known to be zero;
    operators that mix neurons in other ways (layer norm, softmax over neurons, grouped convolutions), and operators
    without a rule, get whole values, with zeros for dropped neurons, and their result is cut.

The active neurons are inputs of the graph, so that one graph serves all masks of equal size: ``kept:LABEL`` the active
places of an axis, int64 [kept]; ``places:LABEL`` the position of each place among these, or -1, int64 [whole]. Random
numbers are drawn for the full network, and cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..protocol.manifest import Manifest
from ..protocol.neurons import CannotNarrow
from .editor import Editor
from .graph import again, attribute

Label = tuple[tuple[str, int], ...]
"""The groups of neurons along an axis, with the places of each neuron; the group "" is always active."""

Labels = tuple[Label | None, ...]
"""Label of each axis along which a value is cut; None for a complete axis."""

Lengths = tuple[int | None, ...]

ALWAYS = ""

KEEP_ZERO = frozenset(
    [
        "Abs",
        "Cast",
        "Elu",
        "Erf",
        "Floor",
        "Gelu",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Neg",
        "Relu",
        "Round",
        "Selu",
        "Sign",
        "Sin",
        "Sqrt",
        "Swish",
        "Tanh",
    ]
)
MAP = frozenset(["Ceil", "Clip", "Cos", "Exp", "HardSigmoid", "Log", "Not", "Reciprocal", "Sigmoid", "Softplus"])
ALL_ZERO = frozenset(["Add", "Sub", "Max", "Min", "Or"])
"""Operators that give zero if all inputs are zero."""

ANY_ZERO = frozenset(["Mul", "And"])
"""Operators that give zero if any input is zero."""

FIRST_ZERO = frozenset(["Div"])
"""Operators that give zero if the first input is zero."""
COMPARE = frozenset(["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Pow", "Mod", "Where"])
POOLS = frozenset(["AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "GlobalLpPool"])
SUMS = frozenset(["ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare"])
REDUCTIONS = SUMS | {"ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp"}


@dataclass(frozen=True)
class Cut:
    """A value of the narrow graph."""

    name: str
    labels: Labels
    # Axes along which all dropped neurons of the whole value are zero.
    zeros: frozenset[int] = frozenset()


@dataclass
class Plan:
    """How to cut a node: labels of inputs and output."""

    inputs: Sequence[Labels]
    labels: Labels
    zeros: frozenset[int] = frozenset()
    # Input position -> replacement.
    other: dict[int, str] = field(default_factory=dict)


def cut_graph(graph: bytes, manifest: Manifest, counts: Mapping[str, int]) -> tuple[bytes, dict[str, Label]]:
    """Return the graph of a network with ``counts`` active neurons per group, and the labels of its new inputs.

    manifest: the full network's. Raises CannotNarrow if an operator cannot be narrowed.
    """
    cutter = Cutter(onnx.load_from_string(graph), manifest, counts)
    return bytes(cutter.cut().SerializeToString(deterministic=True)), cutter.read


class Cutter:
    """Builder of a narrow graph, node by node."""

    def __init__(self, proto: onnx.ModelProto, manifest: Manifest, counts: Mapping[str, int]) -> None:
        self._proto = proto
        self._editor = Editor(proto)
        self._sizes = {**manifest.group_sizes, ALWAYS: 1}
        self._counts = {**counts, ALWAYS: 1}
        self._axes = {
            spec.name: tuple(
                self._label([(segment.group, segment.repeat) for segment in axis])
                for axis in (spec.axes or ((),) * len(spec.shape))
            )
            for spec in manifest.tensors
        }
        self._trained = {spec.name for spec in manifest.tensors if spec.trainable}
        self._nodes = [onnx.NodeProto.FromString(each.SerializeToString()) for each in proto.graph.node]
        self._maker = {name: place for place, node in enumerate(self._nodes) for name in node.output if name}
        self._made: list[onnx.NodeProto] = []
        self._cuts: dict[str, Cut] = {}
        # Places of maxima: name in the whole graph -> in the cut value.
        self._pooled: dict[str, Cut] = {}
        self._done: dict[tuple[Any, ...], str] = {}
        self.read: dict[str, Label] = {}

    def cut(self) -> onnx.ModelProto:
        """Return the narrow graph."""
        graph = self._proto.graph
        for info in graph.input:
            labels = self._axes.get(info.name, (None,) * len(info.type.tensor_type.shape.dim))
            zeros = frozenset(range(len(labels))) if info.name in self._trained else frozenset[int]()
            self._cuts[info.name] = Cut(info.name, labels, zeros)
            self._shorten(info, labels)
        for tensor in graph.initializer:
            self._cuts[tensor.name] = Cut(tensor.name, (None,) * len(tensor.dims))
        for node in self._nodes:
            if any(each.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for each in node.attribute):
                raise CannotNarrow(
                    f"{node.op_type}: operators with subgraphs cannot be narrowed; use a method that trains the full "
                    "network, such as fedspu"
                )
            self._cut_node(node)
        ends = {}
        for info in graph.output:
            name = info.name.partition(":")[2]
            labels = self._axes.get(name, (None,) * len(info.type.tensor_type.shape.dim))
            ends[info.name] = self.get(info.name, labels)
            self._shorten(info, labels)
        self._name_outputs(ends)
        del graph.node[:]
        graph.node.extend(self._made)
        for name, label in self.read.items():
            length = self._kept(label) if name.startswith("kept:") else self._whole(label)
            graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [length]))
        del graph.value_info[:]
        self._editor.remove_unread()
        there = {info.name for info in graph.input}
        self.read = {name: label for name, label in self.read.items() if name in there}
        return self._proto

    def _shorten(self, info: onnx.ValueInfoProto, labels: Labels) -> None:
        for dim, label in zip(info.type.tensor_type.shape.dim, labels, strict=True):
            if label is not None:
                dim.dim_value = self._kept(label)

    def _name_outputs(self, ends: Mapping[str, str]) -> None:
        """Give outputs of the graph their names."""
        renamed: dict[str, str] = {}
        made = {name for node in self._made for name in node.output}
        for output, value in ends.items():
            if value in made and value not in renamed:
                renamed[value] = output
        # Other values with an output's name get a new one.
        for name in ends:
            if name in made and name not in renamed:
                renamed[name] = self._editor.fresh()
        for node in self._made:
            for names in (node.input, node.output):
                names[:] = [renamed.get(name, name) for name in names]
        for output, value in ends.items():
            if renamed.get(value) != output:
                self._made.append(helper.make_node("Identity", [renamed.get(value, value)], [output]))

    # Labels and lengths

    def _label(self, pieces: Sequence[tuple[str, int]]) -> Label | None:
        """Return the label of an axis, or None if it is all active."""
        if all(self._counts[group] == self._sizes[group] for group, _ in pieces):
            return None
        joined: list[tuple[str, int]] = []
        for group, repeat in pieces:
            if joined and group == ALWAYS == joined[-1][0]:
                repeat += joined.pop()[1]
            joined.append((group, repeat))
        return tuple(joined)

    def _whole(self, label: Label) -> int:
        return sum(self._sizes[group] * repeat for group, repeat in label)

    def _kept(self, label: Label) -> int:
        return sum(self._counts[group] * repeat for group, repeat in label)

    def shape(self, name: str) -> Lengths | None:
        """Return the shape of a value of the full graph."""
        constant = self._editor.constant(name)
        return self._editor.shape(name) if constant is None else constant.shape

    def shape_of_cut(self, shape: Lengths, labels: Labels) -> Lengths:
        """Return the shape of a cut value."""
        return tuple(
            length if label is None else self._kept(label) for length, label in zip(shape, labels, strict=True)
        )

    def constant(self, name: str) -> Any:
        """Return the array of a constant, or None."""
        found = self._editor.constant(name)
        if found is None and name in self._maker and self._nodes[self._maker[name]].op_type == "Constant":
            value = self._nodes[self._maker[name]].attribute[0]
            found = (
                numpy_helper.to_array(value.t) if value.name == "value" else np.array(helper.get_attribute_value(value))
            )
        return found

    def labels(self, name: str) -> Labels:
        """Return the labels of a cut value."""
        return self._cuts[name].labels

    def is_zero(self, name: str, axis: int, label: Label) -> bool:
        """Return whether a value is zero at all places along an axis that ``label`` drops."""
        constant = self.constant(name)
        if constant is not None:
            return not constant.any()
        cut = self._cuts[name]
        return cut.labels[axis] == label and axis % len(cut.labels) in cut.zeros

    # Making values

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        output = self._editor.fresh()
        self._made.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def integers(self, values: Sequence[int]) -> str:
        """Return the name of a new constant, int64 [n]."""
        return self._editor.integers(values)

    def get(self, name: str, labels: Labels) -> str:
        """Return the name of a value with exactly these labels."""
        cut = self._cuts.get(name)
        if cut is not None and cut.labels == labels:
            return cut.name
        key = ("value", name, labels)
        if key not in self._done:
            self._done[key] = self._turn(name, labels)
        return self._done[key]

    def _turn(self, name: str, labels: Labels) -> str:
        constant = self.constant(name)
        if constant is not None and constant.size and (constant == constant.flat[0]).all():
            shape = self.shape_of_cut(constant.shape, labels)
            return self._editor.keep(np.full(shape, constant.flat[0], constant.dtype))
        cut = self._cuts.get(name)
        if cut is None or any(
            have is not None and have != want and axis not in cut.zeros and name in self._maker
            for axis, (have, want) in enumerate(zip(cut.labels, labels, strict=True))
        ):
            found = self._recomputed(name)
            labelled: Labels = (None,) * len(labels)
        else:
            found = cut.name
            labelled = cut.labels
            for axis, (have, want) in enumerate(zip(labelled, labels, strict=True)):
                if have is not None and have != want:
                    found = self._spread(found, name, axis, have, len(labels))
        for axis, (have, want) in enumerate(zip(labelled, labels, strict=True)):
            if want is not None and have != want:
                found = self.node("Gather", [found, self._index("kept", want)], axis=axis)
        return found

    def _index(self, what: str, label: Label) -> str:
        name = f"{what}:{json.dumps(label)}"
        self.read[name] = label
        return name

    def _spread(self, found: str, name: str, axis: int, label: Label, axes: int) -> str:
        """Return a value with zeros for dropped neurons along an axis."""
        places = self._index("places", label)
        key = ("there", label, axes - axis)
        if key not in self._done:
            there = self.node("GreaterOrEqual", [places, self._editor.keep(np.array(0, np.int64))])
            shape = self.integers([self._whole(label), *[1] * (axes - axis - 1)])
            self._done[key] = self.node("Reshape", [there, shape])
        kind = self._editor.dtype(name)
        spread = self.node("Gather", [found, places], axis=axis)
        return self.node("Where", [self._done[key], spread, self._editor.keep(np.array(0, kind))])

    def _recomputed(self, name: str) -> str:
        """Return a value of the full network, recomputed from whole values."""
        wanted = set[int]()
        waiting = [name]
        while waiting:
            place = self._maker[waiting.pop()]
            if place in wanted:
                continue
            wanted.add(place)
            for read in self._nodes[place].input:
                if read and not self._is_there(read):
                    waiting.append(read)
        for place in sorted(wanted):
            self._compute_whole(self._nodes[place])
        return self._done["value", name, (None,) * len(self.shape(name) or ())]

    def _is_there(self, name: str) -> bool:
        """Return True if a whole value is available without recomputing it."""
        cut = self._cuts.get(name)
        if cut is not None and (
            name not in self._maker or all(label is None or a in cut.zeros for a, label in enumerate(cut.labels))
        ):
            return True
        return ("value", name, (None,) * len(self.shape(name) or ())) in self._done

    def _compute_whole(self, node: onnx.NodeProto) -> None:
        inputs = [name and self.get(name, (None,) * self._rank(name)) for name in node.input]
        made = again(node, inputs, [name and self._editor.fresh() for name in node.output])
        self._made.append(made)
        for name, output in zip(node.output, made.output, strict=True):
            if name:
                self._done["value", name, (None,) * len(self.shape(name) or ())] = output

    def _rank(self, name: str) -> int:
        cut = self._cuts.get(name)
        return len(cut.labels) if cut is not None else len(self.shape(name) or ())

    def sizes(self, name: str, shape: Lengths, labels: Labels) -> str | None:
        """Return the name of the cut ``shape`` for a node's input ``name``, or None."""
        if all(label is None for label in labels):
            return self.get(name, (None,))
        lengths = self.shape_of_cut(shape, labels)
        if sum(length is None for length in lengths) <= 1:
            return self.integers([-1 if length is None else length for length in lengths])
        return None

    # Nodes

    def _cut_node(self, node: onnx.NodeProto) -> None:
        rule = RULES.get(node.op_type) if node.domain == "" and self._can_be_cut(node) else None
        plan = rule(self, node) if rule is not None else None
        if plan is None:
            # A rule may have finished the node itself.
            if node.output[0] not in self._cuts:
                self._whole_node(node)
            return
        inputs = [
            plan.other.get(place) or (name and self.get(name, labels))
            for place, (name, labels) in enumerate(zip(node.input, plan.inputs, strict=True))
        ]
        self._made.append(again(node, inputs, node.output))
        self._cuts[node.output[0]] = Cut(node.output[0], plan.labels, plan.zeros)
        for name in node.output[1:]:
            if name:
                self._pooled[name] = Cut(name, plan.labels)

    def _can_be_cut(self, node: onnx.NodeProto) -> bool:
        if any(self.shape(name) is None for name in (*node.input, *node.output) if name):
            return False
        read = [self._cuts.get(name) for name in node.input if name]
        # Places of maxima have no cut; only MaxUnpool reads them.
        if None in read:
            return bool(node.op_type == "MaxUnpool")
        return any(label is not None for cut in read if cut is not None for label in cut.labels)

    def _whole_node(self, node: onnx.NodeProto) -> None:
        """Compute a node from whole values."""
        inputs = [name and self.get(name, (None,) * self._rank(name)) for name in node.input]
        self._made.append(again(node, inputs, node.output))
        for name in node.output:
            if name:
                shape = self.shape(name)
                self._cuts[name] = Cut(name, (None,) * len(shape or ()))

    def finish(self, node: onnx.NodeProto, name: str, labels: Labels, zeros: frozenset[int] = frozenset()) -> None:
        """Record an existing value as the output of a node."""
        self._cuts[node.output[0]] = Cut(name, labels, zeros)

    def maker(self, name: str) -> onnx.NodeProto | None:
        """Return the node of the full graph that makes a value."""
        place = self._maker.get(name)
        return None if place is None else self._nodes[place]

    def pooled(self, name: str) -> Cut | None:
        """Return the places of maxima in the cut value."""
        return self._pooled.get(name)


# A rule returns how to cut a node, or None if it needs whole values.

Rule = Callable[[Cutter, onnx.NodeProto], Plan | None]


def _meet(cutter: Cutter, shapes: Sequence[tuple[str, Lengths, Labels]], out: Lengths) -> tuple[list[Labels], Labels]:
    """Return the labels of values that are broadcast to ``out``, and those of the result."""
    labels: list[Label | None] = [None] * len(out)
    for _, shape, own in shapes:
        for axis in range(1, len(shape) + 1):
            if shape[-axis] == out[-axis] and shape[-axis] != 1:
                labels[-axis] = labels[-axis] or own[-axis]
    wanted = [
        tuple(
            labels[len(out) - len(shape) + axis] if length == out[len(out) - len(shape) + axis] else None
            for axis, length in enumerate(shape)
        )
        for _, shape, _ in shapes
    ]
    return wanted, tuple(labels)


def _elementwise(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    out = _shape(cutter, node.output[0])
    kind = node.op_type
    read = [(name, _shape(cutter, name), cutter.labels(name)) for name in node.input if name]
    wanted, labels = _meet(cutter, read, out)
    zeros = set()
    for axis, label in enumerate(labels):
        if label is None:
            continue
        flags = [_is_zero(cutter, name, shape, axis - len(out), label) for name, shape, _ in read]
        if (
            (kind in KEEP_ZERO | FIRST_ZERO and flags[0])
            or (kind in ALL_ZERO and all(flags))
            or (kind in ANY_ZERO and any(flags))
            or (kind == "Where" and all(flags[1:]))
        ):
            zeros.add(axis)
    given = iter(wanted)
    return Plan([next(given) if name else () for name in node.input], labels, frozenset(zeros))


def _is_zero(cutter: Cutter, name: str, shape: Lengths, axis: int, label: Label) -> bool:
    return cutter.is_zero(name, axis, label) if -axis <= len(shape) and shape[axis] != 1 else _no_value(cutter, name)


def _no_value(cutter: Cutter, name: str) -> bool:
    constant = cutter.constant(name)
    return constant is not None and not constant.any()


def _shape(cutter: Cutter, name: str) -> Lengths:
    shape = cutter.shape(name)
    assert shape is not None
    return shape


def _between(cutter: Cutter, a: str, place: int, b: str, other: int) -> Label | None:
    """Return the label of an axis that a product sums over, if dropped neurons add zero."""
    for name, axis in ((a, place), (b, other)):
        label = cutter.labels(name)[axis]
        if label is not None and cutter.is_zero(name, axis, label):
            return label
    return None


def _zeros(cutter: Cutter, labels: Labels, *sources: tuple[int, str, int]) -> frozenset[int]:
    """Return the axes along which all ``sources`` (axis of the result, value, its axis) are zero."""
    found = set[int]()
    for axis, label in enumerate(labels):
        own = [cutter.is_zero(name, place, label) for at, name, place in sources if at == axis and label is not None]
        if own and all(own):
            found.add(axis)
    return frozenset(found)


def _matmul(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    a, b = node.input
    first = _shape(cutter, a)
    second = _shape(cutter, b)
    out = _shape(cutter, node.output[0])
    if len(first) < 2 or len(second) < 2:
        return None
    inner = _between(cutter, a, -1, b, -2)
    wanted, batch = _meet(
        cutter,
        [(a, first[:-2], cutter.labels(a)[:-2]), (b, second[:-2], cutter.labels(b)[:-2])],
        out[:-2],
    )
    labels = (*batch, cutter.labels(a)[-2], cutter.labels(b)[-1])
    zeros = _zeros(cutter, labels, (len(out) - 2, a, -2), (len(out) - 1, b, -1))
    return Plan([(*wanted[0], labels[-2], inner), (*wanted[1], inner, labels[-1])], labels, zeros)


def _gemm(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    a, b = node.input[:2]
    row = 1 if attribute(node, "transA", 0) else 0
    column = 0 if attribute(node, "transB", 0) else 1
    inner = _between(cutter, a, 1 - row, b, 1 - column)
    labels = (cutter.labels(a)[row], cutter.labels(b)[column])
    inputs: list[Labels] = [
        (labels[0], inner) if row == 0 else (inner, labels[0]),
        (inner, labels[1]) if column == 1 else (labels[1], inner),
    ]
    sources = [(0, a, row), (1, b, column)]
    if len(node.input) > 2 and node.input[2]:
        bias = _shape(cutter, node.input[2])
        if len(bias) != 1 or bias[0] == 1:
            return None
        inputs.append((labels[1],))
        sources += [(1, node.input[2], 0)]
    zeros = _zeros(cutter, labels, *sources)
    return Plan(inputs, labels, zeros - {0} if len(node.input) > 2 else zeros)


def _convolution(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    x, weight, *rest = node.input
    if attribute(node, "group", 1) != 1:
        return None
    inside, outside = (0, 1) if node.op_type == "ConvTranspose" else (1, 0)
    inner = _between(cutter, x, 1, weight, inside)
    spatial: Labels = (None,) * (len(cutter.labels(x)) - 2)
    labels: Labels = (cutter.labels(x)[0], cutter.labels(weight)[outside], *spatial)
    sources = [(1, weight, outside), *((1, bias, 0) for bias in rest if bias)]
    if not rest:
        sources.append((0, x, 0))
    kernel = (inner, labels[1]) if inside == 0 else (labels[1], inner)
    inputs: list[Labels] = [(labels[0], inner, *spatial), (*kernel, *spatial), *[(labels[1],) for _ in rest]]
    return Plan(inputs, labels, _zeros(cutter, labels, *sources))


def _pool(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    own = cutter.labels(node.input[0])
    labels = (*own[:2], *(None,) * (len(own) - 2))
    return Plan([labels], labels, _zeros(cutter, labels, *[(axis, node.input[0], axis) for axis in (0, 1)]))


def _unpool(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    """Route errors to the maxima of a pooled, cut value."""
    places = cutter.pooled(node.input[1])
    shape = cutter.shape(node.output[0])
    if places is None or len(node.input) < 3 or shape is None or None in shape[1:]:
        return None
    pool = cutter.maker(node.input[1])
    assert pool is not None
    sizes = cutter.node("Shape", [cutter.get(pool.input[0], places.labels)])
    zeros = _zeros(cutter, places.labels, *[(axis, node.input[0], axis) for axis in (0, 1)])
    inputs: list[Labels] = [places.labels, (), ()]
    return Plan(inputs, places.labels, zeros, {1: places.name, 2: sizes})


def _transpose(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    own = cutter.labels(node.input[0])
    order = attribute(node, "perm", range(len(own) - 1, -1, -1))
    labels = tuple(own[axis] for axis in order)
    return Plan([own], labels, _zeros(cutter, labels, *[(at, node.input[0], a) for at, a in enumerate(order)]))


def _reshape(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    x = node.input[0]
    before = _shape(cutter, x)
    after = _shape(cutter, node.output[0])
    own = cutter.labels(x)
    inputs: list[Label | None] = [None] * len(before)
    labels: list[Label | None] = [None] * len(after)
    zeros = set[int]()
    for axes, others in _same_places(before, after):
        cut = [axis for axis in axes if own[axis] is not None]
        large = [axis for axis in others if after[axis] != 1]
        if len(cut) != 1 or not large or any(before[axis] != 1 for axis in axes if axis < cut[0]):
            continue
        label = own[cut[0]] or ()
        behind = _places(before, [axis for axis in axes if axis > cut[0]])
        rest = _places(after, large[1:])
        if any(repeat * behind % rest for _, repeat in label):
            continue
        inputs[cut[0]] = label
        labels[large[0]] = tuple((group, repeat * behind // rest) for group, repeat in label)
        if cutter.is_zero(x, cut[0], label):
            zeros.add(large[0])
    sizes = cutter.sizes(node.input[1], after, tuple(labels))
    if sizes is None:
        return None
    return Plan([tuple(inputs), (None,)], tuple(labels), frozenset(zeros), {1: sizes})


def _places(shape: Lengths, axes: Sequence[int]) -> int:
    return prod(shape[axis] or 0 for axis in axes)


def _same_places(before: Lengths, after: Lengths) -> list[tuple[list[int], list[int]]]:
    """Return the axes that correspond in two shapes of the same values, as far as lengths are known."""
    found: list[tuple[list[int], list[int]]] = []
    first = 0
    last = (len(before), len(after))
    while min(last) > first and before[last[0] - 1] is not None and after[last[1] - 1] is not None:
        start = [last[0] - 1, last[1] - 1]
        sizes = [before[start[0]], after[start[1]]]
        while sizes[0] != sizes[1]:
            less = 0 if (sizes[0] or 0) < (sizes[1] or 0) else 1
            start[less] -= 1
            length = (before, after)[less][start[less]] if start[less] >= 0 else None
            if length is None:
                return found
            sizes[less] = (sizes[less] or 0) * length
        # An axis of length 1 belongs to the axis before it, so that [16] is the same as [1, 16, 1, 1].
        while sizes[0] == 1 and min(start) > 0 and None not in (before[start[0] - 1], after[start[1] - 1]):
            start = [start[0] - 1, start[1] - 1]
            sizes = [before[start[0]], after[start[1]]]
            if sizes[0] != sizes[1]:
                return found
        found.append(([*range(start[0], last[0])], [*range(start[1], last[1])]))
        last = (start[0], start[1])
    return found


def _expand(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    out = _shape(cutter, node.output[0])
    read = [(node.input[0], _shape(cutter, node.input[0]), cutter.labels(node.input[0]))]
    wanted, labels = _meet(cutter, read, out)
    more = len(out) - len(wanted[0])
    lengths = cutter.shape_of_cut(out, labels)
    if any(length is None and (axis < more or read[0][1][axis - more]) for axis, length in enumerate(lengths)):
        return None
    # Length 1 keeps the batch.
    sizes = cutter.integers([length or 1 for length in lengths])
    zeros = _zeros(cutter, labels, *[(more + axis, node.input[0], axis) for axis in range(len(wanted[0]))])
    return Plan([wanted[0], (None,)], labels, zeros, {1: sizes})


def _reduce(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    x = node.input[0]
    own = cutter.labels(x)
    given = cutter.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else attribute(node, "axes", [])
    if given is None:
        return None
    if not len(given) and attribute(node, "noop_with_empty_axes", 0):
        return None
    axes = {int(axis) % len(own) for axis in given} or set(range(len(own)))
    inputs: list[Label | None] = list(own)
    for axis in axes:
        label = own[axis]
        if label is not None and not (node.op_type in SUMS and cutter.is_zero(x, axis, label)):
            inputs[axis] = None
    stay = [axis for axis in range(len(own)) if axis not in axes or attribute(node, "keepdims", 1)]
    labels = tuple(None if axis in axes else own[axis] for axis in stay)
    zeros = frozenset[int]()
    if node.op_type in SUMS | {"ReduceMean"}:
        zeros = _zeros(cutter, labels, *[(at, x, axis) for at, axis in enumerate(stay)])
    return Plan([tuple(inputs), *[(None,)] * (len(node.input) - 1)], labels, zeros)


def _along(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    """Complete the axis of a softmax."""
    labels = list(cutter.labels(node.input[0]))
    labels[attribute(node, "axis", -1)] = None
    return Plan([tuple(labels)], tuple(labels))


def _concat(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    shapes = [_shape(cutter, name) for name in node.input]
    own = [cutter.labels(name) for name in node.input]
    axis = attribute(node, "axis", 0) % len(own[0])
    labels = [next((each[place] for each in own if each[place] is not None), None) for place in range(len(own[0]))]
    pieces: list[tuple[str, int]] = []
    for shape, each in zip(shapes, own, strict=True):
        length = shape[axis]
        if length is None:
            return None
        pieces += each[axis] or ((ALWAYS, length),)
    labels[axis] = cutter._label(pieces)
    inputs = [(*labels[:axis], each[axis], *labels[axis + 1 :]) for each in own]
    zeros = set()
    for place, label in enumerate(labels):
        parts = [(name, each[place]) for name, each in zip(node.input, own, strict=True)]
        if label is not None and all(
            (place == axis and of is None) or (of is not None and cutter.is_zero(name, place, of)) for name, of in parts
        ):
            zeros.add(place)
    return Plan(inputs, tuple(labels), frozenset(zeros))


def _slice(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    x = node.input[0]
    own = list(cutter.labels(x))
    axes = cutter.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    if axes is None:
        return None
    for axis in axes:
        own[int(axis)] = None
    labels = tuple(own)
    zeros = _zeros(cutter, labels, *[(axis, x, axis) for axis in range(len(labels))])
    return Plan([labels, *[(None,)] * (len(node.input) - 1)], labels, zeros)


def _pad(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    pads = cutter.constant(node.input[1])
    own = cutter.labels(node.input[0])
    if pads is None or len(node.input) > 3:
        return None
    labels = tuple(None if pads[axis] or pads[len(own) + axis] else label for axis, label in enumerate(own))
    return Plan([labels, *[(None,) if i == 1 else () for i in range(1, len(node.input))]], labels)


def _gather(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    x, index = node.input
    own = cutter.labels(x)
    more = len(cutter.labels(index))
    axis = attribute(node, "axis", 0) % len(own)
    data = (*own[:axis], None, *own[axis + 1 :])
    labels = (*own[:axis], *(None,) * more, *own[axis + 1 :])
    sources = [(a if a < axis else a + more - 1, x, a) for a in range(len(own)) if a != axis]
    return Plan([data, (None,) * more], labels, _zeros(cutter, labels, *sources))


def _scatter_rows(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    """Add rows (errors of an embedding); the axes after the indexed ones are cut."""
    data, index, rows = node.input
    depth = _shape(cutter, index)[-1]
    if depth is None:
        return None
    behind = len(cutter.labels(data)) - depth
    tail = cutter.labels(rows)[len(cutter.labels(rows)) - behind :]
    labels = (*(None,) * depth, *tail)
    front: Labels = (None,) * (len(cutter.labels(rows)) - behind)
    return Plan([labels, (None,) * len(cutter.labels(index)), (*front, *tail)], labels)


def _insert_axes(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    axes = cutter.constant(node.input[1])
    own = cutter.labels(node.input[0])
    if axes is None:
        return None
    total = len(own) + len(axes)
    new = {int(axis) % total for axis in axes}
    given = iter(range(len(own)))
    source = [None if axis in new else next(given) for axis in range(total)]
    labels = tuple(None if axis is None else own[axis] for axis in source)
    zeros = _zeros(cutter, labels, *[(at, node.input[0], a) for at, a in enumerate(source) if a is not None])
    return Plan([own, (None,)], labels, zeros)


def _remove_axes(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    axes = cutter.constant(node.input[1]) if len(node.input) > 1 else None
    if axes is None:
        return None
    own = cutter.labels(node.input[0])
    gone = {int(axis) % len(own) for axis in axes}
    stay = [axis for axis in range(len(own)) if axis not in gone]
    labels = tuple(own[axis] for axis in stay)
    return Plan([own, (None,)], labels, _zeros(cutter, labels, *[(at, node.input[0], a) for at, a in enumerate(stay)]))


def _lengths(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    """Compute the shape of the whole value from the cut one."""
    own = cutter.labels(node.input[0])
    shape = _shape(cutter, node.input[0])
    rest = [
        0 if label is None else (length or 0) - (cut or 0)
        for label, length, cut in zip(own, shape, cutter.shape_of_cut(shape, own), strict=True)
    ]
    start = attribute(node, "start", 0)
    end = attribute(node, "end", len(own))
    found = cutter.node("Shape", [cutter.get(node.input[0], own)], start=start, end=end)
    cutter.finish(node, cutter.node("Add", [found, cutter.integers(rest[start:end])]), (None,))
    return None


def _batch_norm(cutter: Cutter, node: onnx.NodeProto) -> Plan | None:
    own = cutter.labels(node.input[0])
    if attribute(node, "training_mode", 0):
        return None
    labels = (own[0], own[1], *(None,) * (len(own) - 2))
    zeros = _zeros(cutter, labels, (1, node.input[1], 0), (1, node.input[2], 0))
    return Plan([labels, *[(own[1],)] * 4], labels, zeros)


RULES: dict[str, Rule] = {
    **dict.fromkeys(KEEP_ZERO | MAP | ALL_ZERO | ANY_ZERO | FIRST_ZERO | COMPARE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(POOLS | {"MaxPool"}, _pool),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _along),
    **dict.fromkeys(("Conv", "ConvTranspose"), _convolution),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "MaxUnpool": _unpool,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "Concat": _concat,
    "Slice": _slice,
    "Pad": _pad,
    "Gather": _gather,
    "ScatterND": _scatter_rows,
    "Unsqueeze": _insert_axes,
    "Squeeze": _remove_axes,
    "Shape": _lengths,
    "BatchNormalization": _batch_norm,
}
