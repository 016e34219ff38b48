"""Memory limits for untrusted ONNX skeletons, checked before ONNX or ONNX Runtime parses them.

A file of 300 bytes can allocate gigabytes, with constants of a given shape or a chain of concatenations. Fields are
therefore counted before parsing, and only ``OPERATORS`` are accepted. Sizes are inferred node by node, and a value that
is too large or of unknown size is refused before it is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
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
from .graph import attributes
from .limits import SIZING, bytes_beside, check_numbers
from .values import Values, named, names, unknown

MIB = 1024 * 1024
MOST_FIELDS = 500_000
"""Largest number of fields of a file, for some 10,000 nodes; a parsed field takes about a hundred bytes."""
DEEPEST = 64
"""Largest accepted nesting depth of messages."""
MOST_ACTIVATIONS = 256 * MIB
"""Limit in bytes of the values that are alive at a time, for one sample."""
MOST_CONSTANTS = 64 * MIB
"""Limit in bytes of constants beyond ``WEIGHTS`` times the weights; they are computed at load."""
WEIGHTS = 4
MOST_AT_ONCE = 1024 * MIB
"""Limit in bytes of the values that are alive at a time, for several samples."""
SMALL = 1024
"""Largest number of elements of a value that is computed to infer a size."""


FOLDED = names(
    """
    Add Cast CastLike Ceil Concat Div Equal Expand Floor Gather Greater Identity Less Max Min Mod Mul Neg Range
    ReduceProd ReduceSum Reshape Slice Squeeze Sub Unsqueeze Where
    """
)
"""Operators that compute sizes."""

_PLAIN: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Cast": lambda given, to: given.astype(onnx.helper.tensor_dtype_to_np_dtype(to)),
    "Concat": lambda *given, axis: np.concatenate(given, axis),
    "Mul": np.multiply,
    "Squeeze": lambda given, axes=None: np.squeeze(given, None if axes is None else tuple(axes)),
    "Sub": np.subtract,
}
"""The most frequent ones; importing ONNX's reference implementation takes longer than a small model's first step."""

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
"""Layers, and computations between layers."""

OPERATORS = FOLDED | SIZING | LAYERS
"""Accepted operators: the sizes of their results can be inferred."""

SAME = names(
    """
    Celu Gelu GroupNormalization HardSwish InstanceNormalization MeanVarianceNormalization Mish RMSNormalization
    Softsign Swish
    """
)
"""Operators whose result has the first input's type; ONNX may not infer it."""

_FACTORS = names("GroupNormalization PRelu RMSNormalization")

MOST_SECONDS = 2.0
"""Longest predicted time of a node, because a run cannot be stopped within a node."""
MOST_GRAPH_SECONDS = 60.0
"""Longest predicted time of a graph for one sample."""


_HELD = {"LSTM": 12, "GRU": 12, "RNN": 12, "Attention": 4, "Where": 2}
"""Operators that need a multiple of their results' memory while they run."""


def check_fields(data: bytes) -> None:
    """Raise SkeletonError for more fields, or deeper messages, than a graph needs, without parsing."""
    _count(memoryview(data), ModelProto.DESCRIPTOR, 0, MOST_FIELDS)


def _count(data: memoryview, kind: Any, depth: int, left: int) -> int:
    """Return ``left`` minus the number of fields of this message."""
    if depth > DEEPEST:
        raise SkeletonError(f"the graph nests messages deeper than {DEEPEST}; a graph without subgraphs does not")
    fields = kind.fields_by_number
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        left -= 1
        if left < 0:
            raise SkeletonError(f"the graph has more than {MOST_FIELDS} fields; publish a smaller graph")
        wire = key & 7
        field = fields.get(key >> 3)
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
    """Raise SkeletonError if a node is not one of ``OPERATORS``, or a value has no known, small size.

    model: one graph without subgraphs and functions.
    """
    Walk(model, samples=1).run()


