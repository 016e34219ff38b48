"""Rewrite an exported model with the oldest operators that express it, for runtimes older than ONNX Runtime 1.19.

A runtime refuses files whose operators (``opset``) or container (``ir_version``) are newer than itself. Each version
from ``OLDEST`` on is tried in turn: operators of a later version are rewritten, or, if the later version only accepts
more types, kept. The model keeps its own version if no older one expresses it, as for weights quantised in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import ceil, pi, sqrt
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from onnx.defs import OpSchema, SchemaError, get_schema

from sparrow.graphs.building import Building
from sparrow.graphs.graph import (
    INVALID,
    Shape,
    attribute,
    attributes,
    constants,
    drop_unused_in_place,
    evaluate,
    is_standard,
    opset,
    set_attribute_in_place,
    set_nodes_in_place,
    shapes,
)
from sparrow.protocol.manifest import Array

from .errors import ExportError

OLDEST = 17
"""First version with LayerNormalization; ONNX Runtime 1.12 of 2022 runs it."""

IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10}
"""Container version of each version of the operators, as in ONNX's releases."""

PREFIX = "older/"
_FOLDED = ("Cast", "Concat", "Reshape", "Squeeze", "Unsqueeze")
"""Operators that exporters use to compute constant axes."""

LARGE = 4096
"""Number of values from which on an initialiser cannot contain axes or sizes."""


def older(model: ModelProto) -> ModelProto:
    """Return a copy with the oldest operators and container that express the model."""
    version = opset(model)
    for target in range(OLDEST, version):
        try:
            return _lowered(model, target)
        except _Newer:
            continue
    result = deepcopy(model)
    result.ir_version = min(result.ir_version, IR_VERSIONS.get(version, result.ir_version))
    return result


class _Newer(ExportError):
    """The operator needs a later version."""


def _lowered(model: ModelProto, target: int) -> ModelProto:
    result = deepcopy(model)
    lowering = _Lowering(shapes(model), opset(model), target)
    lowering.rewrite_in_place(result.graph, {})
    drop_unused_in_place(result.graph)
    for entry in result.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = target
    result.ir_version = IR_VERSIONS[target]
    _check(result)
    return result


def _check(model: ModelProto) -> None:
    """Raise _Newer if the model is not valid, as when this version of an operator does not accept a type."""
    light = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.name = model.graph.name
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims) < LARGE:
            light.graph.initializer.append(tensor)
        else:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            light.graph.input.append(value)
    try:
        onnx.checker.check_model(light)
        onnx.shape_inference.infer_shapes(light, check_type=True)
    except INVALID as error:
        raise _Newer from error


