"""Helpers of methods with one sparse model, and the common part of FedDST and FedSGC, whose devices replace weights."""

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
"""Rounds between replacements of weights; 0: never."""


class OneSparseModelSettings(MethodSettings):
    """The settings of methods with one sparse model and replacements."""

    density: float = Field(default=0.2, gt=0, le=1, description="Share of the maskable weights that exist, 1 - S")
    layer_sparsity: LayerSparsity = Field(default="erk", description="How the density is spread over the layers")
    initial_mask: Literal["random", "magnitude"] = Field(default="random", description="Choice of the first mask")
    initial_scale: Literal["dense", "sparse"] = Field(
        default="dense",
        description="Scale of the first weights: as drawn for a dense layer, or larger by the root of all weights over "
        "existing ones, so that outputs vary as a dense layer's",
    )
    adjust_interval: Interval = Field(
        default="auto",
        description="Rounds between replacements of weights, ΔR; auto: 5, or half of fewer than 10; 0: never",
    )
    over_pruning: float = Field(default=0.5, ge=0, lt=1, description="Share replaced at first, α")
    proximal_weight: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Weight μ of FedProx's pull towards the received model"
    )


class SparseTrainingSettings(OneSparseModelSettings):
    """The settings of dynamic sparse training on devices."""

    device_interval: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="A device's own epochs between replacements, ΔT; auto: 5, or half of its expected epochs T_c",
    )
    of_rounds: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Number of rounds that both intervals are meant for; shorter runs shorten them; 0: fixed",
    )
    adjust_at: Literal["penultimate", "end"] = Field(
        default="penultimate", description="Time of a replacement that is due after a round's last epoch"
    )
    grow_batches: int = Field(default=1, ge=1, le=1000, description="Batches in the gradient that decides growth")
    exploration: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of positions, drawn anew each time, that growth prefers",
    )


def rounds_between(settings: FederationSettings, rules: OneSparseModelSettings) -> int:
    """Return ΔR, the rounds between replacements; 0: never."""
    share = shortening(settings.rounds, rules.of_rounds) if isinstance(rules, SparseTrainingSettings) else 1.0
    return interval(rules.adjust_interval, USUAL_INTERVAL, settings.rounds, share)


def expected_epochs(settings: FederationSettings, devices: int) -> int:
    """Return T_c, the expected total epochs of each device."""
    share = min(1.0, settings.cohort / max(1, devices))
    return max(1, round(settings.local_epochs * settings.rounds * share))


def check_replaces(settings: FederationSettings, rules: SparseTrainingSettings) -> None:
    """Raise BadContent if the intervals exclude any replacement, unless the settings ask for that. Assumes
    ``min_devices`` devices."""
    if 0 in (rules.adjust_interval, rules.over_pruning) or rules.density == 1:
        return
    rounds = settings.rounds
    between = rounds_between(settings, rules)
    instead = "or adjust_interval 0 to keep the first mask; of_rounds shortens both intervals with the run"
    last = (rounds - 1) // between * between
    if not last:
        raise BadContent(
            f"method_settings.adjust_interval: weights are replaced every {between} rounds except in the last, so "
            f"never in {rounds} rounds. Set a lower adjust_interval, more than {between} rounds, {instead}"
        )
    expected = expected_epochs(settings, settings.min_devices)
    epochs = device_interval(rules.device_interval, rules.of_rounds, settings.rounds, expected)
    if epochs >= expected or epochs > last * settings.local_epochs:
        most = min(expected, last * settings.local_epochs + 1)
        lower = f"a device_interval below {most}, " if most > 1 else ""
        raise BadContent(
            f"method_settings.device_interval: no device would replace weights. It does so after every {epochs} of its "
            f"epochs, until round {last} and within T_c = {expected} epochs (rounds x local_epochs x cohort / "
            f"min_devices, here {rounds} x {settings.local_epochs} x {settings.cohort} / {settings.min_devices}, with "
            f"cohort / min_devices at most 1). Set {lower}more rounds, {instead}"
        )


def density_of(settings: FederationSettings) -> float:
    """Return the largest share of existing weights, which is the smallest budget."""
    return float(settings.method_settings["density"])


def check_maskable(manifest: Manifest) -> None:
    """Raise BadContent if no layer can be sparse."""
    if not manifest.maskable:
        raise BadContent("the model has no linear layer or convolution with shared weights, so no layer can be sparse")


