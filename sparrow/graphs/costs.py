"""Predict the time of a graph's nodes from their shapes.

A node's work is split into matrix products, sequential reading and writing of values, and plain code, in nanoseconds of
a reference machine (one core of an AMD EPYC, ONNX Runtime 1.31); three factors convert it to another machine
(``Speed``). The counts follow ONNX Runtime's kernels, including slow ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnx import NodeProto, TensorProto

from .graph import attributes
from .values import FLOATS, Values, names

FAST = 1.0
"""Largest time per value of an operator that is bound by memory, nanoseconds."""
PER_NODE = 2_000.0
"""Overhead of a node, nanoseconds."""
FLOP = 0.02
"""Time of a FLOP in a matrix product, nanoseconds."""
PRODUCT_VALUE = 0.8
"""Time of a value that a matrix product reads or writes, nanoseconds."""
PRODUCT = 250.0
"""Overhead of a matrix product, nanoseconds."""
FEW = 8
"""A product with few rows or columns is slow: a FLOP takes 1 + FEW / rows times as long."""
OTHER_FLOP: dict[int, float] = {TensorProto.FLOAT: 1.0, TensorProto.DOUBLE: 2.0}
"""Cost of a FLOP by type, relative to float32."""
WHOLE_FLOP = 15.0
"""Cost of a FLOP of integers, which have no fast kernel, relative to float32."""
CACHED = 2**20
"""Size of data that fit in the cache, bytes."""
NEAR = 25.0
"""Time of a random read of a value from the cache, nanoseconds."""
FAR = 100.0
"""Time of a random read of a value from memory, nanoseconds."""


class Work(NamedTuple):
    """Times on the reference machine, in nanoseconds, of matrix products, moving values and plain code."""

    products: float = 0.0
    moving: float = 0.0
    plain: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Times of a machine's core relative to the reference machine, for products, moving values and plain code."""

    products: float = 1.0
    moving: float = 1.0
    plain: float = 1.0

    def seconds(self, work: Work) -> float:
        """Return the seconds of work on this machine."""
        parts = self.products * work.products + self.moving * work.moving + self.plain * work.plain
        return 1e-9 * parts


REFERENCE = Speed()


class _Node:
    """A node with the quantities that its cost depends on."""

    def __init__(self, node: NodeProto, values: Values) -> None:
        read = [name for name in node.input if name]
        made = [name for name in node.output if name]
        self.op = node.op_type
        self.attributes = attributes(node)
        self.taken = [values.shape(name) for name in read]
        self.made = [values.shape(name) for name in made]
        self.kind = values.kind([*read, *made][0]) if read or made else 0
        self.bytes = sum(values.size(name) for name in (*read, *made))
        self.first_bytes = values.size(read[0]) if read else 0
        self.known = [values.known(name) for name in read]
        self.outputs = len(made)

    @property
    def out(self) -> int:
        """Number of values of the first result."""
        return math.prod(self.made[0])

    @property
    def into(self) -> int:
        """Number of values of the first input."""
        return math.prod(self.taken[0])

    @property
    def wide(self) -> float:
        """2 for values of 8 bytes, otherwise 1."""
        return 2.0 if self.kind in (TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64) else 1.0

    def axis(self, usual: int) -> int:
        """Return the node's axis in its first result."""
        given = int(self.attributes.get("axis", usual))
        return given % max(1, len(self.made[0]))


def work_of(node: NodeProto, values: Values, readers: Collection[str] = ("",)) -> Work:
    """Return the work of one node; an unknown operator counts as the slowest plain operator.

    readers: operators that read its results; "" for an output of the graph.
    """
    seen = _Node(node, values)
    if not seen.outputs or _is_folded(seen, readers):
        return Work(plain=PER_NODE)
    products, moving, plain = _RULES.get(seen.op, _unknown)(seen)
    return Work(products, moving + 0.1 * seen.bytes, plain + PER_NODE)


