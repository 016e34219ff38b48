"""Functions to rewrite ONNX graphs.

Functions named ``..._in_place`` change their argument; others do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx.checker
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto

from ..protocol.manifest import Array
from .errors import ExportError

BATCHES = (10007, 10009)
"""Trial sizes of free input axes: primes, so that they differ from products of a network's sizes."""

SMALL = 65536
"""Largest excess of a folded constant over its inputs, in bytes, because folding should shrink the file."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a value's axes with free input axes of ``BATCHES[0]``; ``fixed`` marks axes that never vary.

    ``type`` is ONNX's number for the type of its elements.
    """

    sizes: tuple[int, ...]
    fixed: tuple[bool, ...]
    type: int


def constants(graph: GraphProto) -> dict[str, Array]:
    """Return name -> array of every initialiser that a caller cannot replace."""
    given = {value.name for value in graph.input}
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name not in given}


def set_constant_in_place(graph: GraphProto, name: str, array: Array) -> None:
    """Write the initialiser ``name``, existing or new."""
    tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
    for known in graph.initializer:
        if known.name == name:
            known.CopyFrom(tensor)
            return
    graph.initializer.append(tensor)


INVALID = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError)
"""Errors of ONNX's own checks."""


def check_valid(
    model: ModelProto, what: str, advice: str = "", *, error: type[ExportError] = ExportError, full: bool = False
) -> None:
    """Raise ``error`` if ONNX's own check refuses a model; full: infer all shapes too."""
    try:
        onnx.checker.check_model(model, full_check=full)
    except INVALID as fault:
        raise error(f"{what}: {str(fault)[:300]}{'; ' if advice else ''}{advice}") from None


def attributes(node: NodeProto) -> dict[str, Any]:
    """Return name -> value of a node's attributes."""
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """Return an attribute's value, or ``default`` if missing."""
    return attributes(node).get(name, default)


def set_attribute_in_place(node: NodeProto, name: str, value: Any) -> None:
    """Write an attribute; None removes it."""
    kept = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(onnx.helper.make_attribute(name, value))


def again(node: NodeProto, inputs: Iterable[str], outputs: Iterable[str]) -> NodeProto:
    """Return a copy of a node, without its name, with other inputs and outputs."""
    copy = deepcopy(node)
    copy.ClearField("name")
    copy.input[:] = inputs
    copy.output[:] = outputs
    return copy


