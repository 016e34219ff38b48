"""Pad channels between convolutions to multiples of eight, the block size of ONNX Runtime's fast kernels.

ONNX Runtime stores channels in blocks (NCHWc; eight floats with AVX2). Input channels that do not fill a block require
a layout conversion. For ``mnist:leaf`` at density 0.3 (9 and 19 channels), padding makes inference a seventh faster and
the file 2 % larger. Layers with fewer than eight channels use a special kernel and are not padded.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto

from sparrow.graphs import graph as plumbing
from sparrow.protocol.manifest import Array

BLOCK = 8

_CHANNELWISE = {"Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "Identity", "MaxPool", "AveragePool"}
"""Operators that treat channels separately, map zeros to finite values and have one variable input."""


def align(model: ModelProto) -> ModelProto:
    """Return a copy of a compacted model with channels between convolutions padded to full blocks.

    Outputs are identical, because the added channels are multiplied by zeros.
    """
    result = deepcopy(model)
    graph = result.graph
    known = plumbing.constants(graph)
    reads = plumbing.read_counts(graph)
    readers = {name: node for node in graph.node for name in node.input}
    for first in graph.node:
        if not _is_convolution(first, known, reads):
            continue
        missing = -known[first.input[1]].shape[0] % BLOCK
        second = _next_convolution(first, readers, known, reads)
        if missing and known[first.input[1]].shape[0] > BLOCK and second is not None:
            for name in first.input[1:]:
                _append_zeros_in_place(graph, known, name, 0, missing)
            _append_zeros_in_place(graph, known, second.input[1], 1, missing)
            result.graph.ClearField("value_info")
    return result


def _next_convolution(
    node: NodeProto,
    readers: dict[str, NodeProto],
    known: dict[str, Array],
    reads: dict[str, int],
) -> NodeProto | None:
    """Return the only reader of ``node``'s output, through channelwise layers, if it is a convolution, else None."""
    value = node.output[0]
    while reads[value] == 1 and value in readers:
        behind = readers[value]
        if behind.input[0] != value:
            return None
        if _is_convolution(behind, known, reads):
            return behind
        if behind.op_type not in _CHANNELWISE or not plumbing.is_standard(behind) or len(behind.output) > 1:
            return None
        value = behind.output[0]
    return None


def _is_convolution(node: NodeProto, known: dict[str, Array], reads: dict[str, int]) -> bool:
    return (
        node.op_type == "Conv"
        and plumbing.is_standard(node)
        and plumbing.attribute(node, "group", 1) == 1
        and all(name in known and reads[name] == 1 for name in node.input[1:])
    )


def _append_zeros_in_place(graph: GraphProto, known: dict[str, Array], name: str, axis: int, count: int) -> None:
    array = known[name]
    widths = [(0, count if each == axis else 0) for each in range(array.ndim)]
    known[name] = np.pad(array, widths)
    plumbing.set_constant_in_place(graph, name, known[name])
