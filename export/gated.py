"""pFedGate's gated model and its gate in one ONNX graph (arXiv:2305.02776, section 5.2).

    gates = gating layer(x)          SN with running statistics, pooling, linear map, batch norm, sigmoid
    I     = knapsack(G)              within the device's budget, ``selection``
    y     = f(θ ⊛ M·I; x)

θ is from the device's last round. If all blocks are whole rows, gates scale each layer's outputs, batch by batch;
otherwise a ``Scan`` scales the weights for every sample. The metadata entry ``selection`` names the solution of the
knapsack: ``exact``, ``greedy`` (the exact one is too large) or ``fixed`` (blocks do not depend on the input).

Gates differ from PyTorch's by rounding, about 1e-7, which can change the choice between nearly equal selections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from sparrow.graphs.building import Building
from sparrow.graphs.graph import check_valid
from sparrow.graphs.skeleton import fill
from sparrow.protocol.blocks import RULES, TIE, BlockTable, Costs, Importance
from sparrow.protocol.errors import ProtocolError
from sparrow.protocol.flops import block_flops, budget_groups
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import unpack_whole

from .errors import ExportError
from .gating import Gate
from .rows import Rows, by_sample
from .selection import LARGEST_TABLE, decisions, exact, greedy
from .source import Source

GATES = "gate/scales"
"""Name of the gates in the graph, M' = M·I, [N, L]."""

MARGIN = 1e-5
"""Smallest difference of sums of importances that rounding cannot reorder."""


def gated_model(
    skeleton: bytes,
    manifest: Manifest,
    own: Tensors,
    settings: Mapping[str, Any],
    budget: float,
    *,
    personal: Tensors | None = None,
    largest_table: int = LARGEST_TABLE,
) -> ModelProto:
    """Build the gated model of a pFedGate device, for batches of any size.

    manifest: the federation's, with its table of blocks. own: the arrays of the device's state. settings: all settings
    of the method. budget: the device's, in (0, 1]. personal: the state's model, needed for tensors that are
    never sent. largest_table: limit of the exact solution, see ``selection``. Raises SkeletonError, and ExportError if
    state, settings and manifest do not belong together or no block fits the budget.
    """
    table = _table(manifest)
    missing = [name for name in ("model", "static") if name not in own]
    if missing:
        raise ExportError(
            f"the state has no {missing[0]!r}: the device has not trained yet, or not with pFedGate; export after its "
            f"first round, or export the personal model"
        )
    tensors = _weights(manifest, own["model"], personal)
    gate = Gate.of(manifest, own, settings)
    costs = _costs(manifest, own, settings)
    try:
        importance = settings["importance"]
        groups = budget_groups(manifest, settings["budget_per"], settings["smallest_budget"], settings["cost"])
        capacities = {name: table.capacity(budget, costs, blocks, name) for name, blocks in groups.items()}
        everything = all(
            capacities[name] >= costs[blocks][~table.forced[blocks]].sum() for name, blocks in groups.items()
        )
    except ValueError as error:
        raise ExportError(f"{error}; or export with the budget of the device's training") from None
    if gate.constant is not None:
        scales, importances = gate.constant
        chosen = table.select(importances.astype(np.float64), budget, costs, importance=importance, groups=groups)
        table.scale_in_place(tensors, np.where(chosen, scales, 0.0))
        return _finished(_loaded(skeleton, manifest, tensors), "fixed")
    model = _loaded(skeleton, manifest, tensors)
    to = Building("gate/")
    importances_name, scales_name = gate.build(to, model.graph.input[0].type.tensor_type.elem_type)
    selection = "fixed"
    if not everything:
        limits = [(groups[name], capacity) for name, capacity in capacities.items()]
        chosen_name, selection = _choose(to, importances_name, table, costs, limits, importance, largest_table)
        to.add("Mul", scales_name, chosen_name, output=GATES)
    else:
        to.add("Identity", scales_name, output=GATES)
    rows = Rows.of(model, table, manifest)
    if rows is None:
        by_sample(model.graph, to, GATES, table, manifest)
    else:
        rows.scale(model.graph, to, GATES)
    return _finished(model, selection)