class _Lowering:
    """Rewrites of one model. known: name -> constant array, of this graph and those around it."""

    def __init__(self, found: Mapping[str, Shape], version: int, target: int) -> None:
        self._shapes = found
        self._version = version
        self._target = target
        self._graphs = 0

    def rewrite_in_place(self, graph: GraphProto, outer: Mapping[str, Array]) -> None:
        self._graphs += 1
        self._to = Building(f"{PREFIX}{self._graphs}/")
        to = self._to
        known = {**outer, **_small_constants(graph)}
        for node in graph.node:
            if node.op_type in _FOLDED and is_standard(node) and all(name in known for name in node.input):
                (known[node.output[0]],) = evaluate(node, [known[name] for name in node.input], self._version)
            for inner in _graphs_of(node):
                self.rewrite_in_place(inner, known)
                self._to = to
            if is_standard(node):
                self._rewrite(node, known)
            else:
                to.nodes.append(node)
        set_nodes_in_place(graph, to.nodes)
        graph.initializer.extend(to.initializers)

    def _rewrite(self, node: NodeProto, known: Mapping[str, Array]) -> None:
        """Append the nodes that replace ``node``, usually the node itself. Raises _Newer."""
        newest = get_schema(node.op_type, self._version, "")
        if newest.since_version > self._target:
            rule = _RULES.get(node.op_type)
            if rule is not None and rule(self, node, known):
                return
            _fit_in_place(node, newest, self._target)
        self._to.nodes.append(node)

    # Each rule returns True if it added nodes for this one, False if the node stays.

    def gelu(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        to = self._to
        (x,) = node.input
        (output,) = node.output
        if attribute(node, "approximate", b"none") == b"tanh":
            cube = to.add("Mul", to.add("Mul", x, x), to.add("Mul", x, self._number(x, 0.044715)))
            inner = to.add("Mul", to.add("Add", x, cube), self._number(x, sqrt(2 / pi)))
            grown = to.add("Add", to.add("Tanh", inner), self._number(x, 1.0))
        else:
            # The form that ONNX Runtime fuses.
            inner = to.add("Erf", to.add("Div", x, self._number(x, sqrt(2))))
            grown = to.add("Add", inner, self._number(x, 1.0))
        to.add("Mul", to.add("Mul", x, grown), self._number(x, 0.5), output=output)
        return True

    def mish(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        (x,) = node.input
        self._to.add("Mul", x, self._to.add("Tanh", self._to.add("Softplus", x)), output=node.output[0])
        return True

    def split(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        parts = attribute(node, "num_outputs", None)
        set_attribute_in_place(node, "num_outputs", None)
        if parts is None:
            return False
        axis = attribute(node, "axis", 0)
        found = self._shapes.get(node.input[0])
        if found is not None and found.fixed[axis]:
            size = found.sizes[axis]
            if size % parts:
                part = ceil(size / parts)
                node.input[1:] = [self._to.whole(*[part] * (parts - 1), size - part * (parts - 1))]
            return False
        to = self._to
        size_now = to.add("Gather", to.add("Shape", node.input[0]), to.whole(axis))
        # the size of all parts but the last, rounded up
        part_now = to.add("Div", to.add("Add", size_now, to.whole(parts - 1)), to.whole(parts))
        first = to.add("Mul", part_now, to.whole(parts - 1))
        sizes = [part_now] * (parts - 1) + [to.add("Sub", size_now, first)]
        node.input[1:] = [to.add("Concat", *sizes, axis=0)]
        return False

    def pad(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        if attribute(node, "mode", b"constant") == b"wrap" and self._target < 19:
            raise _Newer
        axes = self._axes(node, 3, known)
        if axes is None:
            return False
        found = self._shapes.get(node.input[0])
        if found is None or node.input[1] not in known:
            raise _Newer
        rank = len(found.sizes)
        pads = known[node.input[1]].reshape(2, -1)
        whole = np.zeros((2, rank), dtype=np.int64)
        whole[:, [axis % rank for axis in axes]] = pads
        node.input[1] = self._to.whole(*whole.reshape(-1).tolist())
        return False

    def reduce(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        if self._target >= 18:
            found = self._shapes.get(node.input[0])
            if found is not None and found.type == TensorProto.BOOL:
                raise _Newer
            return False
        axes = self._axes(node, 1, known)
        if not axes and attribute(node, "noop_with_empty_axes", 0):
            raise _Newer
        set_attribute_in_place(node, "noop_with_empty_axes", None)
        set_attribute_in_place(node, "axes", axes or None)
        return False

    def resize(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        if self._target >= 18:
            return False
        found = self._shapes.get(node.input[0])
        axes = attribute(node, "axes", None)
        if axes is not None and (found is None or list(axes) != list(range(len(found.sizes)))):
            raise _Newer
        set_attribute_in_place(node, "axes", None)
        return False

    def group_normalization(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        # Before 21 it has one scale per group.
        if self._version < 21:
            raise _Newer
        to = self._to
        x, scale, bias = node.input
        groups = attribute(node, "num_groups", None)
        ones = np.ones(groups, dtype=np.float32)
        normed = to.add(
            "InstanceNormalization",
            to.add("Reshape", x, to.whole(0, groups, -1)),
            to.constant(ones),
            to.constant(0 * ones),
            epsilon=attribute(node, "epsilon", 1e-5),
        )
        channels = to.add("Concat", to.whole(0), to.add("Shape", scale), to.whole(-1), axis=0)
        by_channel = to.add("Reshape", normed, channels)
        scaled = to.add("Mul", by_channel, to.add("Unsqueeze", scale, to.whole(1)))
        moved = to.add("Add", scaled, to.add("Unsqueeze", bias, to.whole(1)))
        to.add("Reshape", moved, to.add("Shape", x), output=node.output[0])
        return True

    def grid_sample(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        found = self._shapes.get(node.input[0])
        if found is None or len(found.sizes) != 4:
            raise _Newer
        mode = attribute(node, "mode", b"linear")
        set_attribute_in_place(node, "mode", {b"linear": "bilinear", b"cubic": "bicubic"}.get(mode, mode))
        return False

    def dft(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        found = self._shapes.get(node.input[0])
        axes = self._axes(node, 2, known) or [-2]
        if found is None:
            raise _Newer
        set_attribute_in_place(node, "axis", axes[0] % len(found.sizes))
        return False

    def average_pool(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        if any(each != 1 for each in attribute(node, "dilations", [])):
            raise _Newer
        set_attribute_in_place(node, "dilations", None)
        return False

    def scatter(self, node: NodeProto, known: Mapping[str, Array]) -> bool:
        if attribute(node, "reduction", b"none") in (b"max", b"min") and self._target < 18:
            raise _Newer
        return False

    def _axes(self, node: NodeProto, place: int, known: Mapping[str, Array]) -> list[int] | None:
        """Remove the input ``place`` and return its numbers, or None if there is none. Raises _Newer."""
        name = node.input[place] if len(node.input) > place else ""
        if name and name not in known:
            raise _Newer
        del node.input[place:]
        return [int(each) for each in known[name].reshape(-1)] if name else None

    def _number(self, like: str, value: float) -> str:
        """Return the name of a constant of the type of ``like``."""
        found = self._shapes.get(like)
        kind = TensorProto.FLOAT if found is None else found.type
        return self._to.constant(np.array(value, dtype=onnx.helper.tensor_dtype_to_np_dtype(kind)))


_Rule = Callable[[_Lowering, NodeProto, Mapping[str, Array]], bool]
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
_RULES: dict[str, _Rule] = {
    "AveragePool": _Lowering.average_pool,
    "DFT": _Lowering.dft,
    "Gelu": _Lowering.gelu,
    "GridSample": _Lowering.grid_sample,
    "GroupNormalization": _Lowering.group_normalization,
    "Mish": _Lowering.mish,
    "Pad": _Lowering.pad,
    "Resize": _Lowering.resize,
    "ScatterElements": _Lowering.scatter,
    "ScatterND": _Lowering.scatter,
    "Split": _Lowering.split,
    **{f"Reduce{each}": _Lowering.reduce for each in _REDUCTIONS},
}


def _fit_in_place(node: NodeProto, newest: OpSchema, target: int) -> None:
    """Remove attributes that the target's version lacks and that have their default. Raises _Newer."""
    try:
        oldest = get_schema(node.op_type, target, "")
    except SchemaError as error:
        raise _Newer from error
    if len(node.input) > oldest.max_input or len(node.output) > oldest.max_output:
        raise _Newer
    for name, value in attributes(node).items():
        if name in oldest.attributes:
            continue
        default = newest.attributes[name].default_value
        if default.type == AttributeProto.UNDEFINED or onnx.helper.get_attribute_value(default) != value:
            raise _Newer
        set_attribute_in_place(node, name, None)


def _graphs_of(node: NodeProto) -> Sequence[GraphProto]:
    return [inner for each in node.attribute for inner in ([each.g] if each.HasField("g") else each.graphs)]


def _small_constants(graph: GraphProto) -> dict[str, Array]:
    light = GraphProto()
    light.input.extend(graph.input)
    light.initializer.extend(tensor for tensor in graph.initializer if np.prod(tensor.dims) < LARGE)
    found: dict[str, Any] = constants(light)
    for node in graph.node:
        value = attribute(node, "value", None) if node.op_type == "Constant" else None
        ints = attribute(node, "value_ints", None) if node.op_type == "Constant" else None
        if isinstance(value, TensorProto):
            found[node.output[0]] = onnx.numpy_helper.to_array(value)
        elif ints is not None:
            found[node.output[0]] = np.array(ints, dtype=np.int64)
    return found
