"""The server half of each method, named like its device half in ``edge_sdk/methods``.

A method is a stateless record of functions, ``CoordinatorMethod``; the round engine stores its state. Other packages
register a record under the entry point ``sparrow.coordinator_methods``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from sparrow.command_line.installed import load_method_record
from sparrow.protocol.blocks import BlockMask
from sparrow.protocol.elements import ElementMask
from sparrow.protocol.manifest import FileName, Manifest, Tensors
from sparrow.protocol.masks import Mask, NeuronMask, same_mask
from sparrow.protocol.messages import Kind
from sparrow.protocol.neurons import Scores, fits_ratio
from sparrow.protocol.parts import Numbers, Part, Plan
from sparrow.protocol.settings import FederationSettings

from ..errors import BadContent, UnknownMethod
from ..sums.averages import MaskedSums, Sums


class MethodSettings(BaseModel):
    """A method's own settings; by default none."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Own = TypeVar("Own", bound=MethodSettings)


@dataclass(frozen=True)
class GlobalModel:
    """The state of a federation between rounds."""

    tensors: Tensors
    # The existing elements, the others are zero; None: all exist.
    mask: ElementMask | None = None
    # The method's arrays.
    own: Tensors = field(default_factory=dict)
    # Counts for the round's record.
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedModel:
    """A published model; weights by name, except those drawn from recipes."""

    manifest: Manifest
    files: Mapping[FileName, bytes]
    tensors: Tensors


@dataclass(frozen=True)
class Situation:
    """Facts for a method's decisions about a round."""

    manifest: Manifest
    settings: FederationSettings
    # Round from 1; 0 prepares the model.
    round: int = 0
    # Plan of this round's assignments.
    plan: Plan = field(default_factory=dict)
    # Active devices and their training samples.
    devices: int = 0
    num_examples: int = 0

    def own(self, kind: type[Own]) -> Own:
        """Return the method's own settings as ``kind``."""
        return own_settings(self.settings, kind)


def own_settings(settings: FederationSettings, kind: type[Own]) -> Own:
    """Return the own settings of a federation's method as ``kind``."""
    return kind.model_validate(settings.method_settings)


@dataclass(frozen=True)
class Work:
    """The work of a round's devices."""

    # ``train``, or ``personalise`` if devices only send reports.
    kind: Kind = Kind.train
    plan: Plan = field(default_factory=dict)
    # All devices take part, also late ones.
    everyone: bool = False
    # The number of rounds it stands for, up to this one.
    rounds: int = 1


Why = str | None | Callable[[FederationSettings], str | None]
"""The reason for a refusal, None without a refusal, or a function of the settings that returns one of these."""


def masked_sums(model: GlobalModel, situation: Situation) -> Sums:
    """Return sums of all shared values, each over the devices whose masks include it."""
    return MaskedSums(situation.manifest)


def close_with_mean(model: GlobalModel, sums: Any, situation: Situation) -> GlobalModel:
    """Return the weighted mean of the round's updates; values without an update keep their last ones."""
    return GlobalModel(sums.mean(model.tensors), model.mask, model.own)


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Aggregation of updates into the next global model."""

    # Creates the sums of a round's updates.
    sums: Callable[[GlobalModel, Situation], Sums] = masked_sums
    # Makes the next global model. The reasons state why the method cannot be combined with a ``robust`` rule, with
    # noise on the mean, or with updates of older models (``buffer``); None allows it.
    close: Callable[[GlobalModel, Any, Situation], GlobalModel] = close_with_mean
    why_mean_only: Why = "it has an aggregation of its own"
    why_not_private: Why = "it has an aggregation of its own, which may reveal more than the mean"
    why_not_buffered: Why = "it has an aggregation of its own, for updates of one model only"


WEIGHTED_MEAN = Aggregation(why_mean_only=None, why_not_private=None, why_not_buffered=None)
"""FedAvg's mean, weighted by training samples."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of rounds with work other than ``train``, or with a plan."""

    # Returns the work of round ``situation.round``.
    work: Callable[[Situation], Work] = lambda situation: Work()
    # The last closed round for everyone, whose work late devices still get.
    last_for_everyone: Callable[[Situation], int | None] | None = None
    # Raises WrongState if the round cannot start from the model of round ``number`` (0: the first model).
    check_rollback: Callable[[int, Situation], None] = lambda number, situation: None


ALL_ALIKE = Schedule()
"""Schedule of methods with the same work in all rounds."""


