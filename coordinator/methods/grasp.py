"""GraSP: pruning at initialisation, by gradient flow, server half.

Wang, Zhang, Grosse, "Picking Winning Tickets Before Training by Preserving Gradient Flow", ICLR 2020, arXiv:2002.07376.
Before the first round one device scores every weight on its own data and keeps the K = floor(density·n_w) of the
largest scores, over the whole network (``edge_sdk.methods.grasp``). From then on this is FedAvg of what is left,

    θ_{r+1} = Σ_c n_c θ_c / Σ_c n_c,     m_r = m_1 for ever.

The paper knows one machine with all the data. Here a single device scores, in a round 0 of its own.
"""

from __future__ import annotations

from pydantic import Field

from sparrow.protocol.elements import ElementMask
from sparrow.protocol.sparsity import weight_budget

from ..errors import BadContent
from . import Aggregation, CoordinatorMethod, DeviceMasks, GlobalModel, Situation
from .prepared import (
    BELIEVED,
    ONE_DEVICE,
    PreparedSettings,
    check_prepared,
    close_prepared,
    start_whole,
    sums_of_prepared,
)
from .sparse import density_of


class GraSPSettings(PreparedSettings):
    """GraSP's settings beyond those of prepared models."""

    temperature: float = Field(
        default=200.0, gt=0, allow_inf_nan=False, description="What outputs are divided by before their loss is scored"
    )
    score_batches: int = Field(
        default=0, ge=0, le=1_000_000, description="Batches of its training data that a device scores on; 0 is all"
    )


def check_mask(model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
    """Raise BadContent unless the mask has K weights, neither more nor fewer."""
    check_prepared(model, mask, situation)
    wanted = weight_budget(situation.manifest, density_of(situation.settings))
    if mask.count != wanted:
        raise BadContent(f"mask: it has {mask.count} weights, it must have {wanted}; keep the largest scores")


GRASP = CoordinatorMethod(
    smallest_budget=density_of,
    settings_type=GraSPSettings,
    prepares=True,
    start=start_whole,
    masks=DeviceMasks(check=check_mask),
    aggregation=Aggregation(
        sums=sums_of_prepared,
        close=close_prepared,
        why_mean_only=BELIEVED,
        why_not_private=ONE_DEVICE,
    ),
)
