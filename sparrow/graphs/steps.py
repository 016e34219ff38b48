"""Passes that make a training step's graph faster without changing its results.

These passes use the active neurons, and avoid slow kernels of the runtime:

    pool_by_tiles       computes the maxima of windows that do not overlap by comparing the places of all windows; the
                        first of equal values is the maximum, as in PyTorch
    join_channels       computes the error of a convolution's weight by one product instead of one per input channel
    train_parts         computes errors of weights for active rows and columns only, which are inputs
    multiply_turned     merges transposes into products
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from ..protocol.manifest import Manifest, TensorSpec
from ..protocol.masks import Block, NeuronMask, neuron_block
from .editor import Builder, Editor
from .graph import again, attribute

TURNED = [1, 0]
LARGEST_TILE = 9
"""Largest window, in places, for which comparing place by place is faster."""


Parts = Mapping[str, tuple[int | None, int | None]]
"""Weight -> number of its active rows and columns; None for all."""


def step_of_neurons(step: bytes, manifest: Manifest, mask: NeuronMask | None) -> bytes:
    """Return a step, optimised for as many neurons as are active in ``mask``.

    Their indices are int64 inputs ``rows:NAME`` and ``columns:NAME``.
    """
    trained = {spec.name: neuron_block(manifest, spec, mask) for spec in manifest.tensors if spec.trainable}
    frozen = {name: each for name, each in trained.items() if each.rows is not None or each.columns is not None}
    parts, _, lowest = products_of(manifest, frozen)
    return optimise(step, parts, lowest)


def products_of(
    manifest: Manifest, blocks: Mapping[str, Block]
) -> tuple[Parts, dict[str, NDArray[np.int64]], list[str]]:
    """Return arguments for ``optimise``: active rows and columns by number, their indices, and ``lowest``."""
    parts = {}
    index = {}
    for spec in manifest.tensors:
        if spec.name not in blocks or len(spec.shape) < 2:
            continue
        rows, columns = _axes(spec, blocks[spec.name])
        parts[spec.name] = tuple(None if each is None else len(each) for each in (rows, columns))
        for what, places in (("rows", rows), ("columns", columns)):
            if places is not None:
                index[f"{what}:{spec.name}"] = places
    return parts, index, [name for name in _lowest(manifest) if f"rows:{name}" in index]  # type: ignore[return-value]


def _axes(spec: TensorSpec, block: Block) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return the active places of a weight's first two axes; None for all."""
    rows, columns = (None if each is None else np.array(each, np.int64) for each in (block.rows, block.columns))
    # A neuron may own several columns.
    if columns is not None and block.view[1] != spec.shape[1]:
        share = spec.shape[1] // block.view[1]
        columns = (columns[:, None] * share + np.arange(share)).reshape(-1)
    return rows, columns


def _lowest(manifest: Manifest) -> list[str]:
    """Return the weights of layers whose errors only active neurons use (``Layer.input_error``)."""
    groups = set()
    specs = {spec.name: spec for spec in manifest.tensors}
    for layer in manifest.layers:
        if layer.input_error == "active" and len(specs[layer.tensors[0]].axes) > 1:
            groups |= {segment.group for segment in specs[layer.tensors[0]].axes[1]}
    return [
        spec.name
        for spec in manifest.tensors
        if len(spec.shape) > 1 and spec.axes and len(spec.axes[0]) == 1 and spec.axes[0][0].group in groups
    ]


def optimise(model: bytes, parts: Parts | None = None, lowest: Collection[str] = ()) -> bytes:
    """Return the optimised graph of a step; ``parts`` restricts its weights.

    lowest: weights of layers whose errors are used only for active rows.
    """
    proto = onnx.load_from_string(model)
    for unread in [each for each in proto.graph.output if each.name == "error"]:
        proto.graph.output.remove(unread)
    editor = Editor(proto)
    train_parts(editor, parts or {})
    narrow_errors(editor, lowest)
    pool_by_tiles(editor)
    join_channels(editor)
    multiply_turned(editor)
    editor.remove_unread()
    # Some descriptions are outdated, because values have only active neurons now.
    del proto.graph.value_info[:]
    return bytes(proto.SerializeToString(deterministic=True))


