"""DM-PFL, server half: dual masks for shift-robust personalisation.

Zhang et al., KDD 2023. With dense global weights w_g and a mask m_g of at most K_l ones in each layer, rounds pass
through I iterations of

    masks      t_A rounds: devices train under their own masks m_c, and send both                          (Algorithm 1)
               w_g ← Σ n_c w_c m_c / Σ n_c m_c if any device has the weight                               (Eq. 5)
               m_g: the K_l largest |w_g| of those in more than 30 % of the updates
    global     t_B rounds: devices train w_g under m_g; plain means                                       (Algorithm 2)
    personal   one round for everyone that stands for t_C: devices train private weights; only reports    (Algorithm 3)

Choices beyond the paper: the T rounds are cut into I equal parts of half masks, a quarter global and a quarter
personal, in which a device trains the epochs for which it would have been drawn. A position without an update keeps its
value in w_g, but not its place in m_g.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import Mask
from sparrow.protocol.messages import Kind
from sparrow.protocol.sparsity import LayerSparsity, interval, magnitude_mask, trim

from ..errors import BadContent, WrongState
from ..sums.averages import ElementSums, Sum, quotient
from . import (
    Aggregation,
    CoordinatorMethod,
    DeviceMasks,
    GlobalModel,
    MethodSettings,
    Schedule,
    Situation,
    Work,
    refuse_mask,
)
from .sparse import Interval, check_counts, density_of, weights_per_layer

USUAL_INTERVAL = 10
"""Rounds between replacements in the stage masks: the paper's, of 300 rounds."""


class DMPFLSettings(MethodSettings):
    """DM-PFL's settings beyond a federation's."""

    density: float = Field(default=0.5, gt=0, le=1, description="Share of the maskable weights that exist, 1 - S")
    layer_sparsity: LayerSparsity = Field(default="erk", description="How the density is spread over the layers")
    iterations: int = Field(default=2, ge=0, le=1000, description="Iterations of the stages, I; 0: only masks")
    replaced: float = Field(default=0.01, ge=0, lt=1, description="Share of a mask replaced each time, α_s")
    adjust_interval: Interval = Field(
        default="auto",
        description="Rounds between replacements of weights in the stage masks; auto: 10, or half of a stage of fewer "
        "than 20; 0: never",
    )
    anneal: Literal["none", "cosine"] = Field(default="none", description="How the replaced share falls over rounds")
    vote_percent: int = Field(
        default=30, ge=0, lt=100, description="Percentage of a round's updates above which a weight is shared"
    )
    fill: bool = Field(default=False, description="Fill up the global mask with positions that lack votes")
    personal_unmasked: bool = Field(default=True, description="Make biases and norms personal, too")
    adjust_at: Literal["penultimate", "end"] = Field(
        default="penultimate", description="Replace weights before the last epoch of a round, or at its end"
    )
    similarity: Literal["logits", "probabilities"] = Field(
        default="logits", description="Outputs whose cosine similarity DM-PFL+ uses"
    )


@dataclass(frozen=True)
class Stage:
    """Rounds ``first`` to ``last``, preceded by ``before`` rounds of the stage ``masks`` in total."""

    name: Literal["masks", "global", "personal"]
    first: int
    last: int
    before: int

    @property
    def length(self) -> int:
        """Number of rounds."""
        return self.last - self.first + 1


def stages(rounds: int, iterations: int) -> list[Stage]:
    """Return the stages of ``rounds`` rounds, in order."""
    if iterations == 0:
        return [Stage("masks", 1, rounds, 0)]
    found: list[Stage] = []
    last = masked = 0
    for iteration in range(iterations):
        length = rounds // iterations + (iteration < rounds % iterations)
        masks = math.ceil(length / 2)
        shared = math.ceil((length - masks) / 2)
        lengths = (("masks", masks), ("global", shared), ("personal", length - masks - shared))
        for name, count in lengths:
            if count:
                found.append(Stage(name, last + 1, last + count, masked))  # type: ignore[arg-type]
            last += count
        masked += masks
    return found


