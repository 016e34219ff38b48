"""The server half of each method, one file each, named like its device half in ``edge_sdk/methods``.

A method plans what a device trains and turns a round's sums into the next global model. It keeps nothing on itself:
state goes in and comes out, and the round engine stores it. A method from outside registers under the entry point
``sparrow.coordinator_methods``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from edge_sdk.protocol.blocks import BlockMask
from edge_sdk.protocol.bundle import Signs
from edge_sdk.protocol.elements import ElementMask
from edge_sdk.protocol.manifest import Manifest, Tensors
from edge_sdk.protocol.masks import NeuronMask
from edge_sdk.protocol.messages import FederationSettings, Kind
from sparrow.command_line.nearest import nearest
from sparrow.coordinator.errors import BadContent, UnknownMethod
from sparrow.coordinator.rounds.sums import MaskedSums, Sums

Plan = Mapping[str, bool | int | float | str]


class NoSettings(BaseModel):
    """For methods that need none beyond those of every federation."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class GlobalModel:
    """What the coordinator keeps of a federation from round to round.

    tensors: name -> float32, every shared tensor. mask: the elements that exist of it, the others being zero; None: all
    do. own: arrays that the method keeps beside it, by name. notes: what making it counted, for its round's record.
    """

    tensors: Tensors
    mask: ElementMask | None = None
    own: Tensors = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Situation:
    """What a method's decisions for a round depend on.

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


@dataclass(frozen=True)
class Work:
    """What a round asks of its devices.

    kind: ``train``, or ``personalise`` where nothing of the model goes up. plan: what its assignments say beyond the
    settings. everyone: all devices that are there take part, not a drawn cohort, and those that come later are given
    the same work until they are drawn again. rounds: how many of the federation's rounds it counts for; it has the
    number of the last of them.
    """

    kind: Kind = Kind.train
    plan: Plan = field(default_factory=dict)
    everyone: bool = False
    rounds: int = 1


class CoordinatorMethod(Protocol):
    """What every method's server half can do. Subclass it: what is given here is the usual case."""

    settings_type: type[BaseModel] = NoSettings
    """What ``FederationSettings.method_settings`` may hold, checked and completed when a federation is created."""

    usable_global_model: bool = True
    """Whether the global model means something without a device's personal part."""

    personal_models: bool = False
    """Whether devices keep a personal model from round to round. Where not, they are sent the whole global model each
    time, and asked to ``adapt`` the last one when the federation has ended."""

    mixes_global: bool = False
    """Whether a mixture of the personal and the whole global model is a personal model, too: then every device is sent
    the finished global model, and takes of it as much as its validation data speak for."""

    needs_coupling: bool = False
    """Whether devices train some neurons of a layer and not others, so that the manifest must say which neurons feed
    which weights. Its device half says the same."""

    narrow: bool = False
    """Whether devices train the network of their active neurons alone, and never need the rest: then even the first
    download is no more than these."""

    devices_choose: bool = False
    """Whether each device chooses its active neurons itself, once, from the whole model; ``active_ratio`` says how
    many. The mask of its first update is stored, and decides what it is sent from then on and may send."""

    prepares: bool = False
    """Whether one device ``prepare``s the model before the first round: round 0, repeated until an update comes."""

    for_everyone: bool = False
    """Whether it has rounds for everyone, whose work late devices are still given (``last_for_everyone``)."""

    def smallest_budget(self, settings: FederationSettings) -> float:
        """The budget below which a device is not drawn; 0 draws everybody."""
        return 0.0

    def active_ratio(self, budget: float) -> float | None:
        """The share of each hidden layer's neurons that a device of this budget trains; None trains everything."""
        return None

    def neurons(self, manifest: Manifest, ratio: float) -> NeuronMask | None:
        """The neurons that follow from a device's active ratio alone, by a rule that its device half has too; None:
        they are drawn, or ``devices_choose`` them."""
        return None

    mask_type: type = ElementMask
    """The kind of masks that devices may change, where ``check_mask`` lets them."""

    sends_changes: bool = False
    """Whether a device that says which global model it holds is sent only what has ``changed`` since."""

    def manifest(self, published: Manifest, settings: FederationSettings) -> Manifest:
        """The federation's manifest: what of the model never leaves a device, and how it is cut into blocks.

        Raises BadContent for a model that the method cannot take, or not with these settings.
        """
        return published

    def start(self, tensors: Tensors, situation: Situation) -> GlobalModel:
        """The first global model, of initial values. Raises BadContent for settings that cannot be carried out."""
        return GlobalModel(tensors)

    def work(self, situation: Situation) -> Work:
        """What the round that opens with number ``situation.round`` asks of its devices."""
        return Work()

    def sends_values(self, kind: Kind, holds_model: bool) -> bool:
        """Whether a device is sent the global model with work of this kind."""
        if kind is Kind.personalise:
            return not holds_model
        return kind is not Kind.evaluate or self.usable_global_model

    def last_for_everyone(self, situation: Situation) -> int | None:
        """The number of the last round for everyone among those closed, which late devices are still given; or None."""
        return None

    def changed(self, model: GlobalModel, since: int, situation: Situation) -> BlockMask:
        """What of ``model`` is not as it was when round ``since`` had closed; for methods that send changes."""
        raise NotImplementedError

    def signs(self, model: GlobalModel, situation: Situation) -> Signs | None:
        """Directions that go down with the model's values, int8 in -1..1."""
        return None

    def wants_gradients(self, plan: Plan) -> bool:
        """Whether updates of a round so planned bring the gradients of all maskable weights."""
        return False

    def check_mask(self, model: GlobalModel, mask: Any, situation: Situation) -> None:
        """Raise BadContent unless an update may have this mask, of type ``mask_type`` but not its assignment's."""
        raise BadContent("mask: it is not the round's, which this method does not let devices change; train under it")

    def why_mean_only(self, settings: FederationSettings) -> str | None:
        """Why the weighted mean of a round's updates cannot be exchanged for a rule that withstands liars (``robust``).

        None where all that ``close`` needs of the sums is ``mean``; a method with ``sums`` of its own says so itself.
        """
        return None if type(self).sums is CoordinatorMethod.sums else "its sums are its own"

    def why_not_private(self, settings: FederationSettings) -> str | None:
        """Why noise on the mean does not make the global model differentially private: what else of updates goes out.

        None where nothing does; a method that makes its models in its own way says so itself.
        """
        reason = self.why_mean_only(settings)
        own = self._way_of_its_own("start", "work", "signs", "changed", "close")
        return reason or (own and f"{own}, which may tell more than the mean")

    def why_not_buffered(self, settings: FederationSettings) -> str | None:
        """Why an update of an older global model cannot count in today's round (``buffer``); None where it can.

        It can where a round asks for nothing but training, and makes of the sums only their mean.
        """
        reason = self.why_mean_only(settings)
        if reason is None and self.prepares:
            reason = "one device prepares the model before the others"
        own = self._way_of_its_own("work", "signs", "changed", "close")
        return reason or (own and f"{own}, which is of one model")

    def _way_of_its_own(self, *names: str) -> str | None:
        """What the method does otherwise than the usual one, the first of ``names``, in words; or None."""
        own = [name for name in names if getattr(type(self), name) is not getattr(CoordinatorMethod, name)]
        return f"it has a way of its own to {own[0]}" if own else None

    def sums(self, model: GlobalModel, situation: Situation) -> Sums:
        """What a round's updates are folded into."""
        return MaskedSums(situation.manifest)

    def close(self, model: GlobalModel, sums: Any, situation: Situation) -> GlobalModel:
        """The next global model from the last one and the round's sums."""
        return GlobalModel(sums.mean(model.tensors), model.mask, model.own)

    def check_rollback(self, number: int, situation: Situation) -> None:
        """Raise WrongState where round ``situation.round`` cannot begin from the model that round ``number`` made (0:
        the first model)."""

    def warning(self, model: GlobalModel, situation: Situation) -> str | None:
        """What is wrong with how the federation goes, in words for its operator, or None."""
        return None


@cache  # methods keep no state, and looking through the installed packages takes milliseconds
def load_method(name: str) -> CoordinatorMethod:
    """The server half registered as ``name``. Raises UnknownMethod, which names what is installed."""
    found = {entry.name: entry for entry in entry_points(group="sparrow.coordinator_methods")}
    if name not in found:
        raise UnknownMethod(
            f"method: {name!r} is not installed here{nearest(name, found)}; there are {', '.join(sorted(found))}"
        )
    method: CoordinatorMethod = found[name].load()()
    return method