def pool_by_tiles(editor: Editor) -> None:
    """Compute the maxima of windows that tile an image, and their errors."""
    for pool in editor.of_type("MaxPool"):
        kernel = attribute(pool, "kernel_shape", [])
        shape = editor.shape(pool.input[0])
        backs = [
            node for node in editor.of_type("MaxUnpool") if len(pool.output) > 1 and node.input[1] == pool.output[1]
        ]
        tiles = (
            len(kernel) == 2
            and attribute(pool, "strides", [1, 1]) == kernel
            and prod(kernel) <= LARGEST_TILE
            and not any(attribute(pool, "pads", []))
            and set(attribute(pool, "dilations", [1])) == {1}
            and shape is not None
            and all(size is not None and size % width == 0 for size, width in zip(shape[2:], kernel, strict=True))
        )
        if len(pool.output) > 1 and not editor.readers(pool.output[1]):
            # The runtime is faster if no node reads the places of maxima.
            del pool.output[1]
        if not tiles or not backs or len(backs) != len(editor.readers(pool.output[1])):
            continue
        assert shape is not None
        add = editor.before(pool)
        corners = list(_corners(editor, add, pool.input[0], kernel, shape))
        highest = add.Max(*corners)
        pooled = add.Transpose(highest, perm=[0, 3, 1, 2])
        for back in backs:
            error = _put_back(editor, editor.before(back), back.input[0], corners, highest, kernel, shape)
            editor.replace(back, [error])
        editor.replace(pool, [pooled, ""])


def _corners(editor: Editor, add: Builder, x: str, kernel: Sequence[int], shape: Any) -> Iterator[str]:
    """Yield each place of all windows, in row order: [N, H/k, W/k, C] each."""
    high, wide = kernel
    height = shape[2] // high
    width = shape[3] // wide
    rows = add.Reshape(add.Transpose(x, perm=[0, 2, 3, 1]), editor.integers([0, height, high, -1]))
    for row in range(high):
        line = add.Slice(rows, *map(editor.integers, ([row], [row + 1], [2]))) if high > 1 else rows
        line = add.Reshape(line, editor.integers([0, height, width, wide, -1]))
        for place in range(wide):
            one = add.Slice(line, *map(editor.integers, ([place], [place + 1], [3]))) if wide > 1 else line
            yield add.Reshape(one, editor.integers([0, height, width, -1]))


