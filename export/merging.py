"""Adapters merged into the layers beside which they lie: sums of matrix products of the same value become one product.

A low-rank adapter (LoRA, Hu et al., arXiv:2106.09685, equation 3: h = W x + s B A x) costs two products and a sum in
every layer, and several adapters, such as a shared and a private one, as many times that. W + s B A has the shape of W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import onnx.helper
import onnx.numpy_helper
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from sparrow.graphs.graph import (
    Shape,
    attributes,
    constants,
    drop_unused_in_place,
    fold_constants_in_place,
    fresh_name,
    shapes,
)

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class _Linear:
    """A value as ``matrix`` [in, out] and ``bias`` [out] make it of the last axis of the value ``source``; values:
    those of all matrices that it was made of."""

    source: str
    matrix: Matrix
    bias: Matrix
    values: int


@dataclass(frozen=True)
class _Graph:
    """The facts that linear maps are found by: which node makes a value, constants, and shapes."""

    makers: Mapping[str, NodeProto]
    known: Mapping[str, NDArray[np.generic]]
    shapes: Mapping[str, Shape]

    def sizes(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value for one batch; None where it is not known."""
        found = self.shapes.get(name)
        return None if found is None else found.sizes


def merge(model: ModelProto) -> ModelProto:
    """Return a model in which sums of linear maps of one value are one linear map, where that takes no more weights.

    Equal to float rounding. The model given is not changed.
    """
    result = deepcopy(model)
    graph = result.graph
    del graph.value_info[:]  # may say what is no longer so
    fold_constants_in_place(result)
    known, sizes = constants(graph), shapes(result)
    merged = False
    for node in [node for node in graph.node if node.op_type == "Add"]:
        makers = {name: each for each in graph.node for name in each.output}
        found = _sum(node, _Graph(makers, known, sizes))
        if found is None:
            continue
        merged = True
        name, place = node.output[0], list(graph.node).index(node)
        weight, bias = fresh_name(graph, f"{name}.weight"), fresh_name(graph, f"{name}.bias")
        new = {weight: found.matrix.astype(np.float32)}
        product = name
        if found.bias.any():
            new[bias] = found.bias.astype(np.float32)
            product = fresh_name(graph, f"{name}.product")
        made = [onnx.helper.make_node("MatMul", [found.source, weight], [product])]
        made += [onnx.helper.make_node("Add", [product, bias], [name])] if bias in new else []
        graph.node.remove(node)
        for each in reversed(made):
            graph.node.insert(place, each)
        graph.initializer.extend(onnx.numpy_helper.from_array(array, each) for each, array in new.items())
        known.update(new)
    if not merged:
        return model
    drop_unused_in_place(graph)
    return result


def _sum(node: NodeProto, graph: _Graph) -> _Linear | None:
    """Return the linear map that a sum is; None where it is none of one value, or where it would take more weights."""
    if any(name in graph.known for name in node.input):  # a bias
        return None
    one, other = (_chain(name, graph) for name in node.input)
    for left in one:
        for right in other:
            if left.source == right.source and left.matrix.shape == right.matrix.shape:
                given, made = graph.sizes(left.source), graph.sizes(node.output[0])
                if given is None or made is None or given[:-1] != made[:-1]:
                    continue
                total = left.matrix + right.matrix
                if total.size <= left.values + right.values:
                    return _Linear(left.source, total, left.bias + right.bias, total.size)
    return None


def _chain(name: str, graph: _Graph) -> list[_Linear]:
    """Return what a value is as a linear map of values before it: of the nearest first."""
    node = graph.makers.get(name)
    if node is None or not node.input:
        return []
    inputs = [graph.known.get(each) for each in node.input]
    if node.op_type in ("MatMul", "Gemm") and inputs[0] is None and _is_matrix(inputs[1]):
        return _through(node, inputs, graph)
    if node.op_type in ("Add", "Mul") and sum(each is None for each in inputs) == 1:
        place = 0 if inputs[0] is None else 1
        factor = np.asarray(inputs[1 - place], np.float64)
        moved = (_moved(found, node.op_type, factor) for found in _chain(node.input[place], graph))
        return [each for each in moved if each is not None]
    return _chain(node.input[0], graph) if _keeps_last_axis(node, graph) else []


def _keeps_last_axis(node: NodeProto, graph: _Graph) -> bool:
    """Return whether a node leaves rows as they are: it does nothing, or changes the axes before the last."""
    if node.op_type == "Reshape":
        given, made = graph.sizes(node.input[0]), graph.sizes(node.output[0])
        return bool(given and made and given[-1] == made[-1])
    return node.op_type == "Identity"


def _source(name: str, graph: _Graph) -> str:
    """Return the value before what leaves its rows as they are."""
    node = graph.makers.get(name)
    while node is not None and node.input and _keeps_last_axis(node, graph):
        name = node.input[0]
        node = graph.makers.get(name)
    return name


def _through(node: NodeProto, inputs: Sequence[NDArray[np.generic] | None], graph: _Graph) -> list[_Linear]:
    """Return the chain of a product with a constant matrix. inputs: the constants that the node reads."""
    given = attributes(node)
    scaled = given.get("alpha", 1.0) != 1 or given.get("beta", 1.0) != 1
    if given.get("transA") or scaled or any(each is None for each in inputs[2:]):
        return []
    matrix = np.asarray(inputs[1], np.float64)
    matrix = matrix.T if given.get("transB") else matrix
    bias = np.asarray(inputs[2] if len(inputs) > 2 else 0, np.float64)
    shift = np.broadcast_to(bias, (matrix.shape[1],))
    source = _source(node.input[0], graph)
    found = [_Linear(source, matrix, shift, matrix.size)]
    for before in _chain(source, graph):
        if before.matrix.shape[1] == matrix.shape[0]:
            values = before.values + matrix.size
            found.append(_Linear(before.source, before.matrix @ matrix, before.bias @ matrix + shift, values))
    return found


def _moved(found: _Linear, operator: str, by: Matrix) -> _Linear | None:
    """Return a linear map plus, or times, one number or one for each output; None for any other constant."""
    if by.size not in (1, found.matrix.shape[1]) or (by.size > 1 and by.shape[-1] != by.size):
        return None
    by = np.broadcast_to(by.reshape(-1), (found.matrix.shape[1],))
    if operator == "Add":
        return _Linear(found.source, found.matrix, found.bias + by, found.values)
    return _Linear(found.source, found.matrix * by, found.bias * by, found.values)


def _is_matrix(value: NDArray[np.generic] | None) -> bool:
    return value is not None and value.ndim == 2 and value.dtype == np.float32
