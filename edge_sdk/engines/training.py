"""Local training with any engine: trained parts, changes between steps, results and errors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.errors import ManifestError
from sparrow.protocol.failures import Failure
from sparrow.protocol.fields import bounded
from sparrow.protocol.masks import NeuronMask
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.settings import FederationSettings

from ..errors import SdkError
from ..tasks import Batches

Flags = NDArray[np.bool_]
Batch = tuple[Any, Any]
"""(inputs, targets) in the engine's types: numpy arrays or torch tensors."""


LOSS = Failure("training-diverged/loss")
WEIGHTS = Failure("training-diverged/weights")
GRADIENTS = Failure("training-diverged/gradients")
INPUTS = Failure("training-diverged/inputs")
HELD_OUT = Failure("training-diverged/held-out")
VALUES = Failure("training-diverged/values")


class TrainingDiverged(SdkError):
    """A loss or a weight is not finite; the round has failed."""

    failure = Failure("training-diverged")

    def __init__(
        self,
        met: str,
        advice: str | None = None,
        *,
        learning_rate: float | None = None,
        failure: Failure | None = None,
    ) -> None:
        rate = "" if learning_rate is None else f" of {learning_rate:g}"
        usual = f"check the scale of the inputs, lower the learning rate{rate}, or set a clip"
        super().__init__(f"{met}; {advice or usual}", failure=failure)
        self.met = met
        self.advice = advice
        self.learning_rate = learning_rate

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.met, self.advice), {"learning_rate": self.learning_rate, "failure": self.failure}


class UnsoundModel(TrainingDiverged):
    """The received model gives no finite loss before training."""

    failure = Failure("unsound-model")


@dataclass(frozen=True)
class Part:
    """The part of a model that trains; None for all of it."""

    mask: NeuronMask | None = None
    # Name -> existing elements; the others are and stay zero.
    elements: Mapping[str, Flags] | None = None
    # Name -> elements that move.
    trained: Mapping[str, Flags] | None = None
    # Multiplied with parameters during training; the whole model trains then.
    factors: Mapping[str, NDArray[np.float32]] | None = None

    def __post_init__(self) -> None:
        if self.factors is not None and (self.mask or self.elements or self.trained):
            raise ValueError("factors are for a model that trains as a whole; give no mask, elements or trained")


EVERYTHING = Part()


@dataclass(frozen=True)
class Pull:
    """The proximal term μ/2·|w - centre|² (FedProx, arXiv:1812.06127, Eq. 2), by default to the initial weights."""

    weight: float
    centre: Mapping[str, NDArray[Any]] | None = None


@dataclass(frozen=True)
class Teacher:
    """A teacher's outputs z' [N, classes, ...] for distillation, with weight α and temperature T.

    A student's loss for outputs z is (1 - α) loss(z) + α T² KL(softmax(z' / T) ‖ softmax(z / T)).
    """

    outputs: NDArray[Any]
    weight: float
    temperature: float


@dataclass(frozen=True)
class LocalResult:
    """The result of local training."""

    # N_k.
    num_examples: int
    # Number of samples seen, with repetitions.
    samples: int
    steps: int
    # Mean of the losses before each step, weighted by samples.
    train_loss: float


@dataclass(frozen=True)
class Change:
    """A change of a model's existing elements."""

    elements: Mapping[str, Flags]
    # Name -> bool, added or removed elements, whose optimiser state is reset to zero (RigL, arXiv:1911.11134).
    renewed: Mapping[str, Flags]


class Adjustment(Protocol):
    """Changes which elements of a model exist during training."""

    # How many recent ones it needs.
    batches: int

    @property
    def steps(self) -> Collection[int]:
        """The local steps, counted from 1, after which it changes the model."""

    def decide(self, step: int, batches: Sequence[Batch]) -> Change:
        """Change the model's weights, and return its existing elements."""


def count_steps(settings: FederationSettings, batches: Batches) -> int:
    """Return the steps of a round. Raises ValueError without a batch."""
    if len(batches) == 0:
        raise ValueError("the task's training data has no batches; give it at least one sample")
    return settings.local_steps or settings.local_epochs * len(batches)


def weight_of(targets: Any, ignored: int | None) -> float:
    """Return the number of samples in a batch's mean loss; several targets count by their known share."""
    if ignored is None:
        return len(targets)
    known = int((targets != ignored).sum())
    return float(known * len(targets) / math.prod(targets.shape))


def evaluation_of(
    seen: float, loss_sum: float, correct: int | None, metrics: Mapping[str, float] | None = None
) -> Evaluation:
    """Return an evaluation from sums over ``seen`` samples. Raises TrainingDiverged, ValueError without a sample."""
    if seen == 0:
        raise ValueError("no held-out sample to evaluate on; give the task validation data")
    if not math.isfinite(loss_sum):
        raise TrainingDiverged("the loss on held-out data is not finite", failure=HELD_OUT)
    accuracy = None if correct is None else correct / seen
    named = {name: bounded(value) for name, value in (metrics or {}).items()}
    return Evaluation(num_examples=max(1, round(seen)), loss=bounded(loss_sum / seen), accuracy=accuracy, metrics=named)


def check_loadable(tensors: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ManifestError if a model of these ``shapes`` cannot load the tensors."""
    for name, tensor in tensors.items():
        if shapes.get(name) != tensor.shape:
            found = f"has shape {shapes[name]}" if name in shapes else "does not exist"
            raise ManifestError(
                f"{name}: should have shape {tensor.shape}, but in the model it {found}; publish and train the same "
                "model"
            )


def derive_seed(*parts: object) -> int:
    """Return a seed in 0..2^63-1 derived from ``parts``, the same on every machine."""
    text = json.dumps([str(part) for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Divergence:
    """Errors of local training that diverges."""

    settings: FederationSettings
    learning_rate: float
    total: int

    def of_loss(self, loss: float, step: int, *, inputs_finite: bool) -> TrainingDiverged:
        """Return the error of a loss that is not finite."""
        if not inputs_finite:
            return TrainingDiverged(
                f"the inputs of training step {step} are NaN or infinite",
                "replace or leave out such samples",
                failure=INPUTS,
            )
        return self._of(f"the loss is {loss} at step {step} of {self.total}", LOSS)

    def of_tensor(self, name: str) -> TrainingDiverged:
        """Return the error of a tensor that is not finite after training."""
        return self._of(f"{name} is not finite after {self.total} steps", WEIGHTS)

    def _of(self, met: str, failure: Failure) -> TrainingDiverged:
        return TrainingDiverged(met, learning_rate=self.learning_rate, failure=failure)
