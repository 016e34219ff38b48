"""Training engines of a device: PyTorch, or ONNX Runtime, which runs the training step as a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Manifest, Tensors
from sparrow.protocol.masks import NeuronMask
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.settings import FederationSettings

from ..tasks import Batches
from .training import EVERYTHING, Adjustment, Batch, LocalResult, Part, Pull, Teacher

EngineName = Literal["onnx", "torch"]
EngineChoice = Literal["auto", "onnx", "torch"]
"""``auto``: ONNX Runtime on a device without a GPU if federation and method allow it, otherwise PyTorch."""

ONNX_RUNTIME = "ONNX Runtime"
"""The title of the engine ``onnx``."""

Progress = Callable[[int, int, float], None]
"""(steps done, total steps, running loss) of local training."""


class Engine(Protocol):
    """A model with its training and evaluation."""

    @property
    def title(self) -> str:
        """The engine's name for people."""

    @property
    def manifest(self) -> Manifest:
        """The model's manifest."""

    def load(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Copy tensors into the model by name. Raises ManifestError, naming the tensor."""

    def read(self) -> Tensors:
        """Return C-contiguous copies of the tensors that the manifest keeps."""

    def train(
        self,
        batches: Batches,
        settings: FederationSettings,
        part: Part = EVERYTHING,
        *,
        learning_rate: float,
        seed: int,
        pull: Pull | None = None,
        adjustment: Adjustment | None = None,
        progress: Progress = lambda done, total, loss: None,
    ) -> LocalResult:
        """Train a part of the model for ``local_steps``, or else ``local_epochs``.

        The optimiser starts afresh. The reported losses exclude the pull. Raises TrainingDiverged, ValueError without
        training data, and ManifestError or ValueError for an invalid part.
        """

    def epochs(self, batches: Batches, seed: int) -> Iterator[Batch]:
        """Iterate over the data indefinitely, reseeding from ``seed``."""

    def differentiate(
        self,
        batches: Sequence[Batch],
        names: Collection[str],
        visit: Callable[[str, NDArray[Any]], None],
        *,
        moves: bool = False,
        teacher: Teacher | None = None,
        responsibilities: NDArray[Any] | None = None,
    ) -> tuple[float, NDArray[Any]]:
        """Return loss and outputs [N, ...] of all ``batches`` together, in training mode; ``visit`` the gradients.

        moves: whether running statistics move. teacher: replaces or complements the targets. responsibilities [N, M]:
        gradients are of the mean over samples of Σ_m r_m times the loss of component m of a mixture.
        """

    def curvature(self, batches: Sequence[Batch], direction: Mapping[str, NDArray[np.float32]]) -> Tensors:
        """Return the Hessian of ``differentiate``'s loss times ``direction``. Raises NoCurvature if unsupported."""

    def take_statistics(self, batches: Batches) -> int:
        """Set running statistics to means over the batches; return the number of samples."""

    def evaluate(self, batches: Batches, *, metrics: bool = False) -> Evaluation:
        """Return loss, accuracy and metrics.

        Raises TrainingDiverged if the loss is not finite, ValueError if there is no sample.
        """

    def scores(self, batches: Batches) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return outputs [N, C, ...], float32, in evaluation mode, and targets."""

    def likelihoods(self, batches: Batches) -> NDArray[Any]:
        """Return ln p(y | x) under each component of a mixture, float32 [N, M]."""

    def loss(self, outputs: NDArray[Any], targets: Any) -> float:
        """Return the task's loss of outputs [N, ...] for targets of a ``Batch``."""

    def scaled(self, scale: NDArray[np.float32]) -> Engine:
        """Return an engine of this model that computes the loss from outputs [N, C, ...] times ``scale`` [C] or []."""

    def twin(self) -> Engine:
        """Return an engine of a copy of the model."""

    def narrow(self, mask: NeuronMask, batches: Batches | None) -> Cut:
        """Return the engine of a network with only the active neurons of ``mask``.

        batches: compare it with the full network, whose other neurons must have zero weights. Raises CannotNarrow if it
        cannot be built.
        """


class Cut(Protocol):
    """A narrow network of an engine's model."""

    @property
    def engine(self) -> Engine:
        """The narrow network's engine."""

    def write_back(self) -> None:
        """Copy the narrow network's values into the whole one."""


def evaluate_held_out(engine: Engine, validation: Batches, test: Batches | None) -> tuple[Evaluation, Evaluation]:
    """Return the evaluations on test and on validation data."""
    judged = engine.evaluate(validation, metrics=test is None)
    return judged if test is None else engine.evaluate(test, metrics=True), judged
