"""pFedGate: efficient personalised federated learning via sparse model-adaptation, server half.

Chen, Yao, Gao, Ding, Li, "Efficient Personalized Federated Learning via Sparse Model-Adaptation", ICML 2023,
arXiv:2305.02776. One model for all, cut into blocks; each device's gating layer, which it keeps to itself, picks and
scales blocks for every batch within the device's budget (``edge_sdk.methods.pfedgate``). Up go the blocks that some
batch of the round has touched, and for each

    θ_b <- θ_b + Σ n_i Δ_ib / Σ n_i      over the devices i that touched b; without any, θ_b stays      (Algorithm 1)

Down go the blocks that have changed since the device's last download.

One table of blocks for all: it is cut for the weakest device that the federation declares (``smallest_budget``), whose
always-kept first blocks must fit, and of every layer a large one, too, or the gate would have nothing to choose there.
Devices with more keep more of the same blocks.

Where paper and released code differ:

- Eq. 6 has one budget for the model, the code one for linear layers and one for the others. So here: with one, many
  small blocks win against any large one, whatever the gate says (``budget_per``).
- The code averages whole models of all clients, absent ones with their old copies. ``denominator`` all counts untouched
  blocks as no change, for comparison.
- The code keeps first blocks of a fifth whatever the budget. Here a budget that cannot hold them is refused.
- θ is only ever trained under scales: by itself it is no model to use, but after a last round without gates (Table 10).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from sparrow.protocol.blocks import BlockMask, BlockTable, BudgetPer, Costs
from sparrow.protocol.flops import block_flops, budget_groups
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent
from ..sums.averages import BlockSums
from . import (
    Aggregation,
    CoordinatorMethod,
    DeviceMasks,
    GlobalModel,
    MethodSettings,
    Schedule,
    Situation,
    Work,
    own_settings,
)

MOST_BLOCKS = 30

DRAWS = 16
UNTRAINED = (0.494, 0.506)
"""Importances of gates that have learned nothing; so many are drawn to see what they choose."""

NEARLY = 0.9
"""Of a budget: first blocks that are as much leave no room, and need none (an output layer of ten rows, at 0.1)."""

HALF = 0.5
"""Of its fair share: a layer that keeps less is starved."""


class PFedGateSettings(MethodSettings):
    """pFedGate's settings beyond a federation's."""

    smallest_budget: float = Field(
        default=0.3,
        ge=1e-6,
        le=1,
        description="Budget of the weakest device, for which the model is cut; others not drawn",
    )
    blocks: int = Field(
        default=0, ge=0, le=1000, description="Blocks of a tensor, B; 0: 5, or as many as the budget needs"
    )
    first_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of a tensor in its always-kept block, s_min; 0: min(1/B, budget/2)"
    )
    align_rows: bool = Field(default=True, description="Whether blocks end where rows end, so that they can be skipped")
    cost: Literal["parameters", "flops", "seconds"] = Field(
        default="parameters", description="What a budget is a share of; seconds: each layer's, measured on the device"
    )
    importance: Literal["per_weight", "per_block"] = Field(
        default="per_block",
        description="What has importance: each block of whatever size (Eq. 6), or each weight (each unit of cost)",
    )
    budget_per: BudgetPer = Field(
        default="kind",
        description="What has the budget's share for itself: the model, linear layers and the others, or each layer; "
        "the model, too, where one of these is too small to be cut for the smallest budget",
    )
    dense_last: bool = Field(
        default=False, description="Whether the last round trains without gates, for a global model (Table 10)"
    )
    touched_limit: float = Field(
        default=1.0, gt=0, le=1, description="Share of the model beyond which a round touches no further blocks"
    )
    denominator: Literal["touched", "all"] = Field(
        default="touched", description="Who a block's mean is over: devices that touched it, or all that answered"
    )
    gate_learning_rate: float = Field(
        default=0.1, gt=0, allow_inf_nan=False, description="Learning rate of the gate, η"
    )
    gate_gradients: Literal["exact", "estimated"] = Field(
        default="exact", description="How gates of blocks that are off learn: from the whole batch, or an eighth of it"
    )
    gate_paths: Literal[1, 2] = Field(
        default=2, description="1: scales are importances; 2: each has a layer of its own"
    )
    gate_bias: float = Field(
        default=3.0, allow_inf_nan=False, description="Where scales begin, before the sigmoid; the authors' is 0"
    )
    gate_pool: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="Side of the squares pooled before the gate; 0: so that it has a tenth of the model's size",
    )
    gate_input_norm: bool = Field(default=True, description="Whether the gate's input is normalised (ablation)")
    gate_batch_norm: bool = Field(default=True, description="Whether its logits are (ablation)")
    gate_sigmoid: bool = Field(default=True, description="Whether they are squashed (ablation)")
    gate_input: Literal["batch", "device", "nothing"] = Field(
        default="batch", description="What the gate sees: the batch, or the mean of the device's samples (client-wise)"
    )
    gate_window: int = Field(
        default=1, ge=1, le=1024, description="Inputs whose gates are averaged where each has a choice of its own"
    )


def smallest_budget(settings: FederationSettings) -> float:
    """Return the budget that the table of blocks is cut for."""
    return own_settings(settings, PFedGateSettings).smallest_budget


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest with a table of all trainable tensors; what the publisher has cut already stays."""
    private = [spec.name for spec in published.tensors if spec.trainable and spec.policy != "shared"]
    if private:
        raise BadContent(f"{private[0]}: pFedGate shares all that is trained; leave it shared")
    rules, refusal = own_settings(settings, PFedGateSettings), ""
    counts = [rules.blocks] if rules.blocks else range(5, MOST_BLOCKS + 1)
    usable: dict[bool, Manifest] = {}  # whether every block can be chosen -> the first table
    for count in counts:
        cut = _cut(published, rules, count)
        try:
            never = _never_chosen(cut, rules)
        except ValueError as error:
            refusal = refusal or str(error)
            continue
        usable.setdefault(never is None, cut)
        if never is None and _starved(cut, rules) is None:
            return cut
    if not usable:
        raise BadContent(f"method_settings.smallest_budget: {refusal}")
    return usable.get(True) or usable[False]