def _is_folded(node: _Node, readers: Collection[str]) -> bool:
    """Return whether ONNX Runtime merges a transpose into the products that read it."""
    only_products = all(each in ("Gemm", "MatMul", "Transpose") for each in readers)
    return node.op == "Transpose" and only_products and node.kind in OTHER_FLOP and len(node.taken[0]) == 2


def _elements(nanoseconds: float) -> Callable[[_Node], Work]:
    """Return the rule of an elementwise operator; broadcasts are processed run by run."""

    def rule(node: _Node) -> Work:
        each = node.wide * nanoseconds * node.out * max(1, len(node.taken) - 1)
        runs = 30 * node.out / _run_of(node.taken, node.made[0]) if len(node.taken) > 1 else 0
        return Work(0, each, runs) if nanoseconds <= FAST else Work(0, 0, each + runs)

    return rule


def _run_of(taken: Sequence[Sequence[int]], made: Sequence[int]) -> int:
    """Return the length of a broadcast's contiguous runs: the last axes that all inputs repeat equally."""
    padded = [[1] * (len(made) - len(shape)) + list(shape) for shape in taken]
    run = 1
    kinds = None
    for axis in reversed(range(len(made))):
        if made[axis] == 1:
            continue
        here = tuple(shape[axis] == 1 for shape in padded)
        if kinds is not None and here != kinds:
            break
        run *= made[axis]
        kinds = here
    return max(1, run)


def _softmax(node: _Node) -> Work:
    axis = node.axis(-1)
    shape = node.made[0]
    rows = node.out / max(1, shape[axis]) if shape else 1
    turned = Work()
    if math.prod(shape[axis + 1 :]) > 1:
        # The axis is swapped with the last one, and the result is swapped back.
        order = list(range(len(shape)))
        order[axis], order[-1] = order[-1], order[axis]
        turned = _turned(node, order)
    return Work(0, 2 * turned.moving, 2 * turned.plain + node.wide * 1.3 * node.out + 22 * rows)


def _product(node: _Node) -> Work:
    first, second = node.taken[:2]
    if node.op == "Gemm":
        rows, columns = node.made[0]
        inner = first[0] if node.attributes.get("transA") else first[1]
        count = 1
    else:
        inner = first[-1]
        rows = first[-2] if len(first) > 1 else 1
        columns = second[-1] if len(second) > 1 else 1
        count = node.out // max(1, rows * columns)
        if len(second) <= 2 and count > 1:
            # With one matrix on the right, all rows form one product.
            rows *= count
            count = 1
    return _products(node.kind, count, rows, inner, columns)


def _products(kind: int, count: float, rows: float, inner: float, columns: float) -> Work:
    flops = 2.0 * count * rows * inner * columns
    values = count * (rows * inner + inner * columns + rows * columns)
    if kind in OTHER_FLOP:
        slow = 1 + FEW / max(1, rows) + FEW / max(1, columns)
        return Work(OTHER_FLOP[kind] * FLOP * slow * flops, 0, PRODUCT_VALUE * values + PRODUCT * count)
    return Work(0, 0, WHOLE_FLOP * FLOP * flops + PRODUCT_VALUE * values + PRODUCT * count)


def _conv(node: _Node) -> Work:
    taken, kernel = node.taken[:2]
    made = node.made[0]
    groups = int(node.attributes.get("group", 1))
    places = math.prod(made[2:])
    columns = math.prod(kernel[1:])
    rows = kernel[0] / groups
    count = taken[0] * groups
    product = _products(node.kind, count, rows, columns, places)
    pads = node.attributes.get("pads", [0])
    strides = node.attributes.get("strides", [1])
    if math.prod(kernel[2:]) == 1 and not any(pads) and all(stride == 1 for stride in strides):
        return product
    unfolded = float(count) * columns * places
    runs = unfolded / max(1, made[-1])
    return Work(product.products, product.moving, product.plain + 0.6 * unfolded + 15 * runs)


