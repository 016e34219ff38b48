"""Merge low-rank adapters into their layers (LoRA, Hu et al., arXiv:2106.09685, equation 3).

h = W x + s B A x becomes one product with W + s B A, for any number of adapters.
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
    """A linear map of the last axis of ``source``: matrix [in, out], bias [out], and the number of original weights."""

    source: str
    matrix: Matrix
    bias: Matrix
    values: int


@dataclass(frozen=True)
class _Graph:
    makers: Mapping[str, NodeProto]
    known: Mapping[str, NDArray[np.generic]]
    shapes: Mapping[str, Shape]

    def sizes(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value for one batch, None if unknown."""
        found = self.shapes.get(name)
        return None if found is None else found.sizes


def merge(model: ModelProto) -> ModelProto:
    """Merge sums of linear maps of the same input, unless this needs more weights. Return ``model`` itself if there are
    none.

    Equal up to float rounding.
    """
    result = deepcopy(model)
    graph = result.graph
    # its shapes may no longer hold
    del graph.value_info[:]
    fold_constants_in_place(result)
    known = constants(graph)
    sizes = shapes(result)
    merged = False
    for node in [node for node in graph.node if node.op_type == "Add"]:
        makers = {name: each for each in graph.node for name in each.output}
        found = _sum(node, _Graph(makers, known, sizes))
        if found is None:
            continue
        merged = True
        name = node.output[0]
        place = list(graph.node).index(node)
        weight = fresh_name(graph, f"{name}.weight")
        bias = fresh_name(graph, f"{name}.bias")
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
    """Return a sum as a single linear map; None if it has several inputs or needs more weights."""
    # a bias
    if any(name in graph.known for name in node.input):
        return None
    one, other = (_chain(name, graph) for name in node.input)
    for left in one:
        for right in other:
            if left.source == right.source and left.matrix.shape == right.matrix.shape:
                given = graph.sizes(left.source)
                made = graph.sizes(node.output[0])
                if given is None or made is None or given[:-1] != made[:-1]:
                    continue
                total = left.matrix + right.matrix
                if total.size <= left.values + right.values:
                    return _Linear(left.source, total, left.bias + right.bias, total.size)
    return None


def _chain(name: str, graph: _Graph) -> list[_Linear]:
    """Express a value as linear maps of its predecessors, nearest first."""
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
    if node.op_type == "Reshape":
        given = graph.sizes(node.input[0])
        made = graph.sizes(node.output[0])
        return bool(given and made and given[-1] == made[-1])
    return node.op_type == "Identity"


def _source(name: str, graph: _Graph) -> str:
    """Return the input of a chain of nodes that keep the last axis."""
    node = graph.makers.get(name)
    while node is not None and node.input and _keeps_last_axis(node, graph):
        name = node.input[0]
        node = graph.makers.get(name)
    return name


def _through(node: NodeProto, inputs: Sequence[NDArray[np.generic] | None], graph: _Graph) -> list[_Linear]:
    """Return the chain of a product with a constant matrix. inputs: the node's constants, None for others."""
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
    """Return a linear map plus or times a constant; None unless the constant is scalar or has one value per output."""
    if by.size not in (1, found.matrix.shape[1]) or (by.size > 1 and by.shape[-1] != by.size):
        return None
    by = np.broadcast_to(by.reshape(-1), (found.matrix.shape[1],))
    if operator == "Add":
        return _Linear(found.source, found.matrix, found.bias + by, found.values)
    return _Linear(found.source, found.matrix * by, found.bias * by, found.values)


def _is_matrix(value: NDArray[np.generic] | None) -> bool:
    return value is not None and value.ndim == 2 and value.dtype == np.float32
