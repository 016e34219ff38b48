"""Validate, complete and run preparation graphs, and compose them with a model.

The graph maps a batch of raw samples, ``input``, to the model's inputs, ``output``. If devices standardise by their own
statistics, the initialisers ``own:mean`` and ``own:deviation`` have no data until ``complete``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from typing import cast

import numpy as np
import onnx
import onnx.checker
import onnx.compose
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from onnx import ModelProto, NodeProto, TensorProto

from sparrow.graphs.bounds import Walk, check_fields, has_data, samples_at_once
from sparrow.graphs.graph import check_valid
from sparrow.graphs.skeleton import INPUT, OUTPUT, check_node, check_structure, parse, refuse_external
from sparrow.graphs.values import LARGEST_SIZE, named
from sparrow.protocol.manifest import MAX_GRAPH, Array, Manifest
from sparrow.protocol.preparation import OWN_DEVIATION, OWN_MEAN, Preparation

from .errors import ExportError, SkeletonError
from .running import CHUNK, Raws, load, run

PREFIX = "prepare/"
"""Prefix of a preparation's names in an exported model."""

MOST_NODES = 1_000
LARGEST_CONSTANT = 4 * 1024 * 1024
"""Largest constant of a preparation, in bytes."""

PREPARED_TYPES = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32)

Constants = Mapping[str, Array]
"""Initialiser name -> a device's own statistics, float32."""


def check_preparation(graph: bytes, manifest: Manifest) -> ModelProto:
    """Parse a preparation and check its digest, structure, interface and memory. Raises SkeletonError."""
    preparation = manifest.preparation
    if preparation is None:
        raise SkeletonError("the manifest has no preparation; publish the model again")
    if len(graph) > MAX_GRAPH:
        raise SkeletonError(f"the preparation has {len(graph)} bytes, more than {MAX_GRAPH}; make it smaller")
    digest = hashlib.sha256(graph).hexdigest()
    if digest != manifest.preparation_sha256:
        raise SkeletonError(
            f"the preparation has the SHA-256 {digest}, the manifest names {manifest.preparation_sha256}; download it "
            "again"
        )
    check_fields(graph)
    model = parse(graph)
    check_structure(model)
    if len(model.graph.node) > MOST_NODES:
        raise SkeletonError(f"the preparation has {len(model.graph.node)} nodes, more than {MOST_NODES}; simplify it")
    for node in model.graph.node:
        check_node(node)
    _check_constants(model, preparation)
    if preparation.own:
        model = _completed(model, _neutral(model))
    _check_interface(model, preparation, manifest)
    largest = at_most(model, preparation)
    for samples in (1, 2, 3):
        walk = (_Growing if preparation.free else Walk)(largest, samples=samples)
        walk.run()
        wanted = [samples, *manifest.input_shape]
        if walk.values.shape(OUTPUT) != wanted:
            raise SkeletonError(
                f"the preparation returns {walk.values.shape(OUTPUT)} for {samples} samples, but the model "
                f"takes {wanted}; "
                "keep the batch axis first and free"
            )
    check_valid(model, "the preparation is not a valid ONNX graph", error=SkeletonError, full=True)
    return model


class _Growing(Walk):
    """Traversal of a graph with free axes at their largest lengths.

    This gives the largest sizes only if all sizes grow with the free axes, so other operators are refused.
    """

    def _infer(self, node: NodeProto) -> dict[str, int]:
        if not self.values.varies.isdisjoint(node.input) and not self._grows(node):
            raise SkeletonError(
                f"{named(node)}: its output may be larger for shorter samples; remove it, or use samples of one shape"
            )
        return super()._infer(node)

    def _fold(self, node: NodeProto) -> None:
        if self.values.varies.isdisjoint(node.input):
            super()._fold(node)

    def _grows(self, node: NodeProto) -> bool:
        """Return True if no output shrinks when an input grows."""
        given = [name for name in node.input[1:] if name]
        if node.op_type in ("Split", "SplitToSequence", "SequenceAt"):
            return False
        if node.op_type in ("Squeeze", "DFT"):
            # The axes, or the length of a transform, must not depend on the sample.
            return len(node.input) > 1 and node.input[1] in self.values.data
        if node.op_type != "Slice":
            return True
        if not given or any(name not in self.values.data for name in given):
            return False
        starts, ends = (self.values.data[name] for name in node.input[1:3])
        steps = self.values.data[node.input[4]] if len(node.input) > 4 and node.input[4] else np.ones_like(starts)
        # A slice from a position counted from the end to one from the start is empty for long samples.
        return (
            starts.ndim == 1
            and starts.shape == ends.shape == steps.shape
            and all(
                (start >= 0 or end < 0 or end >= LARGEST_SIZE) if step > 0 else end <= -LARGEST_SIZE
                for start, end, step in zip(starts.tolist(), ends.tolist(), steps.tolist(), strict=True)
            )
        )