def start(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return θ^0, of which no block has changed; ``own`` holds in which round each block last changed."""
    return GlobalModel(tensors, own={"changed": np.zeros(len(situation.manifest.block_table.sizes), np.int64)})


def changed(model: GlobalModel, since: int, situation: Situation) -> BlockMask:
    """Return the blocks that a later round has touched."""
    return BlockMask(model.own["changed"].astype(np.int64) > since)


def check_mask(model: GlobalModel, mask: BlockMask, situation: Situation) -> None:
    """Raise BadContent unless the first block of every tensor is among those sent."""
    if not mask.on[situation.manifest.block_table.forced].all():
        raise BadContent("mask: the first block of every tensor is always on; send it, too")


def why_mean_only(settings: FederationSettings) -> str | None:
    """Return why no other rule can take the mean's place where devices count that did not send a block."""
    if own_settings(settings, PFedGateSettings).denominator == "all":
        return "its denominator all counts devices that did not send a block, and no rule sees those"
    return None


def sums_of(model: GlobalModel, situation: Situation) -> BlockSums:
    """Return Σ n_i θ_ib and Σ n_i of each block."""
    return BlockSums(situation.manifest, everybody=situation.own(PFedGateSettings).denominator == "all")


def work(situation: Situation) -> Work:
    """Return what a round asks for: training without gates in the last one, where ``dense_last`` says so."""
    dense = situation.own(PFedGateSettings).dense_last and situation.round == situation.settings.rounds
    return Work(plan={"dense": 1}) if dense else Work()


def close(model: GlobalModel, sums: BlockSums, situation: Situation) -> GlobalModel:
    """Return means over those who touched a block."""
    last = np.where(sums.touched, situation.round, model.own["changed"])
    notes = {"blocks": int(sums.touched.sum()), "masks": len(sums.masks)}
    return GlobalModel(sums.mean(model.tensors), own={"changed": last}, notes=notes)


def warning(model: GlobalModel, situation: Situation) -> str | None:
    """Return a warning for blocks or layers that devices of the smallest budget leave out, or nearly."""
    rules = situation.own(PFedGateSettings)
    return _never_chosen(situation.manifest, rules) or _starved(situation.manifest, rules)


def _never_chosen(manifest: Manifest, rules: PFedGateSettings) -> str | None:
    """Return a warning for blocks larger than what the weakest device may add. Raises ValueError if that is nothing."""
    table, costs = manifest.block_table, costs_of(manifest, rules.cost)
    for name, blocks in budget_groups(manifest, rules.budget_per, rules.smallest_budget, rules.cost).items():
        capacity = table.capacity(rules.smallest_budget, costs, blocks, name)
        largest = int(costs[blocks][~table.forced[blocks]].max(initial=0))
        has = costs[blocks][table.forced[blocks]].sum() / max(1, costs[blocks].sum())
        if largest > capacity and has < NEARLY * rules.smallest_budget:
            return (
                f"a device of the smallest budget, {rules.smallest_budget:g}, can never choose the largest blocks"
                f"{name and f' of {name}'}: they cost {largest}, {capacity} are left; give more blocks, or a smaller "
                f"first_share"
            )
    return None


def _starved(manifest: Manifest, rules: PFedGateSettings) -> str | None:
    """Return a warning for the layer that a gate that has learned nothing leaves furthest below its fair share, less
    than half of it or without any of its large blocks."""
    table, share = manifest.block_table, rules.smallest_budget
    importances = np.random.default_rng(0).uniform(*UNTRAINED, (DRAWS, len(table.sizes)))
    on = table.select(
        importances,
        share,
        costs_of(manifest, rules.cost),
        importance=rules.importance,
        groups=budget_groups(manifest, rules.budget_per, rules.smallest_budget, rules.cost),
    )
    kept: dict[str, float] = {}
    for name, blocks in manifest.block_groups("layer").items():
        sizes, forced, weights = table.sizes[blocks], table.forced[blocks], table.sizes[blocks].sum()
        mean = float((on[:, blocks] @ sizes).mean() / weights)
        large = ~forced & (2 * sizes >= sizes[~forced].max(initial=1))  # not those of biases
        fits = sizes[forced].sum() + sizes[large].min(initial=weights) <= share * weights
        if mean < HALF * share or (fits and not on[:, blocks[large]].any()):
            kept[name] = mean
    if not kept:
        return None
    name = min(kept, key=kept.__getitem__)
    weights = table.sizes[manifest.block_groups("layer")[name]].sum()
    return (
        f"a gate that has learned nothing keeps {kept[name]:.0%} of the {weights} weights of {name}, whose fair share "
        f"of a budget of {share:g} is {share:.0%}: larger blocks lose against many small ones; give more blocks, "
        f"another budget_per, or importance per_weight"
    )


def costs_of(manifest: Manifest, cost: str) -> Costs:
    """Return what each block takes of a budget, [L]; seconds, which only a device can measure, go by FLOPs."""
    return manifest.block_table.sizes if cost == "parameters" else block_flops(manifest)


def _cut(manifest: Manifest, rules: PFedGateSettings, count: int) -> Manifest:
    share = rules.first_share or min(1 / count, rules.smallest_budget / 2)
    shapes = {spec.name: spec.shape for spec in manifest.shared if spec.trainable}
    table = BlockTable.of(shapes, count=count, smallest_share=share, align_rows=rules.align_rows)
    return manifest.with_blocks({**table.tensors, **manifest.blocks})


PFEDGATE = CoordinatorMethod(
    smallest_budget=smallest_budget,
    settings_type=PFedGateSettings,
    usable_global_model=False,
    personal_models=True,
    always_sends_values=True,  # the newest θ is judged with the device's gate
    manifest=manifest,
    start=start,
    masks=DeviceMasks(check=check_mask, type=BlockMask),
    changes=changed,
    schedule=Schedule(work=work),
    aggregation=Aggregation(
        sums=sums_of,
        close=close,
        why_mean_only=why_mean_only,
        why_not_private="which blocks changed follows from what devices' gates choose, and goes out without noise",
        why_not_buffered=None,
    ),
    warning=warning,
)