def _conv_transpose(node: _Node) -> Work:
    taken, kernel = node.taken[:2]
    groups = int(node.attributes.get("group", 1))
    places = math.prod(taken[2:])
    rows = math.prod(kernel[1:])
    inner = taken[1] / groups
    count = taken[0] * groups
    product = _products(node.kind, count, rows, inner, places)
    folded = float(count) * rows * places
    # Two spatial axes have a fast kernel; the kernel for others is slow on values that are not finite.
    each = 2.0 if len(taken) == 4 else 15.0
    runs = 15 * folded / max(1, taken[-1])
    return Work(product.products, product.moving, product.plain + each * folded + runs + node.out)


def _pool(node: _Node) -> Work:
    places = math.prod(node.attributes.get("kernel_shape", [1]))
    each = {"AveragePool": 4.5, "LpPool": 25.0}.get(node.op, 1.5)
    dilated = any(step > 1 for step in node.attributes.get("dilations", []))
    slow = dilated or node.outputs > 1 or node.kind != TensorProto.FLOAT or len(node.made[0]) > 5
    if node.op == "MaxPool" and slow:
        each = 6.0
    return Work(0, 0, node.wide * node.out * (3 + each * places))


def _reduce(node: _Node) -> Work:
    run = max(1, _last_run(node))
    each = 0.4 if node.kind == TensorProto.FLOAT else 3.0
    short = 15.0
    return Work(0, 0, each * node.into + short * node.into / run + 10.0 * node.out)


def _last_run(node: _Node) -> int:
    """Return the number of adjacent values that are kept or reduced together; 1 if the axes are unknown."""
    shape = node.taken[0]
    axes = node.known[1] if len(node.taken) > 1 else None
    if len(node.taken) > 1 and axes is None:
        return 1
    reduced = set(range(len(shape))) if axes is None else {int(axis) % len(shape) for axis in axes.reshape(-1)}
    run = 1
    for axis in reversed(range(len(shape))):
        if (axis in reduced) != (len(shape) - 1 in reduced):
            break
        run *= shape[axis]
    return run


def _pick(node: _Node) -> Work:
    return Work(0, 0, node.wide * 5.0 * node.into + 12.0 * node.out)


def _transpose(node: _Node) -> Work:
    return _turned(node, node.attributes.get("perm", range(len(node.taken[0]) - 1, -1, -1)))


def _turned(node: _Node, permutation: Sequence[int]) -> Work:
    shape = node.taken[0]
    order = [axis for axis in permutation if shape[axis] > 1]
    # Adjacent axes that stay together are merged.
    merged: list[list[int]] = []
    for axis in order:
        follows = merged and all(shape[between] == 1 for between in range(merged[-1][-1] + 1, axis))
        if merged and follows and axis > merged[-1][-1]:
            merged[-1].append(axis)
        else:
            merged.append([axis])
    if len(merged) <= 1:
        return Work(0, node.wide * node.out, 0)
    places = sorted(range(len(merged)), key=lambda place: merged[place][0])
    if places[-1] == len(merged) - 1:
        # The last axes stay last: runs are copied.
        run = max(1, math.prod(shape[axis] for axis in merged[-1]))
        return Work(0, node.wide * node.out, 30 * node.out / run)
    moved_once = any(
        [place for place in places if place != one] == sorted(place for place in places if place != one)
        for one in range(len(merged))
    )
    each = 6.0 if moved_once else 25.0 if node.first_bytes < CACHED else 80.0
    return Work(0, 0, node.wide * each * node.out)


def _gather(node: _Node) -> Work:
    axis = int(node.attributes.get("axis", 0)) % max(1, len(node.taken[0]))
    run = 1 if node.op == "GatherElements" else math.prod(node.taken[0][axis + 1 :])
    return _blocks(node, run)


def _gather_nd(node: _Node) -> Work:
    return _blocks(node, node.out / max(1, math.prod(node.taken[1][:-1])), beside=75)


