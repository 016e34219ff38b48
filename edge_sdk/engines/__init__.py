"""Engines train a model on a device: PyTorch, or ONNX Runtime, which needs the training step as a graph and no PyTorch.

Methods see an ``Engine``: they load tensors into it, let it train a part of them, judge them and read them again, all
as numpy arrays by name.
"""

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
"""``auto``: ONNX Runtime where federation, method and device allow it, and no GPU is there; PyTorch otherwise."""

Progress = Callable[[int, int, float], None]
"""(steps done, steps in all, running loss) of local training."""


class Engine(Protocol):
    """A model, and what trains and judges it. manifest: the model's. title: the engine's name, to be read."""

    @property
    def title(self) -> str:
        """The engine's name."""

    @property
    def manifest(self) -> Manifest:
        """The model's description."""

    def load(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Copy tensors into the model, by name; what is not named stays. Raises ManifestError, naming the tensor."""

    def read(self) -> Tensors:
        """Return copies of every tensor that the manifest keeps, by name, C-contiguous."""

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
        """Train a part of the model on ``batches`` for ``local_steps``, or else ``local_epochs``.

        Steps wrap round the data. The optimiser of ``settings`` starts afresh; ``seed`` decides shuffling and dropout.
        A pull is left out of the losses reported. adjustment: changes what exists of the model on the way. Raises
        TrainingDiverged for a loss or weight that is not finite, ValueError where there is nothing to train on, and
        ManifestError or ValueError for a part that is not the model's.
        """

    def epochs(self, batches: Batches, seed: int) -> Iterator[Batch]:
        """Go through data again and again, as ``differentiate`` takes batches, in the order that ``seed`` decides."""

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
        """Return loss and outputs [N, ...] for ``batches`` taken as one, in training mode, and hand ``visit`` the name
        and the gradient of each parameter in ``names``.

        A gradient is the engine's own, and lasts until the next call; ``visit`` must not change the model. moves:
        whether running statistics do, as in a step. teacher: teaches in place of, or beside, the targets.
        responsibilities: of a mixture, [N, M]: gradients are of the mean over samples of Σ_m r_m times component m's
        loss, where without they are of the mixture's own. Neither changes with the other.
        """

    def curvature(self, batches: Sequence[Batch], direction: Mapping[str, NDArray[np.float32]]) -> Tensors:
        """Return the Hessian of the loss times ``direction``, which has parameters' names and shapes, for these.

        The loss is that of ``differentiate``; the model stays as it is. Raises NoCurvature where the engine cannot
        differentiate it twice.
        """

    def take_statistics(self, batches: Batches) -> int:
        """Give batch norms the means of the batches' statistics; return how many samples that took, 0 without any.

        The model is run in evaluation mode, but for batch norms, and learns nothing.
        """

    def evaluate(self, batches: Batches, *, metrics: bool = False) -> Evaluation:
        """Return mean loss and, where the task is a classification, accuracy on ``batches``, in evaluation mode.

        metrics: measure the task's, too. Raises TrainingDiverged when the loss is not finite, ValueError where there is
        no sample.
        """

    def scores(self, batches: Batches) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the model's outputs [N, C, ...] on ``batches``, float32, in evaluation mode, and their targets [N]."""

    def likelihoods(self, batches: Batches) -> NDArray[Any]:
        """Return ln p(y | x) under each component of a mixture, float32 [N, M], in evaluation mode."""

    def loss(self, outputs: NDArray[Any], targets: Any) -> float:
        """Return the task's loss of outputs [N, ...], for targets as a ``Batch`` has them."""

    def scaled(self, scale: NDArray[np.float32]) -> Engine:
        """Return an engine of this very model that trains on the loss of outputs [N, C, ...] times ``scale`` [C] or
        []."""

    def twin(self) -> Engine:
        """Return an engine of another model of the same kind, which holds the same tensors."""

    def narrow(self, mask: NeuronMask, batches: Batches | None) -> Cut:
        """Return an engine of the active neurons of ``mask`` alone.

        batches: on whose first samples the narrow network is compared with the whole one, where the weights of all
        other neurons must be zero; None leaves that out. Raises CannotNarrow.
        """


class Cut(Protocol):
    """A narrow network that was cut out of an engine's."""

    @property
    def engine(self) -> Engine:
        """The narrow network's."""

    def write_back(self) -> None:
        """Bring what the narrow network has become into the whole one; what is dropped stays as it is."""


def evaluate_held_out(engine: Engine, validation: Batches, test: Batches | None) -> tuple[Evaluation, Evaluation]:
    """Return what ``Engine.evaluate`` does on test and on validation data, once where they are the same."""
    judged = engine.evaluate(validation, metrics=test is None)
    return judged if test is None else engine.evaluate(test, metrics=True), judged
