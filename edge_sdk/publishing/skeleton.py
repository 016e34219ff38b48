"""A model's forward pass as an ONNX graph without weights, made once by torch's exporter when a task is published.

Export is unoptimised: no weight is folded, transposed or merged into another, so every tensor of the manifest stays an
initialiser under its state-dict name. Its data is taken out; ``sparrow.graphs.skeleton.fill`` puts a personal
model's in, without torch. What the exporter adds for debugging, such as names of source files, is taken out as well.
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

from .graph import UnsupportedLayer
from .modes import evaluating
from .translations import Fourier

if TYPE_CHECKING:
    import onnx

OPSET = 21
"""The newest that ONNX Runtime 1.19, the oldest we accept, runs, and the first that has group norm as one operator (a
third of the nodes). Later ones bring our layers nothing."""

IR_VERSION = 10

_REMARKS: tuple[tuple[str, type[Warning]], ...] = (
    (r".*isinstance\(treespec, LeafSpec\)", FutureWarning),
    (r".*_check_is_size will be removed", FutureWarning),
    (r"TF32 acceleration", UserWarning),
    (r".*were assigned during export", UserWarning),  # of recurrent layers, in the copy that is exported
)


def make_skeleton(model: nn.Module, example: torch.Tensor, manifest: Manifest) -> bytes:
    """Return the forward pass of ``model`` in evaluation mode, as serialised ONNX with input ``input`` and output
    ``output``.

    example: [N, ...], N >= 1; the batch axis of the skeleton is free. The same model gives the same bytes, and is left
    as it was. Raises UnsupportedLayer when torch cannot export the model, and ManifestError, naming the tensor, when a
    tensor of the manifest does not survive as an initialiser. Needs onnx and onnxscript.
    """
    proto = export_forward(model, example)
    for alias, name in manifest.aliases.items():
        _rename(proto.graph, alias, name)
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    for spec in manifest.whole:
        tensor = initializers.get(spec.name)
        if tensor is None:
            raise ManifestError(
                f"{spec.name}: the exported forward pass does not read it; remove it from the model, "
                "or register the buffer with persistent=False"
            )
        if tuple(tensor.dims) != spec.shape:
            raise ManifestError(
                f"{spec.name}: exported with shape {tuple(tensor.dims)}, the manifest says {spec.shape}; "
                "describe and export the same model"
            )
        _remove_data(tensor)
    remove_notes(proto)
    return cast(bytes, proto.SerializeToString(deterministic=True))


def export_forward(model: nn.Module, example: torch.Tensor) -> onnx.ModelProto:
    """Return the forward pass of a model in evaluation mode, with its weights and the exporter's notes.

    Input, output and errors are those of ``make_skeleton``.
    """
    transforms = Fourier()
    try:
        return _exported(model, example, transforms)
    except UnsupportedLayer:
        if not transforms.used:
            raise
    # A transform that has no product may have an operator of ONNX.
    return _exported(model, example, contextlib.nullcontext())


def _exported(
    model: nn.Module, example: torch.Tensor, within: contextlib.AbstractContextManager[Any]
) -> onnx.ModelProto:
    model = copy.deepcopy(model)  # exporting leaves stand-ins in recurrent layers
    # A batch axis of 1 would be taken for a constant.
    batch = torch.cat([example[:1], example[:1]])
    try:
        with evaluating(model), exporting(), torch.no_grad(), within:
            program = torch.onnx.export(
                model,
                (batch,),
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                input_names=["input"],
                output_names=["output"],
                dynamic_shapes=_free_batch(model),
            )
    except ImportError as error:
        raise MissingPart("export needs onnx and onnxscript: pip install 'sparrow-fl[publish]'") from error
    except torch.onnx.OnnxExporterError as error:
        reason = next(iter(str(error.__cause__ or error).splitlines()), "")
        raise UnsupportedLayer(
            f"{type(model).__name__} cannot be exported to ONNX: {reason}. Let forward decide by shapes, not values, "
            f"and use operations that torch.onnx.export knows"
        ) from error
    assert program is not None, "the exporter answers with a program whenever dynamo is True"
    return program.model_proto


def _free_batch(model: nn.Module) -> tuple[Any, ...]:
    """Return what leaves the batch axis free, of a forward that takes x, or *args, as wrappers such as peft's do."""
    free = {0: torch.export.Dim("batch", min=1)}
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    return ((free,),) if first is not None and first.kind is first.VAR_POSITIONAL else (free,)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Keep the exporter's remarks on itself (torchvision missing, its own deprecations) from the user; let its time
    grow with the graph, not with its square."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx", "torch._dynamo", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        # What fails raises, too.
        logger.setLevel(logging.CRITICAL)
    try:
        # Where it fails it writes out graphs, past every logger.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            for message, category in _REMARKS:
                warnings.filterwarnings("ignore", message, category)
            with _rules_of_one_node():
                yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _rules_of_one_node() -> Iterator[None]:
    """Context manager: leave out the optimiser's rule that begins at two nodes, two slices that could be a split.

    For every node it lists all nodes, which is most of the time that a large step takes to export.
    """
    try:
        from onnxscript import rewriter
    except ImportError:
        # The exporter says that it is missing.
        yield
        return
    usual = rewriter._DEFAULT_REWRITE_RULES
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in usual if rule._target_pattern.has_single_output_node)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = usual


def _rename(graph: onnx.GraphProto, alias: str, name: str) -> None:
    """Read ``name`` wherever ``alias`` is read: a tied tensor, which the exporter may call by any of its names."""
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


def remove_notes(proto: onnx.ModelProto, *, shapes: bool = False) -> None:
    """Leave nothing of the exporter but the graph and, if asked for, the ``shapes`` of its values: doc strings and
    metadata hold stack traces and paths."""
    proto.ir_version = IR_VERSION
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "metadata_props"):
        proto.ClearField(field)
    graph = proto.graph
    graph.name = "model"
    if not shapes:
        graph.ClearField("value_info")
    for entry in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        entry.ClearField("doc_string")
        entry.ClearField("metadata_props")