def set_nodes_in_place(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Replace a graph's nodes."""
    kept = [deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def is_standard(node: NodeProto) -> bool:
    """Return whether the operator is one of ONNX's own."""
    return node.domain in ("", "ai.onnx")


def opset(model: ModelProto) -> int:
    """Return the version of the standard operators in the model."""
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if len(versions) != 1:
        raise ExportError(f"the model names the operator versions {versions}; export it with one opset")
    return int(versions[0])


def reads(node: NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, including those captured by graphs within it."""
    yield from filter(None, node.input)
    for each in node.attribute:
        for inner in [each.g] if each.type == AttributeProto.GRAPH else each.graphs:
            for node_inside in inner.node:
                yield from reads(node_inside)
            yield from (value.name for value in inner.output)


def read_counts(graph: GraphProto) -> Counter[str]:
    """Return how many times each value is read; an output of the graph counts as a read."""
    return Counter([*(name for node in graph.node for name in reads(node)), *(value.name for value in graph.output)])


def fresh_name(graph: GraphProto, wish: str) -> str:
    """Return ``wish``, or the first unused name of ``wish_2``, ``wish_3``, ..."""
    taken = {tensor.name for tensor in graph.initializer} | {value.name for value in (*graph.input, *graph.output)}
    taken |= {name for node in graph.node for name in (*reads(node), *node.output)}
    name = wish
    number = 1
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name


def activate_before_pooling_in_place(graph: GraphProto) -> None:
    """Move a ReLU after convolution and max-pooling to before the pooling."""
    counts = read_counts(graph)
    made_by = {name: node.op_type for node in graph.node if is_standard(node) for name in node.output}
    read_by = {name: node for node in graph.node if is_standard(node) for name in node.input}
    for pool in graph.node:
        if pool.op_type != "MaxPool" or not is_standard(pool) or len(pool.output) > 1:
            continue
        data = pool.input[0]
        pooled = pool.output[0]
        relu = read_by.get(pooled)
        if relu is None or relu.op_type != "Relu" or counts[data] > 1 or counts[pooled] > 1:
            continue
        if made_by.get(data) in ("Conv", "BatchNormalization"):
            relu.attribute.extend(pool.attribute)
            del pool.attribute[:]
            pool.op_type, relu.op_type = relu.op_type, pool.op_type
            pool.name, relu.name = relu.name, pool.name


def drop_unused_in_place(graph: GraphProto) -> None:
    """Remove nodes and initialisers that no output needs; defaults of inputs stay."""
    used = {value.name for value in (*graph.output, *graph.input)}
    kept = []
    for node in reversed(graph.node):
        if used.intersection(node.output):
            kept.append(node)
            used.update(reads(node))
    if len(kept) < len(graph.node):
        set_nodes_in_place(graph, reversed(kept))
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in used:
            del graph.initializer[index]


def evaluate(node: NodeProto, inputs: Sequence[Array | None], version: int) -> list[Array]:
    """Return the node's outputs by ONNX's reference implementation in numpy; None means a missing input."""
    # The import takes long.
    from onnx.reference import ReferenceEvaluator

    feed = {name: given for name, given in zip(node.input, inputs, strict=True) if given is not None}
    graph = GraphProto(
        node=[node],
        input=[ValueInfoProto(name=name) for name in feed],
        output=[ValueInfoProto(name=name) for name in node.output],
    )
    # Callers check whether the result is finite.
    with np.errstate(all="ignore"):
        return [np.asarray(each) for each in ReferenceEvaluator(graph, opsets={"": version}).run(None, feed)]


def shapes(model: ModelProto) -> dict[str, Shape]:
    """Return name -> shape of every value of known rank, including initialisers."""
    first, second = (_inferred(model, batch) for batch in BATCHES)
    found = {
        name: Shape(sizes, tuple(a == b for a, b in zip(sizes, second[name][0], strict=True)), kind)
        for name, (sizes, kind) in first.items()
        if name in second and len(second[name][0]) == len(sizes)
    }
    for tensor in model.graph.initializer:
        found[tensor.name] = Shape(tuple(tensor.dims), (True,) * len(tensor.dims), tensor.data_type)
    return found


_Sizes = dict[str, tuple[tuple[int, ...], int]]


def _inferred(model: ModelProto, batch: int) -> _Sizes:
    """Return the sizes that ONNX's shape inference finds."""
    given = deepcopy(model)
    version = opset(model)
    graph = given.graph
    # Recorded shapes may be outdated since channels were removed.
    graph.ClearField("value_info")
    for value in graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.WhichOneof("value") != "dim_value":
                dim.dim_value = batch
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    # Weights would only be copied back and forth.
    for index in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[index]
        if np.prod(tensor.dims) > 4096:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
            del graph.initializer[index]
    for node in graph.node:
        # onnx 1.23 does not infer its shape.
        if node.op_type == "GroupNormalization" and is_standard(node):
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    while True:
        sizes = _sizes(onnx.shape_inference.infer_shapes(given, data_prop=True).graph)
        known = constants(graph)
        for node in graph.node:
            if node.op_type == "Shape" and is_standard(node) and node.input[0] in sizes:
                part = slice(attribute(node, "start", 0), attribute(node, "end", None))
                known[node.output[0]] = np.array(sizes[node.input[0]][0][part], dtype=np.int64)
                set_constant_in_place(graph, node.output[0], known[node.output[0]])
                node.op_type = _FOLDED
        if not _fold_nodes_in_place(graph, version, known):
            return sizes


def _sizes(graph: GraphProto) -> _Sizes:
    sizes: _Sizes = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(dim.WhichOneof("value") == "dim_value" for dim in dims):
            sizes[value.name] = tuple(int(dim.dim_value) for dim in dims), value.type.tensor_type.elem_type
    return sizes


_FOLDED = "folded"
_NOT_FOLDED = {_FOLDED, "QuantizeLinear", "DequantizeLinear"}
_NOT_FOLDED |= {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}


def fold_constants_in_place(model: ModelProto) -> None:
    """Replace constant computations by initialisers, and targets of reshapes by constants if possible.

    Nodes whose results are larger than their inputs stay, to keep the file small. Unused nodes are removed.
    """
    graph = model.graph
    version = opset(model)
    _fix_shapes_and_types_in_place(model)
    drop_unused_in_place(graph)
    _fold_nodes_in_place(graph, version, constants(graph))
    _drop_zero_biases_in_place(graph)
    drop_unused_in_place(graph)


def _fold_nodes_in_place(graph: GraphProto, version: int, known: dict[str, Array]) -> bool:
    """Replace nodes that read only ``known`` values by initialisers; return True if any was replaced."""
    for node in graph.node:
        foldable = is_standard(node) and node.op_type not in _NOT_FOLDED
        if not foldable or not all(name in known for name in reads(node)):
            continue
        inputs = [known[name] if name else None for name in node.input]
        try:
            outputs = evaluate(node, inputs, version)
        # Any type: ONNX Runtime may support operators that the reference lacks or gets wrong.
        except Exception:
            continue
        bound = max(SMALL, sum(each.nbytes for each in inputs if each is not None))
        if node.op_type != "Constant" and sum(each.nbytes for each in outputs) > bound:
            continue
        for name, array in zip(node.output, outputs, strict=True):
            if name:
                known[name] = array
                set_constant_in_place(graph, name, array)
        node.op_type = _FOLDED
    remaining = [node for node in graph.node if node.op_type != _FOLDED]
    if len(remaining) == len(graph.node):
        return False
    set_nodes_in_place(graph, remaining)
    return True


def _drop_zero_biases_in_place(graph: GraphProto) -> None:
    """Remove zero biases, which exporters write for layers without a bias."""
    known = constants(graph)
    for node in graph.node:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm") and is_standard(node) and len(node.input) == 3:
            bias = known.get(node.input[2])
            if bias is not None and not bias.any():
                del node.input[2]


def _fix_shapes_and_types_in_place(model: ModelProto) -> None:
    found = shapes(model)
    known = constants(model.graph)
    for node in model.graph.node:
        if node.op_type == "CastLike" and is_standard(node) and node.input[1] in found:
            node.op_type = "Cast"
            kind = found[node.input[1]].type
            del node.input[1:], node.attribute[:]
            set_attribute_in_place(node, "to", kind)
        if node.op_type != "Reshape" or not is_standard(node):
            continue
        target = reshape_target(found.get(node.input[0]), found.get(node.output[0]))
        if target is not None and not (
            node.input[1] in known
            and np.array_equal(known[node.input[1]], target)
            and not attribute(node, "allowzero", 0)
        ):
            set_target_in_place(model.graph, node, target)


def set_target_in_place(graph: GraphProto, node: NodeProto, target: NDArray[np.int64]) -> None:
    """Give a Reshape its own constant shape."""
    if node.input[1] not in constants(graph) or read_counts(graph)[node.input[1]] > 1:
        node.input[1] = fresh_name(graph, f"{node.output[0]}.shape")
    set_attribute_in_place(node, "allowzero", None)
    set_constant_in_place(graph, node.input[1], target)


def reshape_target(before: Shape | None, after: Shape | None) -> NDArray[np.int64] | None:
    """Return the target of a Reshape, with 0 to copy an axis and -1 for the rest; None if there is no such target."""
    if before is None or after is None or 0 in after.sizes or 0 in before.sizes:
        return None
    target = []
    free = 0
    for axis, (size, fixed) in enumerate(zip(after.sizes, after.fixed, strict=True)):
        if fixed:
            target.append(size)
        elif axis < len(before.sizes) and before.sizes[axis] == size and not before.fixed[axis]:
            target.append(0)
        else:
            target.append(-1)
            free += 1
    return np.array(target, dtype=np.int64) if free <= 1 else None