class VotingSums(ElementSums):
    """Sums that also count the updates that have each position."""

    def __init__(self, manifest: Manifest, mask: ElementMask) -> None:
        super().__init__(manifest, mask)
        self.votes = {name: np.zeros(flags.size, dtype=np.uint16) for name, flags in mask.exists.items()}

    def fold_in_place(self, values: Array, mask: Mask | None, num_examples: int) -> None:
        """Add one update, with one vote for each position in its mask."""
        super().fold_in_place(values, mask, num_examples)
        assert isinstance(mask, ElementMask)
        for name, flags in mask.exists.items():
            self.votes[name] += flags.reshape(-1)


def stage_of(situation: Situation) -> Stage:
    """Return the stage of a round."""
    found = stages(situation.settings.rounds, situation.own(DMPFLSettings).iterations)
    return next(each for each in found if situation.round <= each.last)


def start(tensors: Tensors, situation: Situation) -> GlobalModel:
    """Return w_g under m_g, the K_l largest |w_g|."""
    settings = situation.settings
    counts = _counts(situation)
    rules = situation.own(DMPFLSettings)
    if rules.iterations and settings.rounds < 4 * rules.iterations:
        raise BadContent(
            f"rounds: {settings.rounds} rounds are too few for {rules.iterations} iterations of three stages; set "
            f"at least {4 * rules.iterations}"
        )
    _check_replaces(situation)
    mask = magnitude_mask(tensors, situation.manifest, counts)
    return _model({name: tensors[name] for name in mask.exists}, mask, tensors)


def _check_replaces(situation: Situation) -> None:
    """Raise BadContent if the interval excludes replacements, unless the settings ask for that."""
    settings = situation.settings
    rules = situation.own(DMPFLSettings)
    if 0 in (rules.adjust_interval, rules.replaced) or rules.density == 1:
        return
    rounds = (work(replace(situation, round=number)) for number in range(1, settings.rounds + 1))
    if not any(each.plan.get("replace") for each in rounds):
        longest = max(each.length for each in stages(settings.rounds, rules.iterations) if each.name == "masks")
        raise BadContent(
            f"method_settings.adjust_interval: weights are replaced every {rules.adjust_interval} rounds of the stage "
            f"masks, which has {longest}: never. Set adjust_interval to {longest - 1 or 1} or less, "
            f"fewer iterations, more rounds, or adjust_interval to 0 to keep the first masks"
        )


def _counts(situation: Situation) -> dict[str, int]:
    rules = situation.own(DMPFLSettings)
    return weights_per_layer(situation, rules.density, rules.layer_sparsity)


def _model(dense: Tensors, mask: ElementMask, tensors: Tensors, notes: dict[str, int] | None = None) -> GlobalModel:
    """Return w_g under m_g; ``own`` has the dense w_g by tensor."""
    return GlobalModel({**tensors, **mask.apply(dense)}, mask, dense, notes or {})


def work(situation: Situation) -> Work:
    """Return the work of the round's stage."""
    stage = stage_of(situation)
    rules = situation.own(DMPFLSettings)
    settings = situation.settings
    if stage.name == "personal":
        share = min(1.0, settings.cohort / max(1, situation.devices))
        epochs = max(1, math.floor(stage.length * share * settings.local_epochs + 0.5))
        # Fewer than the stage's rounds if it was reopened in its middle.
        rounds = stage.last - situation.round + 1
        return Work(Kind.personalise, {"stage": "personal", "epochs": epochs}, everyone=True, rounds=rounds)
    plan: dict[str, Any] = {"stage": stage.name}
    place = situation.round - stage.first + 1
    between = interval(rules.adjust_interval, USUAL_INTERVAL, stage.length)
    if stage.name == "masks" and between and place % between == 0:
        plan["replace"] = rules.replaced * _annealed(stage.before + place, situation)
    return Work(plan=plan)


def _annealed(place: int, situation: Situation) -> float:
    rules = situation.own(DMPFLSettings)
    rounds = situation.settings.rounds
    if rules.anneal == "none":
        return 1.0
    total = sum(each.length for each in stages(rounds, rules.iterations) if each.name == "masks")
    return 0.5 * (1 + math.cos(math.pi * place / total))


