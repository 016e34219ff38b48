"""Helpers of methods of one sparse model that one device prepares in round 0 (GraSP, PruneFL)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import merge_in_place
from sparrow.protocol.sparsity import weight_budget

from ..errors import BadContent
from ..sums.averages import ElementSums, OneUpdate, Sums
from . import GlobalModel, MethodSettings, Situation, refuse_mask
from .sparse import check_maskable, density_of

BELIEVED = "one device alone prepares the model, with nobody to compare it with"
"""The reason why no robust rule can take the mean's place."""

ONE_DEVICE = "which weights exist follows from the data of the one device that prepares, without noise"
"""The reason why noise on the mean does not make such a method differentially private."""


class PreparedSettings(MethodSettings):
    """The settings of methods whose sparse model one device prepares."""

    density: float = Field(default=0.2, gt=0, le=1, description="Share of the maskable weights that exist, at most")
    proximal_weight: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Weight μ of FedProx's pull back to the model received"
    )


def start_whole(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return the whole model: what exists of it is not known yet. Raises BadContent where nothing can be sparse."""
    check_maskable(situation.manifest)
    return GlobalModel(tensors)


def check_prepared(model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
    """Raise BadContent unless the device that prepares chose up to K weights, some in every layer."""
    if model.mask is not None:
        refuse_mask()
    most = weight_budget(situation.manifest, density_of(situation.settings))
    if mask.count > most:
        raise BadContent(f"mask: it has {mask.count} weights, at most {most} may exist; keep fewer")
    empty = next((name for name, count in mask.counts.items() if not count), None)
    if empty is not None:
        raise BadContent(f"mask: {empty} has no weight, nothing would come through it; keep one at least")


def sums_of_prepared(model: GlobalModel, situation: Situation) -> Sums:
    """Return what takes the prepared model as it comes, or for an ordinary round Σ n_c θ_c."""
    return OneUpdate() if model.mask is None else ElementSums(situation.manifest, model.mask)


def close_prepared(model: GlobalModel, sums: OneUpdate | ElementSums, situation: Situation) -> GlobalModel:
    """Return θ_1 m_1 as it was prepared, or for an ordinary round FedAvg of what exists."""
    if not isinstance(sums, OneUpdate):
        return GlobalModel(sums.mean(model.tensors), model.mask)
    assert isinstance(sums.mask, ElementMask), "check_prepared has let nothing else in"
    tensors: Tensors = {spec.name: np.zeros(spec.shape, dtype=np.float32) for spec in situation.manifest.shared}
    merge_in_place(situation.manifest, tensors, sums.values, sums.mask)
    return GlobalModel(tensors, sums.mask, notes={"weights": sums.mask.count})