def fits_choice(mask: NeuronMask, ratio: float, situation: Situation) -> bool:
    """Return True if a device has chosen the number of neurons of its active ratio."""
    return fits_ratio(situation.manifest, mask, ratio)


def fault_of_choice(held: NeuronMask | None, mask: Mask | None, ratio: float, situation: Situation) -> str | None:
    """Return the fault of a device's choice, or None."""
    if held is not None:
        return None if same_mask(mask, held) else "it differs from the one that the device chose before"
    if fits_ratio(situation.manifest, mask, ratio):
        return None
    return (
        f"at a budget of p = {ratio:g} a device must choose max(1, floor(p n)) of the n neurons of each group, and "
        f"this mask has another number"
    )


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """Each device chooses its own neurons, by default once."""

    # Whether a device with this mask gets only its values, not the whole model.
    keeps: Callable[[NeuronMask, float, Situation], bool] = fits_choice
    # The fault of an update's mask, for a device that was sent the mask ``held``, or the whole model (None).
    fault: Callable[[NeuronMask | None, Mask | None, float, Situation], str | None] = fault_of_choice


@dataclass(frozen=True)
class Participation:
    """Recorded facts of one update."""

    round: int
    device: str
    # The device's current one.
    budget: float
    # The active ratio of its training.
    ratio: float
    num_examples: int
    loss: float
    flops: int
    # Seconds of download, training and upload.
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ServerPruning:
    """The coordinator prunes the global model for each drawn device."""

    # Returns the devices' active ratios, each at most its budget, from earlier participations; chance: name -> a
    # number in (0, 1].
    ratios: Callable[
        [Sequence[Participation], Mapping[str, float], Callable[[str], float], Situation], Mapping[str, float]
    ]
    # Scores of the global model's neurons; the best are kept.
    scores: Callable[[GlobalModel, Situation], Scores]


@dataclass(frozen=True, kw_only=True)
class ActiveNeurons:
    """Devices train some neurons of each layer, depending on their budgets."""

    # Devices do not need the rest of the network.
    narrow: bool = False
    # Neurons that follow from an active ratio; None: they are drawn per round and device.
    rule: Callable[[Manifest, float], NeuronMask] | None = None
    # How devices choose, or how the coordinator prunes, by the settings.
    choice: Callable[[FederationSettings], DeviceChoice | None] = lambda settings: None
    pruning: Callable[[FederationSettings], ServerPruning | None] = lambda settings: None
    # A group that devices train whole, but updates may send in part.
    optional: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceMasks:
    """Devices may change their assignment's mask."""

    # Raises BadContent for an invalid mask of ``type``.
    check: Callable[[GlobalModel, Any, Situation], None]
    type: type = ElementMask


def refuse_mask() -> None:
    """Raise BadContent: this round's mask is fixed."""
    raise BadContent("mask: it differs from the round's, which devices of this method may not change; train under it")


AS_ASSIGNED = DeviceMasks(check=lambda model, mask, situation: refuse_mask())
"""Masks of methods whose devices train under the mask of their assignment."""


@dataclass(frozen=True, kw_only=True)
class UpdatePart(Part):
    """An additional part of updates, with exactly ``count`` numbers."""

    # Adds one update's numbers, weighted with its samples, to ``Aggregation.sums``, after its values. Rounds with
    # parts exclude robust rules, noise and secure aggregation.
    fold: Callable[[Any, Numbers, int], None]


def needs_single_updates(settings: FederationSettings) -> str | None:
    """Return the reason why a method's rounds cannot be secure, the usual case."""
    return "its updates are more than values under a mask that all devices of a cell share"


def needs_sums_alone(settings: FederationSettings) -> str | None:
    """Return None: the method needs only sums of updates."""
    return None


