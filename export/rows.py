"""Scale blocks of weights for every sample: ``edge_sdk.training.per_sample`` in ONNX.

If all blocks are whole output rows, scaling row r of W by M'_r scales output r: layers run once on the batch and
``Rows`` scales their outputs. Otherwise ``by_sample`` scales the weights sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import onnx
import onnx.helper
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from sparrow.graphs.building import Building
from sparrow.graphs.graph import BATCHES, Shape, attributes
from sparrow.graphs.graph import shapes as shapes_of
from sparrow.graphs.skeleton import INPUT, OUTPUT
from sparrow.protocol.blocks import BlockTable
from sparrow.protocol.manifest import Manifest

_CHANNELS = ("Conv", "BatchNormalization", "GroupNormalization", "InstanceNormalization")
"""Operators whose inputs 1 and 2 are the weight and the bias of the outputs' axis 1."""


@dataclass(frozen=True)
class _Layer:
    """A node that is linear in the rows of its weight and adds its bias."""

    weight: str
    bias: str
    axis: int
    # Number of dimensions of its output.
    ranks: int


class Rows:
    """The layers of a graph whose outputs gates can scale."""

    def __init__(
        self, layers: Mapping[str, _Layer], rows: Mapping[str, NDArray[np.int64]], sizes: Mapping[str, int]
    ) -> None:
        self._layers = layers
        self._rows = rows
        self._sizes = sizes

    @classmethod
    def of(cls, model: ModelProto, table: BlockTable, manifest: Manifest) -> Rows | None:
        """Return the rows of a graph; None if a block does not consist of whole rows, or a node uses a tensor in an
        unsupported way.
        """
        shapes = {spec.name: spec.shape for spec in manifest.shared}
        rows: dict[str, NDArray[np.int64]] = {}
        for name, blocks in table.tensors.items():
            sizes = np.array(blocks)
            row = math.prod(shapes[name][1:])
            if (sizes % row).any():
                return None
            place = table.places[name]
            rows[name] = np.repeat(np.arange(place.start, place.stop), sizes // row)
        outputs = shapes_of(model)
        turned = {
            node.output[0]: node.input[0]
            for node in model.graph.node
            if node.op_type == "Transpose" and node.input[0] in rows and len(shapes[node.input[0]]) == 2
        }
        layers = {}
        for node in model.graph.node:
            used = [name for name in node.input if name in rows or name in turned]
            if not used or node.output[0] in turned or node.op_type == "Shape":
                continue
            layer = _layer(node, turned, outputs.get(node.output[0]), shapes)
            if layer is None or {turned.get(name, name) for name in used} - {layer.weight, layer.bias}:
                return None
            layers[node.output[0]] = layer
        return cls(layers, rows, {spec.name: spec.size for spec in manifest.whole})

    def scale(self, graph: GraphProto, to: Building, gates: str) -> None:
        """Scale the layers' outputs by the ``gates`` [N, L] of ``to``."""
        done = Building("gated/")
        for node in graph.node:
            layer = self._layers.get(node.output[0])
            if layer is None:
                done.nodes.append(node)
            else:
                self._scale(node, layer, done, gates)
        del graph.node[:]
        graph.node.extend([*to.nodes, *done.nodes])
        graph.initializer.extend([*to.initializers, *done.initializers])

    def _scale(self, node: NodeProto, layer: _Layer, to: Building, gates: str) -> None:
        result = node.output[0]
        plain = to.name("plain")
        if node.op_type == "Add":
            (plain,) = (name for name in node.input if name != layer.bias)
        else:
            node.output[0] = plain
            if layer.bias and node.op_type in ("Conv", "Gemm", "LayerNormalization"):
                del node.input[2]
            elif layer.bias:
                node.input[2] = to.constant(np.zeros(self._sizes[layer.weight], np.float32))
            to.nodes.append(node)
        adds = bool(layer.bias)
        if layer.weight in self._rows:
            own = to.add("Gather", gates, to.index(self._rows[layer.weight]), axis=1)
            plain = to.add("Mul", plain, self._placed(own, layer, to), output=None if adds else result)
        if layer.bias in self._rows:
            own = to.add("Gather", gates, to.index(self._rows[layer.bias]), axis=1)
            summand = self._placed(to.add("Mul", own, layer.bias), layer, to)
            to.add("Add", plain, summand, output=result)
        elif adds:
            wide = [1] * layer.ranks
            wide[layer.axis] = -1
            to.add("Add", plain, to.reshape(layer.bias, wide), output=result)

    @staticmethod
    def _placed(values: str, layer: _Layer, to: Building) -> str:
        """Return [N, rows] as [N, .., rows, ..]."""
        axes = [axis for axis in range(1, layer.ranks) if axis != layer.axis]
        return to.add("Unsqueeze", values, to.whole(*axes)) if axes else values


def _layer(
    node: NodeProto, turned: Mapping[str, str], found: Shape | None, shapes: Mapping[str, tuple[int, ...]]
) -> _Layer | None:
    """Return the layer of a node; None if its weight rows do not correspond to rows of each sample's output."""
    if found is None or len(found.sizes) < 2 or found.sizes[0] != BATCHES[0]:
        return None
    output = found.sizes
    ranks = len(output)
    _, weight, bias = (*node.input, "", "", "")[:3]
    kind = node.op_type
    # before opset 21, group norm has one scale per group
    if kind in _CHANNELS and all(shapes[name][0] == output[1] for name in (weight, bias) if name in shapes):
        return _Layer(weight, bias, 1, ranks)
    if kind == "LayerNormalization" and len(shapes.get(weight, ())) == 1:
        return _Layer(weight, bias, ranks - 1, ranks)
    if kind == "Gemm":
        return _Layer(weight, bias, 1, ranks) if _is_plain(node) else None
    if kind == "MatMul" and weight in turned:
        return _Layer(turned[weight], "", ranks - 1, ranks)
    if kind == "Add" and node.input[0] != node.input[1]:
        biases = (name for name in node.input if len(shapes.get(name, ())) == 1)
        return next((_Layer("", name, ranks - 1, ranks) for name in biases), None)
    return None


def _is_plain(gemm: NodeProto) -> bool:
    """Return True if the weight has one row per output and the Gemm neither scales nor transposes the input."""
    given = attributes(gemm)
    plain = given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0
    return bool(given.get("transB")) and not given.get("transA") and plain


def by_sample(graph: GraphProto, to: Building, gates: str, table: BlockTable, manifest: Manifest) -> None:
    """Rewrite the graph to scan over samples, and scale the weights by the sample's row of ``gates`` [N, L]."""
    inside = Building("sample/")
    sample = inside.name("input")
    own_gates = inside.name("gates")
    names = {INPUT: inside.add("Unsqueeze", sample, inside.whole(0))}
    shapes = {spec.name: spec.shape for spec in manifest.shared}
    for name, sizes in table.tensors.items():
        place = table.places[name]
        own = inside.slice(own_gates, 0, place.start, place.stop)
        if len(sizes) > 1:
            flat = inside.reshape(name, (-1,))
            ends = list(accumulate(sizes))
            runs = [inside.slice(flat, 0, end - size, end) for end, size in zip(ends, sizes, strict=True)]
            factors = inside.several("Split", own, inside.whole(*[1] * len(sizes)), outputs=len(sizes), axis=0)
            scaled = [inside.add("Mul", run, factor) for run, factor in zip(runs, factors, strict=True)]
            names[name] = inside.reshape(inside.add("Concat", *scaled, axis=0), shapes[name])
        else:
            names[name] = inside.add("Mul", name, own)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        inside.nodes.append(node)
    result = inside.add("Squeeze", OUTPUT, inside.whole(0))
    body = GraphProto(name="sample", node=inside.nodes, initializer=inside.initializers)
    body.input.append(_sample_of(graph.input[0], sample))
    body.input.append(onnx.helper.make_tensor_value_info(own_gates, TensorProto.FLOAT, [len(table.sizes)]))
    body.output.append(_sample_of(graph.output[0], result))
    # inner values must not have the names of outer ones
    for node in body.node:
        node.output[:] = [f"sample/{OUTPUT}" if name == OUTPUT else name for name in node.output]
        node.input[:] = [f"sample/{OUTPUT}" if name == OUTPUT else name for name in node.input]
    del graph.node[:]
    graph.node.extend(to.nodes)
    graph.initializer.extend(to.initializers)
    graph.node.append(onnx.helper.make_node("Scan", [INPUT, gates], [OUTPUT], "samples", body=body, num_scan_inputs=2))


def _sample_of(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    tensor = value.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim][1:]
    return onnx.helper.make_tensor_value_info(name, tensor.elem_type, shape)
