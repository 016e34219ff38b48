"""pFedGate, server half: efficient personalised federated learning via sparse model adaptation.

Chen et al., ICML 2023, arXiv:2305.02776. One model for all devices is cut into blocks, of which each device's gating
layer selects some for every batch. Devices send the blocks that any batch of the round has touched; for each of them

    θ_b <- θ_b + Σ n_i Δ_ib / Σ n_i      over the devices i that touched b; without any, θ_b stays      (Algorithm 1)

The table of blocks is cut for the federation's smallest budget: the first blocks, which are always kept, must fit
together with a large block of any layer.

Differences between paper and released code:

- Eq. 6 has one budget for the model, the code one for linear layers and one for the others, as here (``budget_per``).
- The code averages full models of all clients, absent ones with their old copies. ``denominator`` all does the same.
- The code keeps first blocks of a fifth at any budget. Here a budget that cannot hold them is refused.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from sparrow.command_line.table import percent
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
"""Number of draws to estimate the choices of an untrained gate."""

UNTRAINED = (0.494, 0.506)
"""Range of an untrained gate's importances."""

NEARLY = 0.9
"""Share of a budget from which on first blocks fill it, without a warning (an output layer of ten rows, at 0.1)."""

HALF = 0.5
"""Share of its fair share below which a layer is starved."""


class PFedGateSettings(MethodSettings):
    """pFedGate's settings beyond a federation's."""

    smallest_budget: float = Field(
        default=0.3,
        ge=1e-6,
        le=1,
        description="Smallest supported budget, which determines the number of blocks; devices with less are not drawn",
    )
    blocks: int = Field(
        default=0, ge=0, le=1000, description="Blocks per tensor, B; 0: 5, or as many as the budget needs"
    )
    first_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of a tensor in its always-kept block, s_min; 0: min(1/B, budget/2)"
    )
    align_rows: bool = Field(default=True, description="End blocks at row ends, so that they can be skipped")
    cost: Literal["parameters", "flops", "seconds"] = Field(
        default="parameters", description="Unit of a budget; seconds: of each layer, measured on the device"
    )
    importance: Literal["per_weight", "per_block"] = Field(
        default="per_block",
        description="Give importance to each block of any size (Eq. 6), or to each weight (each unit of cost)",
    )
    budget_per: BudgetPer = Field(
        default="kind",
        description="Scope of the budget: the model, linear layers and the others, or each layer; the model, too, if "
        "one of these is too small to be cut for the smallest budget",
    )
    dense_last: bool = Field(
        default=False, description="Train without gates in the last round, for a global model (Table 10)"
    )
    touched_limit: float = Field(
        default=1.0, gt=0, le=1, description="Largest share of the model that a round may touch"
    )
    denominator: Literal["touched", "all"] = Field(
        default="touched", description="Devices in a block's mean: those that touched it, or all of the cohort"
    )
    gate_learning_rate: float = Field(
        default=0.1, gt=0, allow_inf_nan=False, description="Learning rate of the gate, η"
    )
    gate_gradients: Literal["exact", "estimated"] = Field(
        default="exact", description="Gradients of unselected blocks' gates: from the whole batch, or an eighth of it"
    )
    gate_paths: Literal[1, 2] = Field(default=2, description="1: scales are importances; 2: each has a separate layer")
    gate_bias: float = Field(
        default=3.0, allow_inf_nan=False, description="Initial scales before the sigmoid; the authors' is 0"
    )
    gate_pool: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="Side of the squares pooled before the gate; 0: chosen so that the gate has a tenth of the model's "
        "size",
    )
    gate_input_norm: bool = Field(default=True, description="Normalise the gate's input (ablation)")
    gate_batch_norm: bool = Field(default=True, description="Apply batch norm to the gate's logits (ablation)")
    gate_sigmoid: bool = Field(default=True, description="Apply a sigmoid to the gate's logits (ablation)")
    gate_input: Literal["batch", "device", "nothing"] = Field(
        default="batch", description="Input of the gate: the batch, or the mean of the device's samples (client-wise)"
    )
    gate_window: int = Field(
        default=1, ge=1, le=1024, description="Number of inputs whose gates are averaged, with choices per sample"
    )


def smallest_budget(settings: FederationSettings) -> float:
    """Return the budget for which blocks are cut."""
    return own_settings(settings, PFedGateSettings).smallest_budget


def manifest(published: Manifest, settings: FederationSettings) -> Manifest:
    """Return the manifest with a table of all trainable tensors; blocks of the publisher stay."""
    private = [spec.name for spec in published.tensors if spec.trainable and spec.policy != "shared"]
    if private:
        raise BadContent(f"{private[0]}: pFedGate shares all trained tensors; leave it shared")
    rules = own_settings(settings, PFedGateSettings)
    refusal = ""
    counts = [rules.blocks] if rules.blocks else range(5, MOST_BLOCKS + 1)
    # True: every block can be chosen.
    usable: dict[bool, Manifest] = {}
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
    """Return θ^0; ``own`` has the round of each block's last change."""
    return GlobalModel(tensors, own={"changed": np.zeros(len(situation.manifest.block_table.sizes), np.int64)})


