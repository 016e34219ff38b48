"""The work of a device of every peer, on MNIST's small network.

Plain PyTorch as its tutorials write it, one local epoch, batches of 50, SGD at 0.05. Images stay bytes in memory; a
device's share is scaled when it trains, which takes a hundredth of its time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import peers
from benchmarks.peers import BATCH, LEARNING_RATE

MEAN = 255 * 0.1307
DEVIATION = 255 * 0.3081


class Net(nn.Module):
    """A network [N,1,28,28] -> [N,10] of 21,840 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores before softmax."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        scores: Tensor = self.fc2(x)
        return scores


@dataclass(frozen=True)
class Samples:
    """Images as bytes [N,28,28] and their classes."""

    images: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def scaled(self) -> Tensor:
        """Return images as the network's inputs."""
        return self.images.unsqueeze(1).float().sub_(MEAN).div_(DEVIATION)


def load(file: Path, part: str = "train") -> Samples:
    """Load the part ``train`` or ``test`` of MNIST."""
    return Samples(*map(torch.from_numpy, peers.read(file, part)))


def deal(samples: int, seed: int) -> list[Tensor]:
    """Return the samples of each device."""
    return [torch.from_numpy(share) for share in peers.deal(samples, seed)]


def train(model: nn.Module, samples: Samples, share: Tensor, seed: int) -> float:
    """Train one local epoch over a device's share, in an order from ``seed``; return the processor seconds."""
    start = time.process_time()
    mine = Samples(samples.images[share], samples.targets[share])
    images = mine.scaled()
    targets = mine.targets
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    for begin in range(0, len(targets), BATCH):
        batch = order[begin : begin + BATCH]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), targets[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.process_time() - start


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    """Return the share of right answers."""
    model.eval()
    right = 0
    for begin in range(0, len(samples), 1000):
        part = Samples(samples.images[begin : begin + 1000], samples.targets[begin : begin + 1000])
        right += int((model(part.scaled()).argmax(1) == part.targets).sum())
    return right / len(samples)
