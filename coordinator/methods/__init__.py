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
    """The state of a federation that the coordinator keeps from round to round.

    tensors: name -> float32, every shared tensor. mask: the elements that exist of it, the others being zero; None: all
    do. own: arrays that the method keeps beside it, by name. notes: what making it counted, for its round's record.
    """

    tensors: Tensors
    mask: ElementMask | None = None
    own: Tensors = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedModel:
    """A model as it is published: its manifest, the files that this names, and weights by name.

    tensors: none for those whose first values are drawn from recipes.
    """

    manifest: Manifest
    files: Mapping[FileName, bytes]
    tensors: Tensors


@dataclass(frozen=True)
class Situation:
    """The facts that a method's decisions for a round depend on.

    ``settings.method_settings`` is complete: what was left out has its default of ``settings_type``. round: its number,
    from 1; 0 prepares the model. plan: what was asked of its devices. devices and num_examples: how many are enrolled
    and have not stopped, and their training samples, of those that told.
    """

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
    """The work that a round asks of its devices.

    kind: ``train``, or ``personalise`` where nothing of the model goes up. plan: what its assignments say beyond the
    settings. everyone: all devices that are there take part, not a drawn cohort, and those that come later are given
    the same work until they are drawn again. rounds: how many of the federation's rounds it counts for; it has the
    number of the last of them.
    """

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

    sums: makes the object that a round's updates are folded into. close: makes the next global model of the last one
    and these sums. The three reasons say why a federation may not combine the method with a ``robust`` rule in place of
    the mean, with noise on the mean (differential privacy), and with updates of older models (``buffer``). They are
    refusals unless a method declares None, because its author alone knows.
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

    work: returns what the round with number ``situation.round`` asks of its devices. last_for_everyone: returns the
    number of the last closed round for everyone, whose work late devices are still given, or None; a method without
    such rounds leaves it out. check_rollback: raises WrongState where round ``situation.round`` cannot begin from the
    model that round ``number`` made (0: the first model).
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
    """Return what is wrong with neurons chosen once: of another number than the active ratio makes, or others than the
    device keeps."""
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
    """Each device chooses its neurons itself, from the whole model; the mask of its last update is stored.

    By default it chooses once. keeps: returns whether a device that holds this mask is sent its values alone in round
    ``situation.round``, at its active ratio; if not, it is sent the whole model. fault: returns what is wrong with the
    mask of an update, None if nothing is. Its device was sent the values of the mask ``held``, or of the whole model
    (None).
    """

    keeps: Callable[[NeuronMask, float, Situation], bool] = fits_choice
    fault: Callable[[NeuronMask | None, Mask | None, float, Situation], str | None] = fault_of_choice


@dataclass(frozen=True)
class Participation:
    """Facts of one device's update, from the records.

    device: its name, budget: its present one. ratio: the active ratio at which it trained; loss: the mean training
    loss, over ``num_examples``; flops: of its training; seconds: of download, training and upload, as it reports them.
    """

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

    ratios: returns the active ratios of drawn devices, name -> ratio, each at most its budget, by what the records say
    of earlier rounds. budgets: theirs, by name. chance: a number in (0, 1] of each name, from the federation's secret
    and the round. scores: returns what the neurons of a global model are worth, of which the best are kept at an active
    ratio.
    """

    ratios: Callable[
        [Sequence[Participation], Mapping[str, float], Callable[[str], float], Situation], Mapping[str, float]
    ]
    scores: Callable[[GlobalModel, Situation], Scores]


@dataclass(frozen=True, kw_only=True)
class ActiveNeurons:
    """Devices train some neurons of each layer, as many as their budgets say.

    The manifest then says which neurons feed which weights, and the device half declares the same. narrow: devices
    train the network of their active neurons alone and never need the rest, so that even the first download holds no
    more. rule: returns the neurons that follow from a device's active ratio alone; the device half has the same rule.
    None: they are drawn anew for each round and device. choice and pruning: return, by the settings, how devices choose
    their neurons themselves, or how the coordinator prunes the model for each; None where they do not. optional:
    a group of neurons that every device receives and trains whole, of which its update may leave some out.
    """

    narrow: bool = False
    rule: Callable[[Manifest, float], NeuronMask] | None = None
    choice: Callable[[FederationSettings], DeviceChoice | None] = lambda settings: None
    pruning: Callable[[FederationSettings], ServerPruning | None] = lambda settings: None
    optional: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceMasks:
    """Devices may change the mask of their assignment.

    type: the kind of mask. check: raises BadContent unless an update may have this mask.
    """

    check: Callable[[GlobalModel, Any, Situation], None]
    type: type = ElementMask


def refuse_mask() -> None:
    """Raise BadContent: this round's mask stays as it is."""
    raise BadContent("mask: it is not the round's, which this method does not let devices change; train under it")