def changed(model: GlobalModel, since: int, situation: Situation) -> BlockMask:
    """Return the blocks touched in a later round."""
    return BlockMask(model.own["changed"].astype(np.int64) > since)


def check_mask(model: GlobalModel, mask: BlockMask, situation: Situation) -> None:
    """Raise BadContent unless the first block of every tensor is sent."""
    if not mask.on[situation.manifest.block_table.forced].all():
        raise BadContent("mask: the first block of every tensor is always on; send it, too")


def why_mean_only(settings: FederationSettings) -> str | None:
    """Return a reason if devices that did not send a block count."""
    if own_settings(settings, PFedGateSettings).denominator == "all":
        return "its denominator all counts devices that did not send a block, which robust rules cannot see"
    return None


def sums_of(model: GlobalModel, situation: Situation) -> BlockSums:
    """Return Σ n_i θ_ib and Σ n_i of each block."""
    return BlockSums(situation.manifest, everybody=situation.own(PFedGateSettings).denominator == "all")


def work(situation: Situation) -> Work:
    """Return the round's work: with ``dense_last``, the last round trains without gates."""
    dense = situation.own(PFedGateSettings).dense_last and situation.round == situation.settings.rounds
    return Work(plan={"dense": 1}) if dense else Work()


def close(model: GlobalModel, sums: BlockSums, situation: Situation) -> GlobalModel:
    """Return means over the devices that touched a block."""
    last = np.where(sums.touched, situation.round, model.own["changed"])
    notes = {"blocks": int(sums.touched.sum()), "masks": len(sums.masks)}
    return GlobalModel(sums.mean(model.tensors), own={"changed": last}, notes=notes)


def warning(model: GlobalModel, situation: Situation) -> str | None:
    """Return a warning about blocks or layers that devices with the smallest budget rarely keep, or None."""
    rules = situation.own(PFedGateSettings)
    return _never_chosen(situation.manifest, rules) or _starved(situation.manifest, rules)


def _never_chosen(manifest: Manifest, rules: PFedGateSettings) -> str | None:
    """Return a warning if the weakest device cannot add some blocks.

    Raises ValueError if the smallest budget is too small.
    """
    table = manifest.block_table
    costs = costs_of(manifest, rules.cost)
    for name, blocks in budget_groups(manifest, rules.budget_per, rules.smallest_budget, rules.cost).items():
        capacity = table.capacity(rules.smallest_budget, costs, blocks, name)
        largest = int(costs[blocks][~table.forced[blocks]].max(initial=0))
        has = costs[blocks][table.forced[blocks]].sum() / max(1, costs[blocks].sum())
        if largest > capacity and has < NEARLY * rules.smallest_budget:
            return (
                f"a device of the smallest budget, {rules.smallest_budget:g}, can never choose the largest blocks"
                f"{name and f' of {name}'}: they cost {largest}, and {capacity} is left; set more blocks, or a smaller "
                f"first_share"
            )
    return None


def _starved(manifest: Manifest, rules: PFedGateSettings) -> str | None:
    """Return a warning if an untrained gate leaves a layer less than half of its fair share, or no large block."""
    table = manifest.block_table
    share = rules.smallest_budget
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
        sizes = table.sizes[blocks]
        forced = table.forced[blocks]
        weights = sizes.sum()
        mean = float((on[:, blocks] @ sizes).mean() / weights)
        # Excludes the blocks of biases.
        large = ~forced & (2 * sizes >= sizes[~forced].max(initial=1))
        fits = sizes[forced].sum() + sizes[large].min(initial=weights) <= share * weights
        if mean < HALF * share or (fits and not on[:, blocks[large]].any()):
            kept[name] = mean
    if not kept:
        return None
    name = min(kept, key=kept.__getitem__)
    weights = table.sizes[manifest.block_groups("layer")[name]].sum()
    return (
        f"an untrained gate keeps {percent(kept[name], 0)} of the {weights} weights of {name}, whose fair share of a "
        f"budget of {share:g} is {percent(share, 0)}, because many small blocks win against larger ones; set more "
        f"blocks, another budget_per, or importance per_weight"
    )


def costs_of(manifest: Manifest, cost: str) -> Costs:
    """Return each block's cost, [L]; FLOPs replace seconds, which only a device can measure."""
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
    # The newest θ is evaluated with the device's gate.
    always_sends_values=True,
    manifest=manifest,
    start=start,
    masks=DeviceMasks(check=check_mask, type=BlockMask),
    changes=changed,
    schedule=Schedule(work=work),
    aggregation=Aggregation(
        sums=sums_of,
        close=close,
        why_mean_only=why_mean_only,
        why_not_private="the changed blocks follow from devices' gates, and are sent without noise",
        why_not_buffered=None,
    ),
    warning=warning,
)
