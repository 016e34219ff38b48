"""Remove neurons and channels that do not influence a model's output.

``export.channels`` decides which units to remove. The steps are repeated until nothing changes:

- Fold constants (``graph.fold_constants_in_place``).
- Replace operands whose channels are all constant by initialisers and drop the branch that computes them, such as a
  residual block that is switched off.
- Move constant channels into the next layer's bias. Under padding the border sees zeros instead, so they are merged
  into one channel.
- Cut the remaining units.

Finally ReLUs move before max pooling, so that ONNX Runtime fuses them with convolutions.

The result equals the given model up to float32 rounding, for finite inputs without overflowing activations.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import onnx.helper
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from sparrow.graphs import graph as plumbing
from sparrow.protocol.manifest import Array

from .channels import Bools, Contraction, Floats, Flow, padding

_BROADCASTING = ("Add", "Sub", "Mul", "Div")


def compact(model: ModelProto) -> ModelProto:
    """Return a copy with fewer channels and the same function, inputs and outputs.

    model: its weights must be in the file. Deterministic. Raises ExportError if the model is not valid ONNX.
    """
    plumbing.check_valid(model, "the model is not valid ONNX", "fill the federation's skeleton again")
    result = deepcopy(model)
    result.graph.ClearField("value_info")
    while True:
        plumbing.fold_constants_in_place(result)
        flow = Flow(result)
        if _replace_constant_values_in_place(result, flow) or _merge_constants_in_place(result, flow):
            continue
        if not _cut_in_place(result, flow):
            break
    plumbing.activate_before_pooling_in_place(result.graph)
    plumbing.check_valid(result, "compacting made an invalid model", "export with --mode dense and report this")
    return result


# --- values whose channels are all constant


def _replace_constant_values_in_place(model: ModelProto, flow: Flow) -> bool:
    """Replace constant operands by initialisers and skip additions of zero. Return whether the graph changed."""
    graph = model.graph
    changed = False
    made = {name for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type not in _BROADCASTING or not plumbing.is_standard(node):
            continue
        for place, other in ((0, 1), (1, 0)):
            name = node.input[place]
            if name not in made or not _same_shape(node.input[other], node.output[0], flow):
                continue
            array = _as_constant(name, flow)
            if array is not None:
                node.input[place] = plumbing.fresh_name(graph, f"{name}.constant")
                plumbing.set_constant_in_place(graph, node.input[place], array)
                changed = True
                break
    return _skip_zeros_in_place(graph, flow) or changed


def _same_shape(one: str, other: str, flow: Flow) -> bool:
    return one in flow.shapes and flow.shapes[one] == flow.shapes.get(other)


def _as_constant(name: str, flow: Flow) -> Array | None:
    """Return a constant value as a broadcastable array; None if it is not constant."""
    if name not in flow.shapes or flow.shapes[name].type != TensorProto.FLOAT:
        return None
    for axis in range(flow.rank(name)):
        if flow.has(name, axis) and not np.isnan(flow.constant(name, axis)).any():
            vector = flow.constant(name, axis).astype(np.float32)
            return vector.reshape(-1, *[1] * (flow.rank(name) - axis - 1))
    return None


def _skip_zeros_in_place(graph: GraphProto, flow: Flow) -> bool:
    """Skip additions of zero, except for graph outputs. Return whether the graph changed."""
    outputs = {value.name for value in graph.output}
    known = plumbing.constants(graph)
    changed = False
    for node in graph.node:
        if node.op_type != "Add" or not plumbing.is_standard(node) or node.output[0] in outputs:
            continue
        for place, other in ((0, 1), (1, 0)):
            zero = known.get(node.input[place])
            same = _same_shape(node.input[other], node.output[0], flow)
            if zero is not None and same and node.input[other] not in known and not zero.any():
                changed |= _rename_reads_in_place(graph, node.output[0], node.input[other])
                break
    plumbing.drop_unused_in_place(graph)
    return changed


def _rename_reads_in_place(graph: GraphProto, name: str, to: str) -> bool:
    """Rename a value in all readers except subgraphs. Return whether it had readers."""
    found = [(node, place) for node in graph.node for place, read in enumerate(node.input) if read == name]
    for node, place in found:
        node.input[place] = to
    return bool(found)


# --- constants that padding keeps out of the bias


def _merge_constants_in_place(model: ModelProto, flow: Flow) -> bool:
    """Merge constant channels into one channel with scaled weights. Return whether the graph changed."""
    graph = model.graph
    reads = plumbing.read_counts(graph)
    changed = False
    for contraction in flow.contractions:
        constant = flow.constant(contraction.data, contraction.axis)
        merged = ~np.isnan(constant) & (constant != 0) & contraction.used.any(axis=0) & ~contraction.absorbs(constant)
        if merged.sum() < 2 or reads[contraction.weight] != 1 or not contraction.padded:
            continue
        first = int(np.argmax(np.where(merged, np.abs(constant), 0.0)))
        weights = np.moveaxis(contraction.weights, 1, 0).astype(np.float64)
        total = np.tensordot(constant[merged] / constant[first], weights[merged], axes=1)
        weights[merged] = 0.0
        weights[first] = total
        array = np.moveaxis(weights, 0, contraction.inputs_axis).astype(contraction.weights.dtype)
        plumbing.set_constant_in_place(graph, contraction.weight, array)
        changed = True
    return changed


# --- the cut


def _cut_in_place(model: ModelProto, flow: Flow) -> bool:
    kept = flow.kept()
    if all(units.all() for units in kept.values()):
        return False
    graph = model.graph
    added = [_added(contraction, kept, flow) for contraction in flow.contractions]
    for name, array in flow.arrays.items():
        cut = array
        for axis in range(array.ndim):
            if flow.has(name, axis) and not kept[name, axis].all():
                cut = np.compress(kept[name, axis], cut, axis=axis)
        if cut is not array:
            plumbing.set_constant_in_place(graph, name, cut)
    for node in graph.node:
        _fit_in_place(graph, node, flow, kept)
    behind: dict[str, NodeProto] = {}
    for contraction, bias in zip(flow.contractions, added, strict=True):
        if not bias.any():
            continue
        if contraction.bias is None:
            behind.update(_add_behind_in_place(graph, contraction.node, bias.astype(contraction.weights.dtype)))
        else:
            _add_in_place(graph, contraction, contraction.bias, bias)
    _insert_in_place(graph, behind)
    return True


def _added(contraction: Contraction, kept: dict[tuple[str, int], Bools], flow: Flow) -> Floats:
    """Return [outputs kept]: the contribution of removed constant inputs to the kept outputs."""
    constant = flow.constant(contraction.data, contraction.axis)
    gone = ~kept[contraction.data, contraction.axis] & ~np.isnan(constant) & (constant != 0)
    rows = kept[contraction.node.output[0], contraction.out_axis]
    total: Floats = contraction.weight_of(gone)[rows] @ constant[gone]
    return total


def _fit_in_place(graph: GraphProto, node: NodeProto, flow: Flow, kept: dict[tuple[str, int], Bools]) -> None:
    # Sizes that are in attributes or constants, not in weights.
    if not plumbing.is_standard(node) or not node.output or node.output[0] not in flow.shapes:
        return
    out = node.output[0]
    if node.op_type == "Reshape" and any(
        not kept[out, axis].all() for axis in range(flow.rank(out)) if flow.has(out, axis)
    ):
        before, after = (
            replace(flow.shapes[name], sizes=_sizes_left(name, flow, kept)) for name in (node.input[0], out)
        )
        target = plumbing.reshape_target(before, after)
        if target is None:
            raise AssertionError("a reshape is cut only if its target is known")
        plumbing.set_target_in_place(graph, node, target)
    if (out, 1) not in kept or kept[out, 1].all():
        return
    if node.op_type == "Conv" and plumbing.attribute(node, "group", 1) > 1:
        groups = kept[node.input[0], 1].reshape(plumbing.attribute(node, "group", 1), -1).any(axis=1)
        plumbing.set_attribute_in_place(node, "group", int(groups.sum()))
    if node.op_type == "GroupNormalization":
        groups = kept[out, 1].reshape(plumbing.attribute(node, "num_groups", 1), -1).any(axis=1)
        plumbing.set_attribute_in_place(node, "num_groups", int(groups.sum()))
    if node.op_type == "Pad":
        _fit_pad_in_place(graph, node, flow, kept[out, 1])


def _sizes_left(name: str, flow: Flow, kept: dict[tuple[str, int], Bools]) -> tuple[int, ...]:
    return tuple(
        int(kept[name, axis].sum()) if flow.has(name, axis) else size
        for axis, size in enumerate(flow.shapes[name].sizes)
    )


def _fit_pad_in_place(graph: GraphProto, node: NodeProto, flow: Flow, kept: Bools) -> None:
    rank = flow.rank(node.output[0])
    pads = padding(node, flow.arrays, rank)
    if pads is None:
        raise AssertionError("a pad is cut only if its widths are constant")
    before, behind = pads
    if before[1] or behind[1]:
        end = len(kept) - behind[1]
        before[1], behind[1] = int(kept[: before[1]].sum()), int(kept[end:].sum())
        name = plumbing.fresh_name(graph, f"{node.output[0]}.pads")
        plumbing.set_constant_in_place(graph, name, np.array([*before, *behind], dtype=np.int64))
        node.input[1] = name
        if len(node.input) > 3:
            del node.input[3:]


def _add_in_place(graph: GraphProto, contraction: Contraction, place: int, bias: Floats) -> None:
    """Add ``bias`` [outputs kept] to the node's bias, its input ``place``."""
    node = contraction.node
    known = plumbing.constants(graph)
    while len(node.input) <= place:
        node.input.append("")
    name = node.input[place]
    if not name or plumbing.read_counts(graph)[name] > 1:
        node.input[place] = plumbing.fresh_name(graph, name or f"{node.output[0]}.bias")
    if name:
        bias = np.add(bias, known[name])
    plumbing.set_constant_in_place(graph, node.input[place], bias.astype(contraction.weights.dtype))


