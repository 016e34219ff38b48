"""VoteDST, server half: dynamic sparse training of one model by votes.

As in FedDST (Bibikar et al., AAAI 2022, arXiv:2112.09824) layer l has exactly K_l weights, and some are replaced every
``adjust_interval`` rounds. But all devices keep the round's mask, and vote for growth (``edge_sdk.methods.votedst``).
With θ½ = Σ_c n_c θ_c / Σ_c n_c, FedAvg of the sparse model, the server in a round r with votes

    drops    the q_l smallest |θ½| of each layer,        q_l = ⌊σ(r) K_l⌋,  σ(r) = α/2·(1 + cos(πr/R))
    grows    the q_l largest |Σ_c n_c v_c|, v_c in {-1, 0, 1}, of its ``candidates``·q_l candidates, starting at 0

A candidate with a sum of 0 does not grow; then fewer weights are dropped. The last round has no votes, since new
weights would stay untrained zeros.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sparrow.protocol.elements import ElementMask, Index
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.parts import Plan, Signs
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import Election, draw_candidates, elect, elections, largest, over_pruning

from ..errors import BadContent
from ..sums.averages import ElementSums
from . import Aggregation, CoordinatorMethod, GlobalModel, Schedule, Situation, UpdatePart, Work, own_settings
from .sparse import OneSparseModelSettings, check_maskable, counts_of, density_of, rounds_between, sparse_model

VOTED = "votes decide which weights exist, and no robust rule limits one device's votes"


class VoteDSTSettings(OneSparseModelSettings):
    """VoteDST's settings beyond those of one sparse model."""

    initial_scale: Literal["dense", "sparse"] = Field(
        default="sparse", description=OneSparseModelSettings.model_fields["initial_scale"].description
    )
    candidates: float = Field(
        default=4.0, ge=1, le=1000, description="Candidate positions in a vote, per replaced weight"
    )


class VoteSums(ElementSums):
    """Sums of a round with votes: updates, and Σ n_c v_c, float64 [candidates]."""

    def __init__(self, manifest: Manifest, mask: ElementMask, candidates: int) -> None:
        super().__init__(manifest, mask)
        self.tally = np.zeros(candidates, dtype=np.float64)

    def fold_votes_in_place(self, votes: Signs, num_examples: int) -> None:
        """Add the votes of one update, int8 [candidates]."""
        self.tally += np.multiply(votes, float(num_examples), dtype=np.float64)


def start(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return θ_1 = weights · m_1. Raises BadContent if no layer can be sparse, or no round would replace weights."""
    rules = situation.own(VoteDSTSettings)
    manifest = situation.manifest
    rounds = situation.settings.rounds
    check_maskable(manifest)
    between = rounds_between(situation.settings, rules)
    if between >= rounds and rules.over_pruning and rules.density < 1:
        raise BadContent(
            f"method_settings.adjust_interval: devices vote every {between} rounds except in the last, so never in "
            f"{rounds} rounds. Set a lower adjust_interval, more than {between} rounds, or adjust_interval 0 to keep "
            f"the first mask"
        )
    return sparse_model(tensors, situation, rules, counts_of(manifest, rules.density, rules.layer_sparsity))


def work(situation: Situation) -> Work:
    """Return the round's work: σ(r) and the number of candidates if it has a vote."""
    share = _share(situation)
    votes = sum(vote.candidates for vote in _elections(situation, share).values()) if share else 0
    return Work(plan={"votes": votes, "share": share} if votes else {})


def wanted_votes(manifest: Manifest, plan: Plan) -> int:
    """Return the number of votes in an update of a round with this plan."""
    return int(plan.get("votes", 0))


def sums_of(model: GlobalModel, situation: Situation) -> ElementSums:
    """Return Σ n_c θ_c, with votes if the round asks for them."""
    assert model.mask is not None
    votes = wanted_votes(situation.manifest, situation.plan)
    return VoteSums(situation.manifest, model.mask, votes) if votes else ElementSums(situation.manifest, model.mask)


def close(model: GlobalModel, sums: ElementSums, situation: Situation) -> GlobalModel:
    """Return FedAvg of the sparse model, with the smallest weights replaced by elected ones."""
    tensors = sums.mean(model.tensors)
    before = model.mask
    if not isinstance(sums, VoteSums):
        return GlobalModel(tensors, before, model.own)
    assert before is not None
    exists: dict[str, Any] = dict(before.exists)
    votes = _elections(situation, float(situation.plan["share"]))
    candidates = draw_candidates(before, votes, situation.settings.seed, situation.round)
    replaced = 0
    start = 0
    for name, vote in votes.items():
        grown = candidates[name][elect(sums.tally[start : start + vote.candidates], vote.seats)]
        start += vote.candidates
        exists[name] = _replaced(tensors[name], before.index[name], grown)
        replaced += len(grown)
    mask = ElementMask(exists)
    own = {"replaced": model.own["replaced"] + replaced}
    return GlobalModel({**tensors, **mask.apply(tensors)}, mask, own, {"positions_replaced": replaced})


def _replaced(values: NDArray[Any], active: Index, grown: Index) -> NDArray[np.bool_]:
    """Return a tensor's new mask: ``grown`` replace the smallest |values| of ``active``."""
    sizes = np.abs(np.take(values, active))
    exists = np.zeros(values.size, dtype=bool)
    exists[active[largest(sizes, len(active) - len(grown))]] = True
    exists[grown] = True
    return exists.reshape(values.shape)


def _share(situation: Situation) -> float:
    """Return σ(r), the share of each layer's weights to replace in this round; 0: no vote."""
    rules = situation.own(VoteDSTSettings)
    settings = situation.settings
    between = rounds_between(settings, rules)
    if not between or situation.round % between or not 0 < situation.round < settings.rounds:
        return 0.0
    return over_pruning(situation.round, settings.rounds, rules.over_pruning)


def _elections(situation: Situation, share: float) -> dict[str, Election]:
    rules = situation.own(VoteDSTSettings)
    manifest = situation.manifest
    return elections(manifest, counts_of(manifest, rules.density, rules.layer_sparsity), share, rules.candidates)


def why_not_secure(settings: FederationSettings) -> str | None:
    """Return a reason if rounds have votes, which would be visible per device."""
    if rounds_between(settings, own_settings(settings, VoteDSTSettings)):
        return "devices send votes beside their values; set method_settings.adjust_interval = 0"
    return None


VOTEDST = CoordinatorMethod(
    smallest_budget=density_of,
    settings_type=VoteDSTSettings,
    start=start,
    schedule=Schedule(work=work),
    parts=(UpdatePart(name="signs", dtype="sign", count=wanted_votes, fold=VoteSums.fold_votes_in_place),),
    aggregation=Aggregation(sums=sums_of, close=close, why_mean_only=VOTED),
    why_not_secure=why_not_secure,
)
"""FedAvg of the sparse model; at times elected weights replace the smallest."""
