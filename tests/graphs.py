"""Random training steps that devices accept, to compare predictions of their costs with runs.

Each is drawn from a seed: a few nodes of any accepted operator, on a batch and a weight, with attributes, sizes and
broadcasts that models seldom have. The loss depends on every value, so that the runtime leaves out none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.defs import get_schema

from sparrow.graphs import Graphs
from sparrow.graphs.checking import OPSET, Needs, check_graphs
from sparrow.graphs.values import names
from sparrow.protocol.errors import GraphError
from sparrow.protocol.manifest import Manifest

MOST_NODES = 8
BATCHES = (2, 3)
UNARY = names(
    """
    Abs Ceil Celu Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Log LogSoftmax Mish Neg Reciprocal
    Relu Round Selu Sigmoid Sign Sin Softmax Softplus Softsign Sqrt Tanh
    """
)
BINARY = names("Add Sub Mul Div Pow Max Min PRelu Mod Equal Greater Less LessOrEqual GreaterOrEqual")
NUMBERS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32)


@dataclass
class Drawn:
    """A step that is accepted, and a batch for it."""

    graphs: Graphs
    manifest: Manifest
    needs: Needs
    inputs: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    operators: tuple[str, ...]


@dataclass
class _Graph:
    """A graph that grows. values: name -> type, and its shape at each of ``BATCHES``."""

    chance: np.random.Generator
    values: dict[str, tuple[int, list[list[int]]]] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    last_read: set[str] = field(default_factory=set)

    def constant(self, array: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array, dtype)
        return name

    def add(self, op: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str] | None:
        """Append a node; None where its result is not of the kind that a step may have, or too large."""
        names = [f"v{len(self.values)}_{place}" for place in range(outputs)]
        node = helper.make_node(op, inputs, names, name=f"n{len(self.nodes)}", **attributes)
        found: list[dict[str, Any]] = []
        for place in range(len(BATCHES)):
            types, data = {}, {}
            for name in filter(None, inputs):
                if name in self.constants:
                    data[name] = numpy_helper.from_array(self.constants[name], name)
                    array = self.constants[name]
                    types[name] = helper.make_tensor_type_proto(
                        helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
                    )
                else:
                    kind, shapes = self.values[name]
                    types[name] = helper.make_tensor_type_proto(kind, shapes[place])
            try:
                found.append(
                    onnx.shape_inference.infer_node_outputs(
                        get_schema(op, OPSET, ""),
                        node,
                        types,
                        data,
                        opset_imports=[helper.make_opsetid("", OPSET)],
                        ir_version=10,
                    )
                )
            except Exception:
                return None
        for name in names:
            if name not in found[0]:
                if op in ("Celu", "Gelu", "HardSwish", "Mish", "Softsign"):
                    self.values[name] = self.values[inputs[0]]
                    continue
                return None
            described = [each[name].tensor_type for each in found]
            shapes = [[dim.dim_value for dim in each.shape.dim] for each in described]
            known = all(dim.WhichOneof("value") == "dim_value" for each in described for dim in each.shape.dim)
            if not known or any(min(shape, default=1) < 1 for shape in shapes) or math.prod(shapes[0]) > 2**26:
                return None
            self.values[name] = described[0].elem_type, shapes
        self.nodes.append(node)
        self.last_read |= set(inputs)
        return names

    def pick(self, kinds: tuple[int, ...] = (TensorProto.FLOAT,), ranks: range = range(9)) -> str | None:
        fitting = [name for name, (kind, shapes) in self.values.items() if kind in kinds and len(shapes[0]) in ranks]
        return str(self.chance.choice(fitting[-4:])) if fitting else None

    def shape(self, name: str) -> list[int]:
        return self.values[name][1][0]


def draw(seed: int) -> Drawn | None:
    """Return a step, or None where what was drawn is not accepted."""
    chance = np.random.Generator(np.random.PCG64(seed))
    graph = _Graph(chance)
    batch = int(2 ** chance.uniform(0, 6))
    values = 2 ** chance.uniform(6, 23)
    shape = _shape(chance, max(1, int(values / batch)))
    weight = tuple(_shape(chance, int(2 ** chance.uniform(1, 16))))
    graph.values["input"] = TensorProto.FLOAT, [[count, *shape] for count in BATCHES]
    graph.values["w"] = TensorProto.FLOAT, [list(weight)] * 2
    wanted = int(chance.integers(1, MOST_NODES + 1))
    for _ in range(6 * wanted):
        if len(graph.nodes) >= wanted:
            break
        _OPERATORS[int(chance.integers(len(_OPERATORS)))](graph)
    operators = tuple(sorted({node.op_type for node in graph.nodes}))
    ends = [name for name in graph.values if name not in graph.last_read]
    loss = None
    for name in ends:
        kind, _ = graph.values[name]
        cast = name if kind == TensorProto.FLOAT else graph.add("Cast", [name], to=TensorProto.FLOAT)[0]  # type: ignore[index]
        mean = graph.add("ReduceMean", [cast], keepdims=0)
        if mean is None:
            return None
        loss = mean[0] if loss is None else graph.add("Add", [loss, mean[0]])[0]  # type: ignore[index]
    graph.nodes[-1].output[0] = "loss"
    graphs, manifest = assemble(graph.nodes, graph.constants, tuple(shape), weight)
    try:
        needs, _ = check_graphs(graphs, manifest)
    except GraphError:
        return None
    scale = float(chance.choice([1.0, 1.0, 1.0, 1e38, 1e-39, 0.0]))
    with np.errstate(all="ignore"):
        inputs = (scale * chance.standard_normal((batch, *shape))).astype(np.float32)
    return Drawn(graphs, manifest, needs, inputs, np.zeros(batch, np.int64), operators)


def step_of(nodes: Sequence[NodeProto], shape: tuple[int, ...], **constants: Any) -> tuple[Graphs, Manifest]:
    """Return a step, and its manifest, whose loss is the mean of what the last of these nodes makes of ``input``."""
    last = nodes[-1].output[0]
    ends = [
        helper.make_node("Cast", [last], ["as_float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["as_float"], ["loss"], keepdims=0),
    ]
    arrays = {name: np.asarray(values) for name, values in constants.items()}
    return assemble([*nodes, *ends], arrays, shape, (1,))


def assemble(
    nodes: Sequence[NodeProto], constants: Mapping[str, Any], shape: tuple[int, ...], weight: tuple[int, ...]
) -> tuple[Graphs, Manifest]:
    """Return graphs, and their manifest, of nodes that make ``loss`` of ``input``, of this shape, and the weight
    ``w``."""
    simple = [("output", "input"), ("error", "input"), ("grad:w", "w")]
    nodes = [*nodes, *(helper.make_node("Neg", [source], [output]) for output, source in simple)]
    batches = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", *shape])]
    batches += [helper.make_tensor_value_info("target", TensorProto.INT64, ["N"])]
    read = [*batches, helper.make_tensor_value_info("w", TensorProto.FLOAT, weight)]
    answers = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])]
    answers += [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", *shape])]
    made = [*answers, helper.make_tensor_value_info("error", TensorProto.FLOAT, ["N", *shape])]
    made += [helper.make_tensor_value_info("grad:w", TensorProto.FLOAT, weight)]
    values = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    plain = [helper.make_node("Neg", ["input"], ["output"])]
    plain += [helper.make_node("ReduceMean", ["input"], ["loss"], keepdims=0)]
    return Graphs(_model(nodes, read, made, values), _model(plain, batches, answers, [])), _manifest(shape, weight)


def _model(nodes: Any, inputs: Any, outputs: Any, constants: Any) -> bytes:
    graph = helper.make_graph(nodes, "drawn", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    return bytes(model.SerializeToString())


def _manifest(shape: tuple[int, ...], weight: tuple[int, ...]) -> Manifest:
    return Manifest.model_validate(
        {
            "task": "drawn",
            "input_shape": shape,
            "output_shape": shape,
            "tensors": [{"name": "w", "shape": weight, "trainable": True, "init": {"kind": "constant", "value": 0.5}}],
        }
    )


def _shape(chance: np.random.Generator, values: int) -> list[int]:
    """Return up to five lengths whose product is about ``values``."""
    axes = int(chance.integers(1, 6))
    parts = chance.dirichlet(np.full(axes, 0.7))
    return [max(1, int(values**part)) for part in parts]


def _unary(graph: _Graph) -> None:
    name = graph.pick()
    if name:
        op = str(graph.chance.choice(sorted(UNARY)))
        axis = (
            {"axis": int(graph.chance.integers(len(graph.shape(name)) or 1))} if op in ("Softmax", "LogSoftmax") else {}
        )
        graph.add(op, [name], **axis)


def _binary(graph: _Graph) -> None:
    first = graph.pick((*NUMBERS[:1], *NUMBERS[:1], *NUMBERS))
    if first is None:
        return
    kind, op = graph.values[first][0], str(graph.chance.choice(sorted(BINARY)))
    fitting = [name for name, (other, _) in graph.values.items() if other == kind]
    second = str(graph.chance.choice(fitting))
    if graph.chance.random() < 0.5 and len(graph.shape(first)) > 0:
        # Broadcast in short runs.
        lengths = [size if graph.chance.random() < 0.5 else 1 for size in graph.shape(first)]
        lengths = [1 if axis == 0 else size for axis, size in enumerate(lengths)]
        if math.prod(lengths) <= 2**17:
            array = graph.chance.integers(1, 9, lengths)
            second = graph.constant(array, helper.tensor_dtype_to_np_dtype(kind))
    floats = kind in (TensorProto.FLOAT, TensorProto.DOUBLE)
    graph.add(op, [first, second], **({"fmod": 1} if op == "Mod" and floats else {}))


def _where(graph: _Graph) -> None:
    first = graph.pick()
    second = graph.pick()
    if first and second:
        over = graph.add("Greater", [first, second])
        if over:
            graph.add("Where", [over[0], first, second])


def _cast(graph: _Graph) -> None:
    name = graph.pick(NUMBERS)
    if name:
        graph.add("Cast", [name], to=int(graph.chance.choice(NUMBERS)))


def _reduce(graph: _Graph) -> None:
    name = graph.pick((*NUMBERS[:1], *NUMBERS), range(1, 9))
    if name is None:
        return
    rank = len(graph.shape(name))
    axes = sorted(graph.chance.choice(rank, int(graph.chance.integers(1, rank + 1)), replace=False).tolist())
    keep = int(graph.chance.integers(2))
    if graph.chance.random() < 0.2:
        op = str(graph.chance.choice(["ArgMax", "ArgMin"]))
        graph.add(op, [name], axis=axes[0], keepdims=keep)
    else:
        op = str(graph.chance.choice(["ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"]))
        graph.add(op, [name, graph.constant(axes)], keepdims=keep)


def _matmul(graph: _Graph) -> None:
    first = graph.pick(tuple(graph.chance.permutation(NUMBERS)[:3].tolist()), range(2, 7))
    if first is None:
        return
    kind, shape = graph.values[first][0], graph.shape(first)
    columns = int(2 ** graph.chance.uniform(0, 8))
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    if graph.chance.random() < 0.3:
        turned = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        second = graph.add("Transpose", [first], perm=turned)
        if second:
            graph.add("MatMul", [first, second[0]])
        return
    batch = shape[:-2] if graph.chance.random() < 0.3 and len(shape) > 2 else []
    batch = [1 if axis == 0 else size for axis, size in enumerate(batch)]
    lengths = [*batch, shape[-1], columns]
    if math.prod(lengths) * np.dtype(dtype).itemsize <= 2**19:
        second_constant = graph.constant(graph.chance.integers(-3, 4, lengths), dtype)
        if len(shape) == 2 and kind == TensorProto.FLOAT and graph.chance.random() < 0.5:
            graph.add("Gemm", [first, second_constant])
        else:
            graph.add("MatMul", [first, second_constant])


def _window(graph: _Graph, shape: list[int]) -> dict[str, list[int]]:
    chance, axes = graph.chance, len(shape) - 2
    kernel = [max(1, int(size ** chance.uniform(0, 1))) for size in shape[2:]]
    dilations = [int(chance.integers(1, 3)) if size > 1 else 1 for size in kernel]
    pads = [int(chance.integers(0, size)) if chance.random() < 0.4 else 0 for size in kernel]
    strides = [int(chance.integers(1, 3)) for _ in range(axes)]
    return {"kernel_shape": kernel, "dilations": dilations, "pads": [*pads, *pads], "strides": strides}


def _pool(graph: _Graph) -> None:
    name = graph.pick(ranks=range(3, 6))
    if name:
        op, window = str(graph.chance.choice(["MaxPool", "AveragePool"])), _window(graph, graph.shape(name))
        if window["strides"] and graph.chance.random() < 0.5:
            window["dilations"] = [1] * len(window["dilations"])
        graph.add(op, [name], 2 if op == "MaxPool" and graph.chance.random() < 0.3 else 1, **window)


def _conv(graph: _Graph) -> None:
    name = graph.pick(ranks=range(3, 6))
    if name is None:
        return
    chance, shape = graph.chance, graph.shape(name)
    window = _window(graph, shape)
    groups = shape[1] if chance.random() < 0.3 else 1
    rows = groups if chance.random() < 0.5 else groups * int(2 ** chance.uniform(0, 6))
    transposed = chance.random() < 0.4
    front = [shape[1], rows // groups] if transposed else [rows, shape[1] // groups]
    lengths = [*front, *window["kernel_shape"]]
    if 4 * math.prod(lengths) <= 2**19:
        kernel = graph.constant(chance.standard_normal(lengths), np.float32)
        graph.add("ConvTranspose" if transposed else "Conv", [name, kernel], group=groups, **window)


def _transpose(graph: _Graph) -> None:
    name = graph.pick(NUMBERS, range(2, 9))
    if name:
        graph.add("Transpose", [name], perm=graph.chance.permutation(len(graph.shape(name))).tolist())


def _reshape(graph: _Graph) -> None:
    name = graph.pick(NUMBERS, range(1, 9))
    if name is None:
        return
    shape = graph.values[name][1]
    if [less * BATCHES[1] == more * BATCHES[0] for less, more in zip(*shape, strict=True)][:1] == [True]:
        rest = math.prod(shape[0][1:])
        lengths = []
        while rest > 1 and len(lengths) < 5:
            divisors = [number for number in (2, 3, 5, 7, 16, 32) if rest % number == 0]
            if not divisors:
                break
            part = int(graph.chance.choice(divisors))
            lengths.append(part)
            rest //= part
        graph.add("Reshape", [name, graph.constant([-1, *lengths, rest])])


def _gather(graph: _Graph) -> None:
    name = graph.pick(NUMBERS, range(1, 6))
    if name is None:
        return
    chance, shape = graph.chance, graph.shape(name)
    axis = int(chance.integers(len(shape)))
    count = int(2 ** chance.uniform(0, 16))
    indices = chance.integers(0, shape[axis], count)
    if axis:
        graph.add("Gather", [name, graph.constant(indices)], axis=axis)


def _gather_elements(graph: _Graph) -> None:
    name = graph.pick((TensorProto.FLOAT,), range(2, 6))
    if name is None:
        return
    shape, chance = graph.shape(name), graph.chance
    axis = int(chance.integers(1, len(shape)))
    place = graph.add("ArgMax", [name], axis=axis, keepdims=1)
    if place is None:
        return
    if chance.random() < 0.5:
        graph.add("GatherElements", [name, place[0]], axis=axis)
    else:
        picked = graph.add("GatherElements", [name, place[0]], axis=axis)
        if picked:
            reduction = str(chance.choice(["none", "add", "mul"]))
            graph.add("ScatterElements", [name, place[0], picked[0]], axis=axis, reduction=reduction)


def _gather_nd(graph: _Graph) -> None:
    chance = graph.chance
    count, depth = int(2 ** chance.uniform(0, 15)), int(chance.integers(1, 4))
    lengths = [int(2 ** chance.uniform(0, 7)) for _ in range(depth)]
    if 4 * math.prod(lengths) > 2**19:
        return
    table = graph.constant(chance.standard_normal(lengths), np.float32)
    indices = np.stack([chance.integers(0, size, count) for size in lengths], axis=1)
    index = graph.constant(indices)
    scalar = graph.add("ReduceSum", ["w"], keepdims=0)
    if scalar is None:
        return
    moved = graph.add("Add", [table, scalar[0]])
    if moved is None:
        return
    picked = graph.add("GatherND", [moved[0], index])
    if picked and chance.random() < 0.5:
        reduction = str(chance.choice(["none", "add", "mul"]))
        graph.add("ScatterND", [moved[0], index, picked[0]], reduction=reduction)


def _one_hot(graph: _Graph) -> None:
    name = graph.pick((TensorProto.INT64, TensorProto.INT32), range(1, 5))
    if name is None:
        return
    depth = int(2 ** graph.chance.uniform(0, 10))
    values = graph.constant([0, 1], np.float32)
    graph.add("OneHot", [name, graph.constant(depth), values], axis=-1 if graph.chance.random() < 0.5 else 1)


def _cumsum(graph: _Graph) -> None:
    name = graph.pick((TensorProto.FLOAT, TensorProto.INT64), range(2, 7))
    if name:
        axis = int(graph.chance.integers(1, len(graph.shape(name))))
        graph.add("CumSum", [name, graph.constant(axis)], reverse=int(graph.chance.integers(2)))


def _pad(graph: _Graph) -> None:
    name = graph.pick((TensorProto.FLOAT,), range(1, 7))
    if name is None:
        return
    chance, shape = graph.chance, graph.shape(name)
    mode = str(chance.choice(["constant", "reflect", "edge", "wrap"]))
    pads = [0, *(int(chance.integers(0, max(1, min(size, 9)))) if chance.random() < 0.5 else 0 for size in shape[1:])]
    graph.add("Pad", [name, graph.constant([*pads, *pads])], mode=mode)


def _slice(graph: _Graph) -> None:
    name = graph.pick(NUMBERS, range(2, 7))
    if name is None:
        return
    chance, shape = graph.chance, graph.shape(name)
    axis = int(chance.integers(1, len(shape)))
    step = int(chance.choice([-2, -1, 1, 2, 3]))
    begin, end = (0, shape[axis]) if step > 0 else (-1, -shape[axis] - 1)
    if chance.random() < 0.5 and step > 0:
        end = int(chance.integers(1, shape[axis] + 1))
    graph.add("Slice", [name, *(graph.constant([number]) for number in (begin, end, axis, step))])


def _repeat(graph: _Graph) -> None:
    name = graph.pick(NUMBERS, range(1, 7))
    if name is None:
        return
    chance, shape = graph.chance, graph.shape(name)
    times = [1 if axis == 0 or chance.random() < 0.6 else int(2 ** chance.uniform(0, 5)) for axis in range(len(shape))]
    if chance.random() < 0.5:
        graph.add("Tile", [name, graph.constant(times)])
        return
    place = int(chance.integers(1, len(shape) + 1))
    wider = graph.add("Unsqueeze", [name, graph.constant([place])])
    if wider:
        lengths = [1] * (len(shape) + 1)
        lengths[place] = int(2 ** chance.uniform(0, 8))
        graph.add("Expand", [wider[0], graph.constant(lengths)])


def _join(graph: _Graph) -> None:
    name = graph.pick(NUMBERS, range(2, 7))
    if name is None:
        return
    chance, shape = graph.chance, graph.shape(name)
    axis = int(chance.integers(1, len(shape)))
    if chance.random() < 0.5:
        graph.add("Concat", [name] * int(chance.integers(2, 5)), axis=axis)
    elif 1 < shape[axis] <= 64:
        graph.add("Split", [name], shape[axis], axis=axis, num_outputs=shape[axis])


def _normal(graph: _Graph) -> None:
    name = graph.pick((TensorProto.FLOAT,), range(2, 6))
    if name and graph.shape(name)[1] < 2**16:
        channels = graph.shape(name)[1]
        parts = [graph.constant(np.ones(channels), np.float32) for _ in range(4)]
        graph.add("BatchNormalization", [name, *parts])


def _unpool(graph: _Graph) -> None:
    name = graph.pick((TensorProto.FLOAT,), range(4, 5))
    if name is None or graph.shape(name)[0] != BATCHES[0] or min(graph.shape(name)[2:]) < 2:
        return
    made = graph.add("MaxPool", [name], 2, kernel_shape=[2, 2], strides=[2, 2])
    if made:
        size = graph.add("Shape", [name])
        if size:
            graph.add("MaxUnpool", [made[0], made[1], size[0]], kernel_shape=[2, 2], strides=[2, 2])


_OPERATORS: list[Callable[[_Graph], None]] = [
    _unary,
    _unary,
    _binary,
    _binary,
    _where,
    _cast,
    _reduce,
    _reduce,
    _matmul,
    _matmul,
    _pool,
    _pool,
    _conv,
    _conv,
    _transpose,
    _transpose,
    _reshape,
    _reshape,
    _gather,
    _gather_elements,
    _gather_nd,
    _one_hot,
    _cumsum,
    _pad,
    _slice,
    _repeat,
    _join,
    _normal,
    _unpool,
]
