"""Batches over arrays in memory, and the usual classification task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparrow.protocol.manifest import Array
from sparrow.reading import Decoded
from sparrow.reading.errors import DataError

from . import Seeded, Task, as_arrays

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Arrays", "classification"]

# Samples per batch without gradients. Larger batches are no faster and need more memory.
EVALUATION_BATCH = 32


def label_names(labels: Array) -> str:
    """Format at most five distinct labels for a message: ``label 7`` or ``labels 7, 9``."""
    found = np.unique(labels)
    names = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
    return f"label{'s' if len(found) > 1 else ''} {names}"


Positions = slice | NDArray[np.intp]


class Samples(Protocol):
    """Samples by position, 0 .. len - 1."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def take(self, chosen: Positions) -> tuple[Array, Array]:
        """Return inputs and targets of ``chosen``, a range or integers [batch], in their order."""

    def all_targets(self) -> Array:
        """Return the targets of all samples, in their order."""


@dataclass(frozen=True)
class Arrays:
    """A device's own samples: inputs [N, ...] or ``Decoded``, targets [N], C-contiguous; tensors become arrays."""

    inputs: Any
    targets: Array

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs)} inputs have {len(self.targets)} targets; give one target per input")
        if len(self.inputs) == 0:
            raise DataError("no samples; give at least one")
        if isinstance(self.inputs, Decoded):
            return
        inputs, targets = as_arrays((self.inputs, self.targets))
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "targets", targets)

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, chosen: Positions) -> tuple[Array, Array]:
        """Return the inputs and targets of ``chosen``."""
        return _take(self.inputs, chosen), _take(self.targets, chosen)

    def all_targets(self) -> Array:
        """Return the targets."""
        return self.targets


@dataclass(frozen=True)
class Scale:
    """Conversion of stored values to float32 (x - mean) / deviation, by channel (axis 1)."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, stored: Array) -> Array:
        """Return a scaled copy of ``stored`` [N, C, ...] of any type."""
        shape = (1, -1, *(1,) * (stored.ndim - 2))
        mean, deviation = (np.array(numbers, np.float32).reshape(shape) for numbers in (self.mean, self.deviation))
        values = stored.astype(np.float32, order="C")
        values -= mean
        values /= deviation
        return values


@dataclass(frozen=True)
class Chosen:
    """The samples ``index`` (integers [n]) of a shared set, never copied whole."""

    inputs: Any
    targets: Array
    index: NDArray[np.intp]
    scale: Scale | None = None

    def __post_init__(self) -> None:
        if len(self.index) == 0:
            raise DataError("no samples; give at least one")

    def __len__(self) -> int:
        return len(self.index)

    def take(self, chosen: Positions) -> tuple[Array, Array]:
        """Return the inputs, scaled if given, and targets of ``chosen``."""
        rows = self.index[chosen]
        inputs = _take(self.inputs, rows)
        return inputs if self.scale is None else self.scale(inputs), np.take(self.targets, rows, axis=0)

    def all_targets(self) -> Array:
        """Return the targets of the chosen samples."""
        return np.take(self.targets, self.index, axis=0)


@dataclass(frozen=True)
class Reshaped:
    """Samples, each reshaped to ``shape``."""

    samples: Samples
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, chosen: Positions) -> tuple[Array, Array]:
        """Return the reshaped inputs and the targets of ``chosen``."""
        inputs, targets = self.samples.take(chosen)
        return inputs.reshape(-1, *self.shape), targets

    def all_targets(self) -> Array:
        """Return the targets."""
        return self.samples.all_targets()


def _take(array: Any, chosen: Positions) -> Any:
    if isinstance(array, Decoded):
        places = range(*chosen.indices(len(array))) if isinstance(chosen, slice) else chosen
        return [array[int(place)] for place in places]
    return array[chosen] if isinstance(chosen, slice) else np.take(array, chosen, axis=0)


@dataclass(frozen=True)
class ArrayBatches:
    """Batches over samples in memory."""

    # A DataLoader collates sample by sample in Python, which costs several training steps for small images.

    arrays: Samples
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch size {self.batch_size}; give at least 1")

    @property
    def num_examples(self) -> int:
        """Samples in one pass."""
        return len(self.arrays)

    @property
    def targets(self) -> Array:
        """The targets of all samples, in their order."""
        return self.arrays.all_targets()

    def __len__(self) -> int:
        """Batches in one pass."""
        whole, rest = divmod(self.num_examples, self.batch_size)
        # Batch norm cannot normalise one sample, so a single one joins the batch before.
        return max(1, whole + (rest > 1))

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        return (self.arrays.take(slice(start, stop)) for start, stop in self._bounds())

    def shuffled(self, generator: np.random.Generator) -> Iterator[tuple[Array, Array]]:
        """Yield one pass in an order drawn from ``generator``."""
        order = generator.permutation(self.num_examples)
        return (self.arrays.take(order[start:stop]) for start, stop in self._bounds())

    def _bounds(self) -> Iterator[tuple[int, int]]:
        last = len(self) - 1
        for number in range(last + 1):
            start = number * self.batch_size
            yield start, self.num_examples if number == last else start + self.batch_size


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of class scores [batch, classes] to class indices [batch], by PyTorch."""
    from torch.nn import functional as F

    return F.cross_entropy(outputs, targets)


@dataclass(frozen=True)
class ScaledError:
    """The loss of a regression: mean of ((output - target) / deviation)², of tensors [batch, 1], by PyTorch.

    deviation: standard deviation of the publisher's training targets.
    """

    deviation: float

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return (((outputs - targets) / self.deviation) ** 2).mean()


def batched(parts: Mapping[str, Samples | None], batch_size: int) -> dict[str, Any]:
    """Return the batches of a task's given parts: field -> batches."""
    sizes = {"validation": EVALUATION_BATCH, "test": EVALUATION_BATCH}
    return {
        use: ArrayBatches(samples, sizes.get(use, batch_size)) for use, samples in parts.items() if samples is not None
    }


def classification(
    name: str,
    model: nn.Module | Seeded | None,
    train: Samples,
    validation: Samples,
    test: Samples | None,
    *,
    batch_size: int,
    public: Samples | None = None,
) -> Task:
    """Return a task of cross-entropy over class indices, on arrays in memory."""
    parts = {"train": train, "validation": validation, "test": test, "public": public}
    return Task(name=name, model=model, loss=cross_entropy, **batched(parts, batch_size))
