"""Analyse a traced model in one pass: the neurons along the axes of every value."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, cast

import torch
from torch import fx, nn

from . import products, rules
from .graph import Traced, operation, place_of, shape_of
from .layers import Layers
from .operations import Operation, Rule, State, Value, constant

_RULES = {**rules.RULES, **products.RULES}


class Flow:
    """The neurons of a traced model: their sets in ``groups``, and results in ``state`` and ``layers``.

    choices: kind of reshape -> the part that keeps the neurons.
    """

    def __init__(self, traced: Traced, model: nn.Module, names: Mapping[int, str], choices: Mapping[Any, int]) -> None:
        tensors = model.state_dict(keep_vars=True)
        parameters = frozenset(names[id(parameter)] for parameter in model.parameters())
        self.state = state = State(traced, tensors, names, parameters, dict(choices))
        self.neurons = state.neurons
        samples = next(len(node.meta["val"]) for node, name in traced.inputs.items() if name is None)
        self.layers = Layers(model, state, samples)
        for node in traced.nodes:
            # Parameters wait for their first use: groups bear the name of the first layer.
            if traced.inputs.get(node) is not None:
                continue
            for source in node.all_input_nodes:
                if source not in state.values:
                    state.values[source] = self._derive(source)
            self.neurons.doing = f"{operation(node)} in {place_of(node) or 'forward'}"
            state.values[node] = self._derive(node)
            if node.op == "call_function":
                self.layers.note(node)
        self.neurons.doing = "the model's output"
        self.neurons.complete(*state.values[traced.output].known)
        self.groups = self.neurons.groups(state.axes.values())
        self._described = {
            name: (each.numel(), tuple(self.neurons.covered(axis) for axis in state.axes.get(name, ())))
            for name, each in tensors.items()
            if name in parameters and each.requires_grad
        }

    @property
    def share(self) -> float:
        """Share of the trained weights that belong to neurons."""
        total = sum(size for size, _ in self._described.values())
        return float(self.worth[0] / total) if total else 0.0

    @property
    def worth(self) -> tuple[Fraction | int, Fraction | int, int]:
        """The trained weights with neurons on an axis, these weights counted per axis, and the neurons."""
        masked = sum(size * (1 - math.prod(1 - share for share in axes)) for size, axes in self._described.values())
        both = sum(size * sum(axes) for size, axes in self._described.values())
        return masked, both, sum(group.size for group in self.groups[0])

    def why(self, name: str) -> str:
        """Return the reason that a tensor is complete, to end a sentence."""
        if name not in self.state.axes:
            return ", used nowhere"
        reasons = (self.neurons.why(axis) for axis in self.state.axes[name])
        return next((f", by {reason}" for reason in reasons if reason), "")

    def _derive(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.target is operator.getitem:
            source, place = cast(tuple[fx.Node, int], node.args)
            value = self.state.values.get(source)
            return value[place] if isinstance(value, tuple) and place < len(value) else None
        if node.op != "call_function":
            return _constant(node.meta.get("val"))
        op = Operation(node, self.state)
        if all(value.fixed and not value.learned for value in op.values) or op.name in rules.FILLED:
            return _constant(op.result)
        derived = _rule_of(op)(op)
        if isinstance(derived, list):
            return tuple(derived)
        return None if derived is None or op.several else op.value(op.shape, derived)

    def _placeholder(self, node: fx.Node) -> Value | None:
        shape = shape_of(node)
        state = self.state
        if shape is None:
            return None
        if node in state.traced.inputs and state.traced.inputs[node] is None:
            return Value(shape, ((),) * len(shape))
        name = state.named(node)
        if name is None:
            return constant(shape)
        trains = state.tensors[name].requires_grad
        if name not in state.axes:
            mine = [self.neurons.add(name.rpartition(".")[0] or name, length) for length in shape[:2]]
            state.axes[name] = (*mine, *((),) * (len(shape) - len(mine)))
            if not trains:
                self.neurons.doing = f"{name}, which is frozen"
                self.neurons.complete(*mine)
        known = [axis if length > 1 else None for axis, length in zip(state.axes[name][:2], shape, strict=False)]
        axes = (*known, *(None,) * (len(shape) - len(known)))
        return Value(shape, axes, "all" if trains else "none", fixed=True, learned=True)


def _constant(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return constant(result.shape)
    return tuple(map(_constant, result)) if isinstance(result, (tuple, list)) else None


def _rule_of(op: Operation) -> Rule:
    if op.name in _RULES:
        return _RULES[op.name]
    if op.name.startswith(rules.POOLS):
        return rules.pool
    return rules.broadcast if torch.Tag.pointwise in getattr(op.node.target, "tags", ()) else rules.unknown