def _blocks(node: _Node, run: float, beside: float = 0) -> Work:
    """Return the work of copying blocks of ``run`` values from random places of the first input."""
    far = NEAR if node.first_bytes < CACHED else FAR
    return Work(0, node.wide * node.out, (far + beside) * node.out / max(1, run))


def _scatter(node: _Node) -> Work:
    updates = math.prod(node.taken[2])
    run = 1.0
    if node.op == "ScatterND":
        run = updates / max(1, math.prod(node.taken[1][:-1]))
    far = 2 * (NEAR if node.first_bytes < CACHED else FAR)
    reduced = 4.0 if node.attributes.get("reduction", b"none") != b"none" else 0.0
    return Work(0, 2 * node.wide * node.out, far * updates / max(1, run) + (1 + reduced) * updates)


def _pad(node: _Node) -> Work:
    each = 20 if node.attributes.get("mode", b"constant") == b"constant" else 45
    rows = node.out / max(1, node.made[0][-1] if node.made[0] else 1)
    return Work(0, node.wide * node.out, each * rows)


def _copied(each: float) -> Callable[[_Node], Work]:
    """Return the rule of an operator that copies runs: the last axes whose length does not change."""

    def rule(node: _Node) -> Work:
        run = 1
        shape = node.made[0]
        taken = [1] * (len(shape) - len(node.taken[0])) + node.taken[0] if node.taken else shape
        for one, other in zip(reversed(taken), reversed(shape), strict=False):
            run *= min(one, other)
            if one != other:
                break
        return Work(0, 1.5 * node.wide * node.out, each * node.out / max(1, run))

    return rule


def _joined(node: _Node) -> Work:
    """Return the work of concatenating or splitting along an axis."""
    whole = node.taken[0] if node.op == "Split" else node.made[0]
    axis = int(node.attributes.get("axis", 0)) % max(1, len(whole))
    parts = node.made if node.op == "Split" else node.taken
    rows = sum(math.prod(part[:axis]) for part in parts)
    return Work(0, node.wide * math.prod(whole), 8.0 * rows + 200 * len(parts))


def _stepped(node: _Node) -> Work:
    work = _copied(12)(node)
    return Work(0, work.moving, work.plain + 4.0 * node.out)


def _unpool(node: _Node) -> Work:
    return Work(0, 2.0 * node.out, 40.0 * node.into)


def _moved(node: _Node) -> Work:
    return Work(0, 0.5 * node.wide * node.out, 0)


def _recurrent(node: _Node) -> Work:
    steps, batch, features = node.taken[0]
    hidden = node.taken[2][-1]
    rows = node.taken[1][1]
    each = _products(node.kind, node.taken[1][0] * steps, batch, features + hidden, rows)
    return Work(each.products, each.moving, each.plain + 40.0 * steps * batch * rows * node.taken[1][0])


def _einsum(node: _Node) -> Work:
    sides = bytes(node.attributes.get("equation", b"")).decode("ascii", "replace").replace(" ", "").split("->")[0]
    lengths = dict[str, int]()
    for letters, shape in zip(sides.split(","), node.taken, strict=False):
        if "." in letters or len(letters) != len(shape):
            # If letters are missing, each place of one operand meets each place of the other.
            return _products(node.kind, 1, math.prod(node.taken[0]), 1, math.prod(node.taken[-1]))
        lengths |= dict(zip(letters, shape, strict=True))
    flops = 2.0 * math.prod(lengths.values())
    turned = 2 * 25.0 * (node.out + sum(map(math.prod, node.taken)))
    return Work(2 * FLOP * flops, 0, turned + PRODUCT * node.out)


def _attention(node: _Node) -> Work:
    query, key = node.taken[:2]
    pairs = math.prod(query[:-1]) * key[-2]
    return Work(4 * FLOP * pairs * query[-1] * 2, 0, 20.0 * pairs + 5.0 * sum(map(math.prod, node.taken)))


