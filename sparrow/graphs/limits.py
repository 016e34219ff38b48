"""Check operators whose cost depends on their inputs, and compute the workspace memory of operators."""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto

from .errors import SkeletonError
from .graph import attributes
from .values import FLOATS, LARGEST_SIZE, Values, named, names

CHANNELS = 16
"""Channels in a block of a convolution, on processors with the widest vectors."""
MATRIX = 96
"""Additional bytes per matrix product, if there are many."""
PLACE = 32
"""Additional bytes per expanded value, or per index of a one-hot encoding."""
LARGEST_ATTRIBUTE = 2**24

TRANSFORMS: dict[str, dict[int, int]] = {
    "STFT": {1: 1, 3: 1},
    "DFT": {1: 1},
    "MelWeightMatrix": {0: 1, 1: 1, 2: 1},
    "HannWindow": {0: 1},
    "HammingWindow": {0: 1},
    "BlackmanWindow": {0: 1},
}
"""Signal operators -> positions of the inputs that are lengths, with the smallest value of each."""
LARGEST_TRANSFORM = 2**20
MOST_TRANSFORM_FLOPS = 2**32
"""Limit of the FLOPs of a node's Fourier transforms per sample: some ten seconds with ONNX Runtime on one core."""

SIZING = names(
    """
    AffineGrid BlackmanWindow CenterCropPad ConstantOfShape DFT Expand HammingWindow HannWindow MelWeightMatrix OneHot
    Pad Range Reshape Resize STFT Split SplitToSequence Tile TopK Trilu
    """
)
"""Operators with an input that is a size."""