def dynamic_model(source: Source, budget: float | None) -> ModelProto:
    """Build the dynamic export of pFedGate. Raises as ``gated_model``."""
    assert source.membership is not None, "checked by load_form"
    settings = source.membership.federation.settings.method_settings
    # A device whose budget is too small for rounds adapts with the smallest budget.
    share = budget or max(source.membership.budget, float(settings["smallest_budget"]))
    return gated_model(source.skeleton, source.manifest, source.own, settings, share, personal=source.tensors)


def _table(manifest: Manifest) -> BlockTable:
    table = manifest.block_table
    uncut = [spec.name for spec in manifest.shared if spec.trainable and spec.name not in table.tensors]
    if uncut:
        raise ExportError(
            f"{uncut[0]}: the manifest has no blocks for it; give the federation's manifest from the device's state, "
            f"not the published one"
        )
    return table


def _weights(manifest: Manifest, packed: NDArray[Any], personal: Tensors | None) -> Tensors:
    """Return θ after the device's last round, with the tensors that are never sent from ``personal``."""
    try:
        parts = unpack_whole(manifest, np.asarray(packed, dtype=np.float32))
        tensors = {name: np.array(part) for name, part in parts.items()}
    except (ProtocolError, ValueError) as error:
        raise ExportError(f"the state is of another model: {error}; use the manifest it was trained with") from None
    for spec in manifest.whole:
        if spec.name not in tensors:
            if personal is None or spec.name not in personal:
                raise ExportError(f"{spec.name} is never sent; give the personal model of the state")
            tensors[spec.name] = np.asarray(personal[spec.name])
    return tensors


def _costs(manifest: Manifest, own: Tensors, settings: Mapping[str, Any]) -> Costs:
    match settings.get("cost", "parameters"):
        case "parameters":
            return manifest.block_table.sizes
        case "flops":
            return block_flops(manifest)
        case "seconds" if "nanoseconds" in own and len(own["nanoseconds"]) == len(manifest.block_table.sizes):
            return own["nanoseconds"].astype(np.int64)
    raise ExportError(
        f"the budget is a share of {settings.get('cost')!r}, and the state has no costs of blocks; export from the "
        f"state of the device that trained"
    )


def _loaded(skeleton: bytes, manifest: Manifest, tensors: Tensors) -> ModelProto:
    return onnx.load_model_from_string(fill(skeleton, manifest, tensors))


def _finished(model: ModelProto, selection: str) -> ModelProto:
    onnx.helper.set_model_props(model, {"selection": selection})
    check_valid(model, "the gated model is not a valid ONNX model", "export the static model instead", full=True)
    return model


def _choose(
    to: Building,
    importances: str,
    table: BlockTable,
    costs: Costs,
    limits: Sequence[tuple[NDArray[np.intp], int]],
    importance: Importance,
    largest: int,
) -> tuple[str, str]:
    """Add the selection, float32 [N, L] of 0 and 1; return it and its rule (greedy if any group is greedy).

    limits: the blocks of each group, and its capacity without forced blocks.
    """
    worth = to.add("Sub", to.add("Cast", importances, to=TensorProto.DOUBLE), to.constant(TIE * np.arange(len(costs))))
    if importance == "per_weight":
        worth = to.add("Mul", worth, to.constant(np.maximum(costs, 1).astype(np.float64)))
    parts: list[str] = []
    order: list[int] = []
    rules = {"exact"}
    for blocks, capacity in limits:
        candidates = blocks[~table.forced[blocks]]
        if not len(candidates):
            continue
        order.extend(candidates.tolist())
        values = to.add("Gather", worth, to.index(candidates), axis=1)
        if costs[candidates].sum() <= capacity:
            parts.append(to.add("Cast", to.add("Equal", values, values), to=TensorProto.FLOAT))
            continue
        plan = decisions(costs[candidates], capacity, largest) if RULES[importance] == "exact" else None
        if plan is None:
            parts.append(greedy(to, values, costs[candidates], capacity))
            rules.add("greedy")
        else:
            parts.append(exact(to, values, plan, costs[candidates]))
    taken = to.add("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    ahead = to.add("Pad", taken, to.whole(0, 0, 0, 1), to.constant(np.array(1, np.float32)))
    places = np.full(len(costs), len(order))
    places[order] = np.arange(len(order))
    return to.add("Gather", ahead, to.index(places), axis=1), max(rules)
