"""Checks of single operators whose numbers decide what they take, and the memory that operators take beside results."""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto

from .errors import SkeletonError
from .graph import attributes
from .values import FLOATS, LARGEST_SIZE, Values, named, names

CHANNELS = 16
"""Channels that a convolution takes at a time, on processors with the widest vectors."""
MATRIX = 96
"""Bytes beside each of many products of matrices."""
PLACE = 32
"""Bytes beside each value that is expanded, or each index of a one-hot encoding."""
LARGEST_ATTRIBUTE = 2**24

TRANSFORMS: dict[str, dict[int, int]] = {
    "STFT": {1: 1, 3: 1},
    "DFT": {1: 1},
    "MelWeightMatrix": {0: 1, 1: 1, 2: 1},
    "HannWindow": {0: 1},
    "HammingWindow": {0: 1},
    "BlackmanWindow": {0: 1},
}
"""Operators of signals -> the places of their lengths among the inputs, and the least value of each."""
LARGEST_TRANSFORM = 2**20
MOST_TRANSFORM_FLOPS = 2**32
"""FLOPs of one node's Fourier transforms for one sample: ONNX Runtime takes some ten seconds for them on one core."""

SIZING = names(
    """
    AffineGrid BlackmanWindow CenterCropPad ConstantOfShape DFT Expand HammingWindow HannWindow MelWeightMatrix OneHot
    Pad Range Reshape Resize STFT Split SplitToSequence Tile TopK Trilu
    """
)
"""Operators for which a number among their inputs is a size."""


