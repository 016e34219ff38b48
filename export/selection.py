"""pFedGate's knapsack (arXiv:2305.02776, section 5.2.3) as ONNX nodes.

Costs and capacity are known when the file is written; only the values depend on the input. The exact solution uses
dynamic programming with tables of fixed size. A *decision* is the number of items with a given cost to take, most
valuable first; decisions are ordered from the largest cost to the smallest. A *state* is the remaining capacity before
a decision; all states in which every remaining item fits are merged. With c items of cost w taken,

    F_g(left) = max over c of  (sum of the c most valuable)  +  F_{g+1}(left - c w),      F = 0 at the end

is computed for all states of a decision at once, from the last decision to the first; the counts follow from the first
to the last. Built-in tasks have 100 to 10,000 pairs of a state and a count. ``greedy`` replaces tables beyond
LARGEST_TABLE.

Values are float64, and ties are resolved as in ``sparrow.protocol.blocks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx.helper
from numpy.typing import NDArray
from onnx import GraphProto, TensorProto

from sparrow.graphs.building import Building
from sparrow.protocol.blocks import Costs

LARGEST_TABLE = 100_000
"""Largest exact solution in a file, in pairs of a state and a count, of 2 bytes each."""

_NEVER = -1e300
"""The value of a forbidden choice."""


@dataclass(frozen=True)
class Decision:
    """The choice of how many items of one cost to take."""

    # Indices [n].
    items: NDArray[np.intp]
    # [states, n + 1]: the next decision's state after taking a count, plus 1; 0 if not affordable. State 0 is "every
    # remaining item fits".
    follows: NDArray[np.int64]


def decisions(costs: Costs, capacity: int, largest: int = LARGEST_TABLE) -> list[Decision] | None:
    """Return the decisions for items with ``costs`` [n], largest first; None if they need more than ``largest`` pairs.

    They end when a single state is left; all items with smaller costs then fit.
    """
    kinds = [(int(cost), np.flatnonzero(costs == cost)) for cost in np.unique(costs)[::-1]]
    rest = [*np.cumsum([cost * len(items) for cost, items in reversed(kinds)])[::-1].tolist(), 0]
    found: list[Decision] = []
    states = [capacity] if capacity < rest[0] else []
    pairs = 0
    for (cost, items), after in zip(kinds, rest[1:], strict=True):
        if not states:
            break
        pairs += (len(states) + 1) * (len(items) + 1)
        if pairs > largest:
            return None
        counts = np.arange(len(items) + 1)
        left = np.array(states)[:, None] - cost * counts
        ahead = sorted({int(value) for value in left[(left >= 0) & (left < after)]})
        follows = np.zeros((len(states) + 1, len(counts)), dtype=np.int64)
        follows[0, -1] = 1
        follows[1:] = np.where(left < 0, 0, np.where(left >= after, 1, np.searchsorted(ahead, left) + 2))
        found.append(Decision(items, follows))
        states = ahead
    return found


def exact(to: Building, values: str, plan: Sequence[Decision], costs: Costs) -> str:
    """Return the exact selection, float32 [N, n] of 0 and 1. values: float64 [N, n]; only positive ones are taken."""
    width = max(len(decision.items) for decision in plan)
    decided = np.concatenate([decision.items for decision in plan])
    padded = to.add("Pad", values, to.whole(0, 0, 0, 1), to.constant(np.array(_NEVER)))
    table = np.full((len(plan), width), len(costs), dtype=np.int64)
    for row, decision in zip(table, plan, strict=True):
        row[: len(decision.items)] = decision.items
    grouped = to.add("Gather", padded, to.index(table), axis=1)
    best, order = to.several("TopK", grouped, to.whole(width), outputs=2)
    _, ranks = to.several("TopK", order, to.whole(width), outputs=2, largest=0)
    useful = to.add("Max", best, to.constant(np.array(0.0)))
    sums = to.add("CumSum", to.add("Pad", useful, to.whole(0, 0, 1, 0, 0, 0)), to.whole(2))
    # a column for forbidden choices, and one for the value 0 after the last decision
    never = to.slice(padded, 1, len(costs), len(costs) + 1)
    worth = to.add("Pad", never, to.whole(0, 0, 0, 1))
    each = to.several("Split", sums, to.whole(*[1] * len(plan)), outputs=len(plan), axis=1)
    columns = [
        column if len(decision.items) == width else to.slice(column, 2, 0, len(decision.items) + 1)
        for column, decision in zip(each, plan, strict=True)
    ]
    enough = to.add("Less", ranks, _counts(to, columns, worth, never, plan))
    taken = to.add("And", enough, to.add("Greater", grouped, to.constant(np.array(0.0))))
    flat = to.reshape(to.add("Cast", taken, to=TensorProto.FLOAT), (0, -1))
    places = np.full(len(costs), table.size)
    places[decided] = np.flatnonzero(table.reshape(-1) < len(costs))
    # always affordable items are taken if their value is positive
    if len(decided) < len(costs):
        useful = to.add("Cast", to.add("Greater", values, to.constant(np.array(0.0))), to=TensorProto.FLOAT)
        flat = to.add("Concat", flat, useful, axis=1)
        places = np.where(places < table.size, places, table.size + np.arange(len(costs)))
    return to.add("Gather", flat, to.index(places), axis=1)


def _counts(to: Building, sums: list[str], worth: str, never: str, plan: Sequence[Decision]) -> str:
    """Return the number of items taken of each cost, int64 [N, decisions, 1].

    sums: values of the most valuable 0, 1, .. n items of each cost, [N, 1, n + 1].
    """
    choices: list[str] = []
    for place in reversed(range(len(plan))):
        ahead = to.add("Gather", worth, to.index(plan[place].follows), axis=1)
        best, choice = to.several("TopK", to.add("Add", ahead, sums[place]), to.whole(1), outputs=2)
        choices.insert(0, choice)
        if place:
            worth = to.add("Concat", never, to.add("Squeeze", best, to.whole(2)), axis=1)
    # the first decision has two states: 0, "all fits", and 1, the initial one
    state = to.add("Unsqueeze", to.add("Cast", to.add("Equal", never, never), to=TensorProto.INT64), to.whole(2))
    counts = []
    for decision, choice in zip(plan, choices, strict=True):
        counts.append(to.add("GatherElements", choice, state, axis=1))
        if decision is not plan[-1]:
            width = decision.follows.shape[1]
            pair = to.add("Add", to.add("Mul", state, to.whole(width)), counts[-1])
            state = to.add("Gather", to.index(np.maximum(decision.follows - 1, 0).reshape(-1)), pair)
    return to.add("Concat", *counts, axis=1)


def greedy(to: Building, values: str, costs: Costs, capacity: int) -> str:
    """Return the greedy selection, float32 [N, n] of 0 and 1: items by value per cost, or only the single best item."""
    count = len(costs)
    density = to.add("Div", values, to.constant(np.maximum(costs, 1).astype(np.float64)))
    _, order = to.several("TopK", density, to.whole(count), outputs=2)
    _, ranks = to.several("TopK", order, to.whole(count), outputs=2, largest=0)
    sorted_costs = to.add("Gather", to.constant(costs.astype(np.int64)), order)
    sorted_values = to.add("GatherElements", values, order, axis=1)
    useful = to.add("Greater", sorted_values, to.constant(np.array(0.0)))
    rows = [to.add("Transpose", each, perm=[1, 0]) for each in (sorted_costs, useful)]
    first = to.add("Squeeze", to.slice(sorted_costs, 1, 0, 1), to.whole(1))
    left = to.add("Add", to.add("Sub", first, first), to.whole(capacity))
    _, flags = to.several("Scan", left, *rows, outputs=2, body=_step(to), num_scan_inputs=2)
    taken = to.add("GatherElements", to.add("Transpose", flags, perm=[1, 0]), ranks, axis=1)
    # ONNX Runtime has no Where for float64
    total = to.sum(to.add("Mul", values, to.add("Cast", taken, to=TensorProto.DOUBLE)), 1)
    fitting = to.add("Add", values, to.constant(np.where(costs <= capacity, 0.0, _NEVER)))
    best, which = to.several("TopK", fitting, to.whole(1), outputs=2)
    alone = to.add("Equal", to.constant(np.arange(count)[None]), which)
    better = to.add("Greater", best, total)
    others = to.add("And", to.add("Not", better), taken)
    return to.add("Cast", to.add("Or", to.add("And", better, alone), others), to=TensorProto.FLOAT)


def _step(to: Building) -> GraphProto:
    """Return the step of the scan: take an item of each sample if it fits the remaining capacity."""
    left, cost, useful, fits, taken, spent, after = (
        to.name(value) for value in ("left", "cost", "useful", "fits", "taken", "spent", "after")
    )
    make = onnx.helper.make_node
    nodes = [
        make("LessOrEqual", [cost, left], [fits]),
        make("And", [fits, useful], [taken]),
        make("Cast", [taken], [f"{spent}_flag"], to=TensorProto.INT64),
        make("Mul", [f"{spent}_flag", cost], [spent]),
        make("Sub", [left, spent], [after]),
    ]
    info = onnx.helper.make_tensor_value_info
    return onnx.helper.make_graph(
        nodes,
        to.name("step"),
        [
            info(left, TensorProto.INT64, ["batch"]),
            info(cost, TensorProto.INT64, ["batch"]),
            info(useful, TensorProto.BOOL, ["batch"]),
        ],
        [info(after, TensorProto.INT64, ["batch"]), info(taken, TensorProto.BOOL, ["batch"])],
    )
