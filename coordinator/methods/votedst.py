"""VoteDST: dynamic sparse training of one model by votes, server half.

As in FedDST (Bibikar et al., AAAI 2022, arXiv:2112.09824) in layer l exactly K_l weights exist, and every
``adjust_interval`` rounds some of them are replaced. But all devices keep the round's mask, and vote for what is to
grow (``edge_sdk.methods.votedst``). With θ½ = Σ_c n_c θ_c / Σ_c n_c, FedAvg of what exists, the server in a round r
with votes

    drops    the q_l smallest |θ½| of each layer,        q_l = ⌊σ(r) K_l⌋,  σ(r) = α/2·(1 + cos(πr/R))
    grows    the q_l largest |Σ_c n_c v_c|, v_c in {-1, 0, 1}, of its ``candidates``·q_l candidates, beginning at 0

so that votes add up where devices agree on the sign, and cancel out where they do not. Candidates are drawn anew each
time from what does not exist. One about which all votes cancel out does not grow; then as many fewer weights are
dropped.

FedDST and FedSGC let each device grow by one batch of its own data; the server then sees new weights of single devices,
and drops most of them. Votes take less than two bits for a candidate, and every update is a sum over all devices. The
last round has no votes: what is new would be zeros that nobody trains.
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

VOTED = "votes decide which weights exist, and no rule bounds what one device's votes change"


class VoteDSTSettings(OneSparseModelSettings):
    """VoteDST's settings beyond those of one sparse model."""

    initial_scale: Literal["dense", "sparse"] = Field(
        default="sparse", description=OneSparseModelSettings.model_fields["initial_scale"].description
    )
    candidates: float = Field(
        default=4.0, ge=1, le=1000, description="Positions that devices vote about, for each weight that is replaced"
    )


class VoteSums(ElementSums):
    """Sums of a round with votes: of its updates, and Σ n_c v_c, float64 [candidates]."""

    def __init__(self, manifest: Manifest, mask: ElementMask, candidates: int) -> None:
        super().__init__(manifest, mask)
        self.tally = np.zeros(candidates, dtype=np.float64)

    def fold_votes_in_place(self, votes: Signs, num_examples: int) -> None:
        """Add the votes of one update, int8 [candidates]."""
        self.tally += np.multiply(votes, float(num_examples), dtype=np.float64)


def start(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return θ_1 = weights · m_1. Raises BadContent where nothing can be sparse, or no round would replace weights."""
    rules, manifest, rounds = situation.own(VoteDSTSettings), situation.manifest, situation.settings.rounds
    check_maskable(manifest)
    between = rounds_between(situation.settings, rules)
    if between >= rounds and rules.over_pruning and rules.density < 1:
        raise BadContent(
            f"method_settings.adjust_interval: every {between} rounds devices vote, but not in the last one: in none "
            f"of {rounds}. Give a lower adjust_interval, more than {between} rounds, or adjust_interval 0, if the "
            f"first mask is to stay"
        )
    return sparse_model(tensors, situation, rules, counts_of(manifest, rules.density, rules.layer_sparsity))


def work(situation: Situation) -> Work:
    """Return whether devices vote in this round: σ(r), and about how many candidates."""
    share = _share(situation)
    votes = sum(vote.candidates for vote in _elections(situation, share).values()) if share else 0
    return Work(plan={"votes": votes, "share": share} if votes else {})


def wanted_votes(manifest: Manifest, plan: Plan) -> int:
    """Return how many votes an update of a round so planned brings."""
    return int(plan.get("votes", 0))


def sums_of(model: GlobalModel, situation: Situation) -> ElementSums:
    """Return Σ n_c θ_c, with votes where the round asks for them."""
    assert model.mask is not None
    votes = wanted_votes(situation.manifest, situation.plan)
    return VoteSums(situation.manifest, model.mask, votes) if votes else ElementSums(situation.manifest, model.mask)


def close(model: GlobalModel, sums: ElementSums, situation: Situation) -> GlobalModel:
    """Return FedAvg of what exists, of which the smallest give way to what was voted for."""
    tensors, before = sums.mean(model.tensors), model.mask
    if not isinstance(sums, VoteSums):
        return GlobalModel(tensors, before, model.own)
    assert before is not None
    exists: dict[str, Any] = dict(before.exists)
    votes = _elections(situation, float(situation.plan["share"]))
    candidates = draw_candidates(before, votes, situation.settings.seed, situation.round)
    replaced = start = 0
    for name, vote in votes.items():
        grown = candidates[name][elect(sums.tally[start : start + vote.candidates], vote.seats)]
        start += vote.candidates
        exists[name] = _replaced(tensors[name], before.index[name], grown)
        replaced += len(grown)
    mask = ElementMask(exists)
    own = {"replaced": model.own["replaced"] + replaced}
    return GlobalModel({**tensors, **mask.apply(tensors)}, mask, own, {"positions_replaced": replaced})


def _replaced(values: NDArray[Any], active: Index, grown: Index) -> NDArray[np.bool_]:
    """Return what exists of a tensor whose smallest |values| among those ``active`` give way to as many ``grown``."""
    sizes = np.abs(np.take(values, active))
    exists = np.zeros(values.size, dtype=bool)
    exists[active[largest(sizes, len(active) - len(grown))]] = True
    exists[grown] = True
    return exists.reshape(values.shape)


def _share(situation: Situation) -> float:
    """Return σ(r), the share of each layer's weights that this round replaces; 0: there is no vote."""
    rules, settings = situation.own(VoteDSTSettings), situation.settings
    between = rounds_between(settings, rules)
    if not between or situation.round % between or not 0 < situation.round < settings.rounds:
        return 0.0
    return over_pruning(situation.round, settings.rounds, rules.over_pruning)


def _elections(situation: Situation, share: float) -> dict[str, Election]:
    rules, manifest = situation.own(VoteDSTSettings), situation.manifest
    return elections(manifest, counts_of(manifest, rules.density, rules.layer_sparsity), share, rules.candidates)


def why_not_secure(settings: FederationSettings) -> str | None:
    """Return why votes cannot be counted without seeing one device's; None where there are none."""
    if rounds_between(settings, own_settings(settings, VoteDSTSettings)):
        return "devices send votes beside their values; give method_settings.adjust_interval = 0"
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
"""FedAvg of what exists; now and then the smallest weights give way to those that the cohort votes for."""
