"""Bounds on what an ONNX skeleton makes its readers hold, found before ONNX or ONNX Runtime sees it.

A file of 300 bytes can ask for gigabytes: a constant is described by its shape, a chain of concatenations doubles. So
the fields of the file are counted before it is parsed, only ``OPERATORS`` are accepted, and the size of every value is
inferred node by node: one that is too large, or whose size is not known beforehand, ends the walk before anything of
its size exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, TypeProto
from onnx.checker import ValidationError
from onnx.defs import SchemaError, get_schema
from onnx.shape_inference import InferenceError

from ..protocol.manifest import Array
from .costs import REFERENCE, Work, work_of
from .errors import SkeletonError

MIB = 1024 * 1024
MOST_FIELDS = 500_000
"""Most fields of the file, some 10,000 nodes: parsed, each takes about a hundred bytes."""
DEEPEST = 64
"""Messages within messages that are accepted."""
MOST_ACTIVATIONS = 256 * MIB
"""Bytes of values that may be alive at a time for one sample."""
MOST_CONSTANTS = 64 * MIB
"""Bytes of values that depend on no input, beyond ``WEIGHTS`` times those of the weights: they are computed at load."""
WEIGHTS = 4
MOST_AT_ONCE = 1024 * MIB
"""Bytes that may be alive where several samples run at a time."""
CHANNELS = 16
"""Channels that a convolution takes at a time, on processors with the widest vectors."""
MATRIX = 96
"""Bytes beside each of many products of matrices."""
PLACE = 32
"""Bytes beside each value that is expanded, or each index of a one-hot encoding."""
LARGEST_ATTRIBUTE = 2**24
LARGEST_SIZE = 2**31
SMALL = 1024
"""Most elements of a value that is computed to learn a size."""


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


FOLDED = names(
    """
    Add Cast CastLike Ceil Concat Div Equal Expand Floor Gather Greater Identity Less Max Min Mod Mul Neg Range
    ReduceProd ReduceSum Reshape Slice Squeeze Sub Unsqueeze Where
    """
)
"""Operators that sizes are computed with."""

_PLAIN: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Cast": lambda given, to: given.astype(onnx.helper.tensor_dtype_to_np_dtype(to)),
    "Concat": lambda *given, axis: np.concatenate(given, axis),
    "Mul": np.multiply,
    "Squeeze": lambda given, axes=None: np.squeeze(given, None if axes is None else tuple(axes)),
    "Sub": np.subtract,
}
"""The commonest of them: importing ONNX's reference implementation takes longer than a small model's first step."""

SIZING = names(
    """
    AffineGrid BlackmanWindow CenterCropPad ConstantOfShape DFT Expand HammingWindow HannWindow MelWeightMatrix OneHot
    Pad Range Reshape Resize STFT Split SplitToSequence Tile TopK Trilu
    """
)
"""Operators for which a number among their inputs is a size."""

LAYERS = names(
    """
    Abs Acos Acosh And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BitShift
    BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Celu Clip Constant Conv ConvTranspose Cos Cosh CumSum DepthToSpace
    Dropout Einsum Elu Erf Exp EyeLike Flatten GRU GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool
    GlobalMaxPool GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Hardmax InstanceNormalization
    IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu LessOrEqual Log LogSoftmax LpNormalization LpPool MatMul
    MaxPool MaxUnpool Mean MeanVarianceNormalization Mish Not Or PRelu Pow RMSNormalization RNN Reciprocal
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceSumSquare Relu Round
    ScatterElements ScatterND Selu SequenceAt Shape Shrink Sigmoid Sign Sin Sinh Size Softmax Softplus Softsign
    SpaceToDepth Sqrt Sum Swish Tan Tanh ThresholdedRelu Transpose Xor
    """
)
"""Layers, and what else is computed between them."""

OPERATORS = FOLDED | SIZING | LAYERS
"""Operators that are accepted: those whose results have a size that is known beforehand."""

SAME = names(
    """
    Celu Gelu GroupNormalization HardSwish InstanceNormalization MeanVarianceNormalization Mish RMSNormalization
    Softsign Swish
    """
)
"""Operators whose result is as their first input, of which ONNX itself may say nothing."""

_FACTORS = names("GroupNormalization PRelu RMSNormalization")

_BYTES: dict[int, int] = {
    int(number): np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number)).itemsize
    for number in (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL),
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    )
}

_FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}

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
MOST_SECONDS = 2.0
"""Seconds that a node may take, as predicted: nothing ends a run within a node."""
MOST_GRAPH_SECONDS = 60.0
"""Seconds that a graph may take for one sample, as predicted."""

_HELD = {"LSTM": 12, "GRU": 12, "RNN": 12, "Attention": 4, "Where": 2}
"""Operators that take a multiple of their results while they run."""


def check_fields(data: bytes) -> None:
    """Raise SkeletonError for a file with more fields, or deeper messages, than a graph needs. Nothing is parsed."""
    _count(memoryview(data), ModelProto.DESCRIPTOR, 0, MOST_FIELDS)


def _count(data: memoryview, kind: Any, depth: int, left: int) -> int:
    """Return ``left`` less the fields of this message."""
    if depth > DEEPEST:
        raise SkeletonError(f"the graph nests messages deeper than {DEEPEST}; a graph without subgraphs does not")
    fields, position = kind.fields_by_number, 0
    while position < len(data):
        key, position = _varint(data, position)
        left -= 1
        if left < 0:
            raise SkeletonError(f"the graph has more than {MOST_FIELDS} fields; publish a smaller graph")
        wire, field = key & 7, fields.get(key >> 3)
        if wire == 0:
            _, position = _varint(data, position)
        elif wire in (1, 5):
            position += 8 if wire == 1 else 4
        elif wire == 2:
            length, position = _varint(data, position)
            if length > len(data) - position:
                raise _not_onnx()
            if field is not None and field.message_type is not None:
                left = _count(data[position : position + length], field.message_type, depth + 1, left)
            position += length
        else:
            raise _not_onnx()
    return left


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise _not_onnx()


def _not_onnx() -> SkeletonError:
    return SkeletonError("the graph is not an ONNX file; send the whole file")


def check_sizes(model: ModelProto) -> None:
    """Raise SkeletonError unless every node is one of ``OPERATORS`` and every value has a size that is known and small.

    model: one graph without subgraphs and functions.
    """
    Walk(model, samples=1).run()


def samples_at_once(model: ModelProto, most: int) -> int:
    """Return how many samples, at most ``most``, this checked model may run at a time.

    They take at most ``MOST_AT_ONCE`` bytes, and no node of the model ``MOST_SECONDS``.
    """
    while most > 1:
        try:
            walk = Walk(model, samples=most)
            if walk.run() <= MOST_AT_ONCE and max(map(REFERENCE.seconds, walk.work), default=0) <= MOST_SECONDS:
                return most
        except SkeletonError:
            pass
        most = max(1, most // 4)
    return 1


class Walk:
    """The nodes in order, with type, shape and, where small and constant, data of each value.

    weights: inputs that are a model's tensors: they count as weights, not as activations. ``alive``: for each node, the
    bytes that are held while it runs; ``work``: for each node, the work of it.
    """

    def __init__(self, model: ModelProto, *, samples: int, weights: Collection[str] = ()) -> None:
        self._model, self._samples, self._given = model, samples, frozenset(weights)
        self.alive: list[int] = []
        self.work: list[Work] = []
        self._types: dict[str, TypeProto] = {}
        self._sizes: dict[str, int] = {}
        self._data: dict[str, Array] = {}
        self._pieces: dict[str, list[TypeProto]] = {}  # of what was split into a sequence
        self._varies: set[str] = set()
        self._constants = self._weights = 0
        for tensor in model.graph.initializer:
            self._add(tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
            self._weights += self._sizes[tensor.name]
            if math.prod(tensor.dims) <= SMALL and (has_data(tensor) or 0 in tensor.dims):
                self._data[tensor.name] = _array(tensor)
        for value in model.graph.input:
            described = TypeProto()
            described.CopyFrom(value.type)
            for dim in described.tensor_type.shape.dim:
                if dim.WhichOneof("value") != "dim_value":
                    dim.dim_value = samples
            self._add(value.name, described)
            self._varies.add(value.name)
            if value.name in self._given:
                self._weights += self._sizes[value.name]
        self._most = MOST_ACTIVATIONS * samples + (WEIGHTS * self._weights if weights else 0)

    def run(self) -> int:
        """Return the most bytes of values that are alive at a time, those of constants left out."""
        nodes = self._model.graph.node
        readers: dict[str, list[str]] = {value.name: [""] for value in self._model.graph.output}
        for node in nodes:
            for name in node.input:
                readers.setdefault(name, []).append(node.op_type)
        last = {name: place for place, node in enumerate(nodes) for name in node.input}
        last |= {value.name: len(nodes) for value in self._model.graph.output}
        alive = {
            value.name: self._sizes[value.name] for value in self._model.graph.input if value.name not in self._given
        }
        peak = held = sum(alive.values())
        for place, node in enumerate(nodes):
            varies = not self._varies.isdisjoint(node.input)
            made = self._infer(node)
            beside = _HELD.get(node.op_type, 0) * sum(made.values()) + self._beside(node)
            self.work.append(work_of(node, self, [each for name in node.output for each in readers.get(name, ())]))
            self._check_work(node)
            if varies:
                self._varies.update(made)
                alive |= made
                held += sum(made.values())
                peak = max(peak, held + beside)
                if peak > self._most:
                    raise SkeletonError(
                        f"{_named(node)}: {peak:,} bytes of values would be alive for one sample, at most "
                        f"{MOST_ACTIVATIONS:,} are accepted"
                    )
                self.alive.append(held + beside)
                for name in {*node.input, *made}:
                    if last.get(name, -1) <= place:
                        held -= alive.pop(name, 0)
            else:
                self._constants += sum(made.values())
                self.alive.append(held + self._constants + beside)
                if self._constants + beside > MOST_CONSTANTS + WEIGHTS * self._weights:
                    raise SkeletonError(
                        f"{_named(node)}: the graph would compute {self._constants:,} bytes of constants; compute "
                        f"less in forward that does not depend on the input"
                    )
        seconds = sum(map(REFERENCE.seconds, self.work))
        if self._samples == 1 and seconds > MOST_GRAPH_SECONDS:
            raise SkeletonError(
                f"the graph is predicted to take {seconds:,.0f} s for one sample, at most {MOST_GRAPH_SECONDS:g} s are "
                f"accepted; publish a smaller model"
            )
        return peak

    def _infer(self, node: NodeProto) -> dict[str, int]:
        """Return the bytes of what the node makes, by name."""
        if node.op_type not in OPERATORS:
            raise SkeletonError(f"{_named(node)}: this operator is not accepted; build forward of common layers")
        self._check_numbers(node)
        read = {name for name in node.input if name}
        if not read <= self._types.keys() | self._pieces.keys():
            raise SkeletonError(f"{_named(node)} reads what no node before it makes; export the graph in order")
        if repeated := [name for name in node.output if name in self._types.keys() | self._pieces.keys()]:
            raise SkeletonError(f"{_named(node)} makes {repeated[0][:80]!r} a second time; export the graph again")
        if node.op_type == "SplitToSequence":
            return self._split(node)
        found = self._piece(node) if node.op_type == "SequenceAt" else self._types_of(node, read)
        for name in filter(None, node.output):
            if name not in found:
                raise _unknown(node)
            self._add(name, found[name], node)
        self._fold(node)
        return {name: self._sizes[name] for name in node.output if name}

    def _types_of(self, node: NodeProto, read: set[str]) -> dict[str, TypeProto]:
        """Return the types and shapes of what the node makes."""
        self._check_factors(node)
        if node.op_type in SAME:
            return dict.fromkeys(node.output, self._types[node.input[0]])
        if node.op_type == "MaxUnpool":  # writes where maxima lay: into nothing but what they were taken from
            pool = next((each for each in self._model.graph.node if node.input[1] in each.output), None)
            if pool is None or pool.op_type != "MaxPool" or node.input[1] != pool.output[1]:
                raise SkeletonError(f"{_named(node)}: its places are not those of a maximum; take them of MaxPool")
            if self.shape(node.input[0]) != self.shape(pool.output[0]):
                raise SkeletonError(f"{_named(node)}: has other values than maxima; give one for each")
            size = self._data.get(node.input[2]) if len(node.input) > 2 else None
            if size is None or list(size) != self.shape(pool.input[0]):
                raise SkeletonError(f"{_named(node)}: its result is not as large as what maxima were taken from")
            return dict.fromkeys(node.output, self._types[pool.input[0]])
        if not read <= self._types.keys():
            raise SkeletonError(f"{_named(node)} takes a sequence; export the graph without")
        (opset,) = self._model.opset_import
        known = {name: onnx.numpy_helper.from_array(self._data[name], name) for name in read & self._data.keys()}
        try:
            return onnx.shape_inference.infer_node_outputs(
                get_schema(node.op_type, opset.version, ""),
                node,
                {name: self._types[name] for name in read},
                known,
                opset_imports=[opset],
                ir_version=self._model.ir_version,
            )
        except (InferenceError, ValidationError, SchemaError, RuntimeError, ValueError, TypeError) as error:
            raise SkeletonError(f"{_named(node)}: its result cannot be inferred ({str(error)[:200]})") from None

    def _check_factors(self, node: NodeProto) -> None:
        """Raise SkeletonError for factors that would enlarge a result.

        ONNX's inference says of these operators that the result is as the input. ONNX Runtime, or the operators that it
        takes them apart into, make a value of the larger lengths of both.
        """
        if node.op_type not in _FACTORS:
            return
        taken = self.shape(node.input[0])
        channels = [taken[1]] if len(taken) > 1 else []
        for name in node.input[1:]:
            shape = self.shape(name)
            fits = shape == channels if node.op_type == "GroupNormalization" else _spreads(shape, taken)
            if not fits:
                raise SkeletonError(
                    f"{_named(node)}: its factors {shape} do not fit its input {taken}; give one for each channel"
                )

    def _split(self, node: NodeProto) -> dict[str, int]:
        """Keep the types of the pieces that a value is split into."""
        taken = self._types[node.input[0]]
        given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        axis, shape = given.get("axis", 0), self.shape(node.input[0])
        length = shape[axis] if -len(shape) <= axis < len(shape) else 0
        split = self._data.get(node.input[1]) if len(node.input) > 1 and node.input[1] else np.array(1)
        if split is None or split.dtype.kind not in "iu" or split.size == 0 or split.astype(np.int64).min() < 1:
            raise _unknown(node)
        lengths = [int(each) for each in split.flat]
        if split.ndim == 0 and 0 < length <= SMALL * lengths[0]:
            lengths = [min(lengths[0], length - start) for start in range(0, length, lengths[0])]
        if sum(lengths) != length or len(lengths) > SMALL or (len(node.input) < 2 and not given.get("keepdims", 1)):
            raise _unknown(node)
        self._pieces[node.output[0]] = [
            onnx.helper.make_tensor_type_proto(
                taken.tensor_type.elem_type,
                [each if place == axis % len(shape) else size for place, size in enumerate(shape)],
            )
            for each in lengths
        ]
        return {node.output[0]: self._sizes[node.input[0]]}

    def _piece(self, node: NodeProto) -> dict[str, TypeProto]:
        """Return the type of one piece."""
        pieces, position = self._pieces.get(node.input[0], []), self._data.get(node.input[1])
        if position is None or position.size != 1 or not -len(pieces) <= int(position.item()) < len(pieces):
            raise _unknown(node)
        return {node.output[0]: pieces[int(position.item())]}

    def _check_numbers(self, node: NodeProto) -> None:
        if node.op_type != "Constant":  # its numbers are data
            for each in node.attribute:
                if any(abs(number) > LARGEST_ATTRIBUTE for number in (each.i, *each.ints)):
                    raise SkeletonError(f"{_named(node)}: {each.name[:80]} is beyond {LARGEST_ATTRIBUTE}")
        if node.op_type in ("Div", "Mod"):
            self._check_divisor(node)
        if node.op_type == "Einsum" and len(node.input) > 2:
            raise SkeletonError(f"{_named(node)} joins {len(node.input)} operands; join two at a time")
        if node.op_type in TRANSFORMS:
            self._check_transform(node)
        if node.op_type == "Resize":
            self._check_resize(node)
        if node.op_type not in SIZING:
            return
        for name in node.input[0 if node.op_type in ("ConstantOfShape", "Range") else 1 :]:
            data = self._data.get(name, np.zeros(0))
            resized = node.op_type in ("Range", "Resize") and data.dtype.kind == "f"
            if resized and not (np.isfinite(data).all() and (np.abs(data) <= LARGEST_SIZE).all()):
                raise SkeletonError(f"{_named(node)}: its sizes are no finite numbers")
            if data.dtype.kind in "iu" and any(abs(int(number)) > LARGEST_SIZE for number in data.flat):
                raise SkeletonError(f"{_named(node)}: a size is beyond {LARGEST_SIZE}")

    def _check_work(self, node: NodeProto) -> None:
        """Raise SkeletonError for a node that takes too long for one sample."""
        if self._samples == 1 and (seconds := REFERENCE.seconds(self.work[-1])) > MOST_SECONDS:
            raise too_slow(node.name, node.op_type, seconds, "one sample")

    def _check_divisor(self, node: NodeProto) -> None:
        """Raise SkeletonError for whole numbers divided by 0 or -1: the processor's trap for it ends the process."""
        if any(name not in self._types for name in node.input[:2]):
            return
        if self.kind(node.input[0]) in _FLOATS:
            return
        divisor = self._data.get(node.input[1])
        varies = node.input[1] in self._varies
        if divisor is None or varies or np.isin(divisor, (0, -1)).any():
            raise SkeletonError(
                f"{_named(node)}: whole numbers are divided by what may be 0 or -1; divide by a constant that is "
                f"neither, or floats"
            )

    def _check_transform(self, node: NodeProto) -> None:
        """Raise SkeletonError unless the lengths of a transform are constants that it can work with."""
        for place, least in TRANSFORMS[node.op_type].items():
            name = node.input[place] if place < len(node.input) else ""
            if not name:
                continue
            given = self._data.get(name)
            if given is None or given.size != 1 or not least <= float(given.item()) <= LARGEST_TRANSFORM:
                raise SkeletonError(
                    f"{_named(node)}: its input {place} is to be one constant from {least} to {LARGEST_TRANSFORM}"
                )

        if node.op_type == "MelWeightMatrix":
            self._check_mel(node)
        if node.op_type in ("DFT", "STFT"):
            length, count = self._transforms(node)
            flops = count // self._samples * _transform_flops(length)
            if flops > MOST_TRANSFORM_FLOPS:
                raise SkeletonError(
                    f"{_named(node)}: {count // self._samples:,} transforms of {length:,} values take {flops:,} FLOPs "
                    f"for one sample, at most {MOST_TRANSFORM_FLOPS:,} are accepted; lengths that are powers of two "
                    "take a tenth"
                )

    def _check_mel(self, node: NodeProto) -> None:
        """Raise SkeletonError unless the bands lie within the spectrum: some runtimes write beyond it."""
        given = [self._data.get(name) for name in node.input]
        if len(given) != 5 or any(each is None or each.size != 1 for each in given):
            raise SkeletonError(f"{_named(node)}: its inputs are to be five constants")
        _, length, rate, lowest, highest = (float(each.item()) for each in given if each is not None)
        # Frequencies go to mel and back in single precision, which may raise them by a millionth.
        last = (length + 1) * highest * (1 + 1e-6) / rate
        if not (0 <= lowest <= highest and last < length // 2 + 1):
            raise SkeletonError(
                f"{_named(node)}: bands from {lowest:g} to {highest:g} Hz do not lie within the spectrum of "
                f"{length:g} values at {rate:g} Hz; let them end at half the rate, of an even length"
            )

    def _transforms(self, node: NodeProto) -> tuple[int, int]:
        """Return the length of the transforms that a node makes, and how many there are. Raises SkeletonError."""
        shape = self._shape_of(node, 0)
        length = self._constant_of(node, 3 if node.op_type == "STFT" else 1)
        if node.op_type == "STFT":
            window = self._shape_of(node, 2)
            if length is None and len(window) == 1:
                length = window[0]
            step = self._constant_of(node, 1)
            if length is None or step is None or len(shape) < 2 or not 1 <= length <= shape[1]:
                raise SkeletonError(f"{_named(node)}: its frames are to have one constant length, of the signal's most")
            if window not in ([], [length]):
                raise SkeletonError(f"{_named(node)}: its window is of the shape {window}, its frames of {length}")
            return length, shape[0] * (1 + (shape[1] - length) // step)
        if shape[-1:] not in ([1], [2]):
            raise SkeletonError(f"{_named(node)}: the last axis of {shape} is to be 1, of real values, or 2")
        attributes = {each.name: each.i for each in node.attribute}
        # Up to version 19 the axis is an attribute, from 20 an input.
        (opset,) = self._model.opset_import
        axis = attributes.get("axis", 1) if opset.version < 20 else self._constant_of(node, 2, -2)
        if axis is None or not -len(shape) <= axis < len(shape) - 1 or axis == -1:
            raise SkeletonError(f"{_named(node)}: its axis is to be a constant, one of {shape} but for the last")
        along = shape[axis]
        if attributes.get("inverse") and attributes.get("onesided"):
            along = 2 * (along - 1)
        length = along if length is None else length
        if not 1 <= length <= LARGEST_TRANSFORM:
            raise SkeletonError(
                f"{_named(node)}: transforms {length} values, from 1 to {LARGEST_TRANSFORM} are accepted"
            )
        return length, math.prod(shape[:-1]) // max(1, shape[axis])

    def _check_resize(self, node: NodeProto) -> None:
        """Raise SkeletonError for a resize that no runtime does, or whose sizes do not grow with its input's."""
        given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        mode = given.get("mode", b"nearest")
        kinds = {self._types[name].tensor_type.elem_type for name in node.input[:1] if name in self._types}
        if mode == b"cubic" and not kinds <= _FLOATS:
            raise SkeletonError(
                f"{_named(node)}: a cubic resize takes no whole numbers; cast to float first, or resize linearly"
            )
        if given.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            raise SkeletonError(f"{_named(node)}: keeps an aspect ratio; name the sizes")
        if given.get("coordinate_transformation_mode", b"") == b"tf_crop_and_resize":
            raise SkeletonError(f"{_named(node)}: crops, too; slice before it")
        for name in filter(None, node.input[2:]):
            sizes = self._data.get(name)
            if sizes is None:
                raise SkeletonError(f"{_named(node)}: its sizes are not known before it runs; let them be constants")
            if not np.greater(sizes, 0).all():
                raise SkeletonError(f"{_named(node)}: a size or scale is not above 0")

    def _shape_of(self, node: NodeProto, place: int) -> list[int]:
        """Return the shape of an input, [] without one that is known."""
        name = node.input[place] if place < len(node.input) else ""
        return self.shape(name) if name in self._types else []

    def _constant_of(self, node: NodeProto, place: int, usual: int | None = None) -> int | None:
        """Return the whole number that an input is, None where it is not known; ``usual`` without one."""
        name = node.input[place] if place < len(node.input) else ""
        if not name:
            return usual
        data = self._data.get(name)
        return int(data.item()) if data is not None and data.size == 1 and np.isfinite(data).all() else None

    def _beside(self, node: NodeProto) -> int:
        """Return the bytes that an operator takes beside its inputs and results, as measured of ONNX Runtime."""
        given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type == "ConvTranspose":
            # It unfolds its input.
            taken, kernel = self.shape(node.input[0]), self.shape(node.input[1])
            return 4 * math.prod(kernel[1:]) * math.prod(taken[2:])
        if node.op_type == "Conv":
            # ONNX Runtime brings images into a form of its own, of CHANNELS at a time; it reads fewer as they are.
            images = [node.output[0]]
            if self.shape(node.input[0])[1] >= CHANNELS:
                images.append(node.input[0])
            return sum(map(self._in_channels, images))
        if node.op_type == "MatMul":
            return MATRIX * math.prod(self.shape(node.output[0])[:-2])
        if node.op_type in ("Softmax", "LogSoftmax"):
            # Along another axis than the last it turns a copy, and turns the result back.
            shape = self.shape(node.output[0])
            last = math.prod(shape[int(given.get("axis", -1)) % max(1, len(shape)) + 1 :]) == 1
            return 0 if last else 2 * self._sizes[node.output[0]]
        if node.op_type in ("Expand", "OneHot"):
            return PLACE * math.prod(self.shape(node.input[0]))
        if node.op_type in ("DFT", "STFT"):
            length, _ = self._transforms(node)
            return 16 * length if _is_power(length) else 160 * _turned_length(length)
        if node.op_type == "Resize" and node.output[0]:
            how = given.get("mode", b"nearest") == b"cubic", bool(given.get("antialias"))
            return _resized(self.shape(node.input[0]), self.shape(node.output[0]), *how)
        return 0

    def _in_channels(self, name: str) -> int:
        """Return the bytes of images in ONNX Runtime's own form; 0 of others than [N, C, H, W]."""
        shape = self.shape(name)
        if len(shape) != 4 or not shape[1]:
            return 0
        return self._sizes[name] // shape[1] * (-(-shape[1] // CHANNELS) * CHANNELS)

    def _add(self, name: str, described: TypeProto, node: NodeProto | None = None) -> None:
        """Keep what is known of a value. Raises SkeletonError where its size is not, or is too large."""
        tensor = described.tensor_type
        dims = tensor.shape.dim
        if not tensor.HasField("shape") or any(dim.WhichOneof("value") != "dim_value" for dim in dims):
            raise _unknown(node)
        sizes = [dim.dim_value for dim in dims]
        if tensor.elem_type not in _BYTES or len(sizes) > 16 or any(not 0 <= size <= LARGEST_SIZE for size in sizes):
            what = repr(name[:80]) if node is None else _named(node)
            raise SkeletonError(f"{what}: a value is no tensor of numbers of a common type and size")
        self._types[name] = described
        self._sizes[name] = math.prod(sizes) * _BYTES[tensor.elem_type]

    def shape(self, name: str) -> list[int]:
        """Return the lengths of a value's axes."""
        if name in self._pieces:
            return self._shape(self._pieces[name][0])
        return self._shape(self._types[name])

    @staticmethod
    def _shape(described: TypeProto) -> list[int]:
        return [dim.dim_value for dim in described.tensor_type.shape.dim]

    def kind(self, name: str) -> int:
        """Return a value's type, of ``TensorProto``."""
        described = self._pieces[name][0] if name in self._pieces else self._types[name]
        return int(described.tensor_type.elem_type)

    def size(self, name: str) -> int:
        """Return a value's bytes."""
        return self._sizes.get(name, 0)

    def known(self, name: str) -> Array | None:
        """Return a value that is known beforehand; None if it is not."""
        return self._data.get(name)

    def _fold(self, node: NodeProto) -> None:
        """Compute a small constant result, of which a size may be made."""
        if node.op_type in ("Shape", "Size"):
            shape = self.shape(node.input[0])
            given: Mapping[str, Any] = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            part = shape[slice(given.get("start", 0), given.get("end"))]
            self._data[node.output[0]] = np.array(part if node.op_type == "Shape" else math.prod(shape), dtype=np.int64)
        elif any(math.prod(self.shape(name)) > SMALL for name in node.output if name):
            return
        elif node.op_type == "Constant":
            self._data[node.output[0]] = _constant(node.attribute)
        elif node.op_type in FOLDED | {"ConstantOfShape"} and all(name in self._data for name in node.input if name):
            try:
                made = self._computed(node)
            except Exception:  # of many kinds; what is not known is refused where a size is made of it
                return
            self._data |= {name: np.asarray(array) for name, array in zip(node.output, made, strict=True)}

    def _computed(self, node: NodeProto) -> Sequence[Any]:
        """Return what a node makes of the data that its inputs have."""
        if (plain := _PLAIN.get(node.op_type)) is not None and all(node.input):
            given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            return [plain(*(self._data[name] for name in node.input), **given)]
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(node)
        return list(evaluator.run(None, {name: self._data[name] for name in node.input if name}))


def too_slow(name: str, operator: str, seconds: float, what: str) -> SkeletonError:
    """Return the error for a node that takes too long. what: for which samples."""
    return SkeletonError(
        f"the node {name[:80]!r} ({operator[:80]!r}) is predicted to take {seconds:,.1f} s for {what}, at most "
        f"{MOST_SECONDS:g} s are accepted; publish a smaller model"
    )


def _spreads(shape: list[int], whole: list[int]) -> bool:
    """Return whether a value of this shape, repeated, is as large as another and no larger."""
    padded = [1] * (len(whole) - len(shape)) + shape
    return len(shape) <= len(whole) and all(one in (1, other) for one, other in zip(padded, whole, strict=True))


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


def has_data(tensor: TensorProto) -> bool:
    """Return whether the file holds values of this tensor."""
    fields = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
    return any(len(getattr(tensor, field)) for field in fields)


def _array(tensor: TensorProto) -> Array:
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    except (ValueError, TypeError) as error:
        raise SkeletonError(f"{tensor.name[:200]!r} has other data than its shape and type say ({error})") from None


def _constant(attributes: Collection[AttributeProto]) -> Array:
    (given,) = attributes
    value = onnx.helper.get_attribute_value(given)
    if isinstance(value, TensorProto):
        return _array(value)
    return np.array(value, dtype=np.int64 if given.name in ("value_int", "value_ints") else np.float32)


def _named(node: NodeProto) -> str:
    return f"the node {node.name[:80]!r} ({node.op_type[:80]!r})"


def _unknown(node: NodeProto | None) -> SkeletonError:
    what = "an input or initialiser" if node is None else _named(node)
    return SkeletonError(f"{what}: the size of a value is not known before it runs; let shapes follow from the input's")
