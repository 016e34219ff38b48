"""FjORD, the device half: a narrow network of each layer's first neurons, trained at random widths up to its own.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, NeurIPS 2021, arXiv:2102.13451. A device of budget p receives,
trains, sends and uses the network of the first max(1, floor(p n_l)) neurons of each layer. *Ordered dropout* (Algorithm
1): each local step draws a width q uniformly from p and the widths below p in {1/K, 2/K, .., 1} (``width_steps`` K),
and trains the first neurons at that width. *Self-distillation* (section 3.2): the outputs z_p of the device's widest
network teach the drawn one,

    L = CE(z_p, y) + (1 - α) CE(z_q, y) + α T² KL(softmax(z_p / T) ‖ softmax(z_q / T))        if q < p
    L = CE(z_p, y)                                                                            if q = p

with α = ``distil_weight`` and T = ``distil_temperature``, by default 1 as in the paper. Without ``distil``, or without
classes, L = CE(z_q, y). ``widths`` = fixed is the form that FedSPU's paper compares (section 5.1): the device's own
width, without distillation.

Choices beyond the paper:

- The teacher's outputs are constants in the KL term. T² is from arXiv:1503.02531.
- Momentum and weight decay also move weights beyond the drawn width.
- Only steps of the device's own network, including the teacher's, move running statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.flops import training_flops
from sparrow.protocol.manifest import Manifest
from sparrow.protocol.masks import NeuronMask, count_values
from sparrow.protocol.neurons import Narrowing, first_neurons

from ..engines import Engine
from ..engines.training import Batch, LocalResult, Teacher
from . import ActiveNeurons, DeviceMethod, DeviceState, Job, MethodSettings, Trained, own_settings
from .gradients import Gradients, Weights, optimiser_of, rehearsed, take_steps, trained_weights
from .narrow import adapt_narrow, drawn, train_narrow
from .rounds import conclude, evaluate_both

if TYPE_CHECKING:
    from ..engines.rehearsal import Effort, Rehearsal


class Settings(MethodSettings):
    """FjORD's own settings."""

    widths: Literal["uniform", "fixed"]
    width_steps: int
    distil: bool
    distil_weight: float
    distil_temperature: float


def train(job: Job) -> Trained:
    """Train one round; the personal model is zero outside the narrow network."""
    ratio = drawn(job).ratio
    mask = first_neurons(job.manifest, ratio)
    if job.own(Settings).widths == "uniform":
        below = [first_neurons(job.manifest, each) for each in widths_below(ratio, job.own(Settings).width_steps)]
        return train_narrow(job, mask, train=partial(_train_widths, below=below))
    trained = train_narrow(job, mask)
    whole = count_values(job.manifest, mask) == job.manifest.shared_values
    return replace(trained, counts={**trained.counts, "narrow_steps": 0 if whole else trained.steps})


def widths_below(ratio: float, steps: int) -> list[float]:
    """Return the widths 1/steps, 2/steps, .. that are below ``ratio``."""
    return [step / steps for step in range(1, steps) if step / steps < ratio - 1e-9]


def _train_widths(job: Job, below: list[NeuronMask]) -> Trained:
    generator = np.random.default_rng(job.seed("widths"))
    below = _narrower(job.manifest, below)
    done = take_steps_at(job, below, lambda: int(generator.integers(len(below) + 1)))
    concluded = conclude(job, done.result, personal=None, update=None)
    return replace(concluded, flops=done.flops, counts=done.counts)


def _narrower(manifest: Manifest, masks: Sequence[NeuronMask]) -> list[NeuronMask]:
    """Return the masks that omit at least one neuron."""
    return [mask for mask in masks if count_values(manifest, mask) < manifest.shared_values]


@dataclass(frozen=True)
class AtWidths:
    """The result of steps at several widths, their FLOPs, and counts of them."""

    result: LocalResult
    flops: int
    counts: dict[str, int]


