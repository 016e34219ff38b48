"""Check a federation's ONNX skeleton, and fill it with a personal model's weights.

A skeleton is an ONNX model whose initialisers in the manifest have type and shape but no data
(``edge_sdk.publishing.skeleton`` makes it). It comes over the network, so it is checked as hostile input: it must not
reference other files, define operators or subgraphs, or differ from the manifest's model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import cast

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, ValueInfoProto

from ..protocol.manifest import MAX_GRAPH, Manifest, Tensors, TensorSpec
from .bounds import check_fields, check_sizes, has_data
from .errors import ExportError, SkeletonError
from .graph import check_valid
from .values import named

MAX_MODEL = 2**31 - 1
"""Largest ONNX file without external data, in bytes, by protobuf's limit."""

OPSETS = range(17, 24)
"""Versions of the standard operators that ONNX Runtime 1.19 and later run, and that have LayerNormalization."""

INPUT = "input"
OUTPUT = "output"

_ONNX_DOMAINS = ("", "ai.onnx")
_INPUT_TYPES = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32)
_ATTRIBUTES = {
    AttributeProto.FLOAT,
    AttributeProto.FLOATS,
    AttributeProto.INT,
    AttributeProto.INTS,
    AttributeProto.STRING,
    AttributeProto.STRINGS,
    AttributeProto.TENSOR,
    AttributeProto.TENSORS,
}


def check_skeleton(data: bytes, manifest: Manifest) -> ModelProto:
    """Return the parsed skeleton after all checks. Raises SkeletonError if a check fails."""
    if len(data) > MAX_GRAPH:
        raise SkeletonError(f"the skeleton has {len(data)} bytes; it must have at most {MAX_GRAPH}: leave weights out")
    digest = hashlib.sha256(data).hexdigest()
    if manifest.skeleton_sha256 not in (None, digest):
        raise SkeletonError(
            f"the skeleton has the SHA-256 {digest}, the manifest names {manifest.skeleton_sha256}; fetch it again"
        )
    check_fields(data)
    model = parse(data)
    check_structure(model)
    _check_interface(model.graph, manifest)
    _check_initializers(model.graph, manifest)
    for node in model.graph.node:
        check_node(node)
    check_sizes(model)
    _check_graph(model, manifest)
    return model


