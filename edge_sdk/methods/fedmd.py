"""FedMD, the device half: devices learn from the mean of their models' scores on common public samples.

Li, Wang, NeurIPS workshop 2019, arXiv:1910.03581. No weight leaves a device. In its first round a device trains on the
labelled public samples, then on its own ("transfer learning"). In each round of Algorithm 1 it

    digests      trains its model towards the mean scores of all devices on the public samples,
    revisits     trains on its own samples for a round's epochs, and
    communicates sends its model's class scores (logits) on the public samples.

The public set (``Task.public``) must be the same, in the same order, on every device; its first ``public_samples`` are
used.

Departures: the paper draws a public subset per round; here it is fixed, so that a device that missed rounds can still
use the mean. The digest loss is T² KL(softmax(z'/T) ‖ softmax(z/T)) of mean scores z' and own scores z (Hinton et al.,
arXiv:1503.02531); the paper's code uses the mean absolute difference. Transfer learning takes ``public_epochs``. All
devices have one architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.flops import forward_flops, training_flops
from sparrow.protocol.settings import FederationSettings

from ..engines.training import Batch, LocalResult, Teacher
from ..errors import BadArgument
from ..tasks import Task, as_arrays, count_examples
from ..tasks.loading import ArrayBatches, Arrays
from . import DeviceMethod, DeviceState, Job, MethodSettings, Trained, Update, own_settings
from .gradients import Gradients, in_silence, optimiser_of, take_steps, trained_weights
from .merging import whole_model
from .parts import own_tensors
from .rounds import conclude, evaluate_both, fine_tuning, train_loaded


class Settings(MethodSettings):
    """FedMD's own settings."""

    public_samples: int
    public_epochs: int
    digest_epochs: int
    temperature: float


def check_data(task: Task, settings: FederationSettings) -> None:
    """Raise BadArgument without classes or without enough public samples."""
    wanted = own_settings(settings, Settings).public_samples
    if not task.classification:
        raise BadArgument(f"{settings.method} compares class scores, and the task {task.name} has no classes")
    found = 0 if task.public is None else count_examples(task.public)
    if found < wanted:
        raise BadArgument(
            f"{settings.method} needs {wanted} public samples, the same on all devices, and found {found}: add "
            f"public=0.1 or a larger share to --data on every device (in a file of its own, the arrays x_public and "
            f"y_public; in Python, Task(..., public=...)); or create the federation with a smaller "
            f"method_settings.public_samples"
        )


def train(job: Job) -> Trained:
    """Digest, revisit, and send scores."""
    public, result, passed, counts = _learn(job)
    scores, _ = job.engine.scores(public)
    update = Update(np.ascontiguousarray(scores, np.float32).reshape(-1))
    trained = conclude(job, result, personal=job.engine.read(), update=update, counts=counts)
    flops = training_flops(job.manifest, passed) + public.num_examples * forward_flops(job.manifest)
    return replace(trained, flops=flops)


def adapt(job: Job) -> DeviceState:
    """Make a personal model from the last mean scores, and fine-tune it, as in ``fine_tuning``."""
    _learn(fine_tuning(job))
    return replace(job.state, personal=job.engine.read())


def _learn(job: Job) -> tuple[ArrayBatches, LocalResult, int, dict[str, int]]:
    """Train on public samples in the first round, digest the mean if there is one, and revisit. Returns the public
    samples, the result of revisiting, the number of samples trained on, and counts."""
    rules = job.own(Settings)
    public = _public(job)
    mean = next(iter(whole_model(job.manifest, job.received).values()))
    passed = 0
    job.engine.load(own_tensors(job))
    if job.state.personal is None and rules.public_epochs:
        first = in_silence(job.with_settings(local_epochs=rules.public_epochs, local_steps=None))
        passed += train_loaded(replace(first, task=replace(job.task, train=public)), purpose="public").samples
    # The mean is all zero before any device has sent scores.
    digested = _digest(job, public, mean.astype(np.float32)) if mean.any() else 0
    result = train_loaded(job)
    return public, result, passed + digested + result.samples, {"digested": digested}


def _digest(job: Job, public: ArrayBatches, mean: NDArray[np.float32]) -> int:
    """Train the loaded model towards ``mean`` [public samples, classes]; return the number of samples used."""
    rules = job.own(Settings)
    weights = trained_weights(job.engine)
    count = public.num_examples
    optimiser = optimiser_of(job, weights)
    once = in_silence(job.with_settings(local_epochs=1, local_steps=None))
    for epoch in range(rules.digest_epochs):
        order = np.random.Generator(np.random.PCG64(job.seed(f"digest {epoch}"))).permutation(count)
        places = np.array_split(order, len(public))
        taught = (Teacher(mean[place], 1.0, rules.temperature) for place in places)

        def step(
            gradients: Gradients, batches: Iterator[Batch], taught: Iterator[Teacher] = taught
        ) -> tuple[float, int]:
            batch = next(batches)
            loss, found = gradients.of(batch, weights, moves=True, teacher=next(taught))
            optimiser.step(found)
            job.engine.load(weights)
            return loss, len(batch[1])

        shuffled = replace(job.task, train=[public.arrays.take(place) for place in places])
        take_steps(replace(once, task=shuffled), step, purpose=f"digest {epoch}")
    return rules.digest_epochs * count


def _public(job: Job) -> ArrayBatches:
    """Return the public samples in order, in batches as large as those of training."""
    assert job.task.public is not None, "checked before the device enrolled"
    wanted = job.own(Settings).public_samples
    inputs = list[NDArray[np.generic]]()
    targets = list[NDArray[np.generic]]()
    for some, classes in map(as_arrays, job.task.public):
        inputs.append(some)
        targets.append(classes)
        if sum(map(len, targets)) >= wanted:
            break
    size = len(next(iter(job.task.train))[1])
    return ArrayBatches(Arrays(np.concatenate(inputs)[:wanted], np.concatenate(targets)[:wanted]), size)


FEDMD = DeviceMethod(
    train=train, evaluate=evaluate_both, adapt=adapt, check_data=check_data, acts=("digested",), sums=True
)
