"""Local training whatever the engine: the part that trains, what changes on the way, the result, and what can fail."""

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
"""(inputs, targets), as an engine takes them: numpy arrays or torch tensors."""


LOSS = Failure("training-diverged/loss")
WEIGHTS = Failure("training-diverged/weights")
GRADIENTS = Failure("training-diverged/gradients")
INPUTS = Failure("training-diverged/inputs")
HELD_OUT = Failure("training-diverged/held-out")
VALUES = Failure("training-diverged/values")


class TrainingDiverged(SdkError):
    """A loss or a weight is not finite: the round has failed, nothing of it is kept or sent.

    met: what is not finite, and when. advice: what to do; None if it follows from the usual causes, which the session
    names (``device.diagnosis``). learning_rate: of the training, if it is not the federation's.
    """

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
        usual = f"look at the scale of the inputs, lower the learning rate{rate}, or set a clip"
        super().__init__(f"{met}; {advice or usual}", failure=failure)
        self.met, self.advice, self.learning_rate = met, advice, learning_rate

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.met, self.advice), {"learning_rate": self.learning_rate, "failure": self.failure}


class UnsoundModel(TrainingDiverged):
    """The model that was received gives no finite loss before any training: no fault of this device."""

    failure = Failure("unsound-model")


@dataclass(frozen=True)
class Part:
    """The part of a model that trains.

    mask: active neurons; elements: name -> what exists of a parameter, the rest being and staying zero; trained: name
    -> what moves of it, the rest staying as it is. None: everything. factors: name -> float32 that can be broadcast to
    the parameter, which is multiplied by it while the network trains, and so its gradient is; then everything trains.
    """

    mask: NeuronMask | None = None
    elements: Mapping[str, Flags] | None = None
    trained: Mapping[str, Flags] | None = None
    factors: Mapping[str, NDArray[np.float32]] | None = None

    def __post_init__(self) -> None:
        if self.factors is not None and (self.mask or self.elements or self.trained):
            raise ValueError("factors are of a model that trains as a whole; give no mask, elements or trained beside")


EVERYTHING = Part()


@dataclass(frozen=True)
class Pull:
    """A pull of what is trained to ``centre``, by name, or where it is when training begins: μ/2·|w - centre|², with μ
    the ``weight`` (FedProx, arXiv:1812.06127, Eq. 2)."""

    weight: float
    centre: Mapping[str, NDArray[Any]] | None = None


@dataclass(frozen=True)
class Teacher:
    """Teaching by the outputs z' [N, classes, ...] of another network: of outputs z the loss is then, with α the
    ``weight`` and T the ``temperature``, (1 - α) loss(z) + α T² KL(softmax(z' / T) ‖ softmax(z / T))."""

    outputs: NDArray[Any]
    weight: float
    temperature: float


@dataclass(frozen=True)
class LocalResult:
    """The result of local training.

    num_examples: samples of the training share, n_k, however many of them were seen. samples: those seen, counted as
    often as they were. train_loss: mean of the batch losses, each taken before its step and weighted by its samples.
    """

    num_examples: int
    samples: int
    steps: int
    train_loss: float


@dataclass(frozen=True)
class Change:
    """The part of a model that exists from now on.

    elements: name -> bool of the parameter's shape, as ``Part`` has them. renewed: name -> bool, what is new or was
    taken away: there the optimiser's memory (momentum, moments) starts at zero, as in RigL (arXiv:1911.11134).
    """

    elements: Mapping[str, Flags]
    renewed: Mapping[str, Flags]


class Adjustment(Protocol):
    """Changes which elements of a model exist while it trains.

    batches: how many of the last ones it is shown.
    """

    batches: int

    @property
    def steps(self) -> Collection[int]:
        """The local steps, counted from 1, after which it does."""

    def decide(self, step: int, batches: Sequence[Batch]) -> Change:
        """Change the model's weights, and say what exists of them from now on.

        batches: the last ones trained on, oldest first.
        """


def count_steps(settings: FederationSettings, batches: Batches) -> int:
    """Return the steps of a round: ``local_steps``, or else ``local_epochs`` over ``batches``.

    Raises ValueError where there is nothing to train on.
    """
    if len(batches) == 0:
        raise ValueError("the task's training data has no batches; give it at least one sample")
    return settings.local_steps or settings.local_epochs * len(batches)


def weight_of(targets: Any, ignored: int | None) -> float:
    """Return the number of samples that a batch's mean loss stands for; of a sample with many targets, the share that
    is not ``ignored``. targets: [N, ...], an array or a tensor."""
    if ignored is None:
        return len(targets)
    known = int((targets != ignored).sum())
    return float(known * len(targets) / math.prod(targets.shape))


def evaluation_of(
    seen: float, loss_sum: float, correct: int | None, metrics: Mapping[str, float] | None = None
) -> Evaluation:
    """Return what was judged: ``loss_sum`` over ``seen`` samples, as ``weight_of`` counts them, how many were right,
    None without classes, and the task's metrics.

    Raises TrainingDiverged when the loss is not finite, ValueError where there was no sample.
    """
    if seen == 0:
        raise ValueError("there is no held-out sample to evaluate on; give the task validation data")
    if not math.isfinite(loss_sum):
        raise TrainingDiverged("the loss on held-out data is not finite", failure=HELD_OUT)
    accuracy = None if correct is None else correct / seen
    named = {name: bounded(value) for name, value in (metrics or {}).items()}
    return Evaluation(num_examples=max(1, round(seen)), loss=bounded(loss_sum / seen), accuracy=accuracy, metrics=named)


def check_loadable(tensors: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ManifestError, naming the tensor, unless a model whose tensors have ``shapes`` has all these."""
    for name, tensor in tensors.items():
        if shapes.get(name) != tensor.shape:
            found = f"has shape {shapes[name]}" if name in shapes else "does not exist"
            raise ManifestError(
                f"{name}: should have shape {tensor.shape}, in the model it {found}; publish and train the same model"
            )


def derive_seed(*parts: object) -> int:
    """Return a seed in 0..2^63-1 that follows from ``parts``, the same on every machine."""
    text = json.dumps([str(part) for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Divergence:
    """The errors of local training that diverges after so many of ``total`` steps."""

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
        """Return the error of a tensor that is not finite in the end."""
        return self._of(f"{name} is not finite after {self.total} steps", WEIGHTS)

    def _of(self, met: str, failure: Failure) -> TrainingDiverged:
        return TrainingDiverged(met, learning_rate=self.learning_rate, failure=failure)
