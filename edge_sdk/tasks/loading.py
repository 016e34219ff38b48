"""From arrays in memory to a ``Task``: batches, the usual classification task, seeded models.

A ``DataLoader`` collates sample by sample in Python, which for small images costs several times the training step
itself. Arrays that fit in memory are better indexed whole: one permutation per epoch, one gather per batch.

``Arrays`` are a device's own samples. ``Chosen`` are its part of a set that many simulated devices share: the device
holds indices, and what it costs to make numbers of bytes is paid per batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from edge_sdk.protocol.errors import SdkError
from edge_sdk.protocol.manifest import Array
from edge_sdk.tasks import Task
from sparrow.command_line.exits import Exit

EVALUATION_BATCH = 256
"""Samples per batch where no gradient is kept: only memory limits it."""


class DataError(SdkError):
    """The data that the user named cannot be used; the text says what was met, what was wanted and what to do."""


class BadOption(DataError):
    """An option of the data cannot work, whatever the data are."""

    exit_code = Exit.USAGE


class NoData(DataError):
    """There is no such file or folder."""

    exit_code = Exit.NOT_FOUND


def label_names(labels: Array) -> str:
    """Name labels for a message, each once: ``label 7`` or ``labels 7, 9``; of many the first five."""
    found = np.unique(labels)
    names = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
    return f"label{'s' if len(found) > 1 else ''} {names}"


class Samples(Protocol):
    """Samples by position, 0 .. len - 1."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def take(self, chosen: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the positions ``chosen``, in their order: a range or int64
        [batch] on the CPU."""


@dataclass(frozen=True)
class Arrays:
    """Samples and their targets: inputs [N, ...], targets [N]."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs)} inputs have {len(self.targets)} targets; give one target per input")
        if len(self.inputs) == 0:
            raise DataError("there are no samples; give at least one")

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, chosen: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of ``chosen``."""
        if isinstance(chosen, torch.Tensor):
            chosen = chosen.to(self.inputs.device)
        return self.inputs[chosen], self.targets[chosen]


@dataclass(frozen=True)
class Scale:
    """Stored values to what a network wants: float32 (x - mean) / deviation, one entry each per channel (axis 1)."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a scaled copy of ``stored`` [N, C, ...] of any type."""
        shape = (1, -1, *(1,) * (stored.ndim - 2))
        mean, deviation = (
            torch.tensor(numbers, device=stored.device).reshape(shape) for numbers in (self.mean, self.deviation)
        )
        return stored.to(torch.float32, copy=True).sub_(mean).div_(deviation)


@dataclass(frozen=True)
class Chosen:
    """The samples ``index`` (int64 [n]) of a set that others use too, in this order, each batch ``scale``d.

    ``inputs`` [N, ...] of any type and ``targets`` [N] are never copied whole; the index may name a sample twice.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    index: torch.Tensor
    scale: Scale

    def __post_init__(self) -> None:
        if len(self.index) == 0:
            raise DataError("there are no samples; give at least one")

    def __len__(self) -> int:
        return len(self.index)

    def take(self, chosen: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs, scaled, and targets of ``chosen``."""
        rows = self.index[chosen].to(self.inputs.device)
        return self.scale(self.inputs.index_select(0, rows)), self.targets.index_select(0, rows)


@dataclass(frozen=True)
class ArrayBatches:
    """Batches over samples in memory, ``shuffle``d by torch's default generator at the start of each pass.

    No sample is left out: the last batch may be smaller. Only a rest of a single sample joins the batch before it,
    because batch norm cannot normalise one sample by itself (behind a linear layer it refuses to, and elsewhere its
    statistics would be those of one image).
    """

    arrays: Samples
    batch_size: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"the batch size is {self.batch_size}; it must be at least 1")

    @property
    def num_examples(self) -> int:
        """Samples in one pass."""
        return len(self.arrays)

    def __len__(self) -> int:
        """Batches in one pass."""
        whole, rest = divmod(self.num_examples, self.batch_size)
        return max(1, whole + (rest > 1))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(self.num_examples) if self.shuffle else None
        last = len(self) - 1
        for number in range(last + 1):
            start = number * self.batch_size
            stop = self.num_examples if number == last else start + self.batch_size
            yield self.arrays.take(slice(start, stop) if order is None else order[start:stop])


def classification(
    name: str, model: nn.Module, train: Samples, validation: Samples, test: Samples | None, *, batch_size: int
) -> Task:
    """Return a task of cross-entropy over class indices, on arrays in memory."""
    return Task(
        name=name,
        model=model,
        loss=F.cross_entropy,
        train=ArrayBatches(train, batch_size, shuffle=True),
        validation=ArrayBatches(validation, EVALUATION_BATCH, shuffle=False),
        test=None if test is None else ArrayBatches(test, EVALUATION_BATCH, shuffle=False),
    )