def at_most(model: ModelProto, preparation: Preparation) -> ModelProto:
    """Return the graph with all free axes except the batch at their largest lengths."""
    largest = deepcopy(model)
    for value in largest.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim[1:]):
            if axis in preparation.free:
                dim.dim_value = preparation.shape[axis]
    return largest


def _check_constants(model: ModelProto, preparation: Preparation) -> None:
    open_names = {OWN_MEAN, OWN_DEVIATION} if preparation.own else set()
    seen = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        refuse_external(tensor)
        if tensor.name in seen:
            raise SkeletonError(f"{tensor.name[:80]!r} appears twice among the preparation's inputs and constants")
        seen.add(tensor.name)
        if tensor.ByteSize() > LARGEST_CONSTANT:
            raise SkeletonError(
                f"the preparation's constant {tensor.name[:80]!r} has more than {LARGEST_CONSTANT} bytes"
            )
        if tensor.name in open_names:
            shape = tuple(tensor.dims)
            if (
                has_data(tensor)
                or tensor.data_type != TensorProto.FLOAT
                or max(shape, default=1) > max((*preparation.shape, 1))
            ):
                raise SkeletonError(f"{tensor.name} must be float32 without data, of the length of a raw sample's axis")
        elif not has_data(tensor) and 0 not in tensor.dims:
            raise SkeletonError(f"the preparation has no values for {tensor.name[:80]!r}; publish it with its data")
    missing = sorted(open_names - seen)
    if missing:
        raise SkeletonError(
            f"the preparation has no {missing[0]}, but by the manifest it uses the device's own statistics"
        )


def _check_interface(model: ModelProto, preparation: Preparation, manifest: Manifest) -> None:
    wanted = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(preparation.dtype))
    for values, name, kinds, shape in (
        (model.graph.input, INPUT, (wanted,), preparation.shape),
        (model.graph.output, OUTPUT, PREPARED_TYPES, manifest.input_shape),
    ):
        if [value.name for value in values] != [name]:
            raise SkeletonError(f"the preparation must have exactly one {name}, named {name!r}")
        tensor = values[0].type.tensor_type
        dims = [dim.dim_value if dim.WhichOneof("value") == "dim_value" else None for dim in tensor.shape.dim]
        free = preparation.free if name == INPUT else ()
        said = [None, *(None if axis in free else length for axis, length in enumerate(shape))]
        if tensor.elem_type not in kinds or dims != said:
            raise SkeletonError(
                f"the preparation's {name} is of ONNX type {tensor.elem_type} and shape {dims}, but the manifest has "
                f"{tuple(said)}{f' of {preparation.dtype}' if name == INPUT else ''}"
            )


def _neutral(model: ModelProto) -> Constants:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    return {
        OWN_MEAN: np.zeros(shapes[OWN_MEAN], np.float32),
        OWN_DEVIATION: np.ones(shapes[OWN_DEVIATION], np.float32),
    }


def complete(graph: bytes, constants: Constants) -> bytes:
    """Insert a device's own statistics into a validated preparation. Raises ExportError if they do not fit."""
    model = ModelProto.FromString(graph)
    return cast(bytes, _completed(model, constants).SerializeToString(deterministic=True))


def _completed(model: ModelProto, constants: Constants) -> ModelProto:
    result = deepcopy(model)
    for tensor in result.graph.initializer:
        if tensor.name in (OWN_MEAN, OWN_DEVIATION):
            values = constants.get(tensor.name)
            if values is None or values.size != int(np.prod(tensor.dims)) or not np.isfinite(values).all():
                raise ExportError(
                    f"{tensor.name}: the device's statistics do not fit this preparation; run sparrow join again"
                )
            shaped = np.asarray(values, np.float32).reshape(tuple(tensor.dims))
            tensor.CopyFrom(onnx.numpy_helper.from_array(shaped, tensor.name))
    return result


