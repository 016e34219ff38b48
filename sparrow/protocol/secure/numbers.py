"""Updates as whole numbers: what a device adds to a sum modulo 2^b, and what the sum says.

A device's difference x from what it received is clipped to ±R, multiplied by its weight w / W in (0, 1] (W is the
largest that counts), scaled to L steps, and rounded up or down at random, so that it is right on average:

    q = round(x · w/W · L/R),   L = (2^(b-1) - 1) // n,

so that the sum of n of them never wraps. The sum of q over devices, times R·W/L, is the weighted sum of differences,
with an error of rounding whose deviation is at most R·W/L · √n/2 at each value.
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
"""Values that are rounded at a time: they and what comes of them fit a core's caches."""


@dataclass(frozen=True)
class Scale:
    """The scale of a cell's numbers. bits: b; devices: n; value_range: R; largest_weight: W."""

    bits: int
    devices: int
    value_range: float
    largest_weight: float

    @property
    def steps(self) -> int:
        """L: the largest whole number that one device adds."""
        return int((2 ** (self.bits - 1) - 1) // self.devices)

    @property
    def step(self) -> float:
        """The value of one step of the sum: R·W / L."""
        return self.value_range * self.largest_weight / self.steps

    def deviation(self, devices: int) -> float:
        """Return the largest standard deviation of what rounding does to a value of the sum of so many devices."""
        return self.step * float(np.sqrt(devices)) / 2

    def most_rounded(self, count: int) -> float:
        """Return the most by which rounding can lengthen an update of ``count`` values that counts whole (2-norm)."""
        return self.value_range / self.steps * float(np.sqrt(count))

    def round(self, values: NDArray[np.float32], weight: float, chance: np.random.Generator) -> tuple[Words, int]:
        """Return integers modulo 2^b, and how many values were clipped; NaN counts as 0 and as clipped. weight: w, at
        most W."""
        words: Words = np.empty(len(values), WORDS[self.bits])
        factor, clipped = weight / self.largest_weight * self.steps / self.value_range, 0
        for start in range(0, len(values), PART):
            part = values[start : start + PART]
            kept = np.clip(part, -self.value_range, self.value_range)
            np.copyto(kept, 0, where=np.isnan(kept))
            clipped += int(np.count_nonzero(kept != part))
            # float32 has places enough for numbers of 16 bits and their fractions.
            scaled = np.multiply(kept, factor, dtype=np.float32 if self.bits == 16 else np.float64)
            scaled += chance.random(len(part), dtype=np.float32)
            np.floor(scaled, out=scaled)
            np.clip(scaled, -self.steps, self.steps, out=scaled)
            words[start : start + PART] = scaled.astype(SIGNED[self.bits]).view(words.dtype)
        return words, clipped

    def sum_of(self, words: Words) -> NDArray[np.float64]:
        """Return the weighted sum of differences that a sum modulo 2^b stands for."""
        return self._signed(words) * self.step

    def round_fine(
        self, values: NDArray[np.float64], ranges: NDArray[np.float64], weight: float, chance: np.random.Generator
    ) -> tuple[Words, int]:
        """Return two words for each value, the first ones first, and how many values were clipped to ±their range.

        The second is the rounding error of the first, in steps of 1 / (2 L) of it, itself rounded at random: the sum's
        deviation is at most range·W / (2 L²) · √n/2.
        """
        clipped = np.nan_to_num(np.clip(values, -ranges, ranges))
        scaled = clipped / ranges * (weight / self.largest_weight * self.steps)
        first = np.rint(scaled)
        second = np.floor((scaled - first) * (2 * self.steps) + chance.random(len(values)))
        np.clip(second, -self.steps, self.steps, out=second)
        numbers = np.concatenate([first, second]).astype(np.int64)
        return numbers.astype(WORDS[self.bits]), int(np.count_nonzero(clipped != values))

    def sum_of_fine(self, words: Words, ranges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weighted sums of values that were sent in two words each."""
        first, second = self._signed(words).reshape(2, -1)
        found: NDArray[np.float64] = (first + second / (2 * self.steps)) / self.steps * ranges * self.largest_weight
        return found

    def _signed(self, words: Words) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.ascontiguousarray(words).view(SIGNED[self.bits]).astype(np.float64)
        return found
