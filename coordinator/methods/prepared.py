"""Helpers of methods whose sparse model one device prepares in round 0 (GraSP, PruneFL)."""

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

BELIEVED = "one device prepares the model, and no other can confirm it"
"""The reason against robust rules."""

ONE_DEVICE = "the existing weights follow from one device's data, without noise"
"""The reason against differential privacy by noise on the mean."""


class PreparedSettings(MethodSettings):
    """The settings of methods whose sparse model one device prepares."""

    density: float = Field(default=0.2, gt=0, le=1, description="Largest share of maskable weights that exist")
    proximal_weight: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Weight μ of FedProx's pull towards the received model"
    )


def start_whole(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return the full model without a mask. Raises BadContent if no layer can be sparse."""
    check_maskable(situation.manifest)
    return GlobalModel(tensors)


def check_prepared(model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
    """Raise BadContent unless the preparing device chose up to K weights, some in every layer."""
    if model.mask is not None:
        refuse_mask()
    most = weight_budget(situation.manifest, density_of(situation.settings))
    if mask.count > most:
        raise BadContent(f"mask: it has {mask.count} weights; it must have at most {most}: keep fewer")
    empty = next((name for name, count in mask.counts.items() if not count), None)
    if empty is not None:
        raise BadContent(f"mask: {empty} has no weight, which blocks the network; keep at least one")


def sums_of_prepared(model: GlobalModel, situation: Situation) -> Sums:
    """Return the holder of the prepared model, or Σ n_c θ_c of an ordinary round."""
    return OneUpdate() if model.mask is None else ElementSums(situation.manifest, model.mask)


def close_prepared(model: GlobalModel, sums: OneUpdate | ElementSums, situation: Situation) -> GlobalModel:
    """Return the prepared θ_1 m_1, or FedAvg of an ordinary round."""
    if not isinstance(sums, OneUpdate):
        return GlobalModel(sums.mean(model.tensors), model.mask)
    assert isinstance(sums.mask, ElementMask), "check_prepared accepts no other"
    tensors: Tensors = {spec.name: np.zeros(spec.shape, dtype=np.float32) for spec in situation.manifest.shared}
    merge_in_place(situation.manifest, tensors, sums.values, sums.mask)
    return GlobalModel(tensors, sums.mask, notes={"weights": sums.mask.count})