def weights_per_layer(situation: Situation, density: float, rule: LayerSparsity) -> dict[str, int]:
    """Return K_l of every maskable tensor. Raises BadContent if training is not counted in epochs."""
    if situation.settings.local_steps is not None:
        raise BadContent("local_steps: replacements are counted in epochs; set local_epochs instead")
    check_maskable(situation.manifest)
    return counts_of(situation.manifest, density, rule)


def counts_of(manifest: Manifest, density: float, rule: LayerSparsity) -> dict[str, int]:
    """Return K_l of every maskable tensor. Raises BadContent for a density that the rule cannot spread."""
    try:
        return layer_counts(manifest, density, rule)
    except ValueError as error:
        raise BadContent(f"method_settings: {error}") from None


def check_counts(mask: ElementMask, wanted: dict[str, int]) -> None:
    """Raise BadContent unless the mask has K_l weights in each layer."""
    for name, count in wanted.items():
        if mask.counts[name] != count:
            raise BadContent(
                f"mask: {name} has {mask.counts[name]} weights, but must have {count}; grow as many as drop"
            )


def replacing_method(
    settings_type: type[SparseTrainingSettings],
    close: Callable[[GlobalModel, ElementSums, Situation], GlobalModel],
    payload_parts: Callable[[GlobalModel, Situation], Mapping[str, Numbers]] | None = None,
) -> CoordinatorMethod:
    """Return a method with one sparse model, K_l weights in layer l, whose devices replace weights."""

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
            return "devices replace different weights; set method_settings.adjust_interval = 0"
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
            why_mean_only="the largest weights of any device are kept, so that one device could place weights that a "
            "robust rule cannot compare",
        ),
        warning=warning,
        why_not_secure=why_not_secure,
    )


def sparse_model(
    tensors: Tensors, situation: Situation, rules: OneSparseModelSettings, counts: dict[str, int]
) -> GlobalModel:
    """Return weights · mask with ``counts`` existing. ``initial_scale`` sparse multiplies a layer's by √(W_l / K_l), so
    that outputs vary as a dense layer's (Evci et al., AAAI 2022, arXiv:2010.03533)."""
    manifest = situation.manifest
    seed = situation.settings.seed
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
    """Raise BadContent unless the round replaces weights and the mask has K_l weights in each layer."""
    if not situation.plan:
        refuse_mask()
    assert model.mask is not None
    check_counts(mask, model.mask.counts)


def element_sums(model: GlobalModel, situation: Situation) -> ElementSums:
    """Return Σ n_c θ_c m_c and Σ n_c m_c."""
    assert model.mask is not None
    return ElementSums(situation.manifest, model.mask)


Movement = Callable[[str, NDArray[np.float64], NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]], Tensors]
"""(name, old values, values before and after the global prune, trained; all [n]) -> arrays to keep."""


def average_and_prune(
    model: GlobalModel, sums: ElementSums, rest: int = 0, movement: Movement | None = None
) -> GlobalModel:
    """Return the mean over the devices that have a weight, pruned to the K_l largest of each layer. rest: the examples
    of absent devices, which count with the old weights."""
    assert model.mask is not None
    tensors = Tensors()
    own = Tensors()
    exists: dict[str, Any] = {}
    union = 0
    for spec, numerator, weights in sums.totals():
        # 0 at empty positions.
        old = model.tensors[spec.name].reshape(-1).astype(np.float64)
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
        # A product would leave zeros of both signs.
        new = np.where(kept, half, np.float32(0))
        tensors[spec.name] = new.reshape(spec.shape)
        exists[spec.name] = kept.reshape(spec.shape)
        union += int(np.count_nonzero(weights))
        own |= movement(spec.name, old, half, new, trained) if movement else {}
    mask = ElementMask({name: exists[name] for name in model.mask.exists})
    replaced = mask.without(model.mask).count
    own["replaced"] = model.own["replaced"] + replaced
    return GlobalModel(tensors, mask, own, {"positions_replaced": replaced, "union": union})


def warning_of(model: GlobalModel, situation: Situation, between: int) -> str | None:
    """Return a warning if the mask has never changed although it should, or None."""
    if not between:
        return None
    # The last round re-adjusts nothing.
    last = situation.settings.rounds - 1
    if last < between:
        return f"none of {last + 1} rounds replaces weights; set an adjust_interval of less than {between}"
    adjusted = min(situation.round, last) // between
    if not adjusted or model.own["replaced"][0]:
        return None
    return (
        f"no weight has been replaced in {adjusted} re-adjusting rounds, so the mask is still the first one; lower "
        f"device_interval, raise over_pruning, set rest to none, or treat it as a static mask"
    )
