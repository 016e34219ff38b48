"""FjORD, the device half: a narrow network of each layer's first neurons, trained at random widths up to its own.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021, arXiv:2102.13451. A device of budget p receives, trains and
sends the network of the first max(1, floor(p n_l)) neurons of each layer, and is judged with it. *Ordered dropout*
(Algorithm 1): each local step draws a width q uniformly from those of {1/K, 2/K, .., 1} (``width_steps`` K; the paper
has K = 5 and 10) that are below p, and p itself, and trains the first neurons at that width alone. *Self-distillation*
(section 3.2): the outputs z_p of the device's widest network teach those of the drawn one,

    L = CE(z_p, y) + (1 - α) CE(z_q, y) + α T² KL(softmax(z_p / T) ‖ softmax(z_q / T))        where q < p
    L = CE(z_p, y)                                                                            where q = p

with α = ``distil_weight`` and T = ``distil_temperature``. The paper finds α = T = 1 best and says that the widest
network is then trained as well in each step, so that its loss is the one for labels: the defaults. Without ``distil``
a step is one on L = CE(z_q, y).

Where the paper is silent, or a choice is ours:

- The teacher's outputs are constants in the KL term. T² keeps its gradients as large at any T (Hinton, Vinyals, Dean,
  arXiv:1503.02531). Tasks that are no classification have no soft outputs: they train as without ``distil``.
- Widths are drawn from a generator of their own, so that batches are those of other methods.
- Weights beyond the drawn width have a gradient of zero in that step; momentum and weight decay move them all the same.
- Batch norm's running statistics differ between widths, and the paper keeps them apart. A device is judged at its own
  width alone, so that only steps of its own network, the teacher's included, move those that are kept and sent; steps
  at other widths normalise by their batches, and keep nothing. Scales and shifts are shared between widths.
- The loss that is reported is the one above.

``widths`` = fixed is the simple form that FedSPU's method card (section 5) compares: the device's own width in every
step, and no distillation.

Counts: ``narrow_steps``, steps on fewer neurons than there were to choose from (the device's own under ``uniform``, the
whole model's under ``fixed``); ``widths_drawn``, different widths of the round, and ``distilled_steps``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from edge_sdk.methods import ActiveNeurons, DeviceMethod, DeviceState, Job, MethodSettings, Trained, own_settings
from edge_sdk.methods.narrow import adapt_narrow, drawn, train_narrow
from edge_sdk.methods.rounds import conclude, evaluate_both
from edge_sdk.protocol.flops import training_flops
from edge_sdk.protocol.manifest import Manifest
from edge_sdk.protocol.masks import NeuronMask, count_values
from edge_sdk.protocol.messages import Assignment, Kind
from edge_sdk.protocol.neurons import first_neurons
from edge_sdk.tasks import Task
from edge_sdk.training.freezing import Freezing
from edge_sdk.training.layout import Layout
from edge_sdk.training.local import LocalResult, take_steps
from edge_sdk.training.narrow import Inner, Narrow
from edge_sdk.training.optimisation import Optimisation
from edge_sdk.training.rehearsal import Effort, MaskedEffort, Rehearsal


class Settings(MethodSettings):
    """FjORD's own settings."""

    widths: Literal["uniform", "fixed"]
    width_steps: int
    distil: bool
    distil_weight: float
    distil_temperature: float


def train(job: Job) -> Trained:
    """Train one round; the personal model is narrow, the rest of it zero.

    Raises BundleError for a payload that does not fit, CannotNarrow for a model that does not run with fewer neurons,
    TrainingDiverged.
    """
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
    """Train the network that is loaded, at widths drawn from its own and those ``below``."""
    generator, below = np.random.default_rng(job.seed("widths")), narrower(job.manifest, below)
    result, flops, counts = take_steps_at(job, below, lambda: int(generator.integers(len(below) + 1)))
    return replace(conclude(job, result, personal=None, update=None), flops=flops, counts=counts)


def narrower(manifest: Manifest, masks: list[NeuronMask]) -> list[NeuronMask]:
    """Return those of the masks that leave any neuron of the manifest's out."""
    return [mask for mask in masks if count_values(manifest, mask) < manifest.shared_values]


