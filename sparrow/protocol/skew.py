"""Label skew: the difference between devices' class frequencies, from a few numbers of each device.

For class frequencies p_k [C] of its n_k training samples, a device reports r_kj = s_j · p_k for J fixed vectors s_j in
{-1, 1}^C. This sketch (Alon, Matias, Szegedy, STOC 1996) does not reveal the frequencies of more than J classes. The
variance of r_kj has a part between devices and a part from sampling; the first, as a share of the variance of single
labels,

    ρ = Σ_j (Var_k r_kj - mean_k (1 - r_kj²) / (n_k - 1)) / Σ_j (1 - (mean_k r_kj)²)

is the intraclass correlation of labels: 0 if all devices draw from the same classes, 1 if each has one class, and 1 /
(1 + αC) for Dirichlet partitions of concentration α over C classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .fields import Record

ADJUSTS = "adjusts_logits"
"""Entry of an assignment's plan, once decided: whether outputs are adjusted by class frequencies."""
VECTORS = 8
"""Number of sign vectors, J."""
FEWEST_DEVICES = 2


class LabelSketch(Record):
    """A device's report on its labels."""

    # R_k.
    sketch: tuple[Annotated[float, Field(ge=-1, le=1)], ...] = Field(min_length=VECTORS, max_length=VECTORS)
    # N_k.
    samples: int = Field(ge=2, le=2**40)

    @classmethod
    def of(cls, counts: Sequence[int] | NDArray[np.int64]) -> LabelSketch | None:
        """Return the sketch of class counts [C]; None for fewer than two samples."""
        found = np.asarray(counts, np.float64)
        if found.sum() < 2:
            return None
        sketch = _signs(len(found)) @ (found / found.sum())
        return cls(sketch=tuple(np.clip(sketch, -1, 1).tolist()), samples=int(found.sum()))

    def told(self) -> dict[str, float]:
        """Return the reported numbers by name; ``skew`` uses their means over devices."""
        sketch = np.array(self.sketch)
        chance = (1 - sketch**2).mean() / (self.samples - 1)
        return dict(zip(TOLD, map(float, [*sketch, *sketch**2, chance]), strict=True))


TOLD: Mapping[str, float] = {
    **{f"label {number}": 1.0 for number in range(VECTORS)},
    **{f"label squared {number}": 1.0 for number in range(VECTORS)},
    "label chance": 1.0,
}
"""Names of the reported numbers, and the largest magnitude of each."""


def skew(devices: int, means: Mapping[str, float]) -> float | None:
    """Return ρ, 0 to 1, from the devices' mean numbers; None for too few devices or missing numbers."""
    if devices < FEWEST_DEVICES or not TOLD.keys() <= means.keys():
        return None
    numbers = np.array([means[name] for name in TOLD])
    mean, squared, chance = numbers[:VECTORS], numbers[VECTORS : 2 * VECTORS], numbers[-1]
    between = (squared - mean**2).sum() * devices / (devices - 1) - VECTORS * chance
    single = (1 - mean**2).sum()
    return float(np.clip(between / single, 0, 1)) if single > 0 else 0.0


def skew_of(told: Iterable[LabelSketch]) -> float | None:
    """Return ρ of unmasked sketches; None for fewer than ``FEWEST_DEVICES``."""
    rows = [each.told() for each in told]
    return skew(len(rows), {name: float(np.mean([row[name] for row in rows])) for name in TOLD} if rows else {})


@cache
def _signs(classes: int) -> NDArray[np.float64]:
    """Return s [J, C]: bit j of the first byte of SHA-256 of "label C" is s_jC, 1 for 1 and -1 for 0."""
    bytes_ = np.array([hashlib.sha256(f"label {label}".encode()).digest()[0] for label in range(classes)])
    return np.where(bytes_[None] >> np.arange(VECTORS)[:, None] & 1, 1.0, -1.0)
