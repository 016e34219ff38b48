"""The ONNX Runtime engine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Tensors
from sparrow.protocol.masks import NeuronMask
from sparrow.protocol.messages import Evaluation
from sparrow.protocol.settings import FederationSettings

from ..tasks import Batches, as_arrays, count_examples, passes
from ..tasks.intake import random_state_kept
from ..tasks.metrics import Metric, measure
from . import ONNX_RUNTIME, Progress
from .narrow import Narrow
from .onnx import Array, Network, Training
from .optimiser import rule_of
from .plausibility import Plausibility, check_gradients
from .training import (
    EVERYTHING,
    Adjustment,
    Batch,
    Divergence,
    LocalResult,
    Part,
    Pull,
    Teacher,
    count_steps,
    evaluation_of,
    weight_of,
)

Chance = np.random.Generator


class OnnxEngine:
    """An ``Engine`` on ONNX Runtime. chance: shared with twins and narrow networks."""

    title = ONNX_RUNTIME

    def __init__(
        self,
        network: Network,
        *,
        classification: bool,
        metrics: Mapping[str, Metric] | None = None,
        chance: Chance | None = None,
    ) -> None:
        self.network = network
        self._classification = classification
        self._metrics = dict(metrics or {})
        self._chance = chance or np.random.Generator(np.random.PCG64())
        self.load = network.load
        self.read = network.read
        self.manifest = network.manifest
        self._ignored = None if network.manifest.targets is None else network.manifest.targets.ignored

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
        """Train a part of the model in place."""
        total = count_steps(settings, batches)
        diverged = Divergence(settings, learning_rate, total)
        training = Training(self.network, rule_of(settings, learning_rate), part, pull)
        recent: deque[Batch] = deque(maxlen=adjustment.batches if adjustment else 0)
        seen = 0
        loss_sum = 0.0
        for step, (inputs, targets) in enumerate(islice(self.epochs(batches, seed), total), start=1):
            recent.append((inputs, targets))
            loss = training.step(inputs, targets, training.draw(self._chance, len(targets)))
            if not math.isfinite(loss):
                raise diverged.of_loss(loss, step, inputs_finite=bool(np.isfinite(inputs).all()))
            if adjustment is not None and step in adjustment.steps:
                training.change(adjustment.decide(step, recent))
            seen += len(targets)
            loss_sum += loss * len(targets)
            progress(step, total, loss_sum / seen)
        training.end()
        for name, tensor in self.network.tensors.items():
            if not np.isfinite(tensor).all():
                raise diverged.of_tensor(name)
        return LocalResult(count_examples(batches), seen, total, loss_sum / seen)

    def check_plausible(self, batches: Batches, seed: int) -> Plausibility:
        """Compare the step's gradients with finite differences of its loss.

        Raises ImplausibleStep, and ValueError without a batch.
        """
        with random_state_kept(batches):
            for batch in batches:
                inputs, targets = _known(*as_arrays(batch), self._ignored)
                return check_gradients(self.network, inputs, targets, np.random.Generator(np.random.PCG64([seed, 2])))
        raise ValueError("the task's training data has no batches; give it at least one sample")

    def epochs(self, batches: Batches, seed: int) -> Iterator[Batch]:
        """Iterate over the data indefinitely, reseeding from ``seed``."""
        self._chance.bit_generator.state = np.random.PCG64([seed, 1]).state
        yield from map(as_arrays, passes(batches, seed))

    def differentiate(
        self,
        batches: Sequence[Batch],
        names: Collection[str],
        visit: Callable[[str, Array], None],
        *,
        moves: bool = False,
        teacher: Teacher | None = None,
        responsibilities: Array | None = None,
    ) -> tuple[float, Array]:
        """Return loss and outputs; ``visit`` the gradients."""
        inputs, targets = _joined(batches)
        network = self.network
        more = dict[str, Array]()
        if teacher is not None:
            network = network.taught(teacher.weight, teacher.temperature)
            more = {"teacher": teacher.outputs}
        elif responsibilities is not None:
            network = network.weighed
            more = {"responsibilities": responsibilities}
        step = network.step()
        given = step.draw(self._chance, len(targets)) | more
        loss = step.run(inputs, targets, given, moves=moves)
        for name in names:
            if name in step.gradients:
                visit(name, step.gradients[name])
        return loss, step.output()

    def curvature(self, batches: Sequence[Batch], direction: Mapping[str, Array]) -> Tensors:
        """Return the Hessian times a direction."""
        inputs, targets = _joined(batches)
        drawn = self.network.step().draw(self._chance, len(targets))
        return self.network.flow({"input": inputs, "target": targets, **drawn}, direction)

    def take_statistics(self, batches: Batches) -> int:
        """Set the running statistics of batch norms to means over the batches."""
        found = dict[str, list[Array]]()
        passed = 0
        for inputs, targets in map(as_arrays, batches):
            for name, statistics in self.network.statistics(inputs).items():
                found.setdefault(name, []).extend(statistics)
            if not found:
                break
            passed += len(targets)
        self.network.load({name: np.asarray(np.mean(each, axis=0, dtype=np.float64)) for name, each in found.items()})
        return passed

    def evaluate(self, batches: Batches, *, metrics: bool = False) -> Evaluation:
        """Return mean loss, accuracy and metrics."""
        seen = 0.0
        loss_sum = 0.0
        correct = 0
        pairs: list[tuple[Array, Array]] = []
        for inputs, targets in map(as_arrays, batches):
            weight = weight_of(targets, self._ignored)
            if not weight:
                continue
            loss, outputs = self.network.evaluation.answer(inputs, targets)
            seen += weight
            loss_sum += loss * weight
            if self._classification:
                right = outputs.argmax(axis=1) == targets
                correct += int((right if self._ignored is None else right & (targets != self._ignored)).sum())
            if metrics and self._metrics:
                pairs.append((outputs, targets))
        found = measure(self._metrics, pairs, self._ignored)
        return evaluation_of(seen, loss_sum, correct if self._classification else None, found)

    def scores(self, batches: Batches) -> tuple[Array, Array]:
        """Return the model's outputs and their targets."""
        pairs = list(map(as_arrays, batches))
        scores = [self.network.evaluation.answer(inputs, targets)[1] for inputs, targets in pairs]
        return np.concatenate(scores), np.concatenate([targets for _, targets in pairs])

    def likelihoods(self, batches: Batches) -> Array:
        """Return the likelihoods of a mixture's components."""
        return np.concatenate([self.network.likelihoods(*batch) for batch in map(as_arrays, batches)])

    def loss(self, outputs: Array, targets: Array) -> float:
        """Return the loss of given outputs."""
        return self.network.loss(outputs, targets)

    def scaled(self, scale: NDArray[np.float32]) -> OnnxEngine:
        """Return an engine of this model that computes the loss from its outputs times ``scale``."""
        return self._of(self.network.scaled(scale))

    def twin(self) -> OnnxEngine:
        """Return an engine of a copy of the model."""
        return self._of(self.network.twin())

    def narrow(self, mask: NeuronMask, batches: Batches | None) -> OnnxCut:
        """Return the engine of the active neurons."""
        return OnnxCut(Narrow(self.network, mask), self._of)

    def _of(self, network: Network) -> OnnxEngine:
        return OnnxEngine(network, classification=self._classification, metrics=self._metrics, chance=self._chance)


def _known(inputs: Array, targets: Array, ignored: int | None) -> tuple[Array, Array]:
    """Return the samples whose target the loss counts."""
    if ignored is None:
        return inputs, targets
    known = (targets.reshape(len(targets), -1) != ignored).any(axis=1)
    return inputs[known], targets[known]


def _joined(batches: Sequence[Batch]) -> tuple[Array, Array]:
    inputs, targets = (np.concatenate([batch[part] for batch in batches]) for part in (0, 1))
    return inputs, targets


class OnnxCut:
    """A narrow network with its engine."""

    def __init__(self, narrow: Narrow, engine_of: Callable[[Network], OnnxEngine]) -> None:
        self.engine = engine_of(narrow.network)
        self.write_back = narrow.write_back