def compose(model: ModelProto, graph: bytes) -> ModelProto:
    """Return a model that takes raw samples: the complete preparation ``graph``, then ``model``.

    The preparation's names get ``PREFIX``, except the input. The metadata are the model's.
    """
    preparation = ModelProto.FromString(graph)
    preparation.ir_version = model.ir_version
    prefixed = onnx.compose.add_prefix(preparation, PREFIX)
    merged = onnx.compose.merge_models(prefixed, model, io_map=[(PREFIX + OUTPUT, INPUT)])
    merged.graph.name = model.graph.name
    # ONNX names the common version once for each part.
    del merged.opset_import[:]
    merged.opset_import.extend(model.opset_import)
    _rename_input(merged, PREFIX + INPUT, INPUT)
    merged.producer_name = model.producer_name
    del merged.metadata_props[:]
    merged.metadata_props.extend(model.metadata_props)
    check_valid(merged, "preparation and model make no valid ONNX model", "export --without-preparation")
    return merged


def compose_bytes(model: bytes, graph: bytes) -> bytes:
    """Compose serialised models."""
    return cast(bytes, compose(ModelProto.FromString(model), graph).SerializeToString(deterministic=True))


def _rename_input(model: ModelProto, name: str, to: str) -> None:
    for value in model.graph.input:
        if value.name == name:
            value.name = to
    for node in model.graph.node:
        node.input[:] = [to if read == name else read for read in node.input]


class Preparer:
    """A complete preparation, run in batches that fit memory: raw samples [N, *raw] -> inputs [N, *input_shape].

    shape: shape of a raw sample, None for a free axis.
    """

    def __init__(self, graph: bytes, threads: int = 1) -> None:
        """Load a checked graph. Raises ExportError if ONNX Runtime cannot."""
        self.graph = graph
        self.digest = hashlib.sha256(graph).hexdigest()
        model = ModelProto.FromString(graph)
        tensor = model.graph.input[0].type.tensor_type
        self.dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        self.shape = tuple(dim.dim_value or None for dim in tensor.shape.dim[1:])
        # samples of different lengths are run one by one
        self.at_once = 1 if None in self.shape else samples_at_once(model, CHUNK)
        self._session = load(graph, threads)

    def __call__(self, raw: Raws) -> Array:
        """Return the inputs. Raises ExportError if the graph fails."""
        return run(self._session, raw, self.at_once)


MOST_DRAWN = 32
"""Largest number of random samples with free axes."""
LONGEST_DRAWN = {"uint8": 200, "float32": 20_000}


def draw_raw(preparation: Preparation, count: int, seed: int = 0) -> Raws:
    """Draw raw samples with the described mean and deviation; categories are indices, -1 for an unknown one.

    With free axes, draw at most ``MOST_DRAWN`` samples of different lengths, as a list.
    """
    chance = np.random.default_rng(seed)
    if preparation.free:
        most = LONGEST_DRAWN.get(preparation.dtype, 1_000)
        drawn = []
        for number in range(min(count, MOST_DRAWN)):
            lengths = [
                int(chance.integers(1, min(length, most), endpoint=True)) if axis in preparation.free else length
                for axis, length in enumerate(preparation.shape)
            ]
            one = preparation.model_copy(update={"shape": tuple(lengths), "free": ()})
            drawn.append(np.asarray(draw_raw(one, 1, seed + number))[0])
        return drawn
    kind = np.dtype(preparation.dtype)
    shape = (count, *preparation.shape)
    if kind.kind == "u":
        return chance.integers(0, int(np.iinfo(kind).max), shape, dtype=kind, endpoint=True)
    values = chance.standard_normal(shape, dtype=np.float32)
    if preparation.mean:
        axes = [-1 if axis == preparation.channel else 1 for axis in range(len(preparation.shape))]
        mean, deviation = (np.array(each).reshape(axes) for each in (preparation.mean, preparation.deviation))
        values = (mean + deviation * values).astype(np.float32)
    for place, column in enumerate(preparation.columns):
        if column.categories:
            values[:, place] = chance.integers(-1, len(column.categories), count)
    if kind.kind == "i":
        bounds = np.iinfo(kind)
        return np.clip(np.rint(values), bounds.min, bounds.max).astype(kind)
    return values.astype(kind)
