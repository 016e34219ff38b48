"""GraSP: pruning at initialisation, by gradient flow, server half.

Wang, Zhang, Grosse, "Picking Winning Tickets Before Training by Preserving Gradient Flow", ICLR 2020, arXiv:2002.07376.
Before the first round one device scores every weight on its own data and keeps the K = floor(density·n_w) of the
largest scores, over the whole network (``edge_sdk.methods.grasp``). From then on this is FedAvg of what is left,

    θ_{r+1} = Σ_c n_c θ_c / Σ_c n_c,     m_r = m_1 for ever.

The paper knows one machine with all the data. That a single device scores, in a round 0 of its own, is how
federated papers have it as a baseline (the method card of FedSGC, section 5).
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from edge_sdk.protocol.elements import ElementMask
from edge_sdk.protocol.manifest import Tensors
from edge_sdk.protocol.masks import merge_in_place
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.protocol.sparsity import weight_budget
from sparrow.coordinator.errors import BadContent
from sparrow.coordinator.methods import CoordinatorMethod, GlobalModel, Situation
from sparrow.coordinator.methods.sparse import check_maskable
from sparrow.coordinator.rounds.sums import ElementSums, OneUpdate, Sums


class PreparedSettings(BaseModel):
    """What methods know whose sparse model one device prepares."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    density: float = Field(default=0.2, gt=0, le=1, description="Share of the maskable weights that exist, at most")
    proximal_weight: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Weight μ of FedProx's pull back to the model received"
    )


class GraSPSettings(PreparedSettings):
    """What GraSP knows beyond that."""

    temperature: float = Field(
        default=200.0, gt=0, allow_inf_nan=False, description="What outputs are divided by before their loss is scored"
    )
    score_batches: int = Field(
        default=0, ge=0, le=1_000_000, description="Batches of its training data that a device scores on; 0 is all"
    )


class Prepared(CoordinatorMethod):
    """Server half of methods whose sparse model one device prepares, in round 0."""

    prepares = True
    settings_type: type[BaseModel] = PreparedSettings

    def density(self, settings: FederationSettings) -> float:
        """Share of the maskable weights that exist, at most."""
        return float(settings.method_settings["density"])

    def smallest_budget(self, settings: FederationSettings) -> float:
        """One density for all. (Who prepares needs more: the whole model, trained or differentiated twice.)"""
        return self.density(settings)

    def start(self, tensors: Tensors, situation: Situation) -> GlobalModel:
        """The whole model: what exists of it is not known yet."""
        check_maskable(situation.manifest)
        return GlobalModel(tensors)

    def check_mask(self, model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
        """The one that prepares may choose up to K weights, some in every layer; the others may choose nothing."""
        if model.mask is not None:
            super().check_mask(model, mask, situation)
        most = weight_budget(situation.manifest, self.density(situation.settings))
        if mask.count > most:
            raise BadContent(f"mask: it has {mask.count} weights, at most {most} may exist; keep fewer")
        empty = next((name for name, count in mask.counts.items() if not count), None)
        if empty is not None:
            raise BadContent(f"mask: {empty} has no weight, nothing would come through it; keep one at least")

    def why_mean_only(self, settings: FederationSettings) -> str | None:
        """Of its sums only the mean is needed."""
        return None

    def why_not_private(self, settings: FederationSettings) -> str | None:
        """The mask is one device's."""
        return "which weights exist follows from the data of the one device that prepares, without noise"

    def sums(self, model: GlobalModel, situation: Situation) -> Sums:
        """What is prepared as it comes; of an ordinary round, Σ n_c θ_c."""
        return OneUpdate() if model.mask is None else ElementSums(situation.manifest, model.mask)

    def close(self, model: GlobalModel, sums: OneUpdate | ElementSums, situation: Situation) -> GlobalModel:
        """θ_1 m_1 as it was prepared; then FedAvg of what exists."""
        if not isinstance(sums, OneUpdate):
            return GlobalModel(sums.mean(model.tensors), model.mask)
        assert isinstance(sums.mask, ElementMask), "check_mask has let nothing else in"
        tensors: Tensors = {spec.name: np.zeros(spec.shape, dtype=np.float32) for spec in situation.manifest.shared}
        merge_in_place(situation.manifest, tensors, sums.values, sums.mask)
        return GlobalModel(tensors, sums.mask, notes={"weights": sums.mask.count})


class GraSP(Prepared):
    """Server half of GraSP."""

    settings_type = GraSPSettings

    def check_mask(self, model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
        """K weights, neither more nor fewer."""
        super().check_mask(model, mask, situation)
        wanted = weight_budget(situation.manifest, self.density(situation.settings))
        if mask.count != wanted:
            raise BadContent(f"mask: it has {mask.count} weights, it must have {wanted}; keep the largest scores")
