"""Handwritten digits: 1,797 grey images of 8 x 8 pixels, in ``digits.npz`` beside this file.

They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn ships them. In the file, ``pixels`` is uint8
[1797, 8, 8] from 0 to 16 and ``labels`` uint8 [1797].

Devices share the set out among themselves without talking: each deals the same Dirichlet partition and keeps its part.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.tasks import Task, build_seeded
from edge_sdk.tasks.datasets import Dataset
from edge_sdk.tasks.dealing import deal, read_dealing
from edge_sdk.tasks.loading import Arrays, classification


class DigitsNet(nn.Module):
    """Two convolutions with batch norm and two linear layers: [N,1,8,8] pixels in [0,1] -> [N,10] class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores, before softmax."""
        maps = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 2)
        maps = F.max_pool2d(F.relu(self.bn2(self.conv2(maps))), 2)
        return self.out(F.relu(self.fc1(torch.flatten(maps, 1))))  # type: ignore[no-any-return]


def load(data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
    """Return the digits task over one device's part of the images.

    ``data`` is like ``index=2,of=5,alpha=0.3,seed=0`` (see ``dealing``), every entry optional: part 2 (from 0) of 5,
    label skew ``alpha`` of the Dirichlet partition. Without ``index`` the device's name decides, so that a fleet needs
    no numbering. Raises DataError.
    """
    dataset = load_images()
    parts = deal(dataset, read_dealing(data, task="digits", seed=seed, needs_path=False), device=device)
    inputs, targets = torch.from_numpy(dataset.inputs), torch.from_numpy(dataset.targets)
    train, validation, test = (
        Arrays(inputs[index], targets[index]) for index in (parts.train, parts.validation, parts.test)
    )
    return classification("digits", build_seeded(DigitsNet, seed), train, validation, test, batch_size=batch_size)


@cache
def load_images() -> Dataset:
    """Return the images [1797,1,8,8], float32 in [0,1], and their classes. They are read once in a process."""
    with np.load(Path(__file__).with_suffix(".npz"), allow_pickle=False) as stored:
        pixels, labels = stored["pixels"], stored["labels"]
    images = (pixels[:, None] / np.float32(16)).astype(np.float32)
    return Dataset(images, labels.astype(np.int64), people=None, classes=10, published=len(labels))
