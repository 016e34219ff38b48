"""The choice of a device's model by the evidence of all devices (``personal_model=fleet``).

On few validation samples a model may be better only by chance. So each device measures its candidates' gains over the
finished global model and reports their moments. It receives the pool of all devices, and combines it with its own
measurement (Efron, Morris, Biometrika 59, 1972). With g_k [C] the mean gains of device k on n_k parts of its validation
data, their mean μ and covariance T between devices, and W the covariance of one part's gains within a device,

    E[γ_k | g_k] = μ + T (T + W / n_k)⁻¹ (g_k - μ)

is the expected gain on new samples. With B = T (T + W / n_k)⁻¹ and V the covariance of μ, which is a mean of few
devices, its covariance is T - B T + (I - B) V (I - B)ᵀ (Morris, "Parametric Empirical Bayes Inference", JASA 78, 1983).
A device uses the candidate that is best for all, by μ, unless another is expected to gain more by ``DEPARTS`` standard
deviations of the difference.

A part is one sample or, beyond ``MOST_PARTS`` samples, an equal share of them. Its gain is the difference of losses, at
most ``LARGEST_GAIN`` either way: a few confident errors must not decide. All devices have the same weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .fields import Record

GLOBAL = "global"
CANDIDATES = ("personal", "mixture", "finished", "alone")
"""A device's choices besides the global model: its own, the mean of both, this mean trained once more, and a local-only
one."""

LARGEST_GAIN = 1.0
"""Largest gain of a part, in units of the loss."""
MOST_PARTS = 64
FEWEST_DEVICES = 3
"""Smallest pool: c + 2 for one colluder, who could infer another device's numbers from a smaller pool."""
DEPARTS = 0.5
"""Margin, in standard deviations, by which a device's own choice must be better than the choice for all."""
AHEAD = 2.0
"""Margin, in standard errors, of a candidate's gain if there is no pool."""
TINY = 1e-9

Array = NDArray[np.float64]
Gain = Annotated[float, Field(ge=-LARGEST_GAIN, le=LARGEST_GAIN)]

_COUNT = len(CANDIDATES)
_PAIRS = np.triu_indices(_COUNT)
MOMENTS = _COUNT * (_COUNT + 1) // 2


class Evidence(Record):
    """A device's measurements."""

    parts: int = Field(ge=2, le=2**20)
    # Mean of each candidate over ``parts``.
    gains: tuple[Gain, ...] = Field(min_length=_COUNT, max_length=_COUNT)
    # Covariances of a part's gains, the upper triangle row by row.
    within: tuple[Annotated[float, Field(ge=-2 * LARGEST_GAIN**2, le=2 * LARGEST_GAIN**2)], ...] = Field(
        min_length=MOMENTS, max_length=MOMENTS
    )

    @classmethod
    def of(cls, losses: Mapping[str, Sequence[float]]) -> Evidence | None:
        """Return the evidence of the losses [parts] of candidates and ``GLOBAL``; None for fewer than two parts."""
        shared = np.asarray(losses[GLOBAL], np.float64)
        if len(shared) < 2:
            return None
        gains = np.stack([shared - np.asarray(losses[name], np.float64) for name in CANDIDATES], axis=1)
        gains = np.clip(gains, -LARGEST_GAIN, LARGEST_GAIN)
        within = np.cov(gains, rowvar=False)
        return cls(parts=len(gains), gains=tuple(gains.mean(axis=0).tolist()), within=tuple(within[_PAIRS].tolist()))

    def told(self) -> dict[str, float]:
        """Return the reported numbers by name; the pool uses their means over devices."""
        gains = np.array(self.gains)
        numbers = [1 / self.parts, *gains, *np.outer(gains, gains)[_PAIRS], *self.within]
        return dict(zip(TOLD, map(float, numbers), strict=True))


def _names() -> dict[str, float]:
    """Return the names of the reported numbers, and the largest magnitude of each."""
    pairs = [f"{CANDIDATES[row]} {CANDIDATES[column]}" for row, column in zip(*_PAIRS, strict=True)]
    return {
        "inverse_parts": 0.5,
        **{f"gain {name}": LARGEST_GAIN for name in CANDIDATES},
        **{f"product {pair}": LARGEST_GAIN**2 for pair in pairs},
        **{f"within {pair}": 2 * LARGEST_GAIN**2 for pair in pairs},
    }


TOLD = _names()
"""Names of the pool's numbers, and the largest magnitude of each."""


