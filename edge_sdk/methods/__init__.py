"""The device half of each method, one file each, named like its server half in ``coordinator/methods``.

A method is state in, state out: ``train`` gets a ``Job`` and returns what to keep and what to send. Session, transport
and telemetry are not its business. A method from outside registers under the entry point ``sparrow.device_methods``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

from torch import nn

from edge_sdk.protocol.bundle import Bundle
from edge_sdk.protocol.manifest import Array, Manifest, Tensors
from edge_sdk.protocol.masks import NeuronDraw, NeuronMask
from edge_sdk.protocol.messages import Assignment, Evaluation
from edge_sdk.tasks import Task


@dataclass(frozen=True)
class DeviceState:
    """What a device keeps between rounds.

    personal: every kept tensor of the personal model by name, or None before the first download. memory: the method's
    own JSON-able notes (the last stop-rule loss, say).
    """

    personal: Tensors | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One assignment with all that a method needs to carry it out.

    ``model`` is the task's module, whose weights the method overwrites; ``received`` the decoded payload; ``progress``
    is called with (steps done, steps in all, running loss).
    """

    assignment: Assignment
    manifest: Manifest
    task: Task
    model: nn.Module
    state: DeviceState
    received: Bundle | None
    progress: Callable[[int, int, float], None] = lambda done, total, loss: None


@dataclass(frozen=True)
class Trained:
    """Outcome of local training: the state to keep, and the values to send under ``mask``.

    values: float32 [count_values(manifest, mask)]. stopped: early stopping ends this device's training with this round.
    """

    state: DeviceState
    values: Array
    mask: NeuronMask | None
    draw: NeuronDraw | None
    num_examples: int
    steps: int
    train_loss: float
    validation_loss: float | None
    stop_loss: float | None
    stopped: bool


@dataclass(frozen=True)
class Evaluated:
    """Outcome of an evaluation on the device's held-out data; None for a model that there is not."""

    personal: Evaluation | None
    global_model: Evaluation | None


class DeviceMethod(Protocol):
    """What every method's device half can do."""

    def train(self, job: Job) -> Trained:
        """Merge the payload, train under the assignment's mask, and say what to keep and to send."""

    def evaluate(self, job: Job) -> Evaluated:
        """Judge the personal model and, where the payload brings one, the global model on held-out data."""

    def adapt(self, job: Job) -> DeviceState:
        """Make a personal model from the finished federation's global one."""


class UnknownMethod(LookupError):
    """The federation uses a method that this installation does not have."""


def load_method(name: str) -> DeviceMethod:
    """The device half registered as ``name``. Raises UnknownMethod, which names what is installed."""
    found = {entry.name: entry for entry in entry_points(group="sparrow.device_methods")}
    if name not in found:
        raise UnknownMethod(
            f"the federation uses the method {name!r}, installed are {', '.join(sorted(found))}; update this SDK, "
            f"or install the package that provides it"
        )
    method: DeviceMethod = found[name].load()()
    return method
