"""The server half of each method, one file each, named like its device half in ``edge_sdk/methods``.

A method is a record of functions, ``CoordinatorMethod``. A method plans what devices train and makes the next global
model of a round's sums. It keeps nothing: state goes in and comes out, and the round engine stores it. All that a
method does beyond the weighted mean it declares as a capability record; the engine reads these declarations alone.
Methods share functions (``sparse``, ``prepared``, ``parts``); none is made of another. A method of another package
registers its record under the entry point ``sparrow.coordinator_methods``.
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
    """The settings of a method beyond those of every federation; this one has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Own = TypeVar("Own", bound=MethodSettings)


@dataclass(frozen=True)
class GlobalModel:
    """The state of a federation from round to round. mask: the elements that exist, the others being zero; None: all
    do. own: arrays of the method's. notes: counts for the round's record."""

    tensors: Tensors
    mask: ElementMask | None = None
    own: Tensors = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedModel:
    """A model as it is published: manifest, files, and weights by name, but for those drawn from recipes."""

    manifest: Manifest
    files: Mapping[FileName, bytes]
    tensors: Tensors


@dataclass(frozen=True)
class Situation:
    """The facts that a method's decisions for a round depend on. round: from 1; 0 prepares the model. plan: what was
    asked of its devices. devices and num_examples: those that have not stopped, and their training samples."""

    manifest: Manifest
    settings: FederationSettings
    round: int = 0
    plan: Plan = field(default_factory=dict)
    devices: int = 0
    num_examples: int = 0

    def own(self, kind: type[Own]) -> Own:
        """Return the method's own settings, which ``kind`` describes."""
        return own_settings(self.settings, kind)


def own_settings(settings: FederationSettings, kind: type[Own]) -> Own:
    """Return the own settings of a federation's method, which ``kind`` describes."""
    return kind.model_validate(settings.method_settings)


@dataclass(frozen=True)
class Work:
    """The work that a round asks of its devices. kind: ``train``, or ``personalise`` if nothing of the model goes up.
    everyone: all devices take part, also those that come later. rounds: how many of the federation's rounds it counts
    for; it has the number of the last."""

    kind: Kind = Kind.train
    plan: Plan = field(default_factory=dict)
    everyone: bool = False
    rounds: int = 1


Why = str | None | Callable[[FederationSettings], str | None]
"""The reason for a refusal, None where nothing is refused, or a function of the settings that returns one of these."""


def masked_sums(model: GlobalModel, situation: Situation) -> Sums:
    """Return sums of all shared values, each over the devices whose masks hold it."""
    return MaskedSums(situation.manifest)


def close_with_mean(model: GlobalModel, sums: Any, situation: Situation) -> GlobalModel:
    """Return the weighted mean of the round's updates; a value that nobody sent stays as it is."""
    return GlobalModel(sums.mean(model.tensors), model.mask, model.own)


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """The way from updates to the next global model.

    sums: makes what a round's updates are folded into. close: makes the next global model. The reasons say why the
    method does not go with a ``robust`` rule, with noise on the mean, and with updates of older models (``buffer``):
    refusals unless the author declares None.
    """

    sums: Callable[[GlobalModel, Situation], Sums] = masked_sums
    close: Callable[[GlobalModel, Any, Situation], GlobalModel] = close_with_mean
    why_mean_only: Why = "it has an aggregation of its own"
    why_not_private: Why = "it has an aggregation of its own, which may tell more than the mean"
    why_not_buffered: Why = "it has an aggregation of its own, which is of one model"


WEIGHTED_MEAN = Aggregation(why_mean_only=None, why_not_private=None, why_not_buffered=None)
"""FedAvg's: the mean of what was sent, weighted with training samples."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rounds that ask for other work than ``train``, or that say more than the settings.

    work: returns what round ``situation.round`` asks. last_for_everyone: the number of the last closed round for
    everyone, whose work late devices are still given. check_rollback: raises WrongState if the round cannot begin from
    the model that round ``number`` made (0: the first model).
    """

    work: Callable[[Situation], Work] = lambda situation: Work()
    last_for_everyone: Callable[[Situation], int | None] | None = None
    check_rollback: Callable[[int, Situation], None] = lambda number, situation: None


ALL_ALIKE = Schedule()
"""The schedule of methods whose rounds all ask for the same."""


def fits_choice(mask: NeuronMask, ratio: float, situation: Situation) -> bool:
    """Return whether a device has chosen as many neurons as its active ratio makes."""
    return fits_ratio(situation.manifest, mask, ratio)


