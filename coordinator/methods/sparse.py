"""Helpers of methods of one sparse model, and the whole of those whose devices replace weights (FedDST, FedSGC)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.parts import Numbers
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.sparsity import (
    USUAL_INTERVAL,
    LayerSparsity,
    device_interval,
    interval,
    layer_counts,
    magnitude_mask,
    random_mask,
    shortening,
    trim,
)

from ..errors import BadContent
from ..sums.averages import ElementSums
from . import (
    Aggregation,
    CoordinatorMethod,
    DeviceMasks,
    GlobalModel,
    MethodSettings,
    Schedule,
    Situation,
    Work,
    own_settings,
    refuse_mask,
)

Interval = Annotated[int, Field(ge=0)] | Literal["auto"]
"""Rounds between those that replace weights; 0: none does."""


class OneSparseModelSettings(MethodSettings):
    """The settings of methods of one sparse model, some of whose weights are replaced now and then."""

    density: float = Field(default=0.2, gt=0, le=1, description="Share of the maskable weights that exist, 1 - S")
    layer_sparsity: LayerSparsity = Field(default="erk", description="How it is shared among layers")
    initial_mask: Literal["random", "magnitude"] = Field(default="random", description="What exists at first")
    initial_scale: Literal["dense", "sparse"] = Field(
        default="dense",
        description="Size of the first weights: as drawn for a dense layer, or larger by the root of its weights over "
        "those that exist, so that outputs are as large as a dense layer's",
    )
    adjust_interval: Interval = Field(
        default="auto",
        description="Rounds between those that replace weights, ΔR; auto: 5, or half of fewer than 10; 0: none does",
    )
    over_pruning: float = Field(default=0.5, ge=0, lt=1, description="Share that is replaced at first, α")
    proximal_weight: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Weight μ of FedProx's pull back to the model received"
    )


class SparseTrainingSettings(OneSparseModelSettings):
    """The settings of dynamic sparse training by devices, with or without a direction map."""

    device_interval: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="A device's own epochs between replacements, ΔT; auto: 5, or half of its expected epochs T_c",
    )
    of_rounds: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Rounds of the run that both intervals are meant for: fewer shorten them alike; 0: as they are",
    )
    adjust_at: Literal["penultimate", "end"] = Field(
        default="penultimate", description="Where a replacement due after a round's last epoch takes place"
    )
    grow_batches: int = Field(default=1, ge=1, le=1000, description="Batches whose gradient decides what grows")
    exploration: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the positions, drawn anew each time, to take first where weights grow",
    )


def rounds_between(settings: FederationSettings, rules: OneSparseModelSettings) -> int:
    """Return ΔR, the rounds between those that replace weights; 0: none does."""
    share = shortening(settings.rounds, rules.of_rounds) if isinstance(rules, SparseTrainingSettings) else 1.0
    return interval(rules.adjust_interval, USUAL_INTERVAL, settings.rounds, share)


def expected_epochs(settings: FederationSettings, devices: int) -> int:
    """Return the epochs that each of so many devices is expected to train in all, T_c."""
    share = min(1.0, settings.cohort / max(1, devices))
    return max(1, round(settings.local_epochs * settings.rounds * share))


def check_replaces(settings: FederationSettings, rules: SparseTrainingSettings) -> None:
    """Raise BadContent for rounds and intervals by which no device could ever replace a weight, unless they say so. As
    many devices are counted with as there are when the first round opens."""
    if 0 in (rules.adjust_interval, rules.over_pruning) or rules.density == 1:
        return
    rounds, between = settings.rounds, rounds_between(settings, rules)
    instead = "or adjust_interval 0, if the first mask is to stay; of_rounds shortens both intervals with the run"
    last = (rounds - 1) // between * between
    if not last:
        raise BadContent(
            f"method_settings.adjust_interval: every {between} rounds weights are replaced, but in the last one: in "
            f"none of {rounds}. Give a lower adjust_interval, more than {between} rounds, {instead}"
        )
    expected = expected_epochs(settings, settings.min_devices)
    epochs = device_interval(rules.device_interval, rules.of_rounds, settings.rounds, expected)
    if epochs >= expected or epochs > last * settings.local_epochs:
        most = min(expected, last * settings.local_epochs + 1)
        lower = f"a device_interval below {most}, " if most > 1 else ""
        raise BadContent(
            f"method_settings.device_interval: a device replaces weights after every {epochs} of its epochs, until "
            f"round {last} and before it has trained T_c = {expected} of them (rounds x local_epochs x cohort / "
            f"min_devices, here {rounds} x {settings.local_epochs} x {settings.cohort} / {settings.min_devices}, the "
            f"cohort at most once): never. Give {lower}more rounds, {instead}"
        )


def density_of(settings: FederationSettings) -> float:
    """Return the share of the maskable weights that exist, at most: the smallest budget of a round."""
    return float(settings.method_settings["density"])


def check_maskable(manifest: Manifest) -> None:
    """Raise BadContent for a model of which nothing can be sparse."""
    if not manifest.maskable:
        raise BadContent("the model has no linear layer or convolution whose weights are shared: nothing is sparse")


def weights_per_layer(situation: Situation, density: float, rule: LayerSparsity) -> dict[str, int]:
    """Return K_l of every maskable tensor. Raises BadContent for a federation that cannot replace weights by epochs."""
    if situation.settings.local_steps is not None:
        raise BadContent("local_steps: replacing weights goes by epochs; give local_epochs instead")
    check_maskable(situation.manifest)
    return counts_of(situation.manifest, density, rule)


def counts_of(manifest: Manifest, density: float, rule: LayerSparsity) -> dict[str, int]:
    """Return K_l of every maskable tensor. Raises BadContent for a density that the rule cannot share out."""
    try:
        return layer_counts(manifest, density, rule)
    except ValueError as error:
        raise BadContent(f"method_settings: {error}") from None


def check_counts(mask: ElementMask, wanted: dict[str, int]) -> None:
    """Raise BadContent unless the mask has K_l weights in each layer."""
    for name, count in wanted.items():
        if mask.counts[name] != count:
            raise BadContent(f"mask: {name} has {mask.counts[name]} weights, it must have {count}; grow what it drops")


def replacing_method(
    settings_type: type[SparseTrainingSettings],
    close: Callable[[GlobalModel, ElementSums, Situation], GlobalModel],
    payload_parts: Callable[[GlobalModel, Situation], Mapping[str, Numbers]] | None = None,
) -> CoordinatorMethod:
    """Return a method of one sparse model, K_l weights in layer l, in which devices replace weights now and then."""

    def start(tensors: Tensors, situation: Situation) -> GlobalModel:
        rules = situation.own(settings_type)
        counts = weights_per_layer(situation, rules.density, rules.layer_sparsity)
        check_replaces(situation.settings, rules)
        return sparse_model(tensors, situation, rules, counts)

    def work(situation: Situation) -> Work:
        between = rounds_between(situation.settings, situation.own(settings_type))
        if not between or situation.round % between or situation.round >= situation.settings.rounds:
            return Work()
        return Work(plan={"expected_epochs": expected_epochs(situation.settings, situation.devices)})

    def warning(model: GlobalModel, situation: Situation) -> str | None:
        return warning_of(model, situation, rounds_between(situation.settings, situation.own(settings_type)))

    def why_not_secure(settings: FederationSettings) -> str | None:
        if rounds_between(settings, own_settings(settings, settings_type)):
            return "devices replace weights, each its own; give method_settings.adjust_interval = 0"
        return None

    return CoordinatorMethod(
        smallest_budget=density_of,
        settings_type=settings_type,
        start=start,
        schedule=Schedule(work=work),
        masks=DeviceMasks(check=check_replaced),
        payload_parts=payload_parts,
        aggregation=Aggregation(
            sums=element_sums,
            close=close,
            why_mean_only="the largest weights that any device holds are kept, so that one alone could place weights "
            "that no rule sees a second value of",
        ),
        warning=warning,
        why_not_secure=why_not_secure,
    )


def sparse_model(
    tensors: Tensors, situation: Situation, rules: OneSparseModelSettings, counts: dict[str, int]
) -> GlobalModel:
    """Return weights · mask, of which ``counts`` exist. With ``initial_scale`` sparse a layer's are multiplied by √(W_l
    / K_l), so that outputs vary as a dense layer's do (Evci et al., AAAI 2022, arXiv:2010.03533)."""
    manifest, seed = situation.manifest, situation.settings.seed
    at_random = rules.initial_mask == "random"
    mask = random_mask(manifest, counts, seed) if at_random else magnitude_mask(tensors, manifest, counts)
    if rules.initial_scale == "sparse":
        scales = {name: math.sqrt(tensors[name].size / count) for name, count in counts.items()}
        tensors = {
            **tensors,
            **{name: np.multiply(tensors[name], scale, dtype=np.float32) for name, scale in scales.items()},
        }
    return GlobalModel({**tensors, **mask.apply(tensors)}, mask, {"replaced": np.zeros(1, dtype=np.int64)})