def _put_back(
    editor: Editor, add: Builder, error: str, corners: Sequence[str], highest: str, kernel: Sequence[int], shape: Any
) -> str:
    """Return the error [N, C, H, W] at the first maximum of each window."""
    high, wide = kernel
    height, width = shape[2:]
    error = add.Transpose(error, perm=[0, 2, 3, 1])
    zero = editor.keep(np.array(0, np.float32))
    taken = ""
    parts = []
    for corner in corners[:-1]:
        here = add.Equal(corner, highest)
        parts.append(add.Where(add.And(here, add.Not(taken)) if taken else here, error, zero))
        taken = add.Or(taken, here) if taken else here
    parts.append(add.Where(taken, zero, error) if taken else error)
    lines = [add.Concat(*parts[row * wide : (row + 1) * wide], axis=3) for row in range(high)]
    flat = [add.Reshape(line, editor.integers([0, height // high, 1, -1])) for line in lines]
    whole = add.Reshape(add.Concat(*flat, axis=2), editor.integers([0, height, width, -1]))
    turned: str = add.Transpose(whole, perm=[0, 3, 1, 2])
    return turned


def train_parts(editor: Editor, parts: Parts) -> None:
    """Compute some weights' errors only for the int64 inputs ``rows:NAME`` and ``columns:NAME``.

    Errors that are not one product of the layer's error and input stay whole.
    """
    outputs = {output.name: output for output in editor.graph.output}
    for name, counts in parts.items():
        found = _product(editor, f"grad:{name}")
        if found is None:
            continue
        product, *places = found
        errors, inputs = ((_alone(editor, product, reader), position) for reader, position in places)
        kept = [dim.dim_value for dim in outputs[f"grad:{name}"].type.tensor_type.shape.dim]
        for axis, (what, count, place) in enumerate((("rows", counts[0], errors), ("columns", counts[1], inputs))):
            if count is None:
                continue
            index = f"{what}:{name}"
            editor.graph.input.append(helper.make_tensor_value_info(index, onnx.TensorProto.INT64, [count]))
            reader, position = place
            whole = reader.input[position]
            reader.input[position] = editor.before(reader).Gather(whole, index, axis=1)
            editor.know(
                reader.input[position], [count if a == 1 else n for a, n in enumerate(editor.shape(whole) or ())]
            )
            kept[axis] = count
        tensor = outputs[f"grad:{name}"].type.tensor_type
        tensor.shape.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, kept).tensor_type.shape)


def _alone(editor: Editor, product: onnx.NodeProto, reader: onnx.NodeProto) -> onnx.NodeProto:
    """Return ``reader``, or a copy that only ``product`` reads if parallel layers share it."""
    value = reader.output[0]
    if reader is product or len(editor.readers(value)) == 1:
        return reader
    copy = again(reader, reader.input, [editor.fresh()])
    editor.before(product).insert(copy)
    editor.know(copy.output[0], editor.shape(value) or ())
    product.input[:] = [copy.output[0] if name == value else name for name in product.input]
    made = editor.maker(copy.output[0])
    assert made is not None
    return made


def narrow_errors(editor: Editor, weights: Collection[str]) -> None:
    """Restrict the errors of layers to the active rows that ``train_parts`` uses.

    Errors with readers other than the bias stay whole.
    """
    for name in weights:
        index = f"rows:{name}"
        gathers = [node for node in editor.of_type("Gather") if node.input[1] == index]
        if len(gathers) != 1:
            continue
        (gather,) = gathers
        whole = gather.input[0]
        others = [node for node in editor.readers(whole) if node is not gather]
        sums = [node for node in others if node.op_type == "ReduceSum" and editor.is_output(node.output[0])]
        if len(sums) != len(others) or any(attribute(node, "keepdims", 1) for node in sums):
            continue
        count = (editor.shape(gather.output[0]) or (None, None))[1]
        part = _part(editor, whole, index, count)
        for node in sums:
            node.input[0] = part
            output = next(each for each in editor.graph.output if each.name == node.output[0])
            output.type.tensor_type.shape.dim[0].dim_value = count or 0
        editor.replace(gather, [part])
        editor.sort()


ELEMENTWISE = frozenset(
    [
        "Where",
        "Greater",
        "Less",
        "GreaterOrEqual",
        "LessOrEqual",
        "Equal",
        "Not",
        "And",
        "Or",
        "Mul",
        "Add",
        "Sub",
        "Div",
        "Neg",
        "Exp",
        "Sigmoid",
        "Tanh",
        "Erf",
    ]
)


def _part(editor: Editor, value: str, index: str, count: int | None) -> str:
    """Return channels ``index`` of a value [N, C, ...], from parts of its inputs if possible."""
    node = editor.maker(value)
    shape = editor.shape(value)
    if editor.constant(value) is not None or (shape is not None and len(shape) == 0):
        return value
    made = None if node is None else _parts_read(editor, node, shape, index, count)
    if node is None or made is None:
        place = node or next(iter(editor.graph.node))
        part: str = editor.before(place).Gather(value, index, axis=1)
    else:
        copy = again(node, made, [editor.fresh()])
        editor.before(node).insert(copy)
        part = copy.output[0]
    if shape is not None:
        editor.know(part, [shape[0], count, *shape[2:]])
    return part


def _parts_read(
    editor: Editor, node: onnx.NodeProto, shape: Sequence[int | None] | None, index: str, count: int | None
) -> list[str] | None:
    """Return the inputs for a part of a node's value; None if it needs all of its inputs. shape: shape of the value."""
    if node.op_type in ELEMENTWISE and len(node.output) == 1:
        # A value that is broadcast over the channels has no part.
        if shape is None or any(editor.shape(each) not in (shape, ()) for each in node.input):
            return None
        return [_part(editor, each, index, count) for each in node.input]
    if node.op_type == "MaxUnpool":
        pool = editor.maker(node.input[1])
        if pool is None or pool.op_type != "MaxPool":
            return None
        add = editor.before(node)
        below = _part(editor, pool.input[0], index, count)
        places = editor.fresh()
        add.insert(again(pool, [below], [editor.fresh(), places]))
        return [_part(editor, node.input[0], index, count), places, add.Shape(below)]
    if _is_product(node, shape):
        return [node.input[0], editor.before(node).Gather(node.input[1], index, axis=1)]
    return None


def _is_product(node: onnx.NodeProto, shape: Sequence[int | None] | None) -> bool:
    """Return whether a node propagates an error through a layer; its second input is the layer's weight."""
    if node.op_type == "ConvTranspose":
        return bool(attribute(node, "group", 1) == 1)
    return node.op_type == "MatMul" and len(shape or ()) == 2


Read = tuple[onnx.NodeProto, int]
"""A node, and the position of one of its inputs."""


def _product(editor: Editor, name: str) -> tuple[onnx.NodeProto, Read, Read] | None:
    """Return the product for a weight's error, and its reads of the layer's error and input, [N, C, ...] each.

    None if the error is computed in another way.
    """
    node = editor.maker(name)
    if node is not None and node.op_type == "MatMul":
        turned = editor.maker(node.input[0])
        if turned is None or turned.op_type != "Transpose" or len(editor.readers(node.input[0])) > 1:
            return None
        return node, (turned, 0), (node, 1)
    while node is not None and node.op_type in ("Transpose", "Slice"):
        node = editor.maker(node.input[0])
    if node is None or node.op_type != "Conv" or attribute(node, "group", 1) != 1:
        return None
    images, kernels = (editor.maker(each) for each in node.input[:2])
    if images is None or kernels is None or {images.op_type, kernels.op_type} != {"Transpose"}:
        return None
    return node, (kernels, 0), (images, 0)


def join_channels(editor: Editor) -> None:
    """Compute the error of a convolution's weight by one product."""
    # Matches ``Conv`` of two values with exchanged batch and channels. The channels of the first are moved next to
    # the last axis, [1, N, ..., W C], and the second value steps over them: each place that it reaches stands for a
    # channel and a place of the weight.
    for node in editor.of_type("Conv"):
        makers = [editor.maker(name) for name in node.input]
        if len(makers) != 2 or any(each is None or each.op_type != "Transpose" for each in makers):
            continue
        images, kernels = (each for each in makers if each is not None)
        x = images.input[0]
        shape = editor.shape(x)
        turned = [1, 0, *range(2, 0 if shape is None else len(shape))]
        if shape is None or attribute(images, "perm", []) != turned or attribute(kernels, "perm", []) != turned:
            continue
        known = _known(shape[1:])
        errors = _known((editor.shape(kernels.input[0]) or ())[2:])
        if attribute(node, "group", 1) != 1 or not known or not errors:
            continue
        axes = len(errors)
        channels, *size = known
        dilation = attribute(node, "strides", [1] * axes)
        stride = attribute(node, "dilations", [1] * axes)
        pads = attribute(node, "pads", [0] * 2 * axes)
        reach = [
            (size[i] + pads[i] + pads[axes + i] - stride[i] * (errors[i] - 1) - 1) // dilation[i] + 1
            for i in range(axes)
        ]
        add = editor.before(node)
        beside = add.Transpose(x, perm=[0, *range(2, 2 + axes), 1])
        beside = add.Reshape(beside, editor.integers([1, -1, *size[:-1], size[-1] * channels]))
        # The last axis is stepped over one by one, so that all these places are computed.
        wide = (reach[-1] - 1) * dilation[-1] + 1
        # The result is [1, Co, ..., at least wide C].
        made = add.Conv(
            beside,
            node.input[1],
            strides=[*dilation[:-1], 1],
            dilations=[*stride[:-1], stride[-1] * channels],
            pads=[*pads[: axes - 1], pads[axes - 1] * channels, *pads[axes:-1], pads[-1] * channels],
        )
        made = add.Slice(made, editor.integers([0]), editor.integers([wide * channels]), editor.integers([1 + axes]))
        made = add.Reshape(made, editor.integers([-1, *reach[:-1], wide, channels]))
        if dilation[-1] > 1:
            made = add.Slice(
                made,
                editor.integers([0]),
                editor.integers([wide]),
                editor.integers([axes]),
                editor.integers([dilation[-1]]),
            )
        editor.replace(node, [add.Transpose(made, perm=[axes + 1, 0, *range(1, axes + 1)])])


def _known(lengths: Sequence[int | None]) -> list[int]:
    """Return lengths of axes; empty if one is unknown."""
    return [] if None in lengths else [length for length in lengths if length is not None]


def multiply_turned(editor: Editor) -> None:
    """Merge a ``Transpose`` before a product of two matrices into ``Gemm``."""

    def source(name: str) -> str | None:
        node = editor.maker(name)
        if node is None or node.op_type != "Transpose" or attribute(node, "perm", []) != TURNED:
            return None
        return str(node.input[0])

    for node in editor.of_type("MatMul", "Gemm"):
        both = [source(name) for name in node.input[:2]]
        shapes = [editor.shape(name) for name in node.input[:2]]
        if not any(both) or any(shape is None or len(shape) != 2 for shape in shapes):
            continue
        scales = {each.name: each.f for each in node.attribute if each.name in ("alpha", "beta")}
        inputs = [given or name for name, given in zip(node.input[:2], both, strict=True)]
        turns = [attribute(node, name, 0) ^ bool(given) for name, given in zip(("transA", "transB"), both, strict=True)]
        node.CopyFrom(
            helper.make_node(
                "Gemm", [*inputs, *node.input[2:]], list(node.output), transA=turns[0], transB=turns[1], **scales
            )
        )