def take_steps_at(job: Job, below: Sequence[NeuronMask], draw: Callable[[], int]) -> AtWidths:
    """Train the loaded network as in a round. draw: returns the index in ``below`` of a step's width; the network's own
    is ``len(below)``."""
    engine = job.engine
    own = job.own(Settings)
    widest = len(below)
    distils = job.task.classification and own.distil
    weights = trained_weights(engine)
    optimiser = optimiser_of(job, weights)
    inner = dict[int, _Inner]()
    steps = Counter[int]()
    samples = Counter[int]()

    def step(gradients: Gradients, batches: Iterator[Batch]) -> tuple[float, int]:
        batch = next(batches)
        width = draw()
        found = Weights()
        loss = 0.0
        teacher: Teacher | None = None
        if width == widest or distils:
            loss, found = gradients.of(batch, weights, moves=True)
            if distils:
                assert gradients.outputs is not None, "of the batch"
                teacher = Teacher(gradients.outputs, own.distil_weight, own.distil_temperature)
        if width < widest:
            if width not in inner:
                inner[width] = _Inner(engine, below[width])
            loss += inner[width].add(batch, weights, found, teacher)
            gradients.check(loss, batch)
        optimiser.step(found)
        engine.load(weights)
        steps[width] += 1
        samples[width] += len(batch[1])
        return loss, len(batch[1])

    result = replace(take_steps(job, step), samples=samples.total())
    flops = training_flops(job.manifest, result.samples if distils else samples[widest])
    flops += sum(training_flops(network.manifest, samples[width]) for width, network in inner.items())
    narrow_steps = result.steps - steps[widest]
    distilled = narrow_steps if distils else 0
    counts = {"narrow_steps": narrow_steps, "widths_drawn": len(steps), "distilled_steps": distilled}
    return AtWidths(result, flops, counts)


class _Inner:
    """A network of some of an engine's neurons. Its running statistics are discarded."""

    def __init__(self, engine: Engine, mask: NeuronMask) -> None:
        self._engine = engine.narrow(mask, None).engine
        self._narrowing = Narrowing.of(engine.manifest, mask)
        self.manifest = self._engine.manifest

    def add(self, batch: Batch, weights: Weights, gradients: Weights, teacher: Teacher | None) -> float:
        """Return the loss on a batch with the full network's ``weights``; add the gradients to ``gradients``."""
        specs = {spec.name: spec for spec in self.manifest.tensors if spec.name in weights}
        self._engine.load({name: self._narrowing.take(spec, weights[name]) for name, spec in specs.items()})

        def add(name: str, gradient: NDArray[Any]) -> None:
            block = self._narrowing.blocks[name]
            whole = gradients.setdefault(name, np.zeros_like(weights[name]))
            part = block.take(whole)
            block.put(whole, np.add(part, gradient.reshape(part.shape)))

        return self._engine.differentiate([batch], list(specs), add, teacher=teacher)[0]


def adapt(job: Job) -> DeviceState:
    """Train the narrow part of the finished global model that fits the device's budget."""
    return adapt_narrow(job, train)


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return the effort of rounds at ``budget``."""
    from ..engines.rehearsal import MaskedEffort

    own = own_settings(rehearsal.settings, Settings)
    mask = first_neurons(rehearsal.manifest, budget)
    fixed = MaskedEffort(rehearsal, mask)
    if own.widths == "fixed":
        return fixed
    below = [first_neurons(rehearsal.manifest, each) for each in widths_below(budget, own.width_steps)]
    return _WidthsEffort(rehearsal, fixed, mask, below)


class _WidthsEffort:
    """Steps at each width in turn; the first two need the most memory. fixed: only the device's own width."""

    def __init__(self, rehearsal: Rehearsal, fixed: Effort, mask: NeuronMask, below: Sequence[NeuronMask]) -> None:
        self._rehearsal = rehearsal
        self._mask = mask
        self._below = below
        self.values = fixed.values
        self.judge = fixed.judge

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        """Take steps, the widest first."""
        job, below = self._job(steps, samples)
        draw = partial(next, cycle(reversed(range(len(below) + 1))))
        return self._rehearsal.timed(lambda progress: take_steps_at(replace(job, progress=progress), below, draw))

    def flops(self) -> int:
        """Return the mean over the widths."""
        job, below = self._job(1, None)
        found = list[int]()
        work = (take_steps_at(job, below, partial(int, width)).flops for width in range(len(below) + 1))
        self._rehearsal.timed(lambda progress: found.extend(work))
        return sum(found) // len(found)

    def _job(self, steps: int, samples: int | None) -> tuple[Job, list[NeuronMask]]:
        engine = self._rehearsal.engine(self._mask)
        return rehearsed(self._rehearsal, engine, steps, samples), _narrower(engine.manifest, self._below)


FJORD = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=first_neurons, narrow=True),
    effort=effort,
    acts=("narrow_steps",),
    sums=True,
)
