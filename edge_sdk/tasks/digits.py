"""Handwritten digits: 1,797 grey images of 8 x 8 pixels, in ``digits.npz`` in this folder.

The test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, CC BY 4.0), as shipped by scikit-learn: ``pixels``, uint8 [1797, 8, 8] from 0 to 16,
and ``labels``, uint8 [1797].
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import Seeded, Task
from .datasets import Dataset
from .dealing import deal, public_samples, read_dealing
from .loading import Arrays, classification

if TYPE_CHECKING:
    from torch import nn


def load(data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
    """Return the digits task over one device's part of the images.

    data: like ``index=2,of=5,alpha=0.3,seed=0`` (see ``dealing``). Raises DataError if the part has too few images.
    """
    dataset = load_images()
    dealing = read_dealing(data, task="digits", seed=seed, needs_path=False)
    parts = deal(dataset, dealing, device=device)
    public = public_samples(dataset, dealing)
    train, validation, test = (
        Arrays(dataset.inputs[index], dataset.targets[index]) for index in (parts.train, parts.validation, parts.test)
    )
    shared = None if public is None else Arrays(dataset.inputs[public], dataset.targets[public])
    return classification("digits", Seeded(_build), train, validation, test, batch_size=batch_size, public=shared)


@cache
def load_images() -> Dataset:
    """Return the images [1797,1,8,8], float32 in [0,1], and their classes; read once in a process."""
    with np.load(Path(__file__).with_suffix(".npz"), allow_pickle=False) as stored:
        pixels = stored["pixels"]
        labels = stored["labels"]

    images = (pixels[:, None] / np.float32(16)).astype(np.float32)
    return Dataset(images, labels.astype(np.int64), people=None, classes=10, published=len(labels))


def _build() -> nn.Module:
    from .models import DigitsNet

    return DigitsNet()
