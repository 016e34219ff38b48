"""PruneFL, server half: one sparse model, pruned by the gain of each weight for its time.

Jiang et al., IEEE TNNLS 2022, arXiv:1909.12326. In round 0 one device trains locally and prunes. Then devices train the
sparse model as in FedAvg, and in every ``adjust_interval``-th round also send g², the squared gradient of every weight,
existing or not. With g² = Σ n_c g²_c / Σ n_c the server

    fixes        the existing weights of each layer except a share ρ = share·0.5^(r / half_life), smallest |θ| first
    adds others  by g²_i / t_i, largest first, while g²_i / t_i > Σ g² / (t_0 + Σ t)     sums over those kept so far

and stops at K = floor(density·n_w). New weights start at 0 (``protocol.sparsity``: ``readjust``).

Choices beyond the paper: t_i is FLOPs, 6 per output position of the layer, instead of a Raspberry Pi's time; t_0 is a
share of the dense network's, ``fixed_cost``. Devices compute g² at the received model in one pass; the released code
adds squares of summed gradients. Biases and norms count neither as gain nor as time. The last round re-adjusts nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.parts import Plan, all_maskable
from sparrow.protocol.sparsity import prunefl_interval, readjust

from ..errors import BadContent
from ..sums.averages import ElementSums, OneUpdate, Sums
from . import Aggregation, CoordinatorMethod, DeviceMasks, GlobalModel, Schedule, Situation, UpdatePart, Work
from .prepared import (
    ONE_DEVICE,
    PreparedSettings,
    check_prepared,
    close_prepared,
    start_whole,
    sums_of_prepared,
)
from .sparse import Interval, density_of


class PruneFLSettings(PreparedSettings):
    """PruneFL's settings beyond those of prepared models."""

    prepare_rounds: int = Field(
        default=1000, ge=1, le=1_000_000, description="Largest number of local rounds of the first device"
    )
    adjust_interval: Interval = Field(
        default="auto",
        description="Rounds between replacements of weights; auto: 50, or half of fewer than 100; 0: never, and the "
        "first device prunes once",
    )
    share: float = Field(default=0.3, ge=0, le=1, description="Share of a layer's weights that may be dropped, ρ")
    half_life: float = Field(
        default=10_000.0, gt=0, allow_inf_nan=False, description="Number of rounds that halve the share"
    )
    fixed_cost: float = Field(
        default=0.05, ge=0, allow_inf_nan=False, description="Fixed time t_0, as a share of the dense network's time"
    )


class SquaredGradientSums(ElementSums):
    """Sums of a re-adjusting round: updates, and Σ n_c g²_c, float64 [n_w]."""

    def __init__(self, manifest: Manifest, mask: ElementMask) -> None:
        super().__init__(manifest, mask)
        self._squares = np.zeros(mask.size, dtype=np.float64)

    def fold_squares_in_place(self, squares: Array, num_examples: int) -> None:
        """Add the squared gradients of one update, float32 [n_w]."""
        self._squares += np.multiply(squares, float(num_examples), dtype=np.float64)

    def importance(self) -> dict[str, NDArray[Any]]:
        """Return g²: name of every maskable tensor -> float64, its shape."""
        shapes = [(spec.name, spec.shape, spec.size) for spec in self._manifest.maskable]
        ends = np.cumsum([size for _, _, size in shapes])[:-1]
        parts = np.split(self._squares / self.num_examples, ends)
        return {name: part.reshape(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}


def start(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return the full model. Raises BadContent if no layer can be sparse, or no round would replace weights."""
    rounds = situation.settings.rounds
    given = situation.own(PruneFLSettings).adjust_interval
    between = prunefl_interval(given, rounds)
    if between >= rounds:
        raise BadContent(
            f"method_settings.adjust_interval: weights are replaced every {between} rounds except in the last, so "
            f"never in {rounds} rounds. Set a lower adjust_interval, more than {between} rounds, or adjust_interval 0 "
            f"to keep the first device's mask"
        )
    return start_whole(tensors, situation)


def work(situation: Situation) -> Work:
    """Return the round's work, with gradients if it replaces weights."""
    number = situation.round
    settings = situation.settings
    between = prunefl_interval(situation.own(PruneFLSettings).adjust_interval, settings.rounds)
    due = between and 0 < number < settings.rounds and number % between == 0
    return Work(plan={"gradients": True} if due else {})


def wanted_gradients(manifest: Manifest, plan: Plan) -> int:
    """Return the number of squared gradients in an update of a round with this plan."""
    return all_maskable(manifest, plan) if plan.get("gradients") else 0


def sums_of(model: GlobalModel, situation: Situation) -> Sums:
    """Return sums, with squared gradients if the round asks for them."""
    if model.mask is None or not wanted_gradients(situation.manifest, situation.plan):
        return sums_of_prepared(model, situation)
    return SquaredGradientSums(situation.manifest, model.mask)


def close(model: GlobalModel, sums: OneUpdate | ElementSums, situation: Situation) -> GlobalModel:
    """Return FedAvg of the sparse model, re-adjusted if gradients were sent."""
    averaged = close_prepared(model, sums, situation)
    if not isinstance(sums, SquaredGradientSums):
        return averaged
    assert averaged.mask is not None
    rules = situation.own(PruneFLSettings)
    tensors = averaged.tensors
    mask = readjust(
        situation.manifest,
        {name: tensors[name].astype(np.float32, copy=False) for name in averaged.mask.exists},
        sums.importance(),
        averaged.mask,
        density=rules.density,
        share=rules.share * 0.5 ** (situation.round / rules.half_life),
        fixed_cost=rules.fixed_cost,
    )
    came = mask.without(averaged.mask).count
    went = averaged.mask.without(mask).count
    notes = {"positions_replaced": came, "positions_changed": came + went, "weights": mask.count}
    return GlobalModel({**tensors, **mask.apply(tensors)}, mask, notes=notes)


PRUNEFL = CoordinatorMethod(
    smallest_budget=density_of,
    settings_type=PruneFLSettings,
    prepares=True,
    start=start,
    schedule=Schedule(work=work),
    parts=(
        UpdatePart(
            name="gradients",
            dtype="float32",
            count=wanted_gradients,
            fold=SquaredGradientSums.fold_squares_in_place,
        ),
    ),
    masks=DeviceMasks(check=check_prepared),
    aggregation=Aggregation(
        sums=sums_of,
        close=close,
        why_mean_only="squared gradients decide which weights exist, and one device could make any weight the most "
        "important",
        why_not_private=ONE_DEVICE,
    ),
)
