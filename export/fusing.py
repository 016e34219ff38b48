"""Fuse convolutions with batch norms and ReLUs before quantisation.

ONNX Runtime also fuses them, but not across the rounding nodes that quantisation inserts.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from sparrow.graphs.graph import (
    activate_before_pooling_in_place,
    attribute,
    constants,
    drop_unused_in_place,
    fold_constants_in_place,
    fresh_name,
    read_counts,
)
from sparrow.protocol.manifest import Array


def fuse(model: ModelProto) -> ModelProto:
    """Return a copy with batch norms folded into the convolutions before them and ReLUs moved before max pooling.

    Outputs are equal up to float rounding. Values with other readers, and weights that are also inputs, are not
    changed.
    """
    result = deepcopy(model)
    # its shapes may no longer hold
    del result.graph.value_info[:]
    fold_constants_in_place(result)
    _fold_norms_in_place(result.graph)
    activate_before_pooling_in_place(result.graph)
    return result


def _fold_norms_in_place(graph: GraphProto) -> None:
    # conv, then (y - mean) / sqrt(var + eps) * gain + shift, is a convolution with other weights and bias
    known: dict[str, NDArray[Any]] = {
        name: array for name, array in constants(graph).items() if array.dtype == np.float32
    }
    for conv, norm in list(_pairs(graph, "Conv", "BatchNormalization")):
        names = [*conv.input[1:], *norm.input[1:]]
        if len(norm.output) > 1 or any(name not in known for name in names):
            continue
        weight, *bias = (known[name].astype(np.float64) for name in conv.input[1:])
        gain, shift, mean, variance = (known[name] for name in norm.input[1:])
        scale = gain / np.sqrt(variance.astype(np.float64) + attribute(norm, "epsilon", 1e-5))
        new = {
            fresh_name(graph, f"{norm.output[0]}.weight"): weight * scale.reshape(-1, *[1] * (weight.ndim - 1)),
            fresh_name(graph, f"{norm.output[0]}.bias"): ((bias[0] if bias else 0) - mean) * scale + shift,
        }
        graph.initializer.extend(_float(name, array) for name, array in new.items())
        data = conv.input[0]
        out = norm.output[0]
        del conv.input[:], conv.output[:]
        conv.input.extend([data, *new])
        conv.output.append(out)
        graph.node.remove(norm)
    drop_unused_in_place(graph)


def _pairs(graph: GraphProto, first: str, second: str) -> Iterator[tuple[NodeProto, NodeProto]]:
    """Yield pairs of a ``first`` node and a ``second`` node that is the only reader of its output, as first input."""
    readers = read_counts(graph)
    made_by = {node.output[0]: node for node in graph.node if node.op_type == first}
    for node in graph.node:
        if node.op_type == second and node.input[0] in made_by and readers[node.input[0]] == 1:
            yield made_by[node.input[0]], node


def _float(name: str, array: Array) -> TensorProto:
    return onnx.numpy_helper.from_array(np.ascontiguousarray(array, dtype=np.float32), name)