def check_replaced(model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
    """Raise BadContent unless the mask has K_l weights in each layer, and the round replaces weights."""
    if not situation.plan:
        refuse_mask()
    assert model.mask is not None
    check_counts(mask, model.mask.counts)


def element_sums(model: GlobalModel, situation: Situation) -> ElementSums:
    """Return Σ n_c θ_c m_c and Σ n_c m_c."""
    assert model.mask is not None
    return ElementSums(situation.manifest, model.mask)


Movement = Callable[[str, NDArray[np.float64], NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]], Tensors]
"""(name, old values, those before and after the global prune, which were trained; all [n]) -> arrays to keep."""


def average_and_prune(
    model: GlobalModel, sums: ElementSums, rest: int = 0, movement: Movement | None = None
) -> GlobalModel:
    """Return the mean over those who hold a weight, of which the K_l largest of each layer stay. rest: the examples of
    devices that did not answer, and hold on to the old weights."""
    assert model.mask is not None
    tensors, own = Tensors(), Tensors()
    exists: dict[str, Any] = {}
    union = 0
    for spec, numerator, weights in sums.totals():
        old = model.tensors[spec.name].reshape(-1).astype(np.float64)  # 0 where nobody held it
        held = model.mask.exists.get(spec.name)
        trained = weights > 0
        if rest:
            numerator += rest * old
            weights += rest if held is None else rest * held.reshape(-1)
        half = np.divide(numerator, weights, out=np.zeros_like(numerator), where=weights > 0).astype(np.float32)
        if held is None:
            tensors[spec.name] = half.reshape(spec.shape)
            continue
        kept = trim(half, weights, weights > 0, model.mask.counts[spec.name])
        new = np.where(kept, half, np.float32(0))  # a product would leave zeros of both signs
        tensors[spec.name], exists[spec.name] = new.reshape(spec.shape), kept.reshape(spec.shape)
        union += int(np.count_nonzero(weights))
        own |= movement(spec.name, old, half, new, trained) if movement else {}
    mask = ElementMask({name: exists[name] for name in model.mask.exists})
    replaced = mask.without(model.mask).count
    own["replaced"] = model.own["replaced"] + replaced
    return GlobalModel(tensors, mask, own, {"positions_replaced": replaced, "union": union})


def warning_of(model: GlobalModel, situation: Situation, between: int) -> str | None:
    """Return a warning where the mask has never changed, though it was to: that is no dynamic sparse training."""
    if not between:
        return None
    last = situation.settings.rounds - 1  # the last round re-adjusts nothing
    if last < between:
        return f"of {last + 1} rounds none replaces weights; give an adjust_interval of less than {between}"
    adjusted = min(situation.round, last) // between
    if not adjusted or model.own["replaced"][0]:
        return None
    return (
        f"no weight has been replaced in {adjusted} re-adjusting rounds: the mask is still the first one; lower "
        f"device_interval, raise over_pruning, give rest none, or take it for a static mask"
    )