def check_numbers(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError for numbers that are implausible or would crash the runtime."""
    # The numbers of a constant are data.
    if node.op_type != "Constant":
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
            raise SkeletonError(f"{named(node)}: its sizes are not finite numbers")
        if data.dtype.kind in "iu" and any(abs(int(number)) > LARGEST_SIZE for number in data.flat):
            raise SkeletonError(f"{named(node)}: a size is beyond {LARGEST_SIZE}")


def _check_divisor(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError for integers divided by 0 or -1, which can crash the process with a hardware exception."""
    if any(name not in values.types for name in node.input[:2]):
        return
    if values.kind(node.input[0]) in FLOATS:
        return
    divisor = values.data.get(node.input[1])
    varies = node.input[1] in values.varies
    if divisor is None or varies or np.isin(divisor, (0, -1)).any():
        raise SkeletonError(
            f"{named(node)}: integers are divided by a value that may be 0 or -1; divide by a "
            "constant other than these, or divide floats"
        )


def _check_transform(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError if the lengths of a transform are not valid constants."""
    for place, least in TRANSFORMS[node.op_type].items():
        name = node.input[place] if place < len(node.input) else ""
        if not name:
            continue
        given = values.data.get(name)
        if given is None or given.size != 1 or not least <= float(given.item()) <= LARGEST_TRANSFORM:
            raise SkeletonError(
                f"{named(node)}: its input {place} must be one constant from {least} to {LARGEST_TRANSFORM}"
            )

    if node.op_type == "MelWeightMatrix":
        _check_mel(node, values)
    if node.op_type in ("DFT", "STFT"):
        length, count = _transforms(node, values)
        flops = count // values.samples * _transform_flops(length)
        if flops > MOST_TRANSFORM_FLOPS:
            raise SkeletonError(
                f"{named(node)}: {count // values.samples:,} transforms of {length:,} values take {flops:,} FLOPs "
                f"for one sample; the maximum is {MOST_TRANSFORM_FLOPS:,}; use lengths that are powers of two, which "
                "take a tenth"
            )


def _check_mel(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError if the bands exceed the spectrum, because some runtimes write beyond it."""
    given = [values.data.get(name) for name in node.input]
    if len(given) != 5 or any(each is None or each.size != 1 for each in given):
        raise SkeletonError(f"{named(node)}: its inputs must be five constants")
    _, length, rate, lowest, highest = (float(each.item()) for each in given if each is not None)
    # Conversion to mel and back in single precision may raise frequencies by a millionth.
    last = (length + 1) * highest * (1 + 1e-6) / rate
    if not (0 <= lowest <= highest and last < length // 2 + 1):
        raise SkeletonError(
            f"{named(node)}: bands from {lowest:g} to {highest:g} Hz do not lie within the spectrum of "
            f"{length:g} values at {rate:g} Hz; end them at half the rate, of an even length"
        )


def _transforms(node: NodeProto, values: Values) -> tuple[int, int]:
    """Return the length and the number of a node's transforms.

    Raises SkeletonError if the length is unknown or too large.
    """
    shape = _shape_of(node, values, 0)
    length = _constant_of(node, values, 3 if node.op_type == "STFT" else 1)
    if node.op_type == "STFT":
        window = _shape_of(node, values, 2)
        if length is None and len(window) == 1:
            length = window[0]
        step = _constant_of(node, values, 1)
        if length is None or step is None or len(shape) < 2 or not 1 <= length <= shape[1]:
            raise SkeletonError(f"{named(node)}: its frames must have one constant length, at most the signal's")
        if window not in ([], [length]):
            raise SkeletonError(f"{named(node)}: its window has the shape {window}, its frames have {length} values")
        return length, shape[0] * (1 + (shape[1] - length) // step)
    if shape[-1:] not in ([1], [2]):
        raise SkeletonError(f"{named(node)}: the last axis of {shape} must be 1, for real values, or 2")
    attributes = {each.name: each.i for each in node.attribute}
    # Up to version 19 the axis is an attribute, from 20 an input.
    axis = attributes.get("axis", 1) if values.opset < 20 else _constant_of(node, values, 2, -2)
    if axis is None or not -len(shape) <= axis < len(shape) - 1 or axis == -1:
        raise SkeletonError(f"{named(node)}: its axis must be a constant, one of {shape} except the last")
    along = shape[axis]
    if attributes.get("inverse") and attributes.get("onesided"):
        along = 2 * (along - 1)
    length = along if length is None else length
    if not 1 <= length <= LARGEST_TRANSFORM:
        raise SkeletonError(f"{named(node)}: transforms {length} values; the length must be 1 to {LARGEST_TRANSFORM}")
    return length, math.prod(shape[:-1]) // max(1, shape[axis])


def _check_resize(node: NodeProto, values: Values) -> None:
    """Raise SkeletonError for an unsupported resize, or sizes that are not constant."""
    given = attributes(node)
    mode = given.get("mode", b"nearest")
    kinds = {values.types[name].tensor_type.elem_type for name in node.input[:1] if name in values.types}
    if mode == b"cubic" and not kinds <= FLOATS:
        raise SkeletonError(f"{named(node)}: a cubic resize takes no integers; cast to float first, or resize linearly")
    if given.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise SkeletonError(f"{named(node)}: keeps an aspect ratio; name the sizes")
    if given.get("coordinate_transformation_mode", b"") == b"tf_crop_and_resize":
        raise SkeletonError(f"{named(node)}: crops, too; slice before it")
    for name in filter(None, node.input[2:]):
        sizes = values.data.get(name)
        if sizes is None:
            raise SkeletonError(f"{named(node)}: its sizes are not known before it runs; make them constants")
        if not np.greater(sizes, 0).all():
            raise SkeletonError(f"{named(node)}: a size or scale is not above 0")


def _shape_of(node: NodeProto, values: Values, place: int) -> list[int]:
    """Return the shape of an input, [] if unknown."""
    name = node.input[place] if place < len(node.input) else ""
    return values.shape(name) if name in values.types else []


def _constant_of(node: NodeProto, values: Values, place: int, usual: int | None = None) -> int | None:
    """Return the integer constant of an input, None if unknown; ``usual`` for a missing input."""
    name = node.input[place] if place < len(node.input) else ""
    if not name:
        return usual
    data = values.data.get(name)
    return int(data.item()) if data is not None and data.size == 1 and np.isfinite(data).all() else None


def bytes_beside(node: NodeProto, values: Values) -> int:
    """Return the workspace of an operator in bytes, as measured with ONNX Runtime."""
    given = attributes(node)
    if node.op_type == "ConvTranspose":
        # The input is unfolded.
        taken = values.shape(node.input[0])
        kernel = values.shape(node.input[1])
        return 4 * math.prod(kernel[1:]) * math.prod(taken[2:])
    if node.op_type == "Conv":
        # ONNX Runtime converts images to blocks of CHANNELS; images with fewer channels are read directly.
        images = [node.output[0]]
        if values.shape(node.input[0])[1] >= CHANNELS:
            images.append(node.input[0])
        return sum(_in_channels(image, values) for image in images)
    if node.op_type == "MatMul":
        return MATRIX * math.prod(values.shape(node.output[0])[:-2])
    if node.op_type in ("Softmax", "LogSoftmax"):
        # For another axis than the last, a copy is transposed, and the result is transposed back.
        shape = values.shape(node.output[0])
        last = math.prod(shape[int(given.get("axis", -1)) % max(1, len(shape)) + 1 :]) == 1
        return 0 if last else 2 * values.sizes[node.output[0]]
    if node.op_type in ("Expand", "OneHot"):
        return PLACE * math.prod(values.shape(node.input[0]))
    if node.op_type in ("DFT", "STFT"):
        length, _ = _transforms(node, values)
        return 16 * length if _is_power(length) else 160 * _turned_length(length)
    if node.op_type == "Resize" and node.output[0]:
        cubic = given.get("mode", b"nearest") == b"cubic"
        antialias = bool(given.get("antialias"))
        return _resized(values.shape(node.input[0]), values.shape(node.output[0]), cubic, antialias)
    return 0


def _in_channels(name: str, values: Values) -> int:
    """Return the bytes of [N, C, H, W] images in blocks of channels, 0 for other shapes."""
    shape = values.shape(name)
    if len(shape) != 4 or not shape[1]:
        return 0
    return values.sizes[name] // shape[1] * (-(-shape[1] // CHANNELS) * CHANNELS)


def _is_power(length: int) -> bool:
    return length & (length - 1) == 0


def _turned_length(length: int) -> int:
    """Return the power of two for computing a transform of another length."""
    return 1 << (2 * length - 1).bit_length()


def _transform_flops(length: int) -> int:
    """Return the FLOPs of one complex transform: 5 n log n for a power of two, otherwise three larger ones."""
    if _is_power(length):
        return 5 * length * length.bit_length()
    larger = _turned_length(length)
    return 15 * larger * larger.bit_length()


def _resized(taken: list[int], made: list[int], cubic: bool, antialias: bool) -> int:
    """Return the bytes of a resize's workspace: a table per axis, and intermediate values."""
    tables = 128 * sum(one + other for one, other in zip(taken, made, strict=True) if one != other)
    if antialias:
        # The last axis is resized first.
        parts = (math.prod(taken[:axis]) * math.prod(made[axis:]) for axis in range(1, len(taken)))
        return tables + 4 * max(parts, default=0)
    if cubic and len(taken) > 1:
        # Each row that is read is resized, for one channel at a time.
        return tables + 48 * min(taken[-2], 4 * made[-2]) * made[-1]
    return tables
