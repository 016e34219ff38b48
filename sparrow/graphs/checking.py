"""Check a training step's graph before a device runs it.

Graphs come over the network. A graph is refused before ONNX Runtime reads it if it accesses data other than a batch and
the manifest's tensors, uses an operator of unknown size or effect, or exceeds the limits for a model of this size.

Sizes are inferred node by node for two numbers of samples. At most one axis of a value may differ, in proportion to the
samples, and operators along that axis must keep its length. The results then hold for every batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from sparrow.graphs import Graphs

from ..protocol.errors import GraphError
from ..protocol.flops import forward_flops
from ..protocol.manifest import MAX_GRAPH, MOST_NODES, Manifest
from .bounds import MOST_GRAPH_SECONDS, MOST_SECONDS, Walk, check_fields, too_slow
from .costs import FLOP, REFERENCE, Speed
from .errors import SkeletonError
from .graph import INVALID
from .skeleton import check_node, check_structure, parse, refuse_external
from .values import named, names

OPSET = 21
"""Version of the standard operators in published steps."""

LARGEST_CONSTANT = 1024 * 1024
"""Limit in bytes of one constant."""
SAMPLES = (2, 3)
"""Numbers of samples for inferring sizes."""
FLOPS_OVER_FORWARD = 16
"""Limit of the FLOPs per sample: this multiple of the FLOPs of the manifest's layers ..."""
FLOPS_BESIDE = 2**34
"""... plus this many FLOPs."""

OPERATORS = names(
    """
    Abs Add And ArgMax ArgMin AveragePool BatchNormalization Cast Ceil Celu Clip Concat Constant ConstantOfShape Conv
    ConvTranspose Cos CumSum Div Elu Equal Erf Exp Expand Floor Gather GatherElements GatherND Gelu Gemm Greater
    GreaterOrEqual HardSigmoid HardSwish Identity LeakyRelu Less LessOrEqual Log LogSoftmax MatMul Max MaxPool
    MaxUnpool Min Mish Mod Mul Neg Not OneHot Or PRelu Pad Pow Reciprocal ReduceMax ReduceMean ReduceMin
    ReduceSum Relu Reshape Round ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Size Slice Softmax
    Softplus Softsign Split Sqrt Squeeze Sub Tanh Tile Transpose Unsqueeze Where
    """
)
"""Accepted operators: the operators of published steps and of the engine's passes, and similar ones."""

MOVING = names("Cast Concat Gather Identity Mul Reshape Shape Size Slice Squeeze Unsqueeze")
"""Operators that a batch-dependent size may pass; their results are proportional to it."""

SPATIAL = frozenset(["AveragePool", "Conv", "ConvTranspose", "MaxPool", "MaxUnpool"])
KEEPING = frozenset(["Pad", "Slice", "Split"])

INPUT_TYPES = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32)
DRAWN = {"uniform": 2, "normal": 2, "uniform_step": 1, "normal_step": 1}
"""Inputs with random numbers -> number of axes; the first of two is the batch."""


class Needs:
    """Memory and work of each node of a graph, for any number of samples.

    walks: traversals with ``SAMPLES`` samples. Both quantities are linear in the number of samples, or constant.
    """

    def __init__(self, model: ModelProto, walks: Sequence[Walk]) -> None:
        self._nodes = [(node.name, node.op_type) for node in model.graph.node]
        alive = np.array([walk.alive for walk in walks], np.float64)
        work = np.array([walk.work for walk in walks], np.float64)
        self._bytes = _line(alive)
        self._work = _line(work)

    def bytes(self, samples: int) -> int:
        """Return the largest number of bytes of values, besides the model's tensors, at a time in a batch."""
        return int(_at(self._bytes, samples).max(initial=0))

    def seconds(self, samples: int, speed: Speed = REFERENCE) -> float:
        """Return the predicted seconds of a batch."""
        return float(self._seconds(samples, speed).sum())

    def slowest(self, samples: int, speed: Speed = REFERENCE) -> tuple[str, str, float]:
        """Return name, operator and predicted seconds of the slowest node in a batch."""
        seconds = self._seconds(samples, speed)
        place = int(seconds.argmax())
        return (*self._nodes[place], float(seconds[place]))

    def _seconds(self, samples: int, speed: Speed) -> NDArray[np.float64]:
        factors = np.array([speed.products, speed.moving, speed.plain], np.float64)
        seconds: NDArray[np.float64] = 1e-9 * (_at(self._work, samples) * factors).sum(axis=1)
        return seconds


