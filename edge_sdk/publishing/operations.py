"""Operator calls of a traced graph, the properties of their inputs, and the state of the analysis.

A rule (``rules``, ``products``) maps an ``Operation`` to the axes of its result, or to a list of several results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import torch
from torch import fx

from sparrow.protocol.manifest import InputError

from .graph import Traced, operation, shape_of
from .neurons import Axes, Axis, Neurons

_WIDTH = get_args(InputError).index


def widest(errors: Iterable[InputError]) -> InputError:
    """Return the widest requirement, in the order none, active, all; none if there are none."""
    return max(errors, key=_WIDTH, default="none")


@dataclass(frozen=True)
class Value:
    """Properties of a tensor of the graph."""

    shape: tuple[int, ...]
    # None for an unrestricted axis of a parameter.
    axes: tuple[Axis | None, ...]
    # The part of its gradient that tensors below it need.
    error: InputError = "none"
    # Computed only from parameters and constants.
    fixed: bool = False
    # Computed from parameters.
    learned: bool = False

    @property
    def known(self) -> Axes:
        """The axes; unrestricted ones count as complete."""
        return tuple(axis or () for axis in self.axes)

    @property
    def blank(self) -> Axis | None:
        """An axis of this value without neurons; None if the value is fixed."""
        return None if self.fixed else ()


def constant(shape: Iterable[int]) -> Value:
    """Return a value that does not depend on the input."""
    shape = tuple(shape)
    return Value(shape, (None,) * len(shape), fixed=True)


@dataclass
class State:
    """State of the analysis of a traced model."""

    traced: Traced
    # State dict.
    tensors: Mapping[str, torch.Tensor]
    # Identity -> first name.
    names: Mapping[int, str]
    parameters: frozenset[str]
    # Kind of reshape -> the part that keeps the neurons.
    choices: dict[Any, int]
    # Kind of reshape found -> number of parts.
    splits: dict[Any, int] = field(default_factory=dict)
    neurons: Neurons = field(default_factory=Neurons)
    # Node -> Value, tuple of Values, or None if not a tensor.
    values: dict[fx.Node, Any] = field(default_factory=dict)
    # Axes of parameters and running statistics, by name.
    axes: dict[str, Axes] = field(default_factory=dict)
    statistics: set[str] = field(default_factory=set)

    def of(self, argument: Any) -> Value | None:
        """Return the Value of an argument; None unless it is a single traced tensor."""
        value = self.values.get(argument) if isinstance(argument, fx.Node) else None
        return value if isinstance(value, Value) else None

    def named(self, node: fx.Node) -> str | None:
        """Return the first name of a node's parameter."""
        tensor = self.tensors.get(self.traced.inputs.get(node) or "")
        name = None if tensor is None else self.names[id(tensor)]
        return name if name in self.parameters else None


class Operation:
    """A call of an operator. name: without overload and trailing underscore, such as ``linear``."""

    def __init__(self, node: fx.Node, state: State) -> None:
        self.node = node
        self.state = state
        self.neurons = state.neurons
        self.name = operation(node).rstrip("_")

    @cached_property
    def values(self) -> list[Value]:
        """The Values of the input tensors."""
        found: list[Value] = []
        for source in self.node.all_input_nodes:
            value = self.state.values.get(source)
            found += [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Value)]
        return found

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments by name, including defaults."""
        schema = getattr(self.node.target, "_schema", None)
        if schema is None:
            return {str(place): argument for place, argument in enumerate(self.node.args)}
        named = {argument.name: argument.default_value for argument in schema.arguments}
        return {**named, **dict(zip(named, self.node.args, strict=False)), **self.node.kwargs}

    @property
    def result(self) -> Any:
        """The traced result, without data."""
        return self.node.meta.get("val")

    @property
    def several(self) -> bool:
        """Whether the result is not one tensor."""
        return not isinstance(self.result, torch.Tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, if one tensor."""
        return shape_of(self.node) or ()

    def at(self, place: int) -> Any:
        """Return the argument at a position of the operator's signature."""
        return list(self.given.values())[place]

    def of(self, place: int) -> Value | None:
        """Return the Value of the argument at a position."""
        return self.state.of(self.at(place))

    def dim(self, rank: int) -> int:
        """Return its ``dim`` argument, counted from the front."""
        return int(self.given["dim"]) % rank

    def value(self, shape: Iterable[int], axes: Sequence[Axis | None]) -> Value:
        """Return the Value of a result with these axes."""
        fixed = all(value.fixed for value in self.values)
        learned = any(value.learned for value in self.values)
        error = widest(value.error for value in self.values) if fixed else error_of(self, axes)
        return Value(tuple(shape), tuple(axes), error, fixed, learned)


Rule = Callable[[Operation], Any]


# --- errors -----------------------------------------------------------------------------------------------------------

PRODUCTS = {"matmul", "mm", "bmm", "einsum", "scaled_dot_product_attention", "addmm", "baddbmm", "linear"}
_SOFTMAX = {"softmax", "_softmax", "log_softmax", "_log_softmax"}
_NORMS_OF_ALL = {"group_norm", "layer_norm", "rms_norm"}


def error_of(op: Operation, axes: Sequence[Axis | None]) -> InputError:
    """Return the part of a result's error that the layers below need (``manifest.Layer.input_error``)."""
    error = widest(value.error for value in op.values if not value.fixed)
    if error == "none" and any(value.fixed and value.error != "none" for value in op.values):
        layer = op.name.startswith("conv") or op.name in {"linear", "embedding", "mm", "addmm", "matmul"}
        error = "active" if layer and _is_plain(op) else "all"
    elif error == "active" and _mixes(op, axes):
        error = "all"
    return "all" if error == "active" and not _stays_apart(op, axes) else error


def _stays_apart(op: Operation, axes: Sequence[Axis | None]) -> bool:
    """Return True if each neuron of the result depends only on the same neuron of the input."""
    # Neurons lie along one axis, which includes all those below. Otherwise an active neuron below gets error from
    # inactive ones here, as a map of one channel that is broadcast over the channels of another does.
    flowing = (value for value in op.values if not value.fixed and value.error == "active")
    below = {number for value in flowing for number in _sets(op, value.axes)}
    one_axis = sum(bool(axis and op.neurons.resolve(axis)) for axis in axes) == 1
    return one_axis and below.issubset(_sets(op, axes))


def _mixes(op: Operation, axes: Sequence[Axis | None]) -> bool:
    """Return True if an active neuron of the result depends on inactive neurons of the input."""
    if op.name in _NORMS_OF_ALL or any(value.fixed and value.learned for value in op.values):
        return not (_keeps_channels(op) and len(axes) > 1 and axes[1])
    return op.name in PRODUCTS or op.name in _SOFTMAX


def _keeps_channels(op: Operation) -> bool:
    # A depthwise convolution.
    if op.name.startswith("conv"):
        return len(op.values) > 1 and op.values[0].shape[1] > 1 == op.values[1].shape[1]
    if op.name == "prelu":
        return math.prod(op.values[-1].shape) > 1
    return op.name in {"batch_norm", "instance_norm"}


def _is_plain(op: Operation) -> bool:
    """Return True if a node reads parameters directly, not values computed from them."""
    return all(
        op.state.named(source) is not None
        for source in op.node.all_input_nodes
        if (value := op.state.of(source)) is not None and value.fixed and value.learned
    )


def _sets(op: Operation, axes: Sequence[Axis | None]) -> set[int]:
    return {run.set for axis in axes if axis for run in op.neurons.resolve(axis)}
