"""Updates as integers, for sums modulo 2^b.

A device's difference x from the payload is clipped to ±R, multiplied by its weight w / W in (0, 1] (W is the largest
weight), scaled to L steps, and rounded at random, so that it is unbiased:

    q = round(x · w/W · L/R),   L = (2^(b-1) - 1) // n,

so that the sum of n of them never wraps. The sum of q over devices, times R·W/L, is the weighted sum of differences,
with a rounding error whose deviation is at most R·W/L · √n/2 per value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.unsignedinteger[Any]]
WORDS: dict[int, type[np.unsignedinteger[Any]]] = {16: np.uint16, 32: np.uint32}
"""Bits of a masked value -> its type."""
SIGNED: dict[int, type[np.signedinteger[Any]]] = {16: np.int16, 32: np.int32}
PART = 2**15
"""Number of values rounded at a time; with intermediate results they fit a core's caches."""


@dataclass(frozen=True)
class Scale:
    """Conversion between a cell's values and integers."""

    # B.
    bits: int
    # N.
    devices: int
    # R.
    value_range: float
    # W.
    largest_weight: float

    @property
    def steps(self) -> int:
        """L, the largest integer that one device adds."""
        return int((2 ** (self.bits - 1) - 1) // self.devices)

    @property
    def step(self) -> float:
        """The value of one step of the sum: R·W / L."""
        return self.value_range * self.largest_weight / self.steps

    def deviation(self, devices: int) -> float:
        """Return an upper bound on the rounding deviation of a value in a sum of ``devices`` devices."""
        return self.step * float(np.sqrt(devices)) / 2

    def most_rounded(self, count: int) -> float:
        """Return the largest 2-norm that rounding can add to an update of ``count`` values at full weight."""
        return self.value_range / self.steps * float(np.sqrt(count))

    def round(self, values: NDArray[np.float32], weight: float, chance: np.random.Generator) -> tuple[Words, int]:
        """Return integers modulo 2^b, and the number of clipped values; NaN becomes 0 and counts as clipped. weight: w,
        at most W."""
        words: Words = np.empty(len(values), WORDS[self.bits])
        factor = weight / self.largest_weight * self.steps / self.value_range
        clipped = 0
        for start in range(0, len(values), PART):
            part = values[start : start + PART]
            kept = np.clip(part, -self.value_range, self.value_range)
            np.copyto(kept, 0, where=np.isnan(kept))
            clipped += int(np.count_nonzero(kept != part))
            # float32 has enough digits for 16-bit integers and their fractions.
            scaled = np.multiply(kept, factor, dtype=np.float32 if self.bits == 16 else np.float64)
            scaled += chance.random(len(part), dtype=np.float32)
            np.floor(scaled, out=scaled)
            np.clip(scaled, -self.steps, self.steps, out=scaled)
            words[start : start + PART] = scaled.astype(SIGNED[self.bits]).view(words.dtype)
        return words, clipped

    def sum_of(self, words: Words) -> NDArray[np.float64]:
        """Return the weighted sum of differences from a sum modulo 2^b."""
        return self._signed(words) * self.step

    def round_fine(
        self, values: NDArray[np.float64], ranges: NDArray[np.float64], weight: float, chance: np.random.Generator
    ) -> tuple[Words, int]:
        """Return two words per value, all first ones before the second, and the number of values clipped to ±range.

        The second word is the first one's rounding error, in steps of 1 / (2 L), rounded at random. The sum's deviation
        is at most range·W / (2 L²) · √n/2.
        """
        clipped = np.nan_to_num(np.clip(values, -ranges, ranges))
        scaled = clipped / ranges * (weight / self.largest_weight * self.steps)
        first = np.rint(scaled)
        second = np.floor((scaled - first) * (2 * self.steps) + chance.random(len(values)))
        np.clip(second, -self.steps, self.steps, out=second)
        numbers = np.concatenate([first, second]).astype(np.int64)
        return numbers.astype(WORDS[self.bits]), int(np.count_nonzero(clipped != values))

    def sum_of_fine(self, words: Words, ranges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weighted sums of values with two words each."""
        first, second = self._signed(words).reshape(2, -1)
        found: NDArray[np.float64] = (first + second / (2 * self.steps)) / self.steps * ranges * self.largest_weight
        return found

    def _signed(self, words: Words) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.ascontiguousarray(words).view(SIGNED[self.bits]).astype(np.float64)
        return found
