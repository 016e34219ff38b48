"""Passes over a step's graph: what autograd and the exporter write at length, in fewer and faster operators.

Every pass leaves what the graph computes as it is. Products of two matrices take a transposed one as it lies, what is
transposed twice is not transposed, and what nothing reads is gone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

TURNED = [1, 0]


def simplify_in_place(proto: onnx.ModelProto) -> None:
    """Shorten the graph of a model."""
    graph = proto.graph
    _undo_double_transposes(graph)
    _multiply_transposed(graph)
    _share_constants(graph)
    _remove_unread(graph)


def _attribute(node: onnx.NodeProto, name: str) -> list[int]:
    return next((list(each.ints) for each in node.attribute if each.name == name), [])


def _made_by(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {output: node for node in graph.node for output in node.output}


def _undo_double_transposes(graph: onnx.GraphProto) -> None:
    made = _made_by(graph)
    for node in graph.node:
        before = made.get(node.input[0]) if node.op_type == "Transpose" else None
        if before is None or before.op_type != "Transpose":
            continue
        first, second = _attribute(before, "perm"), _attribute(node, "perm")
        if [first[axis] for axis in second] == sorted(first):
            _read_instead(graph, node.output[0], before.input[0])


def _multiply_transposed(graph: onnx.GraphProto) -> None:
    """Let ``Gemm`` transpose what ``Transpose`` does for a product of two matrices."""
    from onnx import helper

    made = _made_by(graph)

    def source(name: str) -> str | None:
        node = made.get(name)
        turned = node is not None and node.op_type == "Transpose" and _attribute(node, "perm") == TURNED
        return node.input[0] if turned and node is not None else None

    matrices = {name for node in graph.node for name in _matrices(node)}
    for place, node in enumerate(graph.node):
        if node.op_type not in ("MatMul", "Gemm") or len(node.input) < 2:
            continue
        both = [source(name) for name in node.input[:2]]
        known = any(name in matrices or given for name, given in zip(node.input[:2], both, strict=True))
        if not any(both) or not known:
            continue
        flags = {each.name: each.i for each in node.attribute if each.name in ("transA", "transB")}
        scales = {each.name: each.f for each in node.attribute if each.name in ("alpha", "beta")}
        inputs = [given or name for name, given in zip(node.input[:2], both, strict=True)]
        turns = [flags.get(name, 0) ^ bool(given) for name, given in zip(("transA", "transB"), both, strict=True)]
        made_now = helper.make_node(
            "Gemm", [*inputs, *node.input[2:]], list(node.output), transA=turns[0], transB=turns[1], **scales
        )
        graph.node[place].CopyFrom(made_now)


def _matrices(node: onnx.NodeProto) -> list[str]:
    """Return the values that a node tells to have two axes."""
    if node.op_type == "Transpose" and _attribute(node, "perm") == TURNED:
        return [node.input[0], node.output[0]]
    return [*node.input[:2], node.output[0]] if node.op_type == "Gemm" else []


def _share_constants(graph: onnx.GraphProto) -> None:
    """Keep one of constants that are equal."""
    first: dict[bytes, str] = {}
    for tensor in list(graph.initializer):
        key = tensor.dims.__str__().encode() + bytes([tensor.data_type]) + tensor.raw_data
        if tensor.raw_data and (known := first.setdefault(key, tensor.name)) != tensor.name:
            _read_instead(graph, tensor.name, known)


def _read_instead(graph: onnx.GraphProto, name: str, other: str) -> None:
    if any(output.name == name for output in graph.output):
        return
    for node in graph.node:
        node.input[:] = [other if read == name else read for read in node.input]


def _remove_unread(graph: onnx.GraphProto) -> None:
    while True:
        read = Counter(name for node in graph.node for name in node.input)
        read.update(output.name for output in graph.output)
        kept = [node for node in graph.node if any(read[output] for output in node.output)]
        if len(kept) == len(graph.node):
            break
        del graph.node[:]
        graph.node.extend(kept)
    initializers = [tensor for tensor in graph.initializer if read[tensor.name]]
    del graph.initializer[:]
    graph.initializer.extend(initializers)
