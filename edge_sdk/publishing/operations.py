"""One call of an operator in a traced graph, what is known of the values that it takes, and what has been found so far.

A rule (``rules``, ``products``) gets an ``Operation`` and returns the axes of its result; of several results a list of
their values, and None of what is no tensor.
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
    """Return the error of which most is of use."""
    return max(errors, key=_WIDTH, default="none")


@dataclass(frozen=True)
class Value:
    """What is known of a tensor of the graph.

    axes: of a parameter None where anything may lie along an axis, which is then trained whole. error: what is of use
    of its gradient below it, none for what is frozen. fixed: it follows from parameters and constants alone, so that
    each of its neurons has a place in them; learned: not from constants alone.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    error: InputError = "none"
    fixed: bool = False
    learned: bool = False

    @property
    def known(self) -> Axes:
        """The axes, complete where anything may lie."""
        return tuple(axis or () for axis in self.axes)

    @property
    def blank(self) -> Axis | None:
        """An axis of this value along which nothing lies."""
        return None if self.fixed else ()


def constant(shape: Iterable[int]) -> Value:
    """Return a value that is the same in every pass."""
    shape = tuple(shape)
    return Value(shape, (None,) * len(shape), fixed=True)


@dataclass
class State:
    """What has been found of a traced model.

    tensors: its state dict; names: the first name of each of them by identity; parameters: the names of parameters.
    values: node -> its Value, a tuple of them, or None of what is no tensor. axes: name -> axes of every parameter and
    running statistic met; statistics: the names of running means and variances. choices: kind of reshape -> the part
    that keeps neurons where it splits them; splits: those there were, and of how many parts.
    """

    traced: Traced
    tensors: Mapping[str, torch.Tensor]
    names: Mapping[int, str]
    parameters: frozenset[str]
    choices: dict[Any, int]
    splits: dict[Any, int] = field(default_factory=dict)
    neurons: Neurons = field(default_factory=Neurons)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    axes: dict[str, Axes] = field(default_factory=dict)
    statistics: set[str] = field(default_factory=set)

    def of(self, argument: Any) -> Value | None:
        """Return what is known of an argument, if it is one tensor."""
        value = self.values.get(argument) if isinstance(argument, fx.Node) else None
        return value if isinstance(value, Value) else None

    def named(self, node: fx.Node) -> str | None:
        """Return the first name of the parameter that a node is, if it is one."""
        tensor = self.tensors.get(self.traced.inputs.get(node) or "")
        name = None if tensor is None else self.names[id(tensor)]
        return name if name in self.parameters else None


class Operation:
    """A node that calls an operator. name: the operator's, such as ``linear`` of ``aten.linear.default``, also if it
    works in place."""

    def __init__(self, node: fx.Node, state: State) -> None:
        self.node, self.state, self.neurons = node, state, state.neurons
        self.name = operation(node).rstrip("_")

    @cached_property
    def values(self) -> list[Value]:
        """What is known of the tensors that it takes."""
        found: list[Value] = []
        for source in self.node.all_input_nodes:
            value = self.state.values.get(source)
            found += [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Value)]
        return found

    @cached_property
    def given(self) -> dict[str, Any]:
        """The operator's arguments by their names, those that are left out as it has them."""
        schema = getattr(self.node.target, "_schema", None)
        if schema is None:
            return {str(place): argument for place, argument in enumerate(self.node.args)}
        named = {argument.name: argument.default_value for argument in schema.arguments}
        return {**named, **dict(zip(named, self.node.args, strict=False)), **self.node.kwargs}

    @property
    def result(self) -> Any:
        """A stand-in for what it gives: a tensor, or several."""
        return self.node.meta.get("val")

    @property
    def several(self) -> bool:
        """True if its result is not one tensor."""
        return not isinstance(self.result, torch.Tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its result, of one tensor."""
        return shape_of(self.node) or ()

    def at(self, place: int) -> Any:
        """Return the argument that stands here in the operator's list."""
        return list(self.given.values())[place]

    def of(self, place: int) -> Value | None:
        """Return what is known of the argument that stands here."""
        return self.state.of(self.at(place))

    def dim(self, rank: int) -> int:
        """Return the axis that it is given, counted from the front."""
        return int(self.given["dim"]) % rank

    def value(self, shape: Iterable[int], axes: Sequence[Axis | None]) -> Value:
        """Return what is known of a result with these axes."""
        fixed, learned = all(value.fixed for value in self.values), any(value.learned for value in self.values)
        error = widest(value.error for value in self.values) if fixed else error_of(self, axes)
        return Value(tuple(shape), tuple(axes), error, fixed, learned)


Rule = Callable[[Operation], Any]


# --- errors -----------------------------------------------------------------------------------------------------------

PRODUCTS = {"matmul", "mm", "bmm", "einsum", "scaled_dot_product_attention", "addmm", "baddbmm", "linear"}
_SOFTMAX = {"softmax", "_softmax", "log_softmax", "_log_softmax"}
_NORMS_OF_ALL = {"group_norm", "layer_norm", "rms_norm"}


def error_of(op: Operation, axes: Sequence[Axis | None]) -> InputError:
    """Return the part of the error at a result with these axes that is of use below it
    (``manifest.Layer.input_error``)."""
    error = widest(value.error for value in op.values if not value.fixed)
    if error == "none" and any(value.fixed and value.error != "none" for value in op.values):
        layer = op.name.startswith("conv") or op.name in {"linear", "embedding", "mm", "addmm", "matmul"}
        error = "active" if layer and _is_plain(op) else "all"
    elif error == "active" and _mixes(op, axes):
        error = "all"
    return "all" if error == "active" and not _stays_apart(op, axes) else error


def _stays_apart(op: Operation, axes: Sequence[Axis | None]) -> bool:
    """Return whether each neuron of the result gets something of the same neuron below only."""
    # Neurons lie along one axis, those of all below among them. Otherwise an active one below gets its error from
    # inactive ones here, as a map of one channel does that was broadcast over the channels of another.
    flowing = (value for value in op.values if not value.fixed and value.error == "active")
    below = {number for value in flowing for number in _sets(op, value.axes)}
    alone = sum(bool(axis and op.neurons.resolve(axis)) for axis in axes) == 1
    return alone and below.issubset(_sets(op, axes))


def _mixes(op: Operation, axes: Sequence[Axis | None]) -> bool:
    """Return whether an active neuron of the result gets something of others than the active ones below."""
    if op.name in _NORMS_OF_ALL or any(value.fixed and value.learned for value in op.values):
        return not (_keeps_channels(op) and len(axes) > 1 and axes[1])
    return op.name in PRODUCTS or op.name in _SOFTMAX


def _keeps_channels(op: Operation) -> bool:
    if op.name.startswith("conv"):  # depthwise
        return len(op.values) > 1 and op.values[0].shape[1] > 1 == op.values[1].shape[1]
    if op.name == "prelu":
        return math.prod(op.values[-1].shape) > 1
    return op.name in {"batch_norm", "instance_norm"}


def _is_plain(op: Operation) -> bool:
    """Return whether what is learned comes to a node as parameters themselves, and not as what is made of them."""
    return all(
        op.state.named(source) is not None
        for source in op.node.all_input_nodes
        if (value := op.state.of(source)) is not None and value.fixed and value.learned
    )


def _sets(op: Operation, axes: Sequence[Axis | None]) -> set[int]:
    return {run.set for axis in axes if axis for run in op.neurons.resolve(axis)}
