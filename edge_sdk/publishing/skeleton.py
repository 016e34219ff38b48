"""A model's forward pass as an ONNX graph without weights, exported by torch when a task is published.

The export is not optimised, so every tensor of the manifest stays an initialiser under its state-dict name. The data of
the initialisers is removed; ``sparrow.graphs.skeleton.fill`` inserts values without torch.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from sparrow.protocol.errors import ManifestError, MissingPart
from sparrow.protocol.manifest import Manifest

from .graph import UnsupportedLayer, slow_attention
from .modes import evaluating
from .translations import Fourier

if TYPE_CHECKING:
    import onnx

OPSET = 21
"""The newest that ONNX Runtime 1.19, the oldest supported version, runs, and the first with group norm as one operator
(a third of the nodes). Later ones have no advantage for our layers."""

IR_VERSION = 10

_REMARKS: tuple[tuple[str, type[Warning]], ...] = (
    (r".*isinstance\(treespec, LeafSpec\)", FutureWarning),
    (r".*_check_is_size will be removed", FutureWarning),
    (r"TF32 acceleration", UserWarning),
    # Recurrent layers, in the copy that is exported.
    (r".*were assigned during export", UserWarning),
)


def make_skeleton(model: nn.Module, example: torch.Tensor, manifest: Manifest) -> bytes:
    """Return ``model``'s forward pass in evaluation mode as serialised ONNX, from ``input`` to ``output``.

    example: [N, ...], N >= 1; the batch axis of the skeleton is free. The export is deterministic. Raises
    UnsupportedLayer, and ManifestError if a tensor of the manifest is not an initialiser of the graph.
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingPart("export needs onnx and onnxscript: pip install 'sparrow-fl[publish]'") from error

    proto = export_forward(model, example)
    for alias, name in manifest.aliases.items():
        _rename(proto.graph, alias, name)
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    for spec in manifest.whole:
        tensor = initializers.get(spec.name)
        if tensor is None and spec.trainable:
            # Read in training only, as the deviation of a variational autoencoder.
            kind = onnx.TensorProto.FLOAT
            proto.graph.initializer.append(onnx.TensorProto(name=spec.name, dims=spec.shape, data_type=kind))
            continue
        if tensor is None:
            raise ManifestError(
                f"{spec.name}: the exported forward pass does not read it; remove it from the model, "
                "or register the buffer with persistent=False"
            )
        if tuple(tensor.dims) != spec.shape:
            raise ManifestError(
                f"{spec.name}: exported with shape {tuple(tensor.dims)}, but described with {spec.shape}; "
                "describe and export the same model"
            )
        _remove_data(tensor)
    remove_notes(proto)
    return cast(bytes, proto.SerializeToString(deterministic=True))


def export_forward(model: nn.Module, example: torch.Tensor) -> onnx.ModelProto:
    """Return the forward pass of a model in evaluation mode, with weights and the exporter's metadata."""
    transforms = Fourier()
    try:
        return _exported(model, example, transforms)
    except UnsupportedLayer:
        if not transforms.used:
            raise
    # ONNX may have an operator for a transform that cannot be written as products.
    return _exported(model, example, contextlib.nullcontext())


def _exported(
    model: nn.Module, example: torch.Tensor, within: contextlib.AbstractContextManager[Any]
) -> onnx.ModelProto:
    proto = _traced(model, example, within)
    if _is_free(proto):
        return proto
    failure: Exception | None = None
    # torch's tracer takes ``len(x)`` for a constant; its compiler, which is slower, does not.
    try:
        proto = _traced(model, example, within, compiled=True)
    except Exception as error:
        failure = error
    if failure is not None or not _is_free(proto):
        raise UnsupportedLayer(
            f"{type(model).__name__} cannot be exported to ONNX: its batch size is fixed. Let forward take it from the "
            f"inputs, as x.shape[0]"
        ) from failure
    return proto


def _is_free(proto: onnx.ModelProto) -> bool:
    return bool(proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param)


def _traced(
    model: nn.Module, example: torch.Tensor, within: contextlib.AbstractContextManager[Any], *, compiled: bool = False
) -> onnx.ModelProto:
    # Export leaves stand-ins in recurrent layers.
    model = copy.deepcopy(model)
    # The exporter would take a batch axis of 1 for a constant.
    batch = torch.cat([example[:1], example[:1]])
    free = _free_batch(model)
    try:
        with evaluating(model), exporting(), torch.no_grad(), slow_attention(), within:
            source = torch.export.export(model, (batch,), dynamic_shapes=free, strict=True) if compiled else model
            program = torch.onnx.export(
                source,
                (batch,),
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                input_names=["input"],
                output_names=["output"],
                dynamic_shapes=free,
            )
    except ImportError as error:
        raise MissingPart("export needs onnx and onnxscript: pip install 'sparrow-fl[publish]'") from error
    except torch.onnx.OnnxExporterError as error:
        reason = next(iter(str(error.__cause__ or error).splitlines()), "")
        raise UnsupportedLayer(
            f"{type(model).__name__} cannot be exported to ONNX: {reason}. Make forward decide by shapes, not values, "
            f"and use operations that torch.onnx.export supports"
        ) from error
    assert program is not None, "the exporter returns a program if dynamo is True"
    return program.model_proto


def _free_batch(model: nn.Module) -> tuple[Any, ...]:
    free = {0: torch.export.Dim("batch", min=1)}
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    return ((free,),) if first is not None and first.kind is first.VAR_POSITIONAL else (free,)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Context manager: hide the exporter's own warnings (torchvision missing, deprecations)."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx", "torch._dynamo", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        # A failure raises an exception as well.
        logger.setLevel(logging.CRITICAL)
    try:
        # A failing exporter prints graphs to stderr, without a logger.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            for message, category in _REMARKS:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _rename(graph: onnx.GraphProto, alias: str, name: str) -> None:
    """Replace ``alias`` by ``name``: the exporter may call a tied tensor by any of its names."""
    names = {tensor.name for tensor in graph.initializer}
    for tensor in [tensor for tensor in graph.initializer if tensor.name == alias]:
        if name in names:
            graph.initializer.remove(tensor)
        else:
            tensor.name = name
    for node in graph.node:
        node.input[:] = [name if read == alias else read for read in node.input]


def _remove_data(tensor: onnx.TensorProto) -> None:
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "external_data", "data_location"):
        tensor.ClearField(field)


def remove_notes(proto: onnx.ModelProto) -> None:
    """Remove the exporter's doc strings and metadata, which hold paths."""
    proto.ir_version = IR_VERSION
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "metadata_props"):
        proto.ClearField(field)
    graph = proto.graph
    graph.name = "model"
    graph.ClearField("value_info")
    for entry in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        entry.ClearField("doc_string")
        entry.ClearField("metadata_props")
