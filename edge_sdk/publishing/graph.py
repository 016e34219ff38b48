"""A model's forward pass as a graph of torch's operators, traced with torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx, nn

from sparrow.protocol.errors import SdkError


class UnsupportedLayer(SdkError):
    """The model cannot be published for a method."""


@dataclass(frozen=True)
class Traced:
    """Graph of a forward pass, with only the nodes that its output depends on."""

    nodes: tuple[fx.Node, ...]
    # Placeholder -> name of the parameter or buffer, None for the batch.
    inputs: Mapping[fx.Node, str | None]
    output: fx.Node
    # Shape of the output.
    shape: tuple[int, ...]


@contextmanager
def slow_attention() -> Iterator[None]:
    """Context manager: run torch's transformer layers as separate operators, not as one fused operator."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def trace(model: nn.Module, example: torch.Tensor) -> Traced:
    """Return the graph of ``model``, in its present mode, on ``example`` [N, ...].

    Raises UnsupportedLayer if it cannot be traced.
    """
    try:
        with slow_attention(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, (example.clone(),), strict=False)
    # Tracing runs the user's forward on stand-ins for tensors; a failure there may be any exception.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedLayer(
            f"the forward pass of {type(model).__name__} cannot be traced: {reason}. Make forward take only the batch, "
            "and move decisions that depend on data out of it; see the limitations of torch.export"
        ) from error
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = set(signature.inputs_to_lifted_tensor_constants) | set(signature.inputs_to_lifted_custom_objs)
    inputs = {
        node: names.get(node.name)
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name not in constants
    }
    (results,) = next(node.args for node in program.graph.nodes if node.op == "output")
    results = results[len(signature.buffers_to_mutate) :] if isinstance(results, tuple) else results
    if not isinstance(results, tuple) or len(results) != 1 or not isinstance(results[0], fx.Node):
        raise UnsupportedLayer("the model does not return one tensor; make forward return only the class scores")
    output = results[0]
    return Traced(_needed(program.graph, output), inputs, output, tuple(output.meta["val"].shape))


def _needed(graph: fx.Graph, output: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes that the output depends on, in order, also by changes in place."""
    needed = {output}
    nodes = [node for node in graph.nodes if node.op != "output"]
    count = 0
    while count != len(needed):
        count = len(needed)
        for node in reversed(nodes):
            if node in needed or (operation(node).endswith("_") and node.args and node.args[0] in needed):
                needed.update((node, *node.all_input_nodes))
    return tuple(node for node in nodes if node in needed)


def operation(node: fx.Node) -> str:
    """Return the name of a node's operator, without its overload."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name if schema is not None else getattr(node.target, "__name__", str(node.target))
    return str(name).rpartition("::")[2]


def place_of(node: fx.Node) -> str:
    """Return the path of the innermost module that runs the node; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).partition("@")[0]


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of a node's value, if it is a tensor."""
    value = node.meta.get("val")
    return tuple(int(length) for length in value.shape) if isinstance(value, torch.Tensor) else None
