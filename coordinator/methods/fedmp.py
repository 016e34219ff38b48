"""FedMP, server half: a bandit chooses how far the model is pruned for each device, and means are of whole models.

Jiang, Xu, Xu, Wang, Qiao, Qian, "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing", ICDE 2022. For device n, drawn for round k:

    E-UCB     Every device has a bandit of its own over its active ratios (the share kept; the paper's pruning ratio is
              1 minus that). Their range is partitioned into regions; the region j with the largest

                  R̄_j + sqrt(2 ln(Σ_i N_i) / N_j)      N_j = Σ_s λ^(age of s) over its rounds s with a ratio in j,
                                                        R̄_j = the mean of their rewards with the same weights

              is taken (one that was never tried before all others, the widest first), the ratio is drawn uniformly
              from it, and the region is split there unless it is narrower than ``region``.
    reward    R_n^k = ΔL_k / |T_n^k - T̄^k|: what the mean training loss of round k has fallen by, more for devices whose
              time is close to the round's mean.
    pruning   In each hidden group the max(1, floor(ratio n)) neurons with the largest l1 norms of the global model.
    R2SP      A weight that a device was not sent counts in the average with the global model's value (the residual).

Choices of ours: a ratio is at most the device's budget. The bandits keep nothing: updates' ratios, losses and times are
in the coordinator's records, of which the last 500 rounds count. T is, with ``time = flops``, the FLOPs of the device's
training divided by those of one sample at its budget, so that the same seeds give the same model; ``time = seconds``
takes what devices report. |T - T̄| is relative to T̄, plus 0.1, and rewards are divided by the largest of the records.
Weights of the average are training samples.

``ratios = budget`` has devices prune themselves, once, to their budgets, and ``residual = false`` averages each weight
over those who held it: together the form that FedSPU's paper compares (section 5.1).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from sparrow.protocol.flops import training_flops
from sparrow.protocol.neurons import Scores, first_neurons, norm_scores
from sparrow.protocol.settings import FederationSettings

from ..sums.averages import MaskedSums, Sums
from . import (
    ActiveNeurons,
    Aggregation,
    CoordinatorMethod,
    DeviceChoice,
    GlobalModel,
    MethodSettings,
    Participation,
    ServerPruning,
    Situation,
    any_budget,
    close_with_mean,
    own_settings,
)

LEAST_DEVIATION = 0.1
"""Added to a time's deviation from the mean, as a share of it: no reward is infinite."""

Play = tuple[float, float]
"""An active ratio, and the reward that it brought."""


class FedMPSettings(MethodSettings):
    """FedMP's settings."""

    ratios: Literal["bandit", "budget"] = Field(
        default="bandit", description="What chooses how far the model is pruned for a device; budget: itself, once"
    )
    residual: bool = Field(
        default=True, description="Whether weights that a device was not sent count with the global model's values"
    )
    smallest_ratio: float = Field(default=0.1, gt=0, le=1, description="Smallest active ratio that the bandit tries")
    region: float = Field(default=0.25, gt=0, le=1, description="Width below which its regions are not split")
    discount: float = Field(default=0.98, gt=0, le=1, description="Weight of a reward after one more round, λ")
    time: Literal["flops", "seconds"] = Field(
        default="flops", description="What a device's time is: counted from FLOPs and budget, or as it reports"
    )


def ratios(
    history: Sequence[Participation],
    budgets: Mapping[str, float],
    chance: Callable[[str], float],
    situation: Situation,
) -> dict[str, float]:
    """Return the active ratio of each device's next round."""
    rules = situation.own(FedMPSettings)
    plays: dict[str, list[Play]] = defaultdict(list)
    for each, reward in zip(history, rewards(history, situation), strict=True):
        plays[each.device].append((each.ratio, reward))
    return {name: next_ratio(plays[name], budget, chance(name), rules) for name, budget in budgets.items()}


def rewards(history: Sequence[Participation], situation: Situation) -> list[float]:
    """Return the reward of each participation, -1..1; history: in the order of rounds."""
    weights: Counter[int] = Counter()
    losses: dict[int, float] = defaultdict(float)
    times: dict[int, list[float]] = defaultdict(list)
    taken = times_of(history, situation)
    for each, time in zip(history, taken, strict=True):
        weights[each.round] += each.num_examples
        losses[each.round] += each.loss * each.num_examples
        times[each.round].append(time)
    means = {number: losses[number] / weights[number] for number in losses}
    before = dict(zip(list(means)[1:], means.values(), strict=False))
    raw = []
    for each, time in zip(history, taken, strict=True):
        mean = sum(times[each.round]) / len(times[each.round])
        deviation = abs(time - mean) / mean if mean > 0 else 0.0
        raw.append((before.get(each.round, means[each.round]) - means[each.round]) / (deviation + LEAST_DEVIATION))
    largest = max(map(abs, raw), default=0.0)
    return [reward / largest for reward in raw] if largest > 0 else raw