def fault_of_choice(held: NeuronMask | None, mask: Mask | None, ratio: float, situation: Situation) -> str | None:
    """Return what is wrong with neurons chosen once: their number, or that they are not those that the device keeps."""
    if held is not None:
        return None if same_mask(mask, held) else "it is not the one that the device chose and keeps"
    if fits_ratio(situation.manifest, mask, ratio):
        return None
    return (
        f"of the n neurons of each group a device chooses max(1, floor(p n)) at a budget of p = {ratio:g}, and these "
        f"are not so many"
    )


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """Each device chooses its neurons itself, by default once; the mask of its last update is stored.

    keeps: returns whether a device that holds this mask is sent its values alone, not the whole model. fault: returns
    what is wrong with the mask of an update of a device that was sent the mask ``held``, or the whole model (None).
    """

    keeps: Callable[[NeuronMask, float, Situation], bool] = fits_choice
    fault: Callable[[NeuronMask | None, Mask | None, float, Situation], str | None] = fault_of_choice


@dataclass(frozen=True)
class Participation:
    """Facts of one device's update, from the records. budget: its present one. ratio: the active ratio at which it
    trained. seconds: of download, training and upload."""

    round: int
    device: str
    budget: float
    ratio: float
    num_examples: int
    loss: float
    flops: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ServerPruning:
    """The coordinator prunes the global model for each device that it draws.

    ratios: returns the active ratios of drawn devices, each at most its budget, by earlier participations. chance: a
    number in (0, 1] of each name. scores: of the neurons of a global model, of which the best are kept.
    """

    ratios: Callable[
        [Sequence[Participation], Mapping[str, float], Callable[[str], float], Situation], Mapping[str, float]
    ]
    scores: Callable[[GlobalModel, Situation], Scores]


@dataclass(frozen=True, kw_only=True)
class ActiveNeurons:
    """Devices train some neurons of each layer, as many as their budgets say; the device half declares the same.

    narrow: devices never need the rest of the network. rule: returns the neurons that follow from an active ratio;
    None: they are drawn for each round and device. choice and pruning: return, by the settings, how devices choose
    their neurons, or how the coordinator prunes for each. optional: a group that devices train whole, of which an
    update may leave some out.
    """

    narrow: bool = False
    rule: Callable[[Manifest, float], NeuronMask] | None = None
    choice: Callable[[FederationSettings], DeviceChoice | None] = lambda settings: None
    pruning: Callable[[FederationSettings], ServerPruning | None] = lambda settings: None
    optional: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceMasks:
    """Devices may change the mask of their assignment. check: raises BadContent for a mask of ``type`` that no update
    may have."""

    check: Callable[[GlobalModel, Any, Situation], None]
    type: type = ElementMask


def refuse_mask() -> None:
    """Raise BadContent: this round's mask stays as it is."""
    raise BadContent("mask: it is not the round's, which this method does not let devices change; train under it")


AS_ASSIGNED = DeviceMasks(check=lambda model, mask, situation: refuse_mask())
"""Masks of methods whose devices train under the one of their assignment."""


@dataclass(frozen=True, kw_only=True)
class UpdatePart(Part):
    """A part that updates bring beside their values, as many numbers as ``count`` says, or are refused. fold: adds one
    update's numbers, weighted with its samples, to ``Aggregation.sums``, after its values. A method whose rounds ask
    for parts is for neither robust rules, noise nor secure rounds."""

    fold: Callable[[Any, Numbers, int], None]


def needs_single_updates(settings: FederationSettings) -> str | None:
    """Return why a method is not for secure rounds: the usual case."""
    return "its updates are more than values under a mask that all of a cell can have"


def needs_sums_alone(settings: FederationSettings) -> str | None:
    """Return None: sums of its updates are all that a method needs."""
    return None


