"""A device's gated model with its gate in one ONNX graph: pFedGate, for every sample its own choice of blocks.

    gates = gating layer(x)          SN with running statistics, pooling, linear map, batch norm, sigmoid
    I     = knapsack(G)              within the device's budget, ``selection``
    y     = f(θ ⊛ M·I; x)

(arXiv:2305.02776, section 5.2.) θ is that of the device's last round. Where the blocks of all
tensors are whole rows, gates scale what each layer gives of each sample, so that a batch is computed at once;
elsewhere a ``Scan`` goes through the batch and scales the weights for every sample. The knapsack is solved exactly, or,
for costs of which there would be too many sums, by the guard rule; the property ``selection`` of the file says which:
``exact``, ``greedy``, or ``fixed`` where blocks do not depend on the input: the budget is everything, or the gate does
not see the input, in which case the file is a plain model.

Gates differ from PyTorch's by rounding, about 1e-7, and samples whose two best choices are as near to each other may
get the other one.
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
"""What the scales times the choice, M' [N, L], are called in the graph."""

MARGIN = 1e-5
"""Of two choices whose importances add up to sums less than this apart, rounding may decide."""


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
    """Return the gated model of a device of pFedGate, for any number of samples.

    manifest: the federation's, with its table of blocks. own: the arrays of the device's state. settings: the
    method's, complete. budget: the device's, in (0, 1]. personal: the state's model, which is needed where the manifest
    has tensors that are never sent. largest_table: beyond, the choice is the guard rule's, see ``selection``. Raises
    SkeletonError, and ExportError where state, settings and manifest do not belong together or nothing fits the budget.
    """
    table = _table(manifest)
    missing = [name for name in ("model", "static") if name not in own]
    if missing:
        raise ExportError(
            f"the state has no {missing[0]!r}: it is no state of pFedGate, or its device has not trained yet; "
            f"export its personal model instead, or after its first round"
        )
    tensors = _weights(manifest, own["model"], personal)
    gate = Gate.of(manifest, own, settings)
    costs = _costs(manifest, own, settings)
    try:
        importance, per, least = settings["importance"], settings["budget_per"], settings["smallest_budget"]
        groups = budget_groups(manifest, per, least, settings["cost"])
        capacities = {name: table.capacity(budget, costs, blocks, name) for name, blocks in groups.items()}
        everything = all(
            capacities[name] >= costs[blocks][~table.forced[blocks]].sum() for name, blocks in groups.items()
        )
    except ValueError as error:
        raise ExportError(f"{error}; or export with the budget that the device trained with") from None
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
    """Return the gated model of a device's state; the form of pFedGate for ``--mode dynamic``. Raises as above."""
    assert source.membership is not None, "checked where the form is chosen"
    settings = source.membership.federation.settings.method_settings
    # A device whose budget was too small for rounds has adapted with a gate of the smallest one.
    share = budget or max(source.membership.budget, float(settings["smallest_budget"]))
    return gated_model(source.skeleton, source.manifest, source.own, settings, share, personal=source.tensors)


def _table(manifest: Manifest) -> BlockTable:
    table = manifest.block_table
    uncut = [spec.name for spec in manifest.shared if spec.trainable and spec.name not in table.tensors]
    if uncut:
        raise ExportError(
            f"{uncut[0]}: the manifest does not say how it is cut into blocks; give the federation's manifest, which "
            f"lies in the device's state, and not the published one"
        )
    return table


def _weights(manifest: Manifest, packed: NDArray[Any], personal: Tensors | None) -> Tensors:
    """Return θ as the device's last round left it, and from ``personal`` what is never sent."""
    try:
        parts = unpack_whole(manifest, np.asarray(packed, dtype=np.float32))
        tensors = {name: np.array(part) for name, part in parts.items()}
    except (ProtocolError, ValueError) as error:
        raise ExportError(f"the state is one of another model: {error}; use the manifest it was trained with") from None
    for spec in manifest.whole:
        if spec.name not in tensors:
            if personal is None or spec.name not in personal:
                raise ExportError(f"{spec.name}: it is never sent; give the personal model of the state, which has it")
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
        f"budgets are a share of {settings.get('cost')!r}, and the state does not say what blocks cost; export from "
        f"the state of the device that trained"
    )


def _loaded(skeleton: bytes, manifest: Manifest, tensors: Tensors) -> ModelProto:
    return onnx.load_model_from_string(fill(skeleton, manifest, tensors))


def _finished(model: ModelProto, selection: str) -> ModelProto:
    onnx.helper.set_model_props(model, {"selection": selection})
    check_valid(model, "the gated model is no valid ONNX model", "export the static model instead", full=True)
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
    """Return float32 [N, L], 1 where a block is on, and the rule: greedy where it is for any group of blocks.

    limits: the blocks of each group, and what those that are not forced may cost.
    """
    worth = to.add("Sub", to.add("Cast", importances, to=TensorProto.DOUBLE), to.constant(TIE * np.arange(len(costs))))
    if importance == "per_weight":
        worth = to.add("Mul", worth, to.constant(np.maximum(costs, 1).astype(np.float64)))
    parts, order, rules = [], [], {"exact"}
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