def check_numbers(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError for a node with numbers that no layer needs, or that would make its runtime fail."""
    if node.op_type != "Constant":  # its numbers are data
        for each in node.attribute:
            if any(abs(number) > LARGEST_ATTRIBUTE for number in (each.i, *each.ints)):
                raise SkeletonError(f"{named(node)}: {each.name[:80]} is beyond {LARGEST_ATTRIBUTE}")
    if node.op_type in ("Div", "Mod"):
        _check_divisor(node, values)
    if node.op_type == "Einsum" and len(node.input) > 2:
        raise SkeletonError(f"{named(node)} joins {len(node.input)} operands; join two at a time")
    if node.op_type in TRANSFORMS:
        _check_transform(node, values)
    if node.op_type == "Resize":
        _check_resize(node, values)
    if node.op_type not in SIZING:
        return
    for name in node.input[0 if node.op_type in ("ConstantOfShape", "Range") else 1 :]:
        data = values.data.get(name, np.zeros(0))
        resized = node.op_type in ("Range", "Resize") and data.dtype.kind == "f"
        if resized and not (np.isfinite(data).all() and (np.abs(data) <= LARGEST_SIZE).all()):
            raise SkeletonError(f"{named(node)}: its sizes are no finite numbers")
        if data.dtype.kind in "iu" and any(abs(int(number)) > LARGEST_SIZE for number in data.flat):
            raise SkeletonError(f"{named(node)}: a size is beyond {LARGEST_SIZE}")


def _check_divisor(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError for whole numbers divided by 0 or -1: the processor's trap for it ends the process."""
    if any(name not in values.types for name in node.input[:2]):
        return
    if values.kind(node.input[0]) in FLOATS:
        return
    divisor = values.data.get(node.input[1])
    varies = node.input[1] in values.varies
    if divisor is None or varies or np.isin(divisor, (0, -1)).any():
        raise SkeletonError(
            f"{named(node)}: whole numbers are divided by what may be 0 or -1; divide by a constant that is "
            f"neither, or floats"
        )


def _check_transform(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError unless the lengths of a transform are constants that it can work with."""
    for place, least in TRANSFORMS[node.op_type].items():
        name = node.input[place] if place < len(node.input) else ""
        if not name:
            continue
        given = values.data.get(name)
        if given is None or given.size != 1 or not least <= float(given.item()) <= LARGEST_TRANSFORM:
            raise SkeletonError(
                f"{named(node)}: its input {place} is to be one constant from {least} to {LARGEST_TRANSFORM}"
            )

    if node.op_type == "MelWeightMatrix":
        _check_mel(node, values)
    if node.op_type in ("DFT", "STFT"):
        length, count = _transforms(node, values)
        flops = count // values.samples * _transform_flops(length)
        if flops > MOST_TRANSFORM_FLOPS:
            raise SkeletonError(
                f"{named(node)}: {count // values.samples:,} transforms of {length:,} values take {flops:,} FLOPs "
                f"for one sample, at most {MOST_TRANSFORM_FLOPS:,} are accepted; lengths that are powers of two "
                "take a tenth"
            )


def _check_mel(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError unless the bands lie within the spectrum: some runtimes write beyond it."""
    given = [values.data.get(name) for name in node.input]
    if len(given) != 5 or any(each is None or each.size != 1 for each in given):
        raise SkeletonError(f"{named(node)}: its inputs are to be five constants")
    _, length, rate, lowest, highest = (float(each.item()) for each in given if each is not None)
    # Frequencies go to mel and back in single precision, which may raise them by a millionth.
    last = (length + 1) * highest * (1 + 1e-6) / rate
    if not (0 <= lowest <= highest and last < length // 2 + 1):
        raise SkeletonError(
            f"{named(node)}: bands from {lowest:g} to {highest:g} Hz do not lie within the spectrum of "
            f"{length:g} values at {rate:g} Hz; let them end at half the rate, of an even length"
        )


def _transforms(node: NodeProto, values: Values) -> tuple[int, int]:
    """Return the length of the transforms that a node makes, and how many there are. Raises SkeletonError."""
    shape = _shape_of(node, values, 0)
    length = _constant_of(node, values, 3 if node.op_type == "STFT" else 1)
    if node.op_type == "STFT":
        window = _shape_of(node, values, 2)
        if length is None and len(window) == 1:
            length = window[0]
        step = _constant_of(node, values, 1)
        if length is None or step is None or len(shape) < 2 or not 1 <= length <= shape[1]:
            raise SkeletonError(f"{named(node)}: its frames are to have one constant length, of the signal's most")
        if window not in ([], [length]):
            raise SkeletonError(f"{named(node)}: its window is of the shape {window}, its frames of {length}")
        return length, shape[0] * (1 + (shape[1] - length) // step)
    if shape[-1:] not in ([1], [2]):
        raise SkeletonError(f"{named(node)}: the last axis of {shape} is to be 1, of real values, or 2")
    attributes = {each.name: each.i for each in node.attribute}
    # Up to version 19 the axis is an attribute, from 20 an input.
    axis = attributes.get("axis", 1) if values.opset < 20 else _constant_of(node, values, 2, -2)
    if axis is None or not -len(shape) <= axis < len(shape) - 1 or axis == -1:
        raise SkeletonError(f"{named(node)}: its axis is to be a constant, one of {shape} but for the last")
    along = shape[axis]
    if attributes.get("inverse") and attributes.get("onesided"):
        along = 2 * (along - 1)
    length = along if length is None else length
    if not 1 <= length <= LARGEST_TRANSFORM:
        raise SkeletonError(f"{named(node)}: transforms {length} values, from 1 to {LARGEST_TRANSFORM} are accepted")
    return length, math.prod(shape[:-1]) // max(1, shape[axis])


def _check_resize(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError for a resize that no runtime does, or whose sizes do not grow with its input's."""
    given = attributes(node)
    mode = given.get("mode", b"nearest")
    kinds = {values.types[name].tensor_type.elem_type for name in node.input[:1] if name in values.types}
    if mode == b"cubic" and not kinds <= FLOATS:
        raise SkeletonError(
            f"{named(node)}: a cubic resize takes no whole numbers; cast to float first, or resize linearly"
        )
    if given.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise SkeletonError(f"{named(node)}: keeps an aspect ratio; name the sizes")
    if given.get("coordinate_transformation_mode", b"") == b"tf_crop_and_resize":
        raise SkeletonError(f"{named(node)}: crops, too; slice before it")
    for name in filter(None, node.input[2:]):
        sizes = values.data.get(name)
        if sizes is None:
            raise SkeletonError(f"{named(node)}: its sizes are not known before it runs; let them be constants")
        if not np.greater(sizes, 0).all():
            raise SkeletonError(f"{named(node)}: a size or scale is not above 0")


def _shape_of(node: NodeProto, values: Values, place: int) -> list[int]:
    """Return the shape of an input, [] without one that is known."""
    name = node.input[place] if place < len(node.input) else ""
    return values.shape(name) if name in values.types else []


def _constant_of(node: NodeProto, values: Values, place: int, usual: int | None = None) -> int | None:
    """Return the whole number that an input is, None where it is not known; ``usual`` without one."""
    name = node.input[place] if place < len(node.input) else ""
    if not name:
        return usual
    data = values.data.get(name)
    return int(data.item()) if data is not None and data.size == 1 and np.isfinite(data).all() else None


def bytes_beside(node: NodeProto, values: Values) -> int:
    """Return the bytes that an operator takes beside its inputs and results, as measured of ONNX Runtime."""
    given = attributes(node)
    if node.op_type == "ConvTranspose":
        # It unfolds its input.
        taken, kernel = values.shape(node.input[0]), values.shape(node.input[1])
        return 4 * math.prod(kernel[1:]) * math.prod(taken[2:])
    if node.op_type == "Conv":
        # ONNX Runtime brings images into a form of its own, of CHANNELS at a time; it reads fewer as they are.
        images = [node.output[0]]
        if values.shape(node.input[0])[1] >= CHANNELS:
            images.append(node.input[0])
        return sum(_in_channels(image, values) for image in images)
    if node.op_type == "MatMul":
        return MATRIX * math.prod(values.shape(node.output[0])[:-2])
    if node.op_type in ("Softmax", "LogSoftmax"):
        # Along another axis than the last it turns a copy, and turns the result back.
        shape = values.shape(node.output[0])
        last = math.prod(shape[int(given.get("axis", -1)) % max(1, len(shape)) + 1 :]) == 1
        return 0 if last else 2 * values.sizes[node.output[0]]
    if node.op_type in ("Expand", "OneHot"):
        return PLACE * math.prod(values.shape(node.input[0]))
    if node.op_type in ("DFT", "STFT"):
        length, _ = _transforms(node, values)
        return 16 * length if _is_power(length) else 160 * _turned_length(length)
    if node.op_type == "Resize" and node.output[0]:
        how = given.get("mode", b"nearest") == b"cubic", bool(given.get("antialias"))
        return _resized(values.shape(node.input[0]), values.shape(node.output[0]), *how)
    return 0


def _in_channels(name: str, values: Values) -> int:
    """Return the bytes of images in ONNX Runtime's own form; 0 of others than [N, C, H, W]."""
    shape = values.shape(name)
    if len(shape) != 4 or not shape[1]:
        return 0
    return values.sizes[name] // shape[1] * (-(-shape[1] // CHANNELS) * CHANNELS)


def _is_power(length: int) -> bool:
    return length & (length - 1) == 0


def _turned_length(length: int) -> int:
    """Return the power of two in which a transform of another length is made."""
    return 1 << (2 * length - 1).bit_length()


def _transform_flops(length: int) -> int:
    """Return the FLOPs of one complex transform: 5 n log n of a power of two, three of a larger one of any other."""
    if _is_power(length):
        return 5 * length * length.bit_length()
    larger = _turned_length(length)
    return 15 * larger * larger.bit_length()


def _resized(taken: list[int], made: list[int], cubic: bool, antialias: bool) -> int:
    """Return the bytes that a resize takes beside both: a table for each axis, and what is resized along some axes."""
    tables = 128 * sum(one + other for one, other in zip(taken, made, strict=True) if one != other)
    if antialias:
        # The last axis comes first.
        parts = (math.prod(taken[:axis]) * math.prod(made[axis:]) for axis in range(1, len(taken)))
        return tables + 4 * max(parts, default=0)
    if cubic and len(taken) > 1:
        # The rows that are read, each resized, of one channel at a time.
        return tables + 48 * min(taken[-2], 4 * made[-2]) * made[-1]
    return tables
