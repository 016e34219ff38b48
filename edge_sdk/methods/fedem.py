"""FedEM, the device half: a mixture of models that all devices train, and each device's own weights of it.

Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021,
arXiv:2108.10252. In each round of its Algorithm 1 device i has, for the components h_m received and its samples j,

    E-step   r_mj ∝ π_im exp(-loss(h_m(x_j), y_j)),  Σ_m r_mj = 1
    M-step   π_im = mean of r_mj over j;  h_m is trained on Σ_j r_mj loss(h_m(x_j), y_j)

with the loss -ln softmax(h_m(x))_y, and predicts Σ_m π_im softmax(h_m(x)). The components go up; π stays, and begins
uniform. The personal model is the mixture as training has left it; beside it the components received are judged, with
the device's π. A device without a model of its own finds its π by E- and M-steps that leave the components as they are.

Departures: the r of a batch are computed when it comes, by the components received, which gives the same r as computing
all of them first: a task's data may come in any order. So π is the mean over the samples that the round trains on, in
whole epochs all alike, and each epoch after the first costs a forward pass more. A task's loss other than cross-entropy
is what components are trained on, while r goes by their probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.flops import forward_flops, training_flops
from sparrow.protocol.manifest import GraphName, Manifest
from sparrow.protocol.masks import pack
from sparrow.protocol.mixture import SMALLEST_WEIGHT, WEIGHTS, components_of, first_component, mixture_of
from sparrow.protocol.settings import FederationSettings

from ..engines.training import Batch, LocalResult
from ..errors import BadArgument
from ..tasks import Task, count_examples
from . import DeviceMethod, DeviceState, Evaluated, Job, MethodSettings, Trained, Update, own_settings
from .gradients import Gradients, optimiser_of, take_steps, trained_weights
from .merging import whole_model
from .rounds import conclude, evaluate_both, fine_tuning, judge_held_out

Weights = NDArray[np.float64]
"""π, or the responsibilities of samples: [..., M], of sum 1."""

MOST_STEPS, SETTLED = 100, 1e-4
"""Of EM on components that stay: so many steps, or until no weight moves by more."""


def network(task: Task, manifest: Manifest) -> Task:
    """Return the task with the mixture in its model's place. Raises BadArgument where it is no classification."""
    from ..training.mixture import Mixture  # here, because devices need no PyTorch

    if not task.classification:
        raise BadArgument("fedem mixes classifiers, and this task has no classes; join a federation of another method")
    return replace(task, model=Mixture(task.model, components_of(manifest), manifest.aliases))


class Components(MethodSettings):
    """FedEM's setting that devices read."""

    components: int


def compose(
    manifest: Manifest, graphs: Mapping[GraphName, bytes], settings: FederationSettings
) -> tuple[Manifest, dict[GraphName, bytes]]:
    """Return the mixture's manifest, and its graphs of those of one model."""
    from sparrow.graphs.mixture import mix_all  # here, because it needs onnx

    number = own_settings(settings, Components).components
    return mixture_of(manifest, number), {**graphs, **mix_all(graphs, manifest, number)}


def responsibilities(likelihoods: NDArray[np.floating], weights: Weights) -> Weights:
    """Return the E-step: r [N, M], of ln p(y | x) under each component [N, M], and π [M]."""
    joint = likelihoods.astype(np.float64) + np.log(np.maximum(weights, SMALLEST_WEIGHT))
    shares = np.exp(joint - joint.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def train(job: Job) -> Trained:
    """Train one round."""
    personal = job.state.personal or {}
    before = np.asarray(personal.get(WEIGHTS, _uniform(job.manifest)), np.float64)
    job.engine.load({**personal, **whole_model(job.manifest, job.received), WEIGHTS: before})
    result, after = _train_components(job, before)
    job.engine.load({WEIGHTS: after})
    mixture = job.engine.read()
    counts = {
        "mixture_moved": int(np.abs(after - before).max() > SETTLED),
        "components_used": int((after >= 0.5 / len(after)).sum()),
    }
    concluded = conclude(job, result, personal=mixture, update=Update(pack(job.manifest, mixture, None)), counts=counts)
    # Every component is trained on each sample, and judges it before.
    component, samples = first_component(job.manifest), result.samples
    once = training_flops(component, samples) + samples * forward_flops(component)
    return replace(concluded, flops=components_of(job.manifest) * once)


def evaluate(job: Job) -> Evaluated:
    """Judge the personal mixture and, where the payload brings them, the global components under the device's π."""
    if job.state.personal is not None or job.received is None:
        return evaluate_both(job)
    _find_weights(job)
    flops = forward_flops(job.manifest) * count_examples(job.task.train)
    return Evaluated(None, *judge_held_out(job), flops=flops)


def adapt(job: Job) -> DeviceState:
    """Find π for the finished components and, with ``finetune_epochs``, train a copy of these as in a round."""
    weights = _find_weights(job)
    if job.assignment.settings.finetune_epochs:
        _train_components(fine_tuning(job), weights, purpose="adapt")
    return replace(job.state, personal=job.engine.read())


def _uniform(manifest: Manifest) -> Weights:
    size = components_of(manifest)
    return np.full(size, 1 / size)


def _find_weights(job: Job) -> Weights:
    """Load the components received, and the π that fits them best on training data; return it."""
    weights = _uniform(job.manifest)
    job.engine.load({**whole_model(job.manifest, job.received), WEIGHTS: weights})
    likelihoods = job.engine.likelihoods(job.task.train)
    for _ in range(MOST_STEPS):
        before, weights = weights, responsibilities(likelihoods, weights).mean(axis=0)
        if np.abs(weights - before).max() <= SETTLED:
            break
    job.engine.load({WEIGHTS: weights})
    return weights


def _train_components(job: Job, weights: Weights, purpose: str = "train") -> tuple[LocalResult, Weights]:
    """Train the components that are loaded, each sample by its responsibilities; return the mean of these, too."""
    trained, received, shares_sum = trained_weights(job.engine), job.engine.twin(), np.zeros(len(weights))
    optimiser = optimiser_of(job, trained)

    def step(gradients: Gradients, batches: Iterator[Batch]) -> tuple[float, int]:
        nonlocal shares_sum
        batch = next(batches)
        shares = responsibilities(received.likelihoods([batch]), weights)
        loss, found = gradients.of(batch, trained, moves=True, responsibilities=shares.astype(np.float32))
        optimiser.step(found)
        job.engine.load(trained)
        shares_sum = shares_sum + shares.sum(axis=0)
        return loss, len(batch[1])

    result = take_steps(job, step, purpose=purpose)
    return result, shares_sum / result.samples


FEDEM = DeviceMethod(
    train=train,
    evaluate=evaluate,
    adapt=adapt,
    network=network,
    mixes_global=True,
    acts=("mixture_moved",),
    compose=compose,
    sums=True,
)
