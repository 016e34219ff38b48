"""The server half of each method, one file each, named like its device half in ``edge_sdk/methods``.

A method plans what a device trains and turns a round's sums into the next global values. It keeps nothing on itself:
state goes in and comes out, and the round engine stores it. A method from outside registers under the entry point
``sparrow.coordinator_methods``.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from coordinator.aggregation import MaskedSums
from coordinator.errors import BadContent
from edge_sdk.protocol.manifest import Tensors
from edge_sdk.protocol.messages import FederationSettings, Kind


class NoSettings(BaseModel):
    """For methods that need none beyond those of every federation."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CoordinatorMethod(Protocol):
    """What every method's server half can do. Subclass it: what is given here is the usual case."""

    settings_type: type[BaseModel] = NoSettings
    """What ``FederationSettings.method_settings`` may hold, checked and completed when a federation is created."""

    round_kind: Kind = Kind.train
    """What a cohort is asked to do: ``train``, or ``personalise`` where nothing of the model goes up."""

    usable_global_model: bool = True
    """Whether the global model means something without a device's personal part."""

    personal_models: bool = False
    """Whether devices keep a personal model from round to round. Where not, they are sent the whole global model each
    time, and asked to ``adapt`` the last one when the federation has ended."""

    def smallest_budget(self, settings: FederationSettings) -> float:
        """The budget below which a device is not drawn; 0 draws everybody."""
        return 0.0

    def active_ratio(self, budget: float) -> float | None:
        """The share of each hidden layer's neurons that a device of this budget trains; None trains everything."""
        return None

    def close(self, previous: Tensors, sums: MaskedSums, settings: FederationSettings) -> Tensors:
        """The next global values from the last ones and the round's sums.

        ``settings.method_settings`` is complete: what was left out has its default of ``settings_type``.
        """
        return sums.mean(previous)


@cache  # methods keep no state, and looking through the installed packages takes milliseconds
def load_method(name: str) -> CoordinatorMethod:
    """The server half registered as ``name``. Raises BadContent, which names what is installed."""
    found = {entry.name: entry for entry in entry_points(group="sparrow.coordinator_methods")}
    if name not in found:
        raise BadContent(f"method: {name!r} is not installed here; choose one of {', '.join(sorted(found))}")
    method: CoordinatorMethod = found[name].load()()
    return method
