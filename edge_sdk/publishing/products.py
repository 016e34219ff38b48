"""Rules for operators with weights: products, convolutions, norms and recurrent layers.

The columns of a weight have the neurons of its input; its rows are the neurons of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .neurons import Axes, Axis, Run
from .operations import Operation, Rule, Value
from .rules import Lies, broadcast, unknown

# --- products of matrices ---------------------------------------------------------------------------------------------


def _product(op: Operation, terms: Sequence[tuple[Value, str]], result: str, *, weighs: bool) -> Lies:
    """Return the axes of a product in einsum notation; neurons along a summed axis become complete.

    weighs: one side is a parameter; its columns then have the neurons of the summed axis.
    """
    found: dict[str, Axis | None] = {}
    mixed = set() if weighs else {letter for _, letters in terms for letter in letters}
    for value, letters in terms:
        for letter, axis, length in zip(letters, value.axes, value.shape, strict=True):
            # Axes of length 1 are broadcast, and a single neuron is always active.
            if length > 1:
                found[letter] = op.neurons.join(found[letter], axis) if letter in found else axis
                # A constant has no neurons.
                mixed |= {letter} if axis is None else set()
    op.neurons.complete(*(axis or () for letter, axis in found.items() if letter in mixed - set(result)))
    fixed = all(value.fixed for value, _ in terms)
    return tuple(None if found.get(letter) is None and fixed else found.get(letter) or () for letter in result)


def _multiplied(op: Operation, first: Value, second: Value) -> Lies:
    # Batch axes are aligned at their ends.
    batch = ["abcdefgh"[10 - max(len(value.shape), 2) :] for value in (first, second)]
    left = "nm"[-len(first.shape) :]
    right = "mp"[: len(second.shape)]
    if len(first.shape) == 1:
        left = "m"
    result = max(batch, key=len) + left[:-1] + right[1:]
    terms = [(first, batch[0] + left), (second, batch[1] + right)]
    return _product(op, terms, result, weighs=first.fixed or second.fixed)


def _matmul(op: Operation) -> Any:
    first = op.of(0)
    second = op.of(1)
    return unknown(op) if first is None or second is None else _multiplied(op, first, second)


def _addmm(op: Operation) -> Any:
    added = op.of(0)
    first = op.of(1)
    second = op.of(2)
    if added is None or first is None or second is None:
        return unknown(op)
    return broadcast(op, [op.value(op.shape, _multiplied(op, first, second)), added])


def _einsum(op: Operation) -> Any:
    written, arrow, result = str(op.at(0)).replace(" ", "").partition("->")
    given = [op.state.of(argument) for argument in op.at(1)]
    letters = written.split(",")
    terms = [(value, term) for value, term in zip(given, letters, strict=True) if value is not None]
    repeats = any(len(set(term)) != len(term) for term in letters)
    if not arrow or "." in written or repeats or len(terms) < len(given):
        return unknown(op)
    return _product(op, terms, result, weighs=any(value.fixed for value, _ in terms))


def _attention(op: Operation) -> Any:
    rank = len(op.shape)
    given = [value for place in range(3) if (value := op.of(place)) is not None and len(value.shape) == rank]
    if len(given) < 3:
        return unknown(op)
    batch = "abcdefgh"[10 - rank :]
    terms = list(zip(given, (batch + "ls", batch + "ms", batch + "mt"), strict=True))
    mask = op.state.of(op.given["attn_mask"])
    # A learned bias has an entry for each head.
    if mask is not None:
        terms.append((mask, (batch + "lm")[-len(mask.shape) :]))
    return _product(op, terms, batch + "lt", weighs=False)


# --- layers -----------------------------------------------------------------------------------------------------------


def _linear(op: Operation) -> Any:
    """Columns have the neurons of the input's last axis; rows are new neurons."""
    value = op.of(0)
    weight = op.of(1)
    if value is None or weight is None or not weight.fixed:
        return unknown(op)
    op.neurons.join(value.known[-1], weight.axes[1])
    return (*value.axes[:-1], _rows(op, weight.axes[0]))


def _rows(op: Operation, rows: Axis | None) -> Axis:
    """Return the rows of a weight, united with those of its bias."""
    bias = op.state.of(op.given["bias"])
    if bias is not None and bias.shape[-1] > 1:
        op.neurons.join(rows or (), bias.axes[-1])
    return rows or ()


def _convolution(op: Operation) -> Any:
    """Columns have the neurons of the input's channels; rows are new neurons."""
    value = op.of(0)
    weight = op.of(1)
    if value is None or weight is None or not weight.fixed or len(value.shape) != len(weight.shape):
        return unknown(op)
    op.neurons.complete(*value.known[2:])
    given = value.shape[1]
    columns = weight.shape[1]
    rows = weight.axes[0]
    if columns == given:
        op.neurons.join(value.known[1], weight.axes[1])
    # Depthwise: a filter is active with its input channel.
    elif columns == 1:
        times = op.shape[1] // given
        lies = tuple(Run(run.set, run.repeat * times) for run in op.neurons.resolve(value.known[1]))
        rows = op.neurons.join(lies, rows)
    else:
        # With groups, a column is a different input channel in each group of rows, so it belongs to no neuron: a
        # weight is active with its row.
        op.neurons.complete(weight.known[1])
    return (value.axes[0], _rows(op, rows), *((),) * (len(weight.shape) - 2))


def _transposed(op: Operation) -> Any:
    """Convolve transposed: rows have the neurons of the input's channels; columns are new neurons."""
    value = op.of(0)
    weight = op.of(1)
    if value is None or weight is None or weight.shape[1] != op.shape[1]:
        return unknown(op)
    op.neurons.complete(*value.known[2:])
    op.neurons.join(value.known[1], weight.axes[0])
    return (value.axes[0], _rows(op, weight.axes[1]), *((),) * (len(op.shape) - 2))


