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

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from edge_sdk.methods import (
    ActiveNeurons,
    DeviceMethod,
    DeviceState,
    Job,
    MethodSettings,
    Trained,
    own_settings,
    torch_engine,
)
from edge_sdk.methods.narrow import adapt_narrow, drawn, train_narrow
from edge_sdk.methods.rounds import conclude, evaluate_both
from edge_sdk.protocol.masks import NeuronMask, count_values
from edge_sdk.protocol.neurons import first_neurons

if TYPE_CHECKING:
    from edge_sdk.engines.rehearsal import Effort, Rehearsal
    from edge_sdk.training.widths import Distillation


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
    from edge_sdk.training.widths import narrower, take_steps_at

    generator, below = np.random.default_rng(job.seed("widths")), narrower(job.manifest, below)
    settings = job.assignment.settings
    done = take_steps_at(
        torch_engine(job),
        job.task.train,
        settings,
        below,
        lambda: int(generator.integers(len(below) + 1)),
        _distillation(job.own(Settings)) if job.task.classification else None,
        learning_rate=settings.learning_rate_of(job.assignment.round),
        seed=job.seed("train"),
        progress=job.progress,
    )
    concluded = conclude(job, done.result, personal=None, update=None)
    return replace(concluded, flops=done.flops, counts=done.counts)


def _distillation(own: Settings) -> Distillation | None:
    from edge_sdk.training.widths import Distillation

    return Distillation(own.distil_weight, own.distil_temperature) if own.distil else None


def adapt(job: Job) -> DeviceState:
    """Train the narrow part of the finished global model that a device of this budget has, as in a round."""
    return adapt_narrow(job, train)


def effort(rehearsal: Rehearsal, budget: float) -> Effort:
    """Return steps as rounds at ``budget`` take them."""
    from edge_sdk.engines.rehearsal import MaskedEffort
    from edge_sdk.training.widths import WidthsEffort

    own, mask = own_settings(rehearsal.settings, Settings), first_neurons(rehearsal.manifest, budget)
    if own.widths == "fixed":
        return MaskedEffort(rehearsal, mask)
    below = [first_neurons(rehearsal.manifest, each) for each in widths_below(budget, own.width_steps)]
    return WidthsEffort(rehearsal, mask, below, _distillation(own) if rehearsal.task.classification else None)


FJORD = DeviceMethod(
    train=train,
    evaluate=evaluate_both,
    adapt=adapt,
    active=ActiveNeurons(sample=first_neurons, narrow=True),
    effort=effort,
    engines=("torch",),
    acts=("narrow_steps",),
)