def whole_model(settings: FederationSettings) -> float:
    """Return the smallest budget of methods whose devices train the full model."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class CoordinatorMethod:
    """A method's server half."""

    # Devices with less are not drawn.
    smallest_budget: Callable[[FederationSettings], float] = whole_model
    # The type of ``method_settings``.
    settings_type: type[MethodSettings] = MethodSettings
    # The global model is useful without a personal part.
    usable_global_model: bool = True
    # Devices keep one between rounds; otherwise they get the whole global model each time, and ``adapt`` the last
    # one.
    personal_models: bool = False
    # A mixture of both is a valid personal model, so all devices get the finished global model.
    mixes_global: bool = False
    # One device prepares the model in round 0.
    prepares: bool = False
    # Always sends values with any kind of work.
    always_sends_values: bool = False
    # Builds the federation's model from the published one, as in the device half.
    compose: Callable[[PublishedModel, FederationSettings], PublishedModel] | None = None
    # Builds the federation's manifest; tensors may become private or be cut into blocks.
    manifest: Callable[[Manifest, FederationSettings], Manifest] = lambda published, settings: published
    # Returns the first global model, from initial values. All three raise BadContent.
    start: Callable[[Tensors, Situation], GlobalModel] = lambda tensors, situation: GlobalModel(tensors)
    aggregation: Aggregation = WEIGHTED_MEAN
    # The reason against secure aggregation.
    why_not_secure: Callable[[FederationSettings], str | None] = needs_single_updates
    schedule: Schedule = ALL_ALIKE
    active: ActiveNeurons | None = None
    masks: DeviceMasks = AS_ASSIGNED
    # Parts of updates, beside values.
    parts: tuple[UpdatePart, ...] = ()
    # Parts of payloads, by name: float32 [n], or signs, int8 [n] in -1..1.
    payload_parts: Callable[[GlobalModel, Situation], Mapping[str, Numbers]] | None = None
    # The blocks changed after round ``since``; a device that holds that model gets only these.
    changes: Callable[[GlobalModel, int, Situation], BlockMask] | None = None
    # Whether rounds are plain means under these settings.
    only_means: Callable[[FederationSettings], bool] = lambda settings: False
    # A problem in the federation's progress.
    warning: Callable[[GlobalModel, Situation], str | None] = lambda model, situation: None
    # Browser pages can take part.
    pages: bool = False
    # Devices may add class frequencies to outputs (``logit_adjustment``).
    adjusts_logits: bool = False


def sends_values(method: CoordinatorMethod, kind: Kind, holds_model: bool) -> bool:
    """Return True if work of this kind includes the global model."""
    if method.always_sends_values:
        return True
    if kind is Kind.personalise:
        return not holds_model
    return kind is not Kind.evaluate or method.usable_global_model


def more_than_a_mean(method: CoordinatorMethod, settings: FederationSettings) -> str | None:
    """Return the reason why a round is more than a mean of values, or None."""
    if method.only_means(settings):
        return None
    for declared, words in (
        (method.schedule is not ALL_ALIKE, "it plans its rounds itself"),
        (method.parts, "its updates bring more than values"),
        (method.payload_parts, "its payloads bring more than the model's values"),
        (method.changes, "it sends only what has changed"),
    ):
        if declared:
            return words
    return None


def why_mean_only(method: CoordinatorMethod, settings: FederationSettings) -> str | None:
    """Return the reason why a ``robust`` rule cannot replace the mean, or None."""
    reason = _reason(method.aggregation.why_mean_only, settings)
    if reason is None and method.parts and not method.only_means(settings):
        reason = "its updates bring more than values, and robust rules only handle values"
    return reason


def why_not_private(method: CoordinatorMethod, settings: FederationSettings) -> str | None:
    """Return the reason why noise on the mean gives no differential privacy, or None."""
    reason = why_mean_only(method, settings) or _reason(method.aggregation.why_not_private, settings)
    declared = more_than_a_mean(method, settings)
    return reason or (declared and f"{declared}, which may reveal more than the mean")


def why_not_buffered(method: CoordinatorMethod, settings: FederationSettings) -> str | None:
    """Return the reason why rounds cannot be buffered, or None."""
    reason = why_mean_only(method, settings)
    if reason is None and method.prepares:
        reason = "one device prepares the model before the others"
    reason = reason or _reason(method.aggregation.why_not_buffered, settings)
    declared = more_than_a_mean(method, settings)
    return reason or (declared and f"{declared}, which is for one model only")


def _reason(why: Why, settings: FederationSettings) -> str | None:
    return why(settings) if callable(why) else why


def any_budget(settings: FederationSettings) -> float:
    """Return the smallest budget of methods that any device can join."""
    return 0.0


METHODS = "sparrow.coordinator_methods"
"""The entry points of methods."""


# Searching the installed packages takes milliseconds.
@cache
def load_method(name: str) -> CoordinatorMethod:
    """Return the server half registered as ``name``. Raises UnknownMethod."""
    return load_method_record(METHODS, name, CoordinatorMethod, UnknownMethod, advice="; auto chooses one")
