"""FedEM, the device half: a mixture of models that all devices train, with mixture weights of each device's own.

Marfoq, Neglia, Bellet, Kameni, Vidal, NeurIPS 2021, arXiv:2108.10252, Algorithm 1. In each round, for the components
h_m received and its samples j, device i computes

    E-step   r_mj ∝ π_im exp(-loss(h_m(x_j), y_j)),  Σ_m r_mj = 1
    M-step   π_im = mean of r_mj over j;  train h_m on Σ_j r_mj loss(h_m(x_j), y_j)

with the loss -ln softmax(h_m(x))_y, and predicts Σ_m π_im softmax(h_m(x)). Components are sent; π is kept and starts
uniform. The personal model is the trained mixture; the received components are evaluated with the device's π. A device
without its own model finds π by E- and M-steps with fixed components.

Departures: r is computed batch by batch from the components received, so each epoch after the first costs one more
forward pass. π is the mean over the round's samples. If a task's loss is not cross-entropy, it trains the components,
while r uses their probabilities.
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

# EM with fixed components ends after so many steps, or once no weight moves by more.
MOST_STEPS = 100
SETTLED = 1e-4


def network(task: Task, manifest: Manifest) -> Task:
    """Return the task with the mixture as its model. Raises BadArgument unless it is a classification."""
    # Devices may lack PyTorch.
    from ..training.mixture import Mixture

    if not task.classification:
        raise BadArgument("fedem mixes classifiers, and this task has no classes; join a federation of another method")
    return replace(task, model=Mixture(task.model, components_of(manifest), manifest.aliases))


class Components(MethodSettings):
    """FedEM's setting that devices read."""

    components: int


def compose(
    manifest: Manifest, graphs: Mapping[GraphName, bytes], settings: FederationSettings
) -> tuple[Manifest, dict[GraphName, bytes]]:
    """Return manifest and graphs of the mixture, built from those of one model."""
    # Devices may lack onnx.
    from sparrow.graphs.mixture import mix_all

    number = own_settings(settings, Components).components
    return mixture_of(manifest, number), {**graphs, **mix_all(graphs, manifest, number)}


def responsibilities(likelihoods: NDArray[np.floating], weights: Weights) -> Weights:
    """Return r [N, M] of the E-step, from ln p(y | x) under each component [N, M], and π [M]."""
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
    # Each sample trains every component, after one forward pass for r.
    component = first_component(job.manifest)
    samples = result.samples
    once = training_flops(component, samples) + samples * forward_flops(component)
    return replace(concluded, flops=components_of(job.manifest) * once)


def evaluate(job: Job) -> Evaluated:
    """Evaluate the personal mixture and, if received, the global components under the device's π."""
    if job.state.personal is not None or job.received is None:
        return evaluate_both(job)
    _find_weights(job)
    flops = forward_flops(job.manifest) * count_examples(job.task.train)
    return Evaluated(None, *judge_held_out(job), flops=flops)


def adapt(job: Job) -> DeviceState:
    """Find π for the finished components, and fine-tune them."""
    weights = _find_weights(job)
    if job.assignment.settings.finetune_epochs:
        _train_components(fine_tuning(job), weights, purpose="adapt")
    return replace(job.state, personal=job.engine.read())


def _uniform(manifest: Manifest) -> Weights:
    size = components_of(manifest)
    return np.full(size, 1 / size)


def _find_weights(job: Job) -> Weights:
    """Load the components received and the π that best fits the training data; return π."""
    weights = _uniform(job.manifest)
    job.engine.load({**whole_model(job.manifest, job.received), WEIGHTS: weights})
    likelihoods = job.engine.likelihoods(job.task.train)
    for _ in range(MOST_STEPS):
        before = weights
        weights = responsibilities(likelihoods, weights).mean(axis=0)
        if np.abs(weights - before).max() <= SETTLED:
            break
    job.engine.load({WEIGHTS: weights})
    return weights


def _train_components(job: Job, weights: Weights, purpose: str = "train") -> tuple[LocalResult, Weights]:
    """Train the loaded components; also return the mean responsibilities."""
    trained = trained_weights(job.engine)
    received = job.engine.twin()
    shares_sum = np.zeros(len(weights))
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
