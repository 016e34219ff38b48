"""Which shapes the values of an ONNX graph have, for a given number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto
from onnx.reference import ReferenceEvaluator

Shape = list[int | None]


def output_shapes(model: ModelProto, samples: int) -> dict[str, Shape]:
    """Value -> its shape for a batch of ``samples``; None for lengths that cannot be told."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = samples
    for node in fixed.graph.node:
        if node.op_type == "GroupNormalization":  # ONNX infers no shapes for it
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output))
    shapes = _inferred(fixed)
    while _fold_shapes(fixed.graph, shapes):
        shapes = _inferred(fixed)
    return shapes


def _inferred(model: ModelProto) -> dict[str, Shape]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    return {
        value.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
    }


def _fold_shapes(graph: GraphProto, shapes: Mapping[str, Shape]) -> bool:
    """Make constants of lengths that are known, and of what is computed of them: ONNX's own inference gives up there.
    Whether there was anything to do."""
    lengths = {each.name: each for each in graph.initializer if each.data_type == TensorProto.INT64}
    known: dict[str, NDArray[Any]] = {name: onnx.numpy_helper.to_array(each) for name, each in lengths.items()}
    folded = []
    for node in graph.node:
        if node.op_type == "Shape":
            shape = [length for length in shapes.get(node.input[0], [None]) if length is not None]
            if len(shape) < len(shapes.get(node.input[0], [None])):
                continue
            feeds = {node.input[0]: np.broadcast_to(np.float32(0), shape)}
        elif all(name in known for name in node.input if name):
            feeds = {name: known[name] for name in node.input if name}
        else:
            continue
        results = [np.asarray(result) for result in ReferenceEvaluator(node).run(None, feeds)]
        if all(result.dtype == np.int64 and result.size < 100 for result in results):
            known |= dict(zip(node.output, results, strict=True))
            folded.append(node)
    for node in folded:
        graph.node.remove(node)
        graph.initializer.extend(onnx.numpy_helper.from_array(known[name], name) for name in node.output)
    return bool(folded)