def samples_at_once(model: ModelProto, most: int) -> int:
    """Return the number of samples, up to ``most``, that a checked model may run at a time."""
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
    """The nodes in order, with type, shape and, if small and constant, data of each value.

    weights: inputs that count as weights, not as activations. ``alive``: bytes held while each node runs; ``work``: the
    work of each node.
    """

    def __init__(self, model: ModelProto, *, samples: int, weights: Collection[str] = ()) -> None:
        self._model = model
        self._given = frozenset(weights)
        self.values = Values(samples, model.opset_import[0].version)
        self.alive: list[int] = []
        self.work: list[Work] = []
        self._constants = 0
        self._weights = 0
        for tensor in model.graph.initializer:
            self.values.add(tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
            self._weights += self.values.sizes[tensor.name]
            if math.prod(tensor.dims) <= SMALL and (has_data(tensor) or 0 in tensor.dims):
                self.values.data[tensor.name] = _array(tensor)
        for value in model.graph.input:
            described = TypeProto()
            described.CopyFrom(value.type)
            for dim in described.tensor_type.shape.dim:
                if dim.WhichOneof("value") != "dim_value":
                    dim.dim_value = samples
            self.values.add(value.name, described)
            self.values.varies.add(value.name)
            if value.name in self._given:
                self._weights += self.values.sizes[value.name]
        self._most = MOST_ACTIVATIONS * samples + (WEIGHTS * self._weights if weights else 0)

    def run(self) -> int:
        """Return the largest number of bytes of values alive at a time, without constants."""
        values = self.values
        nodes = self._model.graph.node
        readers: dict[str, list[str]] = {value.name: [""] for value in self._model.graph.output}
        for node in nodes:
            for name in node.input:
                readers.setdefault(name, []).append(node.op_type)
        last = {name: place for place, node in enumerate(nodes) for name in node.input}
        last |= {value.name: len(nodes) for value in self._model.graph.output}
        alive = {
            value.name: values.sizes[value.name] for value in self._model.graph.input if value.name not in self._given
        }
        peak = held = sum(alive.values())
        for place, node in enumerate(nodes):
            varies = not values.varies.isdisjoint(node.input)
            made = self._infer(node)
            beside = _HELD.get(node.op_type, 0) * sum(made.values()) + bytes_beside(node, values)
            self.work.append(work_of(node, values, [each for name in node.output for each in readers.get(name, ())]))
            self._check_work(node)
            if varies:
                values.varies.update(made)
                alive |= made
                held += sum(made.values())
                peak = max(peak, held + beside)
                if peak > self._most:
                    raise SkeletonError(
                        f"{named(node)}: {peak:,} bytes of values would be alive for one sample; the maximum is "
                        f"{MOST_ACTIVATIONS:,}"
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
                        f"{named(node)}: the graph would compute {self._constants:,} bytes of constants; compute "
                        f"less in forward that does not depend on the input"
                    )
        seconds = sum(map(REFERENCE.seconds, self.work))
        if values.samples == 1 and seconds > MOST_GRAPH_SECONDS:
            raise SkeletonError(
                f"the graph is predicted to take {seconds:,.0f} s for one sample; it must take at most "
                f"{MOST_GRAPH_SECONDS:g} s: publish a smaller model"
            )
        return peak

    def _infer(self, node: NodeProto) -> dict[str, int]:
        """Return the bytes of the node's outputs: name -> bytes."""
        values = self.values
        if node.op_type not in OPERATORS:
            raise SkeletonError(f"{named(node)}: this operator is not accepted; build forward of common layers")
        check_numbers(node, values)
        read = {name for name in node.input if name}
        if not read <= values.types.keys() | values.pieces.keys():
            raise SkeletonError(f"{named(node)} reads a value that no earlier node makes; export the graph in order")
        if repeated := [name for name in node.output if name in values.types.keys() | values.pieces.keys()]:
            raise SkeletonError(f"{named(node)} makes {repeated[0][:80]!r} a second time; export the graph again")
        if node.op_type == "SplitToSequence":
            return self._split(node)
        found = self._piece(node) if node.op_type == "SequenceAt" else self._types_of(node, read)
        for name in filter(None, node.output):
            if name not in found:
                raise unknown(node)
            values.add(name, found[name], node)
        self._fold(node)
        return {name: values.sizes[name] for name in node.output if name}

    def _types_of(self, node: NodeProto, read: set[str]) -> dict[str, TypeProto]:
        """Return the types and shapes of the node's outputs."""
        values = self.values
        self._check_factors(node)
        if node.op_type in SAME:
            return dict.fromkeys(node.output, values.types[node.input[0]])
        # It may only write to the value from which the maxima were taken.
        if node.op_type == "MaxUnpool":
            pool = next((each for each in self._model.graph.node if node.input[1] in each.output), None)
            if pool is None or pool.op_type != "MaxPool" or node.input[1] != pool.output[1]:
                raise SkeletonError(
                    f"{named(node)}: its indices are not those of a maximum; use the indices of MaxPool"
                )
            if values.shape(node.input[0]) != values.shape(pool.output[0]):
                raise SkeletonError(f"{named(node)}: has another number of values than indices; give one for each")
            size = values.data.get(node.input[2]) if len(node.input) > 2 else None
            if size is None or list(size) != values.shape(pool.input[0]):
                raise SkeletonError(f"{named(node)}: its result has another size than the input of MaxPool")
            return dict.fromkeys(node.output, values.types[pool.input[0]])
        if not read <= values.types.keys():
            raise SkeletonError(f"{named(node)} takes a sequence; export the graph without")
        known = {name: onnx.numpy_helper.from_array(values.data[name], name) for name in read & values.data.keys()}
        try:
            return onnx.shape_inference.infer_node_outputs(
                get_schema(node.op_type, values.opset, ""),
                node,
                {name: values.types[name] for name in read},
                known,
                opset_imports=list(self._model.opset_import),
                ir_version=self._model.ir_version,
            )
        except (InferenceError, ValidationError, SchemaError, RuntimeError, ValueError, TypeError) as error:
            raise SkeletonError(f"{named(node)}: its result cannot be inferred ({str(error)[:200]})") from None

    def _check_factors(self, node: NodeProto) -> None:
        """Raise SkeletonError for a norm's factors that would enlarge its result."""
        # ONNX infers the input's shape for these operators, but ONNX Runtime broadcasts to the larger lengths of
        # both.
        if node.op_type not in _FACTORS:
            return
        taken = self.values.shape(node.input[0])
        channels = [taken[1]] if len(taken) > 1 else []
        for name in node.input[1:]:
            shape = self.values.shape(name)
            fits = shape == channels if node.op_type == "GroupNormalization" else _spreads(shape, taken)
            if not fits:
                raise SkeletonError(
                    f"{named(node)}: its factors {shape} do not fit its input {taken}; give one for each channel"
                )

    def _split(self, node: NodeProto) -> dict[str, int]:
        """Record the types of the pieces of a split value."""
        values = self.values
        taken = values.types[node.input[0]]
        given = attributes(node)
        axis = given.get("axis", 0)
        shape = values.shape(node.input[0])
        length = shape[axis] if -len(shape) <= axis < len(shape) else 0
        split = values.data.get(node.input[1]) if len(node.input) > 1 and node.input[1] else np.array(1)
        if split is None or split.dtype.kind not in "iu" or split.size == 0 or split.astype(np.int64).min() < 1:
            raise unknown(node)
        lengths = [int(each) for each in split.flat]
        if split.ndim == 0 and 0 < length <= SMALL * lengths[0]:
            lengths = [min(lengths[0], length - start) for start in range(0, length, lengths[0])]
        if sum(lengths) != length or len(lengths) > SMALL or (len(node.input) < 2 and not given.get("keepdims", 1)):
            raise unknown(node)
        values.pieces[node.output[0]] = [
            onnx.helper.make_tensor_type_proto(
                taken.tensor_type.elem_type,
                [each if place == axis % len(shape) else size for place, size in enumerate(shape)],
            )
            for each in lengths
        ]
        return {node.output[0]: values.sizes[node.input[0]]}

    def _piece(self, node: NodeProto) -> dict[str, TypeProto]:
        pieces = self.values.pieces.get(node.input[0], [])
        position = self.values.data.get(node.input[1])
        if position is None or position.size != 1 or not -len(pieces) <= int(position.item()) < len(pieces):
            raise unknown(node)
        return {node.output[0]: pieces[int(position.item())]}

    def _check_work(self, node: NodeProto) -> None:
        """Raise SkeletonError if a node takes too long for one sample."""
        if self.values.samples == 1 and (seconds := REFERENCE.seconds(self.work[-1])) > MOST_SECONDS:
            raise too_slow(node.name, node.op_type, seconds, "one sample")

    def _fold(self, node: NodeProto) -> None:
        """Compute a small constant result, which may be used as a size."""
        values = self.values
        if node.op_type in ("Shape", "Size"):
            shape = values.shape(node.input[0])
            given = attributes(node)
            part = shape[slice(given.get("start", 0), given.get("end"))]
            values.data[node.output[0]] = np.array(
                part if node.op_type == "Shape" else math.prod(shape), dtype=np.int64
            )
        elif any(math.prod(values.shape(name)) > SMALL for name in node.output if name):
            return
        elif node.op_type == "Constant":
            values.data[node.output[0]] = _constant(node.attribute)
        elif node.op_type in FOLDED | {"ConstantOfShape"} and all(name in values.data for name in node.input if name):
            try:
                made = self._computed(node)
            # Many kinds. An unknown value is refused when it becomes a size.
            except Exception:
                return
            values.data |= {name: np.asarray(array) for name, array in zip(node.output, made, strict=True)}

    def _computed(self, node: NodeProto) -> Sequence[Any]:
        """Return a node's results from its inputs' data."""
        if (plain := _PLAIN.get(node.op_type)) is not None and all(node.input):
            given = attributes(node)
            return [plain(*(self.values.data[name] for name in node.input), **given)]
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(node)
        return list(evaluator.run(None, {name: self.values.data[name] for name in node.input if name}))


def too_slow(name: str, operator: str, seconds: float, what: str) -> SkeletonError:
    """Return the error for a node that takes too long. what: description of its samples."""
    return SkeletonError(
        f"the node {name[:80]!r} ({operator[:80]!r}) is predicted to take {seconds:,.1f} s for {what}; it must take "
        f"at most {MOST_SECONDS:g} s: publish a smaller model"
    )


def _spreads(shape: list[int], whole: list[int]) -> bool:
    """Return whether a value of ``shape`` can be broadcast to ``whole`` without enlarging it."""
    padded = [1] * (len(whole) - len(shape)) + shape
    return len(shape) <= len(whole) and all(one in (1, other) for one, other in zip(padded, whole, strict=True))


def has_data(tensor: TensorProto) -> bool:
    """Return True if the file contains the tensor's values."""
    fields = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
    return any(len(getattr(tensor, field)) for field in fields)


def _array(tensor: TensorProto) -> Array:
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    except (ValueError, TypeError) as error:
        raise SkeletonError(f"{tensor.name[:200]!r} has data that do not fit its shape and type ({error})") from None


def _constant(attributes: Collection[AttributeProto]) -> Array:
    (given,) = attributes
    value = onnx.helper.get_attribute_value(given)
    if isinstance(value, TensorProto):
        return _array(value)
    return np.array(value, dtype=np.int64 if given.name in ("value_int", "value_ints") else np.float32)