def whole_model(settings: FederationSettings) -> float:
    """Return the smallest budget of methods whose devices train the whole model or none of it."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class CoordinatorMethod:
    """A method's server half. Every field that is left out has the usual case as its value.

    smallest_budget: returns the budget below which a device is not drawn. settings_type: of ``method_settings``.
    usable_global_model: it means something without a device's personal part. personal_models: devices keep one from
    round to round; otherwise they are sent the whole global model each time, and ``adapt`` the last one. mixes_global:
    a mixture of both is a personal model; every device is then sent the finished global model. prepares: one device
    prepares the model in round 0. always_sends_values: with any kind of work.

    compose: makes the federation's model of the published one, as the device half does. manifest: returns the
    federation's manifest of the published one: tensors may become private, be cut into blocks. start: returns the first
    global model, of initial values. All three raise BadContent.

    parts: what updates bring beside their values. payload_parts: returns what goes down with the values, by name:
    float32 [n], or signs, int8 [n] in -1..1. changes: returns the blocks that changed after round ``since``, which are
    all that a device that holds its model is sent. only_means: returns whether rounds are no more than a mean under
    these settings. warning: returns what is wrong with how the federation goes. why_not_secure: returns why secure
    rounds are not possible. pages: a page in a browser takes part. adjusts_logits: devices may add class frequencies to
    outputs (``logit_adjustment``).
    """

    smallest_budget: Callable[[FederationSettings], float] = whole_model
    settings_type: type[MethodSettings] = MethodSettings
    usable_global_model: bool = True
    personal_models: bool = False
    mixes_global: bool = False
    prepares: bool = False
    always_sends_values: bool = False
    compose: Callable[[PublishedModel, FederationSettings], PublishedModel] | None = None
    manifest: Callable[[Manifest, FederationSettings], Manifest] = lambda published, settings: published
    start: Callable[[Tensors, Situation], GlobalModel] = lambda tensors, situation: GlobalModel(tensors)
    aggregation: Aggregation = WEIGHTED_MEAN
    why_not_secure: Callable[[FederationSettings], str | None] = needs_single_updates
    schedule: Schedule = ALL_ALIKE
    active: ActiveNeurons | None = None
    masks: DeviceMasks = AS_ASSIGNED
    parts: tuple[UpdatePart, ...] = ()
    payload_parts: Callable[[GlobalModel, Situation], Mapping[str, Numbers]] | None = None
    changes: Callable[[GlobalModel, int, Situation], BlockMask] | None = None
    only_means: Callable[[FederationSettings], bool] = lambda settings: False
    warning: Callable[[GlobalModel, Situation], str | None] = lambda model, situation: None
    pages: bool = False
    adjusts_logits: bool = False


def sends_values(method: CoordinatorMethod, kind: Kind, holds_model: bool) -> bool:
    """Return whether a device is sent the global model with work of this kind. holds_model: a personal one."""
    if method.always_sends_values:
        return True
    if kind is Kind.personalise:
        return not holds_model
    return kind is not Kind.evaluate or method.usable_global_model


def more_than_a_mean(method: CoordinatorMethod, settings: FederationSettings) -> str | None:
    """Return what the method declares that makes a round more than a mean of values, in words, or None."""
    if method.only_means(settings):
        return None
    for declared, words in (
        (method.schedule is not ALL_ALIKE, "it plans its rounds itself"),
        (method.parts, "its updates bring more than values"),
        (method.payload_parts, "it sends more than the model's values"),
        (method.changes, "it sends only what has changed"),
    ):
        if declared:
            return words
    return None


def why_mean_only(method: CoordinatorMethod, settings: FederationSettings) -> str | None:
    """Return why the mean of a round's updates cannot be exchanged for a ``robust`` rule; None where it can."""
    reason = _reason(method.aggregation.why_mean_only, settings)
    if reason is None and method.parts and not method.only_means(settings):
        reason = "its updates bring more than values, of which no rule knows"
    return reason


def why_not_private(method: CoordinatorMethod, settings: FederationSettings) -> str | None:
    """Return why noise on the mean does not make the global model differentially private; None where it does."""
    reason = why_mean_only(method, settings) or _reason(method.aggregation.why_not_private, settings)
    declared = more_than_a_mean(method, settings)
    return reason or (declared and f"{declared}, which may tell more than the mean")


def why_not_buffered(method: CoordinatorMethod, settings: FederationSettings) -> str | None:
    """Return why an update of an older global model cannot count in today's round; None where it can."""
    reason = why_mean_only(method, settings)
    if reason is None and method.prepares:
        reason = "one device prepares the model before the others"
    reason = reason or _reason(method.aggregation.why_not_buffered, settings)
    declared = more_than_a_mean(method, settings)
    return reason or (declared and f"{declared}, which is of one model")


def _reason(why: Why, settings: FederationSettings) -> str | None:
    return why(settings) if callable(why) else why


def any_budget(settings: FederationSettings) -> float:
    """Return the smallest budget of methods in which every device can take part."""
    return 0.0


@cache  # looking through the installed packages takes milliseconds
def load_method(name: str) -> CoordinatorMethod:
    """Return the server half registered as ``name``. Raises UnknownMethod, which names what is installed."""
    return load_method_record("sparrow.coordinator_methods", name, CoordinatorMethod, UnknownMethod)
