"""GraSP, server half: pruning at initialisation by gradient flow.

Wang, Zhang, Grosse, ICLR 2020, arXiv:2002.07376. In round 0 one device scores every weight on its own data (the paper's
machine has all data) and keeps the K = floor(density·n_w) largest scores of the full network. The rounds after it are
FedAvg of the sparse model,

    θ_{r+1} = Σ_c n_c θ_c / Σ_c n_c,     m_r = m_1 for all r.
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
        default=200.0, gt=0, allow_inf_nan=False, description="Divisor of the outputs in the scored loss"
    )
    score_batches: int = Field(
        default=0, ge=0, le=1_000_000, description="Number of training batches that weights are scored on; 0: all"
    )


def check_mask(model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
    """Raise BadContent unless the mask has exactly K weights."""
    check_prepared(model, mask, situation)
    wanted = weight_budget(situation.manifest, density_of(situation.settings))
    if mask.count != wanted:
        raise BadContent(f"mask: it has {mask.count} weights, but must have {wanted}; keep the largest scores")


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