def take_steps_at(
    job: Job, below: list[NeuronMask], draw: Callable[[], int]
) -> tuple[LocalResult, int, dict[str, int]]:
    """Train the network that is loaded as in a round; return the result, the FLOPs and the counts.

    draw: returns the place in ``below`` of a step's width; the network's own is the one after the last. Raises
    TrainingDiverged.
    """
    settings, own = job.assignment.settings, job.own(Settings)
    rate, distils = settings.learning_rate_of(job.assignment.round), own.distil and job.task.classification
    layout = Layout(job.model, job.task)
    inner: dict[int, Inner] = {}
    steps: Counter[int] = Counter()
    samples: Counter[int] = Counter()

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, width = layout(inputs, targets), draw()
        steps[width] += 1
        samples[width] += len(targets)
        if width == len(below):
            outputs: Tensor = job.model(inputs)
            return outputs[None] if distils else outputs
        if width not in inner:
            inner[width] = Inner(job.model, job.manifest, below[width])
        narrow = inner[width](inputs)
        return torch.stack([job.model(inputs), narrow]) if distils else narrow

    result = take_steps(
        job.model,
        _distilling(job.task, own) if distils else job.task,
        settings,
        Optimisation(Freezing(job.model, job.manifest, None), settings, learning_rate=rate),
        forward,
        learning_rate=rate,
        seed=job.seed("train"),
        layout=layout,
        progress=job.progress,
    )
    flops = training_flops(job.manifest, result.samples if distils else samples[len(below)])
    flops += sum(training_flops(network.manifest, samples[width]) for width, network in inner.items())
    narrow_steps = result.steps - steps[len(below)]
    counts = {"narrow_steps": narrow_steps, "widths_drawn": len(steps), "distilled_steps": narrow_steps * distils}
    return result, flops, counts


def _distilling(task: Task, own: Settings) -> Task:
    """Return the task whose loss takes outputs [widths, N, classes, ...], those of the device's own width first."""
    weight, temperature = own.distil_weight, own.distil_temperature

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        teacher, *others = outputs.unbind()
        total = task.loss(teacher, targets)
        for student in others:
            wanted, found = ((each / temperature).log_softmax(1) for each in (teacher.detach(), student))
            divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(1).mean()
            total = total + weight * temperature**2 * divergence
            if weight < 1:
                total = total + (1 - weight) * task.loss(student, targets)
        return total

    return replace(task, loss=loss)


def adapt(job: Job) -> DeviceState:
    """Train the narrow part of the finished global model that a device of this budget has, as in a round."""
    return adapt_narrow(job, train)


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return steps as rounds at ``budget`` take them."""
    own, mask = own_settings(rehearsal.settings, Settings), first_neurons(rehearsal.manifest, budget)
    fixed = MaskedEffort(rehearsal, mask)
    if own.widths == "fixed":
        return fixed
    below = [first_neurons(rehearsal.manifest, each) for each in widths_below(budget, own.width_steps)]
    return _WidthsEffort(rehearsal, mask, below, fixed)


class _WidthsEffort:
    """Steps at each width in turn, where a round draws them: the first two hold the most at once."""

    def __init__(self, rehearsal: Rehearsal, mask: NeuronMask, below: list[NeuronMask], fixed: MaskedEffort) -> None:
        self._rehearsal, self._mask, self._below = rehearsal, mask, below
        self.values, self.judge = fixed.values, fixed.judge

    def train(self, steps: int, samples: int | None = None) -> list[float]:
        job, below = self._job(steps, samples)
        return self._rehearsal.timed(
            lambda progress: take_steps_at(replace(job, progress=progress), below, _in_turn(len(below)))
        )

    def flops(self) -> int:
        """Return the mean over the widths."""
        job, below = self._job(1, None)
        with torch.random.fork_rng(devices=[]):
            each = [take_steps_at(job, below, partial(int, width))[1] for width in range(len(below) + 1)]
        return sum(each) // len(each)

    def _job(self, steps: int, samples: int | None) -> tuple[Job, list[NeuronMask]]:
        rehearsal = self._rehearsal
        network = Narrow(rehearsal.model, rehearsal.manifest, self._mask, None)
        settings = rehearsal.settings.model_copy(update={"local_steps": steps, "learning_rate": 0.0})
        job = Job(
            assignment=Assignment(
                assignment_id="rehearsal", kind=Kind.train, round=1, deadline_seconds=0.0, settings=settings
            ),
            manifest=network.manifest,
            task=replace(rehearsal.task, model=network.model, train=[rehearsal.batch(samples)]),
            model=network.model,
            state=DeviceState(),
            received=None,
        )
        return job, narrower(network.manifest, self._below)


def _in_turn(below: int) -> Callable[[], int]:
    """Return a function that gives the places of all widths again and again, the widest first."""
    places = cycle(reversed(range(below + 1)))
    return lambda: next(places)


FJORD = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=first_neurons, narrow=True),
    effort=effort,
    acts=("narrow_steps",),
)