def fill(skeleton: bytes, manifest: Manifest, tensors: Tensors, *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a complete ONNX model: the skeleton with ``tensors`` as its weights.

    tensors: every tensor that the manifest does not drop; others are ignored. The result is deterministic. Raises
    SkeletonError for the skeleton, ExportError, naming the tensor, otherwise.
    """
    model = check_skeleton(skeleton, manifest)
    for spec in manifest.whole:
        _check_tensor(spec, tensors)
    size = len(skeleton) + sum(tensors[spec.name].nbytes for spec in manifest.whole)
    if size > MAX_MODEL:
        raise ExportError(f"the model needs {size} bytes, but an ONNX file has at most {MAX_MODEL}; make it smaller")
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for spec in manifest.whole:
        values = np.ascontiguousarray(tensors[spec.name]).reshape(spec.shape)
        initializers[spec.name].CopyFrom(onnx.numpy_helper.from_array(values, spec.name))
    model.producer_name = "sparrow"
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, dict(sorted((metadata or {}).items())))
    check_valid(model, "the filled skeleton is not a valid ONNX model", "publish the task again", error=SkeletonError)
    return cast(bytes, model.SerializeToString(deterministic=True))


def parse(data: bytes) -> ModelProto:
    """Return the parsed file, after ``check_fields``. Raises SkeletonError if it is not an ONNX model."""
    model = ModelProto()
    try:
        model.ParseFromString(data)
    # The module of protobuf's DecodeError depends on the installed protobuf.
    except Exception as error:
        raise SkeletonError(f"the graph is not an ONNX file: {error}; send the whole file") from None
    model.DiscardUnknownFields()
    if not model.HasField("graph"):
        raise SkeletonError("the file has no graph; make it with sparrow publish")
    return model


def check_structure(model: ModelProto) -> None:
    """Raise SkeletonError if the model is not one plain graph of standard operators."""
    domains = [opset.domain for opset in model.opset_import]
    foreign = [domain for domain in domains if domain not in _ONNX_DOMAINS]
    if foreign:
        raise SkeletonError(f"the graph uses operators of {foreign[0][:80]!r}; only the standard ones are accepted")
    if len(domains) != 1 or model.opset_import[0].version not in OPSETS:
        versions = [opset.version for opset in model.opset_import]
        raise SkeletonError(
            f"the graph names the operator versions {versions[:4]}; give one of {OPSETS[0]} to {OPSETS[-1]}"
        )
    if model.functions:
        raise SkeletonError("the graph has its own functions; export it with these inlined")
    if model.training_info or model.graph.sparse_initializer or model.graph.quantization_annotation:
        raise SkeletonError("the graph contains training, sparse or quantisation data; export only the forward pass")


def _check_interface(graph: GraphProto, manifest: Manifest) -> None:
    _check_value(graph.input, INPUT, manifest.input_shape)
    _check_value(graph.output, OUTPUT, manifest.output_shape)


def _check_value(values: Iterable[ValueInfoProto], name: str, shape: tuple[int, ...]) -> None:
    names = [value.name[:80] for value in values]
    if names != [name]:
        raise SkeletonError(f"the skeleton's {name}s are {names[:4]}; give exactly one, named {name!r}")
    (value,) = values
    tensor = value.type.tensor_type
    dims = list(tensor.shape.dim)
    if tensor.elem_type not in _INPUT_TYPES or not dims:
        raise SkeletonError(f"the skeleton's {name} must be a tensor of float32, int64 or int32 with a batch axis")
    if dims[0].WhichOneof("value") != "dim_param":
        raise SkeletonError(f"the skeleton's {name} has a fixed batch size; export it with a dynamic first axis")
    found = tuple(dim.dim_value if dim.WhichOneof("value") == "dim_value" else None for dim in dims[1:])
    if found != shape:
        raise SkeletonError(f"the skeleton's {name} has shape {found} per sample, but the manifest has {shape}")


def _check_initializers(graph: GraphProto, manifest: Manifest) -> None:
    found: dict[str, TensorProto] = {}
    for tensor in graph.initializer:
        refuse_external(tensor)
        if tensor.name in found:
            raise SkeletonError(f"the initialiser {tensor.name[:200]!r} occurs twice in the skeleton")
        found[tensor.name] = tensor
    for spec in manifest.whole:
        if spec.name not in found:
            raise SkeletonError(f"{spec.name}: the skeleton has no such initialiser; export it unoptimised")
        tensor = found.pop(spec.name)
        shape = tuple(tensor.dims)
        dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        if shape != spec.shape or tensor.data_type != dtype:
            raise SkeletonError(
                f"{spec.name}: the skeleton has shape {shape} of ONNX type {tensor.data_type}, "
                f"the manifest has {spec.shape} of type {dtype}; publish both from the same model"
            )
        if has_data(tensor):
            raise SkeletonError(
                f"{spec.name}: the skeleton contains its values; remove them, because weights are sent separately"
            )
    for name, tensor in found.items():
        if not has_data(tensor):
            raise SkeletonError(f"the skeleton needs values for {name[:200]!r}, which the manifest does not have")


def refuse_external(tensor: TensorProto) -> None:
    """Raise SkeletonError for a tensor with data in another file."""
    if tensor.external_data or tensor.data_location != TensorProto.DEFAULT:
        raise SkeletonError(f"{tensor.name[:200]!r} refers to a file outside the skeleton; embed the data")


def check_node(node: onnx.NodeProto) -> None:
    """Raise SkeletonError for a node of another domain, or with attributes such as subgraphs."""
    what = named(node)
    if node.domain not in _ONNX_DOMAINS:
        raise SkeletonError(f"{what} is of {node.domain[:80]!r}; only standard operators are accepted")
    for attribute in node.attribute:
        if attribute.type not in _ATTRIBUTES or attribute.ref_attr_name:
            raise SkeletonError(f"{what} has a graph or another kind of attribute that no common layer needs")
        for tensor in (attribute.t, *attribute.tensors):
            refuse_external(tensor)


def _check_graph(model: ModelProto, manifest: Manifest) -> None:
    """Run ONNX's own check with shape inference; initialisers without data become inputs, or they would fail it."""
    open_model = deepcopy(model)
    graph = open_model.graph
    kept = {spec.name for spec in manifest.whole}
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in kept]
    del graph.initializer[:]
    graph.initializer.extend(constants)
    for tensor in model.graph.initializer:
        if tensor.name in kept:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    check_valid(open_model, "the skeleton is not a valid ONNX graph", error=SkeletonError, full=True)


def _check_tensor(spec: TensorSpec, tensors: Tensors) -> None:
    if spec.name not in tensors:
        raise ExportError(f"{spec.name}: its values are missing; export needs the whole personal model")
    tensor = tensors[spec.name]
    if tensor.shape != spec.shape or tensor.dtype != np.dtype(spec.dtype):
        raise ExportError(
            f"{spec.name}: the personal model has shape {tensor.shape} of {tensor.dtype}, "
            f"the manifest has {spec.shape} of {spec.dtype}; use the manifest the model was trained with"
        )
