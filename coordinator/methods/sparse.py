"""What methods of one sparse model share: settings (FedDST, FedSGC), and what they refuse."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from edge_sdk.protocol.elements import ElementMask
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.sparsity import LayerSparsity, layer_counts
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import Situation


class SparseTrainingSettings(BaseModel):
    """What dynamic sparse training knows, with or without a direction map."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    density: float = Field(default=0.2, gt=0, le=1, description="Share of the maskable weights that exist, 1 - S")
    layer_sparsity: LayerSparsity = Field(default="erk", description="How it is shared among layers")
    initial_mask: Literal["random", "magnitude"] = Field(default="random", description="What exists at first")
    adjust_interval: int = Field(default=5, ge=1, description="Rounds between those that replace weights, ΔR")
    device_interval: int = Field(default=5, ge=1, description="A device's own epochs between replacements, ΔT")
    over_pruning: float = Field(default=0.5, ge=0, lt=1, description="Share that is replaced at first, α")
    adjust_at: Literal["penultimate", "end"] = Field(
        default="penultimate", description="Where a replacement due after a round's last epoch takes place"
    )
    grow_batches: int = Field(default=1, ge=1, le=1000, description="Batches whose gradient decides what grows")
    exploration: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the positions, drawn anew each time, to take first where weights grow",
    )
    proximal_weight: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Weight μ of FedProx's pull back to the model received"
    )


def check_maskable(manifest: Manifest) -> None:
    """Raise BadContent for a model of which nothing can be sparse."""
    if not manifest.maskable:
        raise BadContent("the model has no linear layer or convolution whose weights are shared: nothing is sparse")


def weights_per_layer(situation: Situation, density: float, rule: LayerSparsity) -> dict[str, int]:
    """K_l of every maskable tensor. Raises BadContent for a federation that cannot replace weights by epochs."""
    if situation.settings.local_steps is not None:
        raise BadContent("local_steps: replacing weights goes by epochs; give local_epochs instead")
    check_maskable(situation.manifest)
    try:
        return layer_counts(situation.manifest, density, rule)
    except ValueError as error:
        raise BadContent(f"method_settings: {error}") from None


def check_counts(mask: ElementMask, wanted: dict[str, int]) -> None:
    """Raise BadContent unless the mask has K_l weights in each layer."""
    for name, count in wanted.items():
        if mask.counts[name] != count:
            raise BadContent(f"mask: {name} has {mask.counts[name]} weights, it must have {count}; grow what it drops")
