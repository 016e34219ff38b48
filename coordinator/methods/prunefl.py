"""PruneFL: one sparse model, pruned by what its weights gain for their time, server half.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, "Model Pruning Enables Efficient Federated Learning on Edge Devices",
IEEE TNNLS 2022, arXiv:1909.12326. In round 0 one device trains alone and prunes (``edge_sdk.methods.prunefl``). Then
devices train what exists, as in FedAvg, and in every ``adjust_interval``-th round also send g², the squared gradient of
every weight, existing or not. With g² = Σ n_c g²_c / Σ n_c the server

    fixes        in each layer the weights that exist but for a share ρ = share·0.5^(r / half_life), smallest |θ| first
    adds others  by g²_i / t_i, largest first, while g²_i / t_i > Σ g² / (t_0 + Σ t)     sums over what is kept so far

and stops at K = floor(density·n_w). What is new begins at 0 (``protocol.sparsity``: ``readjust``).

Where the paper is silent, or measures what nobody else has: t_i is FLOPs, 6 per output position of the layer, not a
Raspberry Pi's time; t_0 is a share of the dense network's, ``fixed_cost``. Devices take g² at the model received, in
one pass, where the released code adds up squares of summed gradients. Biases and norms count neither as gain nor as
time. The last round re-adjusts nothing: what is new would be zeros that nobody trains.
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
        default=1000, ge=1, le=1_000_000, description="Most rounds that the first device trains alone"
    )
    adjust_interval: Interval = Field(
        default="auto",
        description="Rounds between those that replace weights; auto: 50, or half of fewer than 100; 0: none does, and "
        "the first device prunes once",
    )
    share: float = Field(default=0.3, ge=0, le=1, description="Share of a layer's weights that may go at first, ρ")
    half_life: float = Field(
        default=10_000.0, gt=0, allow_inf_nan=False, description="Rounds after which half as many may go"
    )
    fixed_cost: float = Field(
        default=0.05, ge=0, allow_inf_nan=False, description="Time that no weight takes, t_0, of the dense network's"
    )


class SquaredGradientSums(ElementSums):
    """Sums of a re-adjusting round: of its updates, and Σ n_c g²_c, float64 [n_w]."""

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
    """Return the whole model. Raises BadContent where nothing can be sparse, or no round would replace weights."""
    rounds, given = situation.settings.rounds, situation.own(PruneFLSettings).adjust_interval
    between = prunefl_interval(given, rounds)
    if between >= rounds:
        raise BadContent(
            f"method_settings.adjust_interval: every {between} rounds weights are replaced, but in the last one: in "
            f"none of {rounds}. Give a lower adjust_interval, more than {between} rounds, or adjust_interval 0, if "
            f"what the first device keeps is to stay"
        )
    return start_whole(tensors, situation)


def work(situation: Situation) -> Work:
    """Return whether this round replaces weights, and so wants gradients."""
    number, settings = situation.round, situation.settings
    between = prunefl_interval(situation.own(PruneFLSettings).adjust_interval, settings.rounds)
    due = between and 0 < number < settings.rounds and number % between == 0
    return Work(plan={"gradients": True} if due else {})


def wanted_gradients(manifest: Manifest, plan: Plan) -> int:
    """Return how many squared gradients an update of a round so planned brings."""
    return all_maskable(manifest, plan) if plan.get("gradients") else 0


def sums_of(model: GlobalModel, situation: Situation) -> Sums:
    """Return sums with the squared gradients, where the round asks for them."""
    if model.mask is None or not wanted_gradients(situation.manifest, situation.plan):
        return sums_of_prepared(model, situation)
    return SquaredGradientSums(situation.manifest, model.mask)


def close(model: GlobalModel, sums: OneUpdate | ElementSums, situation: Situation) -> GlobalModel:
    """Return FedAvg of what exists, of which then exists what is worth its time."""
    averaged = close_prepared(model, sums, situation)
    if not isinstance(sums, SquaredGradientSums):
        return averaged
    assert averaged.mask is not None
    rules, tensors = situation.own(PruneFLSettings), averaged.tensors
    mask = readjust(
        situation.manifest,
        {name: tensors[name].astype(np.float32, copy=False) for name in averaged.mask.exists},
        sums.importance(),
        averaged.mask,
        density=rules.density,
        share=rules.share * 0.5 ** (situation.round / rules.half_life),
        fixed_cost=rules.fixed_cost,
    )
    came, went = mask.without(averaged.mask).count, averaged.mask.without(mask).count
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
