"""FedSGC: gradient-congruity guided federated sparse training, server half.

Tian, Liu, Li, Cheung, Wang, "Gradient-Congruity Guided Federated Sparse Training", arXiv:2405.01189. One sparse model
for everybody: in layer l exactly K_l weights exist (Erdos-Renyi-Kernel densities), and every device downloads, trains
and uploads those alone. Now and then devices replace some (``edge_sdk.methods.fedsgc``), and the server, at the end of
any round,

    θ½ = (Σ_c n_c θ_c m_c + n_rest θ_r m_r) / (Σ_c n_c m_c + n_rest m_r)      where anybody holds it          (Eq. 5)
    m_{r+1}: the K_l largest |θ½| of each layer among those;   θ_{r+1} = θ½ m_{r+1}
    d_{r+1} = sign(θ½ - θ_r)                                                   the direction map

with n_rest the examples of the devices that did not answer. The map tells devices which way the model moved; it goes
down in re-adjusting rounds only, for the weights that exist.

Where the paper is silent or errs (the method card has the reasons):

- n_rest slows learning to the cohort's share of all examples. ``rest`` is none by default; all is as printed.
- The map of a round without re-adjusting is 0 wherever nothing existed, so that it can revive nothing but what was just
  dropped. ``direction_memory`` keeps each position's last direction, and sends them all.
- The map is taken before the global prune, which is no direction of learning. The prune is per layer, among positions
  that somebody holds; ties go to those held with more examples, then to the lower index.
- Re-adjusting ends with the last round, and the expected epochs of a device are E·R·cohort/devices.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field, model_validator

from edge_sdk.protocol.bundle import Signs
from edge_sdk.protocol.elements import ElementMask
from edge_sdk.protocol.manifest import Tensors
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.protocol.sparsity import magnitude_mask, random_mask, trim
from sparrow.coordinator.methods import CoordinatorMethod, GlobalModel, Situation, Work
from sparrow.coordinator.methods.sparse import SparseTrainingSettings, check_counts, weights_per_layer
from sparrow.coordinator.rounds.sums import ElementSums

PAPER = {"rest": "all", "direction_memory": False, "adjust_interval": 20, "device_interval": 20}
"""As printed (for MNIST), where the defaults are not: they were chosen on validation data (docs/results/fedsgc.md)."""


class FedSGCSettings(SparseTrainingSettings):
    """What FedSGC knows beyond that. ``preset`` paper gives what is left out the paper's values."""

    preset: Literal["sparrow", "paper"] = Field(default="sparrow", description="Whose values the others have")
    guided_share: float = Field(default=0.01, ge=0, le=1, description="Share of the changes that directions guide, λ")
    guided_basis: Literal["total", "moved"] = Field(
        default="total", description="Of what λ is a share: all zeros afterwards (as printed), or what is dropped"
    )
    rest: Literal["all", "none"] = Field(
        default="none", description="Whether devices that do not answer hold on to the old weights with theirs"
    )
    direction: Literal["pre_prune", "post_prune"] = Field(
        default="pre_prune", description="Whether directions are taken before the global prune"
    )
    direction_memory: bool = Field(default=False, description="Whether every position keeps its last direction")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        paper = isinstance(given, dict) and given.get("preset") == "paper"
        return {**PAPER, **given} if paper else given