def times_of(history: Sequence[Participation], situation: Situation) -> list[float]:
    """Return what devices took for their rounds: seconds, or samples that each could train on at its budget."""
    if situation.own(FedMPSettings).time == "seconds":
        return [each.seconds for each in history]
    manifest = situation.manifest
    own = {
        budget: training_flops(manifest, 1, weight_gradients=first_neurons(manifest, budget), narrow=True)
        for budget in {each.budget for each in history}
    }
    return [each.flops / max(1, own[each.budget]) for each in history]


def next_ratio(plays: Sequence[Play], budget: float, chance: float, rules: FedMPSettings) -> float:
    """Return the ratio that the bandit of a device tries next. plays: its own, in their order; chance: in (0, 1]."""
    least = min(rules.smallest_ratio, budget)
    regions = [(least, budget)]
    for ratio, _ in plays:
        place = _region_of(ratio, regions)
        if place is None:
            continue  # tried when the budget was another
        low, high = regions[place]
        if high - low > rules.region and low < ratio < high:
            regions[place : place + 1] = [(low, ratio), (ratio, high)]
    counts, sums = [0.0] * len(regions), [0.0] * len(regions)
    for age, (ratio, reward) in enumerate(reversed(plays)):
        place = _region_of(ratio, regions)
        if place is not None:
            counts[place] += rules.discount**age
            sums[place] += rules.discount**age * reward
    exploration = 2 * math.log(max(1.0, sum(counts)))

    def rank(place: int) -> tuple[float, float]:
        low, high = regions[place]
        if not counts[place]:
            return math.inf, high - low
        return sums[place] / counts[place] + math.sqrt(exploration / counts[place]), high - low

    low, high = regions[max(range(len(regions)), key=rank)]
    return low + chance * (high - low)


def _region_of(ratio: float, regions: Sequence[tuple[float, float]]) -> int | None:
    """Return the place of the region that a ratio is of; each has its upper end, and the first its lower one, too."""
    for place, (low, high) in enumerate(regions):
        if low < ratio <= high or (place == 0 and ratio == low):
            return place
    return None


def scores(model: GlobalModel, situation: Situation) -> Scores:
    """Return the l1 norms by which neurons of the global model are kept."""
    return norm_scores(situation.manifest, model.tensors, 1)


PRUNING = ServerPruning(ratios=ratios, scores=scores)


def pruning(settings: FederationSettings) -> ServerPruning | None:
    """Return how the coordinator prunes."""
    return PRUNING if own_settings(settings, FedMPSettings).ratios == "bandit" else None


def choice(settings: FederationSettings) -> DeviceChoice | None:
    """Return how devices choose."""
    return DeviceChoice() if own_settings(settings, FedMPSettings).ratios == "budget" else None


def sums_of(model: GlobalModel, situation: Situation) -> Sums:
    """Return sums of whole models, or of what devices sent."""
    return MaskedSums(situation.manifest, everybody=situation.own(FedMPSettings).residual)


def close(model: GlobalModel, sums: Any, situation: Situation) -> GlobalModel:
    """Return the mean, and how many values of residuals were recovered for it."""
    closed = close_with_mean(model, sums, situation)
    if not situation.own(FedMPSettings).residual:
        return closed
    return replace(closed, notes={"residual_values": sums.completed})


def why_not(settings: FederationSettings) -> str | None:
    """Return why R2SP cannot be combined with another aggregation."""
    if not own_settings(settings, FedMPSettings).residual:
        return None
    return "it adds to each update what its device was not sent before the mean is taken (residual)"


def why_not_private(settings: FederationSettings) -> str | None:
    """Return why noise on the mean would not be enough."""
    if own_settings(settings, FedMPSettings).ratios == "budget":
        return None
    return "what it asks of devices follows from losses and times that devices reported (ratios)"


FEDMP = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=FedMPSettings,
    active=ActiveNeurons(narrow=True, choice=choice, pruning=pruning),
    aggregation=Aggregation(
        sums=sums_of, close=close, why_mean_only=why_not, why_not_private=why_not_private, why_not_buffered=why_not
    ),
    personal_models=True,
)
