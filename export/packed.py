"""Pack sparse weights as nonzero values and one mask bit per element.

A float32 weight of density q takes q + 1/32 of its size (float16: q + 1/16, int8: q + 1/8). Standard operators unpack
it. They read only constants, so ONNX Runtime folds them on load and inference runs at the plain model's speed.

The mask has eight elements per byte, most significant bit first. A shared table holds the bits of all 256 bytes::

    bits   = Reshape(Gather(table, mask), n)     1 for a nonzero element
    index  = CumSum(bits) x bits                 position in values, from 1; 0 for a zero
    weight = Reshape(GatherElements(values, index), shape)    values begins with a zero

This formulation loads fastest: ONNX Runtime's Gather and broadcasts take 30 to 60 ns per row, GatherElements a tenth of
this. Peak memory during loading is about seven times the weights' float32 size, and four times the peak of the plain
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.helper import make_node
from onnx.numpy_helper import from_array, to_array

from sparrow.protocol.manifest import Array

from .errors import ExportError

MIN_VALUES = 256
"""Smaller weights are not packed, because the unpacking nodes need 380 to 450 bytes."""

MAX_VALUES = 2**28
"""Larger weights are not packed: ONNX Runtime folds outputs up to 1 GiB, and every prediction would unpack them."""

OLDEST_OPSET = 13
"""First opset with the axes and types that the operators use here."""

_BITS: dict[int, str] = {TensorProto.FLOAT: "u4", TensorProto.FLOAT16: "u2", TensorProto.INT8: "u1"}


def pack(model: ModelProto) -> ModelProto:
    """Return a copy with packed weights and bitwise equal predictions.

    Initialisers of float32, float16 and int8 are packed unless they are also inputs or would not get smaller. -0.0
    counts as nonzero. Raises ExportError for opsets before ``OLDEST_OPSET`` and for external data.
    """
    versions = [opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")]
    if any(version < OLDEST_OPSET for version in versions):
        raise ExportError(
            f"the model uses operators of version {versions[0]}, packing needs {OLDEST_OPSET}; "
            "convert it with onnx.version_converter"
        )
    prefix = _free_prefix(model.graph)
    inputs = {value.name for value in model.graph.input}
    found: dict[str, _Packed] = {}
    for tensor in model.graph.initializer:
        if tensor.name not in inputs and tensor.data_type in _BITS:
            packed = _pack(tensor, f"{prefix}{len(found)}", prefix)
            if packed is not None and packed.bytes < tensor.ByteSize():
                found[tensor.name] = packed
    table = _table(prefix)
    saved = sum(tensor.ByteSize() for tensor in model.graph.initializer if tensor.name in found)
    if saved <= table.bytes + sum(packed.bytes for packed in found.values()):
        return deepcopy(model)
    return _with(model, [table, *found.values()], set(found))


@dataclass(frozen=True)
class _Packed:
    """Constants and nodes that compute a weight under its original name."""

    tensors: list[TensorProto]
    nodes: list[NodeProto]

    @property
    def bytes(self) -> int:
        entries: list[TensorProto | NodeProto] = [*self.tensors, *self.nodes]
        return sum(entry.ByteSize() + 4 for entry in entries)


def _pack(tensor: TensorProto, name: str, prefix: str) -> _Packed | None:
    if tensor.external_data or tensor.data_location != TensorProto.DEFAULT:
        raise ExportError(f"{tensor.name!r} is stored in a separate file; load the model with its external data")
    weight = to_array(tensor)
    if not MIN_VALUES <= weight.size <= MAX_VALUES:
        return None
    flat = np.ascontiguousarray(weight).reshape(-1)
    exists = flat.view(_BITS[tensor.data_type]) != 0
    # return early, before copying, for weights with few zeros
    if weight.nbytes <= np.count_nonzero(exists) * weight.itemsize + weight.size // 8:
        return None
    values = np.concatenate([np.zeros(1, flat.dtype), np.compress(exists, flat)])
    mask = np.packbits(exists)
    constants: dict[str, Array] = {"v": values, "m": mask, "s": np.array(weight.shape, dtype=np.int64)}
    nodes = [
        make_node("Cast", [f"{name}m"], [f"{name}c"], to=TensorProto.INT32),
        make_node("Gather", [f"{prefix}table", f"{name}c"], [f"{name}t"]),
        make_node("Reshape", [f"{name}t", f"{prefix}flat"], [f"{name}f"]),
    ]
    flat_bits = f"{name}f"
    if weight.size % 8:
        # the last byte has padding bits
        constants |= {"z": np.array([0], dtype=np.int64), "e": np.array([weight.size], dtype=np.int64)}
        nodes.append(make_node("Slice", [flat_bits, f"{name}z", f"{name}e"], [f"{name}g"]))
        flat_bits = f"{name}g"
    nodes += [
        make_node("Cast", [flat_bits], [f"{name}b"], to=TensorProto.INT32),
        make_node("CumSum", [f"{name}b", f"{prefix}axis"], [f"{name}n"]),
        make_node("Mul", [f"{name}n", f"{name}b"], [f"{name}i"]),
        make_node("GatherElements", [f"{name}v", f"{name}i"], [f"{name}w"]),
        make_node("Reshape", [f"{name}w", f"{name}s"], [tensor.name]),
    ]
    return _Packed([from_array(array, name + key) for key, array in constants.items()], nodes)


def _table(prefix: str) -> _Packed:
    """Return ``table`` [256, 8], uint8, the bits of each byte, with the constants that all weights share."""
    # It is computed on load, since it would take 2 KiB in the file; in int32, since some ONNX Runtimes divide no
    # bytes.
    constants: dict[str, Array] = {
        "codes": np.arange(256, dtype=np.uint8).reshape(256, 1),
        "places": 2 ** np.arange(7, -1, -1, dtype=np.int32),
        "two": np.array(2, dtype=np.int32),
        "axis": np.array(0, dtype=np.int32),
        "flat": np.array([-1], dtype=np.int64),
    }
    nodes = [
        make_node("Cast", [f"{prefix}codes"], [f"{prefix}code"], to=TensorProto.INT32),
        make_node("Div", [f"{prefix}code", f"{prefix}places"], [f"{prefix}high"]),
        make_node("Mod", [f"{prefix}high", f"{prefix}two"], [f"{prefix}bit"]),
        make_node("Cast", [f"{prefix}bit"], [f"{prefix}table"], to=TensorProto.UINT8),
    ]
    return _Packed([from_array(array, prefix + key) for key, array in constants.items()], nodes)


def _free_prefix(graph: GraphProto) -> str:
    """Return an unused name prefix. It is short, because the file contains it twenty times per weight."""
    names = set(_names(graph))
    number = 0
    while any(name.startswith(f"~{number}.") for name in names):
        number += 1
    return f"~{number}."


def _names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values, including those of subgraphs."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        yield value.name
    for node in graph.node:
        yield from node.input
        yield from node.output
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _names(inner)


def _with(model: ModelProto, parts: list[_Packed], gone: set[str]) -> ModelProto:
    result = deepcopy(model)
    graph = result.graph
    plain = [tensor for tensor in graph.initializer if tensor.name not in gone]
    nodes = list(graph.node)
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend([*plain, *(tensor for part in parts for tensor in part.tensors)])
    graph.node.extend([*(node for part in parts for node in part.nodes), *nodes])
    return result
