"""Public data sets: images, human activities, and a text.

``data`` is like ``PATH,partition=dirichlet,alpha=0.1,index=3,of=100`` (see ``dealing``); PATH is a file or folder in a
format of ``formats``. Nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from sparrow.places import expanded
from sparrow.protocol.manifest import Array

from . import Seeded, Task, UnknownTask
from .corruption import PUBLISHED, Images, corrupt, read_published
from .datasets import Dataset
from .dealing import Dealing, deal, place, public_samples, read_dealing
from .formats import SampleFormat, read_dataset
from .loading import Chosen, Scale, classification
from .partition import Index

if TYPE_CHECKING:
    from torch import nn

MNIST = SampleFormat("mnist", (1, 28, 28), 10, "MNIST (LeCun, Cortes and Burges, yann.lecun.com/exdb/mnist)")
CIFAR10 = SampleFormat("cifar10", (3, 32, 32), 10, "CIFAR-10 (Krizhevsky 2009, www.cs.toronto.edu/~kriz/cifar.html)")
EMNIST = SampleFormat(
    "emnist",
    (1, 28, 28),
    62,
    "EMNIST ByClass (Cohen et al. 2017, www.nist.gov/itl/products-and-services/emnist-dataset)",
)
FEMNIST = SampleFormat("femnist", (1, 28, 28), 62, "FEMNIST of LEAF (Caldas et al. 2018, leaf.cmu.edu)")
CIFAR100 = SampleFormat(
    "cifar100", (3, 32, 32), 100, "CIFAR-100 (Krizhevsky 2009, www.cs.toronto.edu/~kriz/cifar.html)"
)
PACS = SampleFormat(
    "pacs", (3, 64, 64), 7, "PACS (Li et al. 2017: photos, art paintings, cartoons, sketches), scaled to 64 x 64 pixels"
)
UCI_HAR = SampleFormat(
    "uci_har",
    (9, 128),
    6,
    "that of Anguita et al. (phones, UCI Machine Learning Repository 2012), in windows of 128 samples at 50 Hz, half "
    "overlapping",
    pixels=False,
    archives=("har_uci.npz", "uci_har.npz"),
)
SHAKESPEARE = SampleFormat("shakespeare", (80,), 65, "Shakespeare's plays by speaking role, as text, start and role")
HAR = SampleFormat(
    "har",
    (6, 64),
    5,
    "that of Matey-Sanz, Casteleyn and Granell (phones and watches, Data in Brief 2023), in windows of 64 samples at "
    "50 Hz, half overlapping",
    pixels=False,
    archives=("har_watch_phone.npz", "har.npz"),
)


@dataclass(frozen=True)
class Choice:
    """A network and the scaling (x - mean) / deviation of its inputs of ``shape``."""

    # Name of the model's function in ``models``.
    network: str
    shape: tuple[int, ...]
    # One entry per channel, in the units of the stored samples (grey levels 0..255, or the sensor's).
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    # Number of trainable values.
    parameters: int

    def build(self) -> nn.Module:
        """Return the network, which needs PyTorch."""
        from . import models

        made: nn.Module = getattr(models, self.network)()
        return made


def _grey_levels(*shares: float) -> tuple[float, ...]:
    return tuple(255 * share for share in shares)


_MNIST = ((1, 28, 28), _grey_levels(0.1307), _grey_levels(0.3081))
_CIFAR = ((3, 32, 32), _grey_levels(0.4914, 0.4822, 0.4465), _grey_levels(0.2023, 0.1994, 0.2010))
_CIFAR_HALF = ((3, 32, 32), _grey_levels(0.5, 0.5, 0.5), _grey_levels(0.5, 0.5, 0.5))

_BYTES = ((1, 28, 28), (0.0,), (255.0,))
_PACS = ((3, 64, 64), _grey_levels(0.485, 0.456, 0.406), _grey_levels(0.229, 0.224, 0.225))
_TEXT = ((80,), (0.0,) * 80, (1.0,) * 80)

# Over all 7,226 windows of the public set: m/s^2 along x, y, z (gravity included, hence the means), then rad/s.
_HAR = ((6, 64), (-5.0153, -1.5459, 0.2286, -0.0026, 0.0153, 0.0223), (5.2587, 6.4453, 4.0262, 1.3970, 1.2346, 1.0315))

# Over all 10,299 windows of UCI HAR: body acceleration (g), rotation (rad/s), and acceleration with gravity (g).
_UCI_HAR = (
    (9, 128),
    (-0.0007, -0.0003, -0.0002, -0.0034, -0.0002, 0.0009, 0.8083, 0.0218, 0.0848),
    (0.1919, 0.1219, 0.1038, 0.4039, 0.3705, 0.254, 0.412, 0.3973, 0.3443),
)

MODELS: dict[str, dict[str, Choice]] = {
    "mnist": {
        "small": Choice("mnist_small", *_MNIST, parameters=21_840),
        "fedsgc": Choice("mnist_fedsgc", *_MNIST, parameters=261_840),
        "dmpfl": Choice("mnist_dmpfl", *_MNIST, parameters=1_663_370),
        "leaf": Choice("mnist_leaf", *_MNIST, parameters=2_171_786),
    },
    "emnist": {
        "fedspu": Choice("emnist_fedspu", *_BYTES, parameters=64_722),
        "leaf": Choice("emnist_leaf", *_MNIST, parameters=2_278_334),
    },
    "femnist": {"leaf": Choice("emnist_leaf", *_MNIST, parameters=2_278_334)},
    "cifar10": {
        "fedspu": Choice("cifar10_fedspu", *_CIFAR_HALF, parameters=134_902),
        "fedsgc": Choice("cifar10_fedsgc", *_CIFAR, parameters=232_970),
        "dmpfl": Choice("cifar10_dmpfl", *_CIFAR, parameters=797_962),
        "pfedgate": Choice("cifar10_pfedgate", *_CIFAR, parameters=256_830),
    },
    "cifar100": {"pfedgate": Choice("cifar100_pfedgate", *_CIFAR, parameters=3_537_444)},
    "har": {"small": Choice("har_small", *_HAR, parameters=57_125)},
    "uci_har": {
        "small": Choice("uci_har_small", *_UCI_HAR, parameters=90_438),
        "dmpfl": Choice("uci_har_dmpfl", *_UCI_HAR, parameters=328_838),
    },
    "pacs": {
        "resnet18": Choice("pacs_resnet18", *_PACS, parameters=11_180_103),
        "small": Choice("pacs_small", *_PACS, parameters=156_455),
    },
    "shakespeare": {
        "small": Choice("shakespeare_small", *_TEXT, parameters=79_561),
        "leaf": Choice("shakespeare_leaf", *_TEXT, parameters=815_945),
    },
}
"""Task -> name of the model -> model; the first one is the default."""

# Tasks whose models are published by devices, because their training steps are too large to ship with coordinators.
BY_DEVICES = ("pacs", "shakespeare")


def full_name(task: str, model: str) -> str:
    """Return the full name of a task; the default model is left out, as in ``mnist`` and ``mnist:leaf``."""
    return task if model == next(iter(MODELS[task])) else f"{task}:{model}"


def load(
    wanted: SampleFormat,
    data: str | None,
    *,
    device: str,
    seed: int,
    batch_size: int,
    model: str | None = None,
    partition: str = "dirichlet",
) -> Task:
    """Return the task of one of these sets: a ``TaskLoader`` after its first argument.

    partition: the default. Raises DataError, and UnknownTask for an unknown ``model``.
    """
    choices = MODELS[wanted.task]
    model = next(iter(choices)) if model is None else model
    if model not in choices:
        raise UnknownTask(
            f"the task {wanted.task} has no model {model!r}; choose from "
            f"{', '.join(full_name(wanted.task, name) for name in choices)}"
        )
    choice = choices[model]
    dealing = read_dealing(
        data, task=wanted.task, seed=seed, partition=partition, corruptible=wanted.pixels and len(wanted.shape) == 3
    )
    dataset = read_dataset(dealing.path, wanted)
    parts = deal(dataset, dealing, device=device)
    public = public_samples(dataset, dealing)
    scale = Scale(choice.mean, choice.deviation)
    train, validation, test = (
        Chosen(dataset.inputs, dataset.targets, index, scale) for index in (parts.train, parts.validation, parts.test)
    )
    if dealing.corruption is not None:
        images = _corrupted(dataset, dealing, parts.test, device=device)
        test = Chosen(images, dataset.targets[parts.test], np.arange(len(images)), scale)
    return classification(
        full_name(wanted.task, model),
        Seeded(choice.build),
        train,
        validation,
        test,
        batch_size=batch_size,
        public=None if public is None else Chosen(dataset.inputs, dataset.targets, public, scale),
    )


load_mnist = partial(load, MNIST)
load_cifar10 = partial(load, CIFAR10)
load_emnist = partial(load, EMNIST)
load_femnist = partial(load, FEMNIST, partition="person")
load_cifar100 = partial(load, CIFAR100)
load_pacs = partial(load, PACS, partition="person")
load_har = partial(load, HAR, partition="person")
load_uci_har = partial(load, UCI_HAR, partition="person")
load_shakespeare = partial(load, SHAKESPEARE, partition="person")


def _corrupted(dataset: Dataset, dealing: Dealing, test: Index, *, device: str) -> Array:
    name = str(dealing.corruption)
    own = np.moveaxis(cast(Images, dataset.inputs[test]), 1, 3)
    if name in PUBLISHED:
        start = dataset.published
        folder = expanded(str(dealing.path))
        images = read_published(folder, name, dealing.severity, dataset.targets[start:], shape=own.shape[1:])
        images = images[test - start]
    else:
        index, _ = place(dataset, dealing, device=device)
        images = corrupt(own, name, dealing.severity, seed=dealing.seed, device=index)
    return np.ascontiguousarray(np.moveaxis(images, 3, 1))