def last_for_everyone(situation: Situation) -> int | None:
    """Return the last round of the last closed stage ``personal``."""
    found = stages(situation.settings.rounds, situation.own(DMPFLSettings).iterations)
    closed = [each.last for each in found if each.name == "personal" and each.last <= situation.round]
    return max(closed, default=None)


def check_rollback(number: int, situation: Situation) -> None:
    """Raise WrongState for a model of another stage."""
    rules = situation.own(DMPFLSettings)
    rounds = situation.settings.rounds
    found = stages(rounds, rules.iterations)
    wanted = next((each for each in found if situation.round <= each.last), None)
    given = next((each for each in found if number + 1 <= each.last), None)
    if wanted != given:
        what = f"of the stage {wanted.name}" if wanted else "after the last"
        usable = f"rounds {wanted.first - 1} to {situation.round - 1}" if wanted else f"round {rounds}"
        raise WrongState(
            f"model_version: DM-PFL's stages build on each other, and round {situation.round} is {what}; start from "
            f"the models of {usable}, not from that of round {number}"
        )


def check_mask(model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
    """Raise BadContent unless the stage is ``masks`` and the mask has K_l weights in each layer."""
    if situation.plan.get("stage") != "masks":
        refuse_mask()
    check_counts(mask, _counts(situation))


def sums_of(model: GlobalModel, situation: Situation) -> ElementSums:
    """Return weighted sums, with votes if masks differ."""
    assert model.mask is not None
    voting = situation.plan.get("stage") == "masks"
    return VotingSums(situation.manifest, model.mask) if voting else ElementSums(situation.manifest, model.mask)


def close(model: GlobalModel, sums: ElementSums, situation: Situation) -> GlobalModel:
    """Return means over the updates that have each weight; in the stage ``masks``, also the new m_g."""
    assert model.mask is not None
    counts = _counts(situation)
    rules = situation.own(DMPFLSettings)
    tensors: Tensors = {}
    dense: Tensors = {}
    exists: dict[str, Any] = {}
    for spec, numerator, weights in sums.totals():
        maskable = spec.name in model.mask.exists
        old = (model.own if maskable else model.tensors)[spec.name].reshape(-1)
        mean = quotient(numerator, weights, old)
        if not maskable:
            tensors[spec.name] = mean.reshape(spec.shape)
            continue
        dense[spec.name] = mean.reshape(spec.shape)
        if isinstance(sums, VotingSums):
            kept = _shared(mean, sums.votes[spec.name], sums.updates, counts[spec.name], rules)
            exists[spec.name] = kept.reshape(spec.shape)
    mask = ElementMask({name: exists[name] for name in model.mask.exists}) if exists else model.mask
    new = mask.without(model.mask).count
    return _model(dense, mask, tensors, {"positions_replaced": new, "shared": mask.count})


def _shared(mean: Array, votes: Array, updates: int, count: int, rules: DMPFLSettings) -> Any:
    """Return m_g of one layer, bool [n]: the largest weights with more than ``vote_percent`` of the votes."""
    alike: Sum = np.ones(len(mean))
    eligible = 100 * votes.astype(np.int64) > rules.vote_percent * updates
    kept = trim(mean, alike, eligible, count)  # type: ignore[arg-type]
    missing = count - int(np.count_nonzero(kept))
    return kept | trim(mean, alike, ~kept, missing) if rules.fill and missing else kept  # type: ignore[arg-type]


DMPFL = CoordinatorMethod(
    smallest_budget=density_of,
    settings_type=DMPFLSettings,
    personal_models=True,
    always_sends_values=True,
    start=start,
    schedule=Schedule(work=work, last_for_everyone=last_for_everyone, check_rollback=check_rollback),
    masks=DeviceMasks(check=check_mask),
    aggregation=Aggregation(
        sums=sums_of,
        close=close,
        why_mean_only="masks follow from votes, and some weights come from few devices, so that a robust rule has "
        "nothing to compare",
    ),
)
