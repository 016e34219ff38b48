"""Channels between convolutions in whole blocks of eight, which is how ONNX Runtime's fast convolutions hold them.

Its processor kernels keep channels in blocks (NCHWc), of eight floats with AVX2. A convolution whose input channels do
not fill blocks runs on the plain layout instead, with a change of layout before it. What a method leaves of a layer is
any number, so a few channels of zeros make the network faster: at 0.3 of ``mnist:leaf`` (9 channels, then 19) by a
seventh, for 2 % of the file. Fewer than eight channels are read by a kernel of their own and stay.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto

from sparrow.graphs import graph as plumbing
from sparrow.protocol.manifest import Array

BLOCK = 8

_CHANNELWISE = {"Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "Identity", "MaxPool", "AveragePool"}
"""What works on each channel by itself, and makes of zeros something finite; those with one input that is not a
constant."""


def align(model: ModelProto) -> ModelProto:
    """Return the same function with channels of zeros where what one convolution makes for another does not fill
    blocks.

    model: as ``compact`` makes it; it is not changed. Exact: the new channels are multiplied by zeros.
    """
    result = deepcopy(model)
    graph = result.graph
    known, reads = plumbing.constants(graph), plumbing.read_counts(graph)
    readers = {name: node for node in graph.node for name in node.input}
    for first in graph.node:
        if not _is_convolution(first, known, reads):
            continue
        missing = -known[first.input[1]].shape[0] % BLOCK
        second = _convolution_behind(first, readers, known, reads)
        if missing and known[first.input[1]].shape[0] > BLOCK and second is not None:
            for name in first.input[1:]:
                _append_zeros_in_place(graph, known, name, 0, missing)
            _append_zeros_in_place(graph, known, second.input[1], 1, missing)
            result.graph.ClearField("value_info")
    return result


def _convolution_behind(
    node: NodeProto,
    readers: dict[str, NodeProto],
    known: dict[str, Array],
    reads: dict[str, int],
) -> NodeProto | None:
    """Return the convolution that alone reads what ``node`` makes, through layers that keep channels apart; None
    without."""
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
    """Return True for a convolution over all channels whose weights are constants of its own."""
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