class FedSGC(CoordinatorMethod):
    """Server half of FedSGC. Beside the model it keeps the direction map, and how many positions were replaced."""

    settings_type: type[BaseModel] = FedSGCSettings

    def rules(self, settings: FederationSettings) -> FedSGCSettings:
        """The method's settings."""
        return FedSGCSettings.model_validate(settings.method_settings)

    def smallest_budget(self, settings: FederationSettings) -> float:
        """One density for all."""
        return self.rules(settings).density

    def start(self, tensors: Tensors, situation: Situation) -> GlobalModel:
        """θ_1 = weights · m_1; no directions yet."""
        rules, manifest = self.rules(situation.settings), situation.manifest
        counts = weights_per_layer(situation, rules.density, rules.layer_sparsity)
        seed = situation.settings.seed
        at_random = rules.initial_mask == "random"
        mask = random_mask(manifest, counts, seed) if at_random else magnitude_mask(tensors, manifest, counts)
        return GlobalModel({**tensors, **mask.apply(tensors)}, mask, {"replaced": np.zeros(1, dtype=np.int64)})

    def work(self, situation: Situation) -> Work:
        """Whether this round replaces weights, and the epochs that a device is expected to train in all, T_c."""
        settings = situation.settings
        if situation.round % self.rules(settings).adjust_interval or situation.round >= settings.rounds:
            return Work()
        share = min(1.0, settings.cohort / max(1, situation.devices))
        return Work(plan={"expected_epochs": max(1, round(settings.local_epochs * settings.rounds * share))})

    def signs(self, model: GlobalModel, situation: Situation) -> Signs | None:
        """d_r where weights exist; everywhere, where it may be known elsewhere."""
        rules = self.rules(situation.settings)
        if not situation.plan or rules.guided_share == 0 or model.mask is None:
            return None
        everywhere = rules.direction_memory or rules.adjust_interval == 1
        parts = []
        for name, exists in model.mask.exists.items():
            directions = model.own.get(_key(name), np.zeros(exists.size, dtype=np.int8))
            parts.append(directions if everywhere else np.take(directions, model.mask.index[name]))
        return np.concatenate(parts).astype(np.int8, copy=False)

    def check_mask(self, model: GlobalModel, mask: ElementMask, situation: Situation) -> None:
        """In a re-adjusting round, any mask that has K_l weights in each layer."""
        if not situation.plan:
            super().check_mask(model, mask, situation)
        assert model.mask is not None
        check_counts(mask, model.mask.counts)

    def why_mean_only(self, settings: FederationSettings) -> str | None:
        """Masks are decided outside of it."""
        return (
            "the largest weights that any device holds are kept, so that one alone could place weights that no rule "
            "sees a second value of"
        )

    def sums(self, model: GlobalModel, situation: Situation) -> ElementSums:
        """Σ n_c θ_c m_c and Σ n_c m_c."""
        assert model.mask is not None
        return ElementSums(situation.manifest, model.mask)

    def close(self, model: GlobalModel, sums: ElementSums, situation: Situation) -> GlobalModel:
        """Aggregate, prune to K_l, and see which way the model moved."""
        assert model.mask is not None
        rules = self.rules(situation.settings)
        rest = max(0, situation.num_examples - sums.num_examples) if rules.rest == "all" else 0
        if sums.alike:
            return self._close_alike(model, sums, rest, remember=rules.direction_memory)
        tensors: Tensors = {}
        own: Tensors = {}
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
            moved = half if rules.direction == "pre_prune" else new
            directions = (np.sign(moved - old) * trained).astype(np.int8)
            if rules.direction_memory and _key(spec.name) in model.own:
                directions = np.where(directions == 0, model.own[_key(spec.name)], directions).astype(np.int8)
            own[_key(spec.name)] = directions
        mask = ElementMask({name: exists[name] for name in model.mask.exists})
        replaced = mask.without(model.mask).count
        own["replaced"] = model.own["replaced"] + replaced
        return GlobalModel(tensors, mask, own, {"positions_replaced": replaced, "union": union})

    @staticmethod
    def _close_alike(model: GlobalModel, sums: ElementSums, rest: int, *, remember: bool) -> GlobalModel:
        """The same where everybody kept the round's mask, as in ordinary rounds: it stays, there is nothing to prune,
        and only what exists need be looked at."""
        assert model.mask is not None
        tensors: Tensors = {}
        own: Tensors = {"replaced": model.own["replaced"]}
        for spec, part, numerator in sums.packed():
            old = part.take(model.tensors[spec.name]).astype(np.float64)
            mean = ((numerator + rest * old) / float(sums.num_examples + rest)).astype(np.float32)
            tensors[spec.name] = np.zeros(spec.shape, dtype=np.float32)
            part.put(tensors[spec.name], mean)
            if spec.name in model.mask.exists:
                key, went = _key(spec.name), np.sign(mean - old).astype(np.int8)
                own[key] = model.own[key].copy() if remember and key in model.own else np.zeros(spec.size, np.int8)
                part.put(own[key], np.where(went == 0, part.take(own[key]), went) if remember else went)
        return GlobalModel(tensors, model.mask, own, {"positions_replaced": 0, "union": model.mask.count})

    def warning(self, model: GlobalModel, situation: Situation) -> str | None:
        """A mask that has never changed is no dynamic sparse training."""
        last = situation.settings.rounds - 1  # the last round re-adjusts nothing
        interval = self.rules(situation.settings).adjust_interval
        if last < interval:
            return f"of {last + 1} rounds none replaces weights; give an adjust_interval of less than {interval}"
        adjusted = min(situation.round, last) // interval
        if not adjusted or model.own["replaced"][0]:
            return None
        return (
            f"no weight has been replaced in {adjusted} re-adjusting rounds: the mask is still the first one; lower "
            f"device_interval, raise over_pruning, give rest none, or take it for a static mask"
        )


def _key(name: str) -> str:
    return f"direction:{name}"
