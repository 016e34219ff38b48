"""The server half of each method, one file each, named like its device half in ``edge_sdk/methods``.

A method plans what a device trains and turns a round's sums into the next global values. It keeps nothing on itself:
state goes in and comes out, and the round engine stores it. A method from outside registers under the entry point
``sparrow.coordinator_methods``.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from coordinator.aggregation import MaskedSums
from coordinator.errors import BadContent
from edge_sdk.protocol.manifest import Tensors


class CoordinatorMethod(Protocol):
    """What every method's server half can do."""

    usable_global_model: bool
    """Whether the global model means something without a device's personal part."""

    def active_ratio(self, budget: float) -> float | None:
        """The share of each hidden layer's neurons that a device of this budget trains; None trains everything."""

    def close(self, previous: Tensors, sums: MaskedSums) -> Tensors:
        """The next global values from the last ones and the round's sums."""


@cache  # methods keep no state, and looking through the installed packages takes milliseconds
def load_method(name: str) -> CoordinatorMethod:
    """The server half registered as ``name``. Raises BadContent, which names what is installed."""
    found = {entry.name: entry for entry in entry_points(group="sparrow.coordinator_methods")}
    if name not in found:
        raise BadContent(f"method: {name!r} is not installed here; choose one of {', '.join(sorted(found))}")
    method: CoordinatorMethod = found[name].load()()
    return method
