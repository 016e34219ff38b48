"""int8 in transit: an update as its difference from the payload, with a quarter of fp32's bytes.

Packed values are divided into *rows*: the active weights of one output neuron, or a whole vector (biases, norms). A
row's largest magnitude gives its scale, s = max|x|/127, and each value becomes an integer multiple of the scale,
rounded at random so that E[q]·s = x. The rounding residual is added to the device's next difference (error feedback;
Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .blocks import Runs
from .elements import Points
from .manifest import Manifest
from .masks import Mask, blocks

LARGEST = 127


def row_lengths(manifest: Manifest, mask: Mask | None) -> NDArray[np.intp]:
    """Return the number of packed values of each non-empty row, in order; their sum is ``count_values``."""
    lengths: list[NDArray[np.intp]] = []
    for spec, block in blocks(manifest, mask):
        if block.size == 0:
            continue
        # By shape, not by view, which has an additional axis behind a flatten.
        if len(spec.shape) < 2:
            lengths.append(np.array([block.size]))
        elif isinstance(block, Points):
            rows = block.view[0]
            columns = math.prod(block.view[1:])
            counts = np.diff(np.searchsorted(block.index, np.arange(rows + 1) * columns))
            lengths.append(counts[counts > 0])
        elif isinstance(block, Runs):
            ends = np.arange(spec.shape[0] + 1) * math.prod(spec.shape[1:])
            counts = np.diff(sum(np.clip(ends - start, 0, stop - start) for start, stop in block.spans))
            lengths.append(counts[counts > 0])
        else:
            rows = block.shape[0]
            lengths.append(np.full(rows, block.size // rows))
    return np.concatenate(lengths).astype(np.intp) if lengths else np.zeros(0, dtype=np.intp)


@dataclass(frozen=True)
class Quantised:
    """Integers int8 [n] in -127..127, and the scales of their rows, float32 [rows], finite and not negative."""

    numbers: NDArray[np.int8]
    scales: NDArray[np.float32]

    def values(self, lengths: NDArray[np.intp]) -> NDArray[np.float32]:
        """Return the values, float32 [n], with rows of ``lengths``."""
        return np.asarray(self.numbers * np.repeat(self.scales, lengths), dtype=np.float32)


def quantise(values: NDArray[np.float32], lengths: NDArray[np.intp], seed: int) -> Quantised:
    """Return finite ``values`` [n], with rows of ``lengths``, as integers. The seed determines the rounding."""
    starts = np.cumsum(lengths) - lengths
    largest = np.maximum.reduceat(np.abs(values), starts) if len(values) else values
    scales = (largest / np.float32(LARGEST)).astype(np.float32)
    divisors = np.repeat(np.where(scales > 0, scales, np.float32(1)), lengths)
    chance = np.random.Generator(np.random.PCG64(seed)).random(len(values), dtype=np.float32)
    numbers = np.clip(np.floor(values / divisors + chance), -LARGEST, LARGEST)
    return Quantised(numbers.astype(np.int8), scales)