def _add_behind_in_place(graph: GraphProto, node: NodeProto, bias: Array) -> dict[str, NodeProto]:
    """Add the bias to the Add after a matrix product, or return a new Add to insert there."""
    # The node is not inserted here, since the nodes still to be changed would move.
    known = plumbing.constants(graph)
    reads = plumbing.read_counts(graph)
    out = node.output[0]
    for other in graph.node:
        if other.op_type == "Add" and plumbing.is_standard(other) and out in other.input and reads[out] == 1:
            place = 1 - list(other.input).index(out)
            array = known.get(other.input[place])
            if array is not None and array.shape[-1:] == bias.shape and array.size == bias.size:
                if reads[other.input[place]] > 1:
                    other.input[place] = plumbing.fresh_name(graph, other.input[place])
                total = np.add(array, bias, dtype=np.float64).astype(bias.dtype)
                plumbing.set_constant_in_place(graph, other.input[place], total)
                return {}
    name = plumbing.fresh_name(graph, f"{out}.bias")
    before = plumbing.fresh_name(graph, f"{out}.product")
    plumbing.set_constant_in_place(graph, name, bias)
    node.output[0] = before
    return {before: onnx.helper.make_node("Add", [before, name], [out])}


def _insert_in_place(graph: GraphProto, behind: dict[str, NodeProto]) -> None:
    """Insert each node after the one whose output is its key."""
    if not behind:
        return
    nodes = []
    for node in graph.node:
        nodes += [node, *(behind[name] for name in node.output if name in behind)]
    plumbing.set_nodes_in_place(graph, nodes)