def _embedding(op: Operation) -> Any:
    """Rows are words; columns are new neurons."""
    weight = op.of(0)
    index = op.of(1)
    if weight is None or index is None:
        return unknown(op)
    op.neurons.complete(weight.known[0], *index.known)
    blank = None if weight.fixed and index.fixed else ()
    return (*(blank,) * len(index.shape), weight.axes[1])


def _channel_norm(op: Operation) -> Any:
    """Batch, group and instance norm, PReLU: parameters and statistics have the neurons of the channels."""
    value = op.of(0)
    if value is None:
        return unknown(op)
    axis = value.axes[1] if len(value.axes) > 1 else None
    for argument in op.given.values():
        held = op.state.of(argument)
        if held is None or held.shape != (value.shape[1],):
            continue
        if held.shape != (1,):
            axis = op.neurons.join(axis, held.axes[0])
        name = op.state.traced.inputs.get(argument)
        if name is not None and name not in op.state.parameters:
            op.state.statistics.add(name)
            op.state.axes[name] = (value.known[1],)
    return (value.axes[0], axis or (), *value.axes[2:])


def _layer_norm(op: Operation) -> Lies:
    """Layer and RMS norm: parameters have the neurons of the normalised axes."""
    axes = list(op.values[0].axes)
    count = len(op.at(1))
    # Blocks are cut out of the first two axes of a tensor only.
    op.neurons.complete(*(axis or () for axis in axes[-count:][2:]))
    axes[len(axes) - count + 2 :] = [()] * max(0, count - 2)
    for argument in (op.given["weight"], op.given.get("bias")):
        held = op.state.of(argument)
        if held is not None and held.fixed:
            for place, axis in enumerate(held.axes[:2], start=len(axes) - count):
                axes[place] = op.neurons.join(axes[place], axis)
    return tuple(axes)


# --- recurrent layers -------------------------------------------------------------------------------------------------

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Weight rows of each hidden unit."""


def _recurrent(op: Operation) -> Any:
    """Recurrent layers: a unit has a row for each gate, and a column."""
    value = op.of(0)
    states = op.at(1) if isinstance(op.at(1), (list, tuple)) else [op.at(1)]
    given = [op.state.of(argument) for argument in op.at(2)]
    weights = [each for each in given if each is not None]
    moves = any(not state.fixed for state in map(op.state.of, states) if state is not None)
    if value is None or len(weights) < len(given) or moves:
        return unknown(op)
    ways = 2 if op.given["bidirectional"] else 1
    count = len(weights) // (op.given["num_layers"] * ways)
    # Another count of weights means a projection.
    if count not in (2, 4):
        return unknown(op)
    each_way = [weights[start : start + count] for start in range(0, len(weights), count)]
    below = value.known[-1]
    for start in range(0, len(each_way), ways):
        below = _recurrent_layer(op, below, each_way[start : start + ways])
    used = {user.args[1] for user in op.node.users if user in op.state.traced.nodes}
    made = [op.value(op.result[0].shape, (*value.known[:-1], below))]
    for place, each in enumerate(op.result[1:], start=1):
        made.append(op.value(each.shape, _last_state(op, each_way) if place in used else ((),) * 3))
    return made


def _cell(op: Operation) -> Any:
    """One step of a recurrent cell: the state has the units that the weights' columns have."""
    value = op.of(0)
    hidden = op.at(1) if isinstance(op.at(1), (list, tuple)) else [op.at(1)]
    states = [op.state.of(argument) for argument in hidden]
    weights = [op.state.of(argument) for argument in list(op.given.values())[2:6] if argument is not None]
    if value is None or not all(each is not None and each.fixed for each in weights):
        return unknown(op)
    units = _recurrent_layer(op, value.known[-1], [[each for each in weights if each is not None]])
    for state in states:
        if state is not None:
            op.neurons.join(state.axes[-1], units)
    axes = (*value.known[:-1], units)
    return [op.value(each.shape, axes) for each in op.result] if op.several else axes


def _weight_norm(op: Operation) -> Any:
    """Scale the rows of a direction: direction, scale and result have the same neurons."""
    direction = op.of(0)
    scale = op.of(1)
    if direction is None or scale is None:
        return unknown(op)
    axes = broadcast(op, [direction, scale])
    return [op.value(direction.shape, axes), op.value(scale.shape, scale.axes)] if op.several else axes


def _recurrent_layer(op: Operation, below: Axis, ways: Sequence[Sequence[Value]]) -> Axis:
    """Return the units of a recurrent layer on the neurons ``below``, direction after direction."""
    lies: Axis = ()
    for first, second, *biases in ways:
        units = second.known[1]
        op.neurons.join(below, first.axes[1])
        for rows in (first, second, *biases):
            op.neurons.join(units * _GATES[op.name.replace("_cell", "")], rows.axes[0])
        lies += units
    return op.neurons.resolve(lies)


def _last_state(op: Operation, ways: Sequence[Sequence[Value]]) -> Axes:
    """Return the axes of the final states, in which the units of all layers and directions are one set."""
    units, *others = (second.known[1] for _, second, *_ in ways)
    for other in others:
        units = op.neurons.unite(units, other)
    return ((), (), units)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "linear": _linear,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
    "embedding": _embedding,
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm", "prelu"), _channel_norm),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    **dict.fromkeys(_GATES, _recurrent),
    **dict.fromkeys((f"{name}_cell" for name in _GATES), _cell),
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), _weight_norm),
}
"""Operator -> rule."""
