"""The same federated averaging on Flower's simulation and in a plain PyTorch loop, for comparison with our fleet.

This module has the settings and data of the common work: MNIST on 100 devices with equal shares, FedAvg with 10 devices
per round. ``work`` trains it in plain PyTorch; ``memory`` samples any command from outside.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DEVICES = 100
COHORT = 10
BATCH = 50
LEARNING_RATE = 0.05


def read(file: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images [N,28,28] and classes [N] of a part, ``train`` or ``test``, of an npz file with x_train,
    y_train, x_test and y_test."""
    with np.load(file, allow_pickle=False) as arrays:
        return arrays[f"x_{part}"], arrays[f"y_{part}"].astype(np.int64)


def deal(samples: int, seed: int) -> list[NDArray[np.int64]]:
    """Return the samples of each device: a seeded permutation of all, cut into equal shares."""
    order = np.random.default_rng(seed).permutation(samples)
    share = samples // DEVICES
    return [order[device * share : (device + 1) * share] for device in range(DEVICES)]
