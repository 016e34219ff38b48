"""Training a network at several widths, one drawn for each step, the widest one teaching the others (FjORD)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from edge_sdk.engines import Progress
from edge_sdk.engines.rehearsal import MaskedEffort, Rehearsal
from edge_sdk.engines.training import LocalResult
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronMask, count_values
from edge_sdk.protocol.messages import FederationSettings
from edge_sdk.tasks import Batches, Task
from edge_sdk.training.engine import TorchEngine
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.layout import Layout
from edge_sdk.training.local import take_steps
from edge_sdk.training.narrow import Inner
from edge_sdk.training.optimisation import Optimisation


@dataclass(frozen=True)
class Distillation:
    """Teaching of narrower networks by the outputs of the widest one (FjORD, section 3.2)."""

    weight: float
    temperature: float

    def loss_of(self, task: Task) -> Task:
        """Return the task whose loss takes outputs [widths, N, classes, ...], those of the widest network first."""

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            teacher, *others = outputs.unbind()
            total: Tensor = task.loss(teacher, targets)
            for student in others:
                wanted, found = ((each / self.temperature).log_softmax(1) for each in (teacher.detach(), student))
                divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(1).mean()
                total = total + self.weight * self.temperature**2 * divergence
                if self.weight < 1:
                    total = total + (1 - self.weight) * task.loss(student, targets)
            return total

        return replace(task, loss=loss)


@dataclass(frozen=True)
class AtWidths:
    """The result of steps at several widths, their FLOPs, and counts of them."""

    result: LocalResult
    flops: int
    counts: dict[str, int]


def take_steps_at(
    engine: TorchEngine,
    batches: Batches,
    settings: FederationSettings,
    below: Sequence[NeuronMask],
    draw: Callable[[], int],
    distillation: Distillation | None,
    *,
    learning_rate: float,
    seed: int,
    progress: Progress = lambda done, total, loss: None,
) -> AtWidths:
    """Train the network that is loaded as in a round.

    draw: returns the place in ``below`` of a step's width; the network's own is the one after the last. Raises
    TrainingDiverged.
    """
    model, manifest, task = engine.model, engine.manifest, replace(engine.task, train=batches)
    layout = Layout(model, task)
    inner: dict[int, Inner] = {}
    steps: Counter[int] = Counter()
    samples: Counter[int] = Counter()

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, width = layout(inputs, targets), draw()
        steps[width] += 1
        samples[width] += len(targets)
        if width == len(below):
            outputs: Tensor = model(inputs)
            return outputs[None] if distillation else outputs
        if width not in inner:
            inner[width] = Inner(model, manifest, below[width])
        narrow = inner[width](inputs)
        return torch.stack([model(inputs), narrow]) if distillation else narrow

    result = take_steps(
        model,
        distillation.loss_of(task) if distillation else task,
        settings,
        Optimisation(Freezing(model, manifest, None), settings, learning_rate=learning_rate),
        forward,
        learning_rate=learning_rate,
        seed=seed,
        layout=layout,
        progress=progress,
    )
    flops = training_flops(manifest, result.samples if distillation else samples[len(below)])
    flops += sum(training_flops(network.manifest, samples[width]) for width, network in inner.items())
    narrow_steps = result.steps - steps[len(below)]
    distilled = narrow_steps if distillation else 0
    counts = {"narrow_steps": narrow_steps, "widths_drawn": len(steps), "distilled_steps": distilled}
    return AtWidths(result, flops, counts)


def narrower(manifest: Manifest, masks: Sequence[NeuronMask]) -> list[NeuronMask]:
    """Return those of the masks that leave any neuron of the manifest's out."""
    return [mask for mask in masks if count_values(manifest, mask) < manifest.shared_values]


class WidthsEffort:
    """Steps at each width in turn, where a round draws them: the first two hold the most at once."""

    def __init__(
        self,
        rehearsal: Rehearsal,
        mask: NeuronMask,
        below: Sequence[NeuronMask],
        distillation: Distillation | None,
    ) -> None:
        fixed = MaskedEffort(rehearsal, mask)
        self._rehearsal, self._mask, self._below, self._distillation = rehearsal, mask, below, distillation
        self.values, self.judge = fixed.values, fixed.judge

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take steps, the widest first."""
        work, places = self._work(steps, samples)
        turns = cycle(reversed(range(places + 1)))
        return self._rehearsal.timed(lambda progress: work(partial(next, turns), progress))

    def flops(self) -> int:
        """Return the mean over the widths."""
        with torch.random.fork_rng(devices=[]):
            work, places = self._work(1, None)
            each = [work(partial(int, width), lambda *step: None).flops for width in range(places + 1)]
        return sum(each) // len(each)

    def _work(self, steps: int, samples: int | None) -> tuple[Callable[[Callable[[], int], Progress], AtWidths], int]:
        """Return a function of a draw and of what is told of progress, and how many narrower widths there are."""
        rehearsal = self._rehearsal
        engine = rehearsal.engine(self._mask)
        assert isinstance(engine, TorchEngine), "these widths are PyTorch's"
        settings = rehearsal.settings.model_copy(update={"local_steps": steps})
        below = narrower(engine.manifest, self._below)

        def work(draw: Callable[[], int], progress: Progress) -> AtWidths:
            batches = [rehearsal.batch(samples)]
            return take_steps_at(
                engine, batches, settings, below, draw, self._distillation, learning_rate=0.0, seed=0, progress=progress
            )

        return work, len(below)