AS_ASSIGNED = DeviceMasks(check=lambda model, mask, situation: refuse_mask())
"""Masks of methods whose devices train under the one of their assignment."""


@dataclass(frozen=True, kw_only=True)
class UpdatePart(Part):
    """A part that updates bring beside their values, as many numbers as ``count`` says, or are refused.

    fold: adds the numbers of one update, weighted with its training samples, to the sums of ``Aggregation.sums``, after
    its values. A method whose rounds ask for parts is for neither a ``robust`` rule, noise nor secure rounds, as all
    of these know values alone.
    """

    fold: Callable[[Any, Numbers, int], None]


def needs_single_updates(settings: FederationSettings) -> str | None:
    """Return why a method is not for secure rounds: the usual case."""
    return "its updates are more than values under a mask that all of a cell can have"


def needs_sums_alone(settings: FederationSettings) -> str | None:
    """Return None: sums of its updates are all that a method needs."""
    return None


@dataclass(frozen=True, kw_only=True)
class CoordinatorMethod:
    """A method's server half. Every field that is left out has the usual case as its value.

    smallest_budget: returns the budget below which a device is not drawn; 0 draws everybody.
    settings_type: the model of ``FederationSettings.method_settings``, which is checked and completed when a federation
        is created.
    usable_global_model: the global model means something without a device's personal part.
    personal_models: devices keep a personal model from round to round. Where not, they are sent the whole global model
        each time, and asked to ``adapt`` the last one when the federation has ended.
    mixes_global: a mixture of the personal and the whole global model is a personal model, too. Then every device is
        sent the finished global model, and takes of it as much as its validation data speak for.
    prepares: one device ``prepare``s the model before the first round: round 0, repeated until an update comes.
    always_sends_values: devices are sent the global model with any kind of work.
    compose: makes the federation's model of the published one: several of it, say, with graphs of their own. The device
        half's ``network`` does the same. None: it is the published one. Raises BadContent for a model that cannot be
        taken.
    manifest: returns the federation's manifest: the published one, in which tensors may become private and be cut into
        blocks. Raises BadContent for a model that the method cannot take, or not with these settings.
    start: returns the first global model, of initial values. Raises BadContent for settings that cannot be carried out.
    parts: what updates bring beside their values.
    payload_parts: returns what goes down with the model's values, by name: float32 [n], or signs, int8 [n] in -1..1.
        The device half declares these parts.
    changes: returns the blocks of a model that are not as they were when round ``since`` had closed. With it a device
        that says which global model it holds is sent these alone.
    only_means: returns whether rounds are no more than a mean under these settings, whatever schedule, parts and
        changes are declared for others.
    warning: returns what is wrong with how the federation goes, for its operator, or None.
    why_not_secure: returns why sums of its updates cannot be made without seeing one of them; None: they can, as each
        is no more than values, of all that exists or of neurons that devices of one active ratio can have in common.
    pages: a page in a browser takes part (``coordinator.web``), which has the device half in JavaScript.
    adjusts_logits: devices may add their class frequencies to the outputs (``logit_adjustment``): what travels is the
        values of one whole model or of a part of it, and nothing else is made of them.
    """

    smallest_budget: Callable[[FederationSettings], float]
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


def whole_model(settings: FederationSettings) -> float:
    """Return the smallest budget of methods whose devices train the whole model or none of it."""
    return 1.0


def any_budget(settings: FederationSettings) -> float:
    """Return the smallest budget of methods in which every device can take part."""
    return 0.0


@cache  # looking through the installed packages takes milliseconds
def load_method(name: str) -> CoordinatorMethod:
    """Return the server half registered as ``name``. Raises UnknownMethod, which names what is installed."""
    return load_method_record("sparrow.coordinator_methods", name, CoordinatorMethod, UnknownMethod)
