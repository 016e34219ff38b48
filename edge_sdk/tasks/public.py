"""Public data sets that a federation's devices share out among themselves: MNIST, CIFAR-10, and human activities.

``data`` is like ``PATH,partition=dirichlet,alpha=0.1,index=3,of=100`` (see ``dealing``); PATH is a file or folder in a
format of ``formats``. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import torch

from edge_sdk.protocol.manifest import Array
from edge_sdk.tasks import Task, UnknownTask, build_seeded
from edge_sdk.tasks.corruption import PUBLISHED, Images, corrupt, read_published
from edge_sdk.tasks.datasets import Dataset, read_dataset
from edge_sdk.tasks.dealing import Dealing, deal, place, read_dealing
from edge_sdk.tasks.formats import SampleFormat
from edge_sdk.tasks.loading import Chosen, Scale, classification
from edge_sdk.tasks.models import MODELS, full_name
from edge_sdk.tasks.partition import Index

MNIST = SampleFormat(
    "mnist",
    (1, 28, 28),
    classes=10,
    pixels=True,
    archives=("mnist.npz",),
    described="MNIST (LeCun, Cortes and Burges, yann.lecun.com/exdb/mnist)",
)
CIFAR10 = SampleFormat(
    "cifar10",
    (3, 32, 32),
    classes=10,
    pixels=True,
    archives=("cifar10.npz",),
    described="CIFAR-10 (Krizhevsky 2009, www.cs.toronto.edu/~kriz/cifar.html)",
)
HAR = SampleFormat(
    "har",
    (6, 64),
    classes=5,
    pixels=False,
    archives=("har_watch_phone.npz", "har.npz"),
    described="that of Matey-Sanz, Casteleyn and Granell (phones and watches, Data in Brief 2023), in windows of 64 "
    "samples at 50 Hz, half overlapping",
)


def load_mnist(data: str | None, *, device: str, seed: int, batch_size: int, model: str = "small") -> Task:
    """Handwritten digits, 28 x 28 grey levels. Raises DataError, and UnknownTask for a ``model`` that is not there."""
    return _load(MNIST, model, data, device=device, seed=seed, batch_size=batch_size)


def load_cifar10(data: str | None, *, device: str, seed: int, batch_size: int, model: str = "fedspu") -> Task:
    """Photographs of ten kinds of things, 32 x 32 in colour. Raises as ``load_mnist``."""
    return _load(CIFAR10, model, data, device=device, seed=seed, batch_size=batch_size)


def load_har(data: str | None, *, device: str, seed: int, batch_size: int, model: str = "small") -> Task:
    """Load the task of a person's activity, from 1.28 s of acceleration and rotation; dealt by person by default."""
    return _load(HAR, model, data, device=device, seed=seed, batch_size=batch_size, partition="person")


def _load(
    wanted: SampleFormat,
    model: str,
    data: str | None,
    *,
    device: str,
    seed: int,
    batch_size: int,
    partition: str = "dirichlet",
) -> Task:
    choices = MODELS[wanted.task]
    if model not in choices:
        raise UnknownTask(
            f"the task {wanted.task} has no model {model!r}; there are "
            f"{', '.join(full_name(wanted.task, name) for name in choices)}"
        )
    choice = choices[model]
    dealing = read_dealing(
        data, task=wanted.task, seed=seed, partition=partition, corruptible=wanted.pixels and len(wanted.shape) == 3
    )
    dataset = read_dataset(dealing.path, wanted)
    parts = deal(dataset, dealing, device=device)
    inputs, targets = torch.from_numpy(dataset.inputs), torch.from_numpy(dataset.targets)
    scale = Scale(choice.mean, choice.deviation)
    train, validation, test = (
        Chosen(inputs, targets, torch.from_numpy(index), scale) for index in (parts.train, parts.validation, parts.test)
    )
    if dealing.corruption is not None:
        images = _corrupted(dataset, dealing, parts.test, device=device)
        test = Chosen(torch.from_numpy(images), targets[test.index], torch.arange(len(images)), scale)
    return classification(
        full_name(wanted.task, model),
        build_seeded(choice.build, seed),
        train,
        validation,
        test,
        batch_size=batch_size,
    )


def _corrupted(dataset: Dataset, dealing: Dealing, test: Index, *, device: str) -> Array:
    """Return the test images as ``dealing`` wants them: uint8 [n, C, H, W]. Raises DataError."""
    name = str(dealing.corruption)
    own = np.moveaxis(cast(Images, dataset.inputs[test]), 1, 3)
    if name in PUBLISHED:
        start, folder = dataset.published, Path(str(dealing.path)).expanduser()
        images = read_published(folder, name, dealing.severity, dataset.targets[start:], shape=own.shape[1:])
        images = images[test - start]
    else:
        index, _ = place(dataset, dealing, device=device)
        images = corrupt(own, name, dealing.severity, seed=dealing.seed, device=index)
    return np.ascontiguousarray(np.moveaxis(images, 3, 1))