def _line(at: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return intercepts and slopes of the lines through the values [2, ...] at ``SAMPLES``."""
    rise = (at[1] - at[0]) / (SAMPLES[1] - SAMPLES[0])
    return at[0] - SAMPLES[0] * rise, rise


def _at(line: tuple[NDArray[np.float64], NDArray[np.float64]], samples: int) -> NDArray[np.float64]:
    begins, rise = line
    return np.maximum(0, begins + samples * rise)


def check_graphs(graphs: Graphs, manifest: Manifest) -> tuple[Needs, Needs]:
    """Return the needs of step and evaluation. Raises GraphError for an unsafe graph."""
    return _check(graphs.step, manifest, "step"), _check(graphs.evaluation, manifest, "evaluation")


def _check(data: bytes, manifest: Manifest, what: str) -> Needs:
    try:
        if len(data) > MAX_GRAPH:
            raise GraphError(f"it has {len(data)} bytes; it must have at most {MAX_GRAPH}")
        check_fields(data)
        model = parse(data)
        check_structure(model)
        _check_operators(model)
        _check_constants(model)
        _check_inputs(model, manifest)
        _check_outputs(model, manifest, trains=what == "step")
        needs = _check_sizes(model, manifest)
        onnx.checker.check_model(model, full_check=True)
    except (SkeletonError, GraphError) as error:
        raise GraphError(f"the {what}'s graph is refused: {error}") from None
    except INVALID as error:
        raise GraphError(f"the {what}'s graph is not a valid ONNX graph: {str(error)[:300]}") from None
    return needs


def _check_operators(model: ModelProto) -> None:
    (opset,) = model.opset_import
    if opset.version != OPSET:
        raise GraphError(f"it has operators of version {opset.version}, steps are published with {OPSET}")
    if len(model.graph.node) > MOST_NODES:
        raise GraphError(f"it has {len(model.graph.node)} nodes; it must have at most {MOST_NODES}")
    for node in model.graph.node:
        if node.op_type not in OPERATORS:
            raise GraphError(f"{named(node)}: this operator is not accepted")
        check_node(node)


def _check_constants(model: ModelProto) -> None:
    inputs = {each.name for each in model.graph.input}
    seen = set[str]()
    values = [each.t for node in model.graph.node for each in node.attribute if each.HasField("t")]
    for tensor in (*model.graph.initializer, *values):
        refuse_external(tensor)
        if tensor.ByteSize() > LARGEST_CONSTANT:
            raise GraphError(f"the constant {tensor.name[:80]!r} has more than {LARGEST_CONSTANT} bytes")
    for tensor in model.graph.initializer:
        if tensor.name in inputs or tensor.name in seen:
            raise GraphError(f"{tensor.name[:80]!r} occurs twice among inputs and constants")
        seen.add(tensor.name)


def _check_inputs(model: ModelProto, manifest: Manifest) -> None:
    specs = {spec.name: spec for spec in manifest.whole}
    _refuse_repeated("input", model.graph.input)
    for value in model.graph.input:
        kind, shape = _described(value)
        if value.name in specs:
            spec = specs[value.name]
            if (kind, shape) != (onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), spec.shape):
                raise GraphError(f"the input {value.name[:80]!r} is not of the manifest's type and shape {spec.shape}")
        elif value.name == "input":
            if kind not in INPUT_TYPES or shape[:1] != (None,) or shape[1:] != manifest.input_shape:
                raise GraphError(f"input has the shape {shape}, but the manifest has {manifest.input_shape} per sample")
        elif value.name == "target":
            if kind not in INPUT_TYPES or shape[:1] != (None,) or None in shape[1:]:
                raise GraphError(f"target has the shape {shape}; only its first axis may be free")
        elif value.name in DRAWN:
            axes = DRAWN[value.name]
            fits = len(shape) == axes and [size is None for size in shape] == [True, False][2 - axes :]
            if kind != TensorProto.FLOAT or not fits:
                raise GraphError(f"{value.name} has the shape {shape}; it must have {axes} axes of float32")
        else:
            raise GraphError(f"the input {value.name[:80]!r} is neither a tensor of the manifest nor part of a batch")


def _check_outputs(model: ModelProto, manifest: Manifest, *, trains: bool) -> None:
    trained = {f"grad:{spec.name}": spec.shape for spec in manifest.kept if spec.trainable}
    moved = {f"new:{spec.name}": spec.shape for spec in manifest.kept if not spec.trainable and spec.dtype == "float32"}
    needed: dict[str, tuple[int | None, ...]] = {"loss": (), "output": (None, *manifest.output_shape)}
    needed |= {"error": needed["output"]} if trains else {}
    known = {**needed, **trained, **moved} if trains else needed
    _refuse_repeated("output", model.graph.output)
    for value in model.graph.output:
        if value.name not in known:
            raise GraphError(f"the output {value.name[:80]!r} is not allowed for this model")
        if _described(value) != (TensorProto.FLOAT, known[value.name]):
            raise GraphError(f"the output {value.name[:80]!r} is not float32 of the shape {known[value.name]}")
    missing = sorted(needed.keys() - {value.name for value in model.graph.output})
    if missing:
        raise GraphError(f"it has no output {missing[0]!r}")


def _refuse_repeated(what: str, values: Iterable[ValueInfoProto]) -> None:
    seen = set[str]()
    for value in values:
        if value.name in seen:
            raise GraphError(f"the {what} {value.name[:80]!r} occurs twice")
        seen.add(value.name)


def _described(value: ValueInfoProto) -> tuple[int, tuple[int | None, ...]]:
    """Return a value's type and shape, None for a free axis."""
    tensor = value.type.tensor_type
    if value.type.WhichOneof("value") != "tensor_type" or not tensor.HasField("shape"):
        raise GraphError(f"{value.name[:80]!r} is not a tensor with a known number of axes")
    return tensor.elem_type, tuple(
        dim.dim_value if dim.WhichOneof("value") == "dim_value" else None for dim in tensor.shape.dim
    )


class _Walk(Walk):
    """A ``Walk`` that accepts batch-dependent sizes only if they are proportional to the batch."""

    def _fold(self, node: NodeProto) -> None:
        grows = [name for name in node.input if name in self.values.data and name in self.values.varies]
        if grows and (node.op_type not in MOVING or (node.op_type == "Mul" and len(grows) > 1)):
            return
        super()._fold(node)


def _check_sizes(model: ModelProto, manifest: Manifest) -> Needs:
    """Raise GraphError for sizes that break the module's rules or are too large."""
    weights = {spec.name for spec in manifest.whole}
    walks = [_Walk(model, samples=count, weights=weights) for count in SAMPLES]
    for walk in walks:
        walk.run()
    small, large = walks
    grows: dict[str, int | None] = dict.fromkeys((each.name for each in model.graph.initializer), None)
    read = [each.name for each in model.graph.input]
    for name in (*read, *(made for node in model.graph.node for made in node.output if made)):
        grows[name] = _growing_axis(name, small.values.shape(name), large.values.shape(name))
    for node in model.graph.node:
        _check_axes(node, grows, small)
    for value in (*model.graph.value_info, *model.graph.output):
        if value.name not in grows:
            raise GraphError(f"{value.name[:80]!r} is described, but no node makes it")
        _, recorded = _described(value)
        found = small.values.shape(value.name)
        fits = len(recorded) == len(found) and all(
            length is None or (length == there and axis != grows[value.name])
            for axis, (length, there) in enumerate(zip(recorded, found, strict=True))
        )
        if not fits:
            raise GraphError(f"{value.name[:80]!r} is recorded with the shape {recorded}, but has {found} at 2 samples")
    needs = Needs(model, walks)
    name, operator, longest = needs.slowest(1)
    if longest > MOST_SECONDS:
        raise too_slow(name, operator, longest, "one sample")
    most = min(MOST_GRAPH_SECONDS, FLOP * 1e-9 * (FLOPS_OVER_FORWARD * forward_flops(manifest) + FLOPS_BESIDE))
    if (seconds := needs.seconds(1)) > most:
        raise GraphError(
            f"it is predicted to take {seconds:.2f} s for a sample, but a step of this manifest's layers takes at most "
            f"{most:.2f} s; publish it again with sparrow publish"
        )
    return needs


def _growing_axis(name: str, small: list[int], large: list[int]) -> int | None:
    """Return the axis that grows with the batch, if any. Raises GraphError for several, or another growth."""
    growing = []
    for axis, (less, more) in enumerate(zip(small, large, strict=True)):
        if less == 0 or (less != more and less * SAMPLES[1] != more * SAMPLES[0]):
            raise GraphError(f"{name[:80]!r} has an axis of {less} and {more} places for {SAMPLES} samples")
        growing += [axis] if less != more else []
    if len(growing) > 1:
        raise GraphError(f"{name[:80]!r} grows with the square of the batch, or faster")
    return growing[0] if growing else None


def _check_axes(node: NodeProto, grows: dict[str, int | None], walk: Walk) -> None:
    """Raise GraphError for an operator that mixes or drops samples along the batch axis."""
    read = [name for name in node.input if name]
    if node.op_type in SPATIAL:
        values = [*read[:2], *(name for name in node.output if name)]
        if any((grows[name] or 0) > 1 for name in values):
            raise GraphError(f"{named(node)}: moves a window along the samples")
    if node.op_type in KEEPING and (axis := grows[read[0]]) is not None:
        length = walk.values.shape(read[0])[axis]
        if any(walk.values.shape(name)[axis] != length for name in node.output if name):
            raise GraphError(f"{named(node)}: takes some samples out of a batch")