def _normal(node: _Node) -> Work:
    rows = node.into / max(1, node.taken[0][-1] if node.taken[0] else 1)
    return Work(0, 6.0 * node.wide * node.into, 30 * rows)


def _transform(node: _Node) -> Work:
    return Work(0, 0, 20.0 * (node.out + node.into) * math.log2(2 + node.out + node.into))


def _resize(node: _Node) -> Work:
    # Antialiasing reads the whole input; without it the cubic kernel is slow.
    smooth = bool(node.attributes.get("antialias"))
    each = 600.0 if node.attributes.get("mode") == b"cubic" and not smooth else 12.0
    return Work(0, (8.0 if smooth else 1.0) * node.into, each * node.out)


def _unknown(node: _Node) -> Work:
    return Work(0, 0, FAR * (node.out + sum(map(math.prod, node.taken))))


def _mod(node: _Node) -> Work:
    # A remainder of floats takes a step per bit of the difference of exponents.
    floats = node.kind in FLOATS
    long = 1200.0 if node.kind == TensorProto.DOUBLE else 200.0
    return _elements(long if floats else 5.0)(node)


_NANOSECONDS = {
    1.0: """
        Abs Add And Ceil Clip Div Equal Floor Greater GreaterOrEqual HardSigmoid HardSwish LeakyRelu Less LessOrEqual
        Mul Neg Not Or Reciprocal Relu Round Sigmoid Softsign Sqrt Sub Tanh Erf Exp BatchNormalization Max Min Cast
        """,
    2.0: "Gelu Sign Where",
    4.0: "Celu Elu Selu Log",
    8.0: "PRelu Sin Cos",
    18.0: "Mish Softplus Pow",
    25.0: """
        Acos Acosh Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CastLike Cosh DepthToSpace
        Dropout Hardmax IsInf IsNaN Mean Shrink Sinh SpaceToDepth Sum Swish Tan ThresholdedRelu Trilu Xor
        """,
}

_RULES: dict[str, Callable[[_Node], Work]] = {
    **{op: _elements(nanoseconds) for nanoseconds, ops in _NANOSECONDS.items() for op in names(ops)},
    **dict.fromkeys(["Softmax", "LogSoftmax"], _softmax),
    **dict.fromkeys(["MatMul", "Gemm"], _product),
    **dict.fromkeys(["MaxPool", "AveragePool"], _pool),
    **dict.fromkeys(
        names(
            """
            ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
            ReduceSumSquare
            """
        ),
        _reduce,
    ),
    **dict.fromkeys(["ArgMax", "ArgMin"], _pick),
    **dict.fromkeys(["Gather", "GatherElements"], _gather),
    **dict.fromkeys(["ScatterElements", "ScatterND"], _scatter),
    **dict.fromkeys(["Concat", "Split"], _joined),
    **dict.fromkeys(
        ["Constant", "ConstantOfShape", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze", "Flatten"],
        _moved,
    ),
    **dict.fromkeys(["LSTM", "GRU", "RNN"], _recurrent),
    **dict.fromkeys(["DFT", "STFT", "TopK"], _transform),
    **dict.fromkeys(
        names(
            """
            GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization InstanceNormalization LRN
            LayerNormalization LpNormalization MeanVarianceNormalization RMSNormalization
            """
        ),
        _normal,
    ),
    "Attention": _attention,
    "Conv": _conv,
    "Einsum": _einsum,
    "LpPool": _pool,
    "ConvTranspose": _conv_transpose,
    "CumSum": _elements(6.0),
    "Expand": _copied(35),
    "GatherND": _gather_nd,
    "MaxUnpool": _unpool,
    "Mod": _mod,
    "OneHot": _elements(7.0),
    "Pad": _pad,
    "Resize": _resize,
    "Slice": _stepped,
    "Tile": _copied(8),
    "Transpose": _transpose,
}
