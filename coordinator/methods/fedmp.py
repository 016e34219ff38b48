"""FedMP, server half: a bandit chooses each device's pruning ratio.

Jiang et al., ICDE 2022. For device n, drawn for round k:

    E-UCB     A bandit over the device's active ratios (1 - pruning ratio), whose range is partitioned into regions. It
              chooses the region j with the largest

                  R̄_j + sqrt(2 ln(Σ_i N_i) / N_j)      N_j = Σ_s λ^(age of s) over its rounds s with a ratio in j,
                                                        R̄_j = the mean of their rewards with the same weights

              (untried ones first, the widest before others), draws the ratio uniformly from it, and splits the region
              there unless it is narrower than ``region``.
    reward    R_n^k = ΔL_k / |T_n^k - T̄^k|: the decrease of round k's mean training loss, larger for devices whose time
              is close to the round's mean.
    pruning   In each hidden group the max(1, floor(ratio n)) neurons with the largest l1 norms of the global model.
    R2SP      A weight that a device was not sent counts in the average with the global model's value (the residual).

Choices beyond the paper: a ratio is at most the device's budget. Bandits use the last 500 rounds. With ``time = flops``
T is the FLOPs of the device's training divided by those of one sample at its budget. |T - T̄| is relative to T̄, plus
0.1, and rewards are divided by the largest one. Averages are weighted by training samples.

``ratios = budget`` with ``residual = false`` is the form that FedSPU's paper compares (section 5.1).
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
"""Added to a time's relative deviation from the mean, to keep rewards finite."""

Play = tuple[float, float]
"""An active ratio, and its reward."""


class FedMPSettings(MethodSettings):
    """FedMP's settings."""

    ratios: Literal["bandit", "budget"] = Field(
        default="bandit", description="Choose pruning ratios by a bandit, or let devices prune once to their budget"
    )
    residual: bool = Field(
        default=True, description="Count weights that a device was not sent with the global model's values"
    )
    smallest_ratio: float = Field(default=0.1, gt=0, le=1, description="Smallest active ratio of the bandit")
    region: float = Field(default=0.25, gt=0, le=1, description="Width below which the bandit's regions are not split")
    discount: float = Field(default=0.98, gt=0, le=1, description="Factor on a reward's weight per round, λ")
    time: Literal["flops", "seconds"] = Field(
        default="flops", description="Measure a device's time by FLOPs and budget, or use the seconds that it reports"
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
    """Return the reward of each participation, -1..1; history: ordered by rounds."""
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
    """Return the devices' times, in seconds or in samples at their budgets."""
    if situation.own(FedMPSettings).time == "seconds":
        return [each.seconds for each in history]
    manifest = situation.manifest
    own = {
        budget: training_flops(manifest, 1, weight_gradients=first_neurons(manifest, budget), narrow=True)
        for budget in {each.budget for each in history}
    }
    return [each.flops / max(1, own[each.budget]) for each in history]


def next_ratio(plays: Sequence[Play], budget: float, chance: float, rules: FedMPSettings) -> float:
    """Return the next ratio of a device's bandit. plays: its own, in order; chance: a random number in (0, 1]."""
    least = min(rules.smallest_ratio, budget)
    regions = [(least, budget)]
    for ratio, _ in plays:
        place = _region_of(ratio, regions)
        # None: it was tried at another budget.
        if place is None:
            continue
        low, high = regions[place]
        if high - low > rules.region and low < ratio < high:
            regions[place : place + 1] = [(low, ratio), (ratio, high)]
    counts = [0.0] * len(regions)
    sums = [0.0] * len(regions)
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
    """Return the index of a ratio's region; regions include their upper end."""
    for place, (low, high) in enumerate(regions):
        if low < ratio <= high or (place == 0 and ratio == low):
            return place
    return None


def scores(model: GlobalModel, situation: Situation) -> Scores:
    """Return the l1 norms of the global model's neurons."""
    return norm_scores(situation.manifest, model.tensors, 1)


PRUNING = ServerPruning(ratios=ratios, scores=scores)


def pruning(settings: FederationSettings) -> ServerPruning | None:
    """Return the server's pruning, if ``ratios`` asks for it."""
    return PRUNING if own_settings(settings, FedMPSettings).ratios == "bandit" else None


def choice(settings: FederationSettings) -> DeviceChoice | None:
    """Return how devices choose their neurons, if ``ratios`` is ``budget``."""
    return DeviceChoice() if own_settings(settings, FedMPSettings).ratios == "budget" else None


def sums_of(model: GlobalModel, situation: Situation) -> Sums:
    """Return sums of full models; without ``residual``, of the sent values only."""
    return MaskedSums(situation.manifest, everybody=situation.own(FedMPSettings).residual)


def close(model: GlobalModel, sums: Any, situation: Situation) -> GlobalModel:
    """Return the mean, and note the number of residual values in it."""
    closed = close_with_mean(model, sums, situation)
    if not situation.own(FedMPSettings).residual:
        return closed
    return replace(closed, notes={"residual_values": sums.completed})


def why_not(settings: FederationSettings) -> str | None:
    """Return the reason why R2SP cannot be combined with another aggregation, or None."""
    if not own_settings(settings, FedMPSettings).residual:
        return None
    return "it adds to each update the values that the device was not sent, before taking the mean (residual)"


def why_not_private(settings: FederationSettings) -> str | None:
    """Return the reason why noise on the mean would not suffice, or None."""
    if own_settings(settings, FedMPSettings).ratios == "budget":
        return None
    return "its assignments follow from losses and times that devices reported (ratios)"


FEDMP = CoordinatorMethod(
    smallest_budget=any_budget,
    settings_type=FedMPSettings,
    active=ActiveNeurons(narrow=True, choice=choice, pruning=pruning),
    aggregation=Aggregation(
        sums=sums_of, close=close, why_mean_only=why_not, why_not_private=why_not_private, why_not_buffered=why_not
    ),
    personal_models=True,
)