@dataclass(frozen=True)
class Pool:
    """The combined evidence."""

    devices: int
    # Μ [C].
    mean: Array
    # T [C, C].
    between: Array
    # W [C, C].
    within: Array
    # Mean of 1 / n_k.
    inverse_parts: float

    @classmethod
    def of(cls, devices: int, means: Mapping[str, float]) -> Pool | None:
        """Return the pool from the devices' mean numbers; None for too few devices or missing numbers."""
        if devices < FEWEST_DEVICES or not TOLD.keys() <= means.keys():
            return None
        numbers = np.array([means[name] for name in TOLD])
        noise, mean, products, within = numbers[0], *np.split(numbers[1:], np.cumsum([_COUNT, MOMENTS]))
        spread = (_square(products) - np.outer(mean, mean)) * devices / (devices - 1)
        covariance = _positive(_square(within))
        return cls(devices, mean, _positive(spread - noise * covariance), covariance, float(noise))

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any]) -> Pool | None:
        """Return the pool of an assignment's plan; None if it has no valid one."""
        names = [name for name in _PLANNED if isinstance(plan.get(name), int | float)]
        numbers = np.array([float(plan[name]) for name in names])
        if len(numbers) < len(_PLANNED) or not (np.isfinite(numbers).all() and np.abs(numbers).max() <= 1e6):
            return None
        devices, inverse_parts = numbers[:2]
        if devices < FEWEST_DEVICES or inverse_parts < 0:
            return None
        mean, between, within = np.split(numbers[2:], np.cumsum([_COUNT, MOMENTS]))
        return cls(int(devices), mean, _positive(_square(between)), _positive(_square(within)), float(inverse_parts))

    def as_plan(self) -> dict[str, float]:
        """Return the pool as entries of a plan."""
        counts = (float(self.devices), self.inverse_parts)
        numbers = [*counts, *self.mean, *self.between[_PAIRS], *self.within[_PAIRS]]
        return dict(zip(_PLANNED, map(float, numbers), strict=True))

    def expected(self, evidence: Evidence) -> tuple[Array, Array]:
        """Return each candidate's expected gain on new samples of a device [C], and the covariance [C, C]."""
        noisy = self.between + self.within / evidence.parts + TINY * np.eye(_COUNT)
        own = np.linalg.solve(noisy, self.between).T
        others = np.eye(_COUNT) - own
        of_mean = (self.between + self.inverse_parts * self.within) / self.devices
        covariance = self.between - own @ self.between + others @ of_mean @ others.T
        return self.mean + own @ (np.array(evidence.gains) - self.mean), covariance


_PLANNED = tuple(
    ["pool devices", "pool inverse_parts", *(f"pool {name}" for name in TOLD if name.startswith("gain "))]
    + [f"pool between {name.removeprefix('product ')}" for name in TOLD if name.startswith("product ")]
    + [f"pool {name}" for name in TOLD if name.startswith("within ")]
)


def pool_of(told: Iterable[Evidence]) -> Pool | None:
    """Return the pool of unmasked evidence; None for fewer than ``FEWEST_DEVICES`` devices."""
    rows = [each.told() for each in told]
    return Pool.of(len(rows), {name: float(np.mean([row[name] for row in rows])) for name in TOLD} if rows else {})


def choice(pool: Pool | None, evidence: Evidence | None, there: Collection[str] = CANDIDATES) -> str:
    """Return the device's choice among the candidates ``there``, or ``GLOBAL``."""
    missing = np.array([False, *(name not in there for name in CANDIDATES)])
    if pool is not None:
        gains = np.append(0.0, pool.mean)
        usual = _most(gains, missing)
        if evidence is not None:
            found, covariance = pool.expected(evidence)
            gains = np.append(0.0, found) - _deviations(covariance, usual) * DEPARTS
        gains[usual] += TINY
    elif evidence is not None:
        variances = np.diag(_square(np.array(evidence.within))).clip(min=0)
        gains = np.append(TINY, np.array(evidence.gains) - AHEAD * np.sqrt(variances / evidence.parts))
    else:
        return GLOBAL
    return (GLOBAL, *CANDIDATES)[_most(gains, missing)]


def _most(gains: Array, missing: NDArray[np.bool_]) -> int:
    """Return the index of the largest gain, with 0 for the global model."""
    return int(np.where(missing, -np.inf, gains).argmax())


def _deviations(covariance: Array, usual: int) -> Array:
    """Return the standard deviations of gains relative to the ``usual`` choice [1 + C]."""
    whole = np.zeros((_COUNT + 1, _COUNT + 1))
    whole[1:, 1:] = covariance
    differences = np.diag(whole) + whole[usual, usual] - 2 * whole[usual]
    deviations: Array = np.sqrt(differences.clip(min=0))
    return deviations


def _square(upper: Array) -> Array:
    """Return the symmetric matrix of an upper triangle."""
    matrix = np.zeros((_COUNT, _COUNT))
    matrix[_PAIRS] = upper
    return matrix + np.triu(matrix, 1).T


def _positive(matrix: Array) -> Array:
    """Return the nearest covariance matrix, with negative eigenvalues set to 0."""
    values, vectors = np.linalg.eigh(matrix)
    covariance: Array = (vectors * values.clip(min=0)) @ vectors.T
    return covariance
