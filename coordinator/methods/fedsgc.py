"""FedSGC, server half: gradient-congruity guided federated sparse training.

Tian et al., arXiv:2405.01189. One sparse model for all devices: layer l has exactly K_l weights (Erdos-Renyi-Kernel
densities), and devices replace some at times (``edge_sdk.methods.fedsgc``). At the end of any round the server computes

    θ½ = (Σ_c n_c θ_c m_c + n_rest θ_r m_r) / (Σ_c n_c m_c + n_rest m_r)      if any device has the weight     (Eq. 5)
    m_{r+1}: the K_l largest |θ½| of each layer among those;   θ_{r+1} = θ½ m_{r+1}
    d_{r+1} = sign(θ½ - θ_r)                                                   the direction map

with n_rest the examples of absent devices. The map is sent in re-adjusting rounds only, for existing weights.

Choices beyond the paper:

- n_rest slows learning to the cohort's share of all examples. ``rest`` is none by default; all is as printed.
- Without re-adjusting, a round's map is 0 at empty positions, so that it can only revive weights just dropped.
  ``direction_memory`` keeps each position's last direction, and sends all.
- The map is taken before the global prune, which is no direction of learning. Ties in the prune go to positions with
  more examples, then to the lower index.
- Re-adjusting ends before the last round, and a device's expected epochs are E·R·cohort/devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from sparrow.protocol.manifest import Tensors
from sparrow.protocol.parts import Numbers

from ..sums.averages import ElementSums
from . import GlobalModel, Situation
from .sparse import SparseTrainingSettings, average_and_prune, replacing_method, rounds_between

PAPER = {
    "rest": "all",
    "direction": "post_prune",
    "direction_memory": False,
    "adjust_at": "end",
    "adjust_interval": 20,
    "device_interval": 20,
}
"""As printed (for MNIST); the defaults were chosen on validation data (docs/results/fedsgc.md). The intervals are for
400 rounds: see ``of_rounds``. Devices' last replacements are sent as zeros, which the global prune removes."""


class FedSGCSettings(SparseTrainingSettings):
    """FedSGC's settings beyond those of sparse training. ``preset`` paper sets the paper's values for all others."""

    preset: Literal["sparrow", "paper"] = Field(default="sparrow", description="Source of the other settings' defaults")
    guided_share: float = Field(default=0.01, ge=0, le=1, description="Share of changes guided by directions, λ")
    guided_basis: Literal["total", "moved"] = Field(
        default="total", description="Base of the share λ: all zeros after dropping (as printed), or dropped weights"
    )
    rest: Literal["all", "none"] = Field(
        default="none", description="Count absent devices with the old weights (all), or not (none)"
    )
    direction: Literal["pre_prune", "post_prune"] = Field(
        default="pre_prune", description="Take directions before or after the global prune"
    )
    direction_memory: bool = Field(default=False, description="Keep the last direction of every position")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        paper = isinstance(given, dict) and given.get("preset") == "paper"
        return {**PAPER, **given} if paper else given


def _directions(
    before: Tensors,
    rules: FedSGCSettings,
    name: str,
    old: NDArray[np.float64],
    half: NDArray[np.float32],
    new: NDArray[np.float32],
    trained: NDArray[np.bool_],
) -> Tensors:
    """Return d of one tensor, int8 [n]."""
    moved = half if rules.direction == "pre_prune" else new
    key = _key(name)
    directions = (np.sign(moved - old) * trained).astype(np.int8)
    if rules.direction_memory and key in before:
        directions = np.where(directions == 0, before[key], directions).astype(np.int8)
    return {key: directions}


def directions_of(model: GlobalModel, situation: Situation) -> dict[str, Numbers]:
    """Return d_r as signs, of existing weights or of all positions; {} if it guides nothing."""
    rules = situation.own(FedSGCSettings)
    if not situation.plan or rules.guided_share == 0 or model.mask is None:
        return {}
    everywhere = rules.direction_memory or rounds_between(situation.settings, rules) == 1
    parts = []
    for name, exists in model.mask.exists.items():
        directions = model.own.get(_key(name), np.zeros(exists.size, dtype=np.int8))
        parts.append(directions if everywhere else np.take(directions, model.mask.index[name]))
    return {"signs": np.concatenate(parts).astype(np.int8, copy=False)}


def close(model: GlobalModel, sums: ElementSums, situation: Situation) -> GlobalModel:
    """Return the mean pruned to K_l, with its directions."""
    rules = situation.own(FedSGCSettings)
    rest = max(0, situation.num_examples - sums.num_examples) if rules.rest == "all" else 0
    return average_and_prune(model, sums, rest, partial(_directions, model.own, rules))


def _key(name: str) -> str:
    return f"direction:{name}"


FEDSGC = replacing_method(FedSGCSettings, close, directions_of)
