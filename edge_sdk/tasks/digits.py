"""scikit-learn's handwritten digits: 1797 grey images of 8 x 8 pixels, bundled with the library, nothing to download.

Devices share the set out among themselves without talking: each deals the same Dirichlet partition and keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.protocol.manifest import Array
from edge_sdk.tasks import Task
from edge_sdk.tasks.loading import Arrays, DataError, build_seeded, classification
from edge_sdk.tasks.partition import dirichlet, split


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


@dataclass(frozen=True)
class Part:
    """Which part of the digits a device holds: part ``index``, counted from 0, of a partition into ``of``."""

    index: int
    of: int
    alpha: float
    seed: int

    def __post_init__(self) -> None:
        if self.of < 1:
            raise DataError(f"--data: of={self.of}; the digits are dealt to at least 1 device")
        if not 0 <= self.index < self.of:
            raise DataError(
                f"--data: index={self.index} of {self.of} parts; parts are counted from 0 to {self.of - 1}, "
                f"choose one of them or set of="
            )


def load(data: str | None, *, device: str, seed: int, batch_size: int) -> Task:
    """The digits task over one device's part of the images.

    ``data`` is like ``index=2,of=5,alpha=0.3,seed=0``, every entry optional: part 2 (from 0) of 5, label skew
    ``alpha`` of the Dirichlet partition. Without ``index`` the device's name decides, so that a fleet needs no
    numbering, though two devices may then hold the same part. Raises DataError.
    """
    part = parse_part(data, device=device, seed=seed)
    images, labels = _digits()
    mine = dirichlet(labels, part.of, part.alpha, part.seed)[part.index]
    parts = split(len(mine), part.seed)
    train, validation, test = (
        Arrays(torch.from_numpy(images[mine[index]]), torch.from_numpy(labels[mine[index]]))
        for index in (parts.train, parts.validation, parts.test)
    )
    return classification("digits", build_seeded(DigitsNet, seed), train, validation, test, batch_size=batch_size)


def parse_part(data: str | None, *, device: str, seed: int) -> Part:
    """Read ``index=..,of=..,alpha=..,seed=..``; defaults: the part that the name hashes to, 10, 0.3 and ``seed``."""
    readers: dict[str, Callable[[str], float]] = {"index": int, "of": int, "alpha": float, "seed": int}
    given: dict[str, float] = {}
    for entry in (data or "").split(","):
        if not entry.strip():
            continue
        key, equals, text = (word.strip() for word in entry.partition("="))
        if key not in readers or not equals:
            raise DataError(
                f"--data: {entry.strip()!r} is not understood; digits takes index, of, alpha and seed, "
                f"as in index=2,of=5,alpha=0.3"
            )
        if key in given:
            raise DataError(f"--data: {key} is given twice; give it once")
        try:
            given[key] = readers[key](text)
        except ValueError:
            wanted = "a number" if key == "alpha" else "a whole number"
            raise DataError(f"--data: {key}={text}; {key} must be {wanted}, as in index=2,of=5,alpha=0.3") from None
    of = int(given.get("of", 10))
    hashed = int.from_bytes(hashlib.sha256(device.encode()).digest()[:8], "big") % max(of, 1)
    return Part(int(given.get("index", hashed)), of, given.get("alpha", 0.3), int(given.get("seed", seed)))


@cache
def _digits() -> tuple[Array, Array]:
    """Images [1797,1,8,8] float32 in [0,1] and labels [1797] int64; read once for a fleet of simulated devices."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)  # pixels 0..16
    return (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)
