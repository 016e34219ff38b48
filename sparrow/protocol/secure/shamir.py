"""Shamir's secret sharing over a prime field ("How to Share a Secret", Communications of the ACM 22, 1979)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**255 - 19
SECRET_BYTES = 31
"""Bytes of a secret; every such secret is below ``PRIME``."""
SHARE_BYTES = 32


def split(secret: int, threshold: int, points: Sequence[int]) -> dict[int, int]:
    """Return a share for each point x in 1..PRIME-1: the value of a polynomial whose value at 0 is the secret.

    Any ``threshold`` shares determine it; fewer reveal no information. Raises ValueError if the secret or a point is
    out of range, points repeat, or they are fewer than ``threshold``.
    """
    if not 0 <= secret < PRIME:
        raise ValueError("the secret must lie in the field")
    if (
        not 1 <= threshold <= len(set(points))
        or len(set(points)) < len(points)
        or not all(0 < x < PRIME for x in points)
    ):
        raise ValueError(f"the {len(points)} points must be different and in the field, and at least the threshold")
    coefficients = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: _value(coefficients, x) for x in points}


def join(shares: Mapping[int, int]) -> int:
    """Return the secret from ``threshold`` shares, point -> value (Lagrange's formula)."""
    return at(0, shares)


def at(point: int, shares: Mapping[int, int]) -> int:
    """Return the value at ``point`` of the polynomial through these shares."""
    if point in shares:
        return shares[point] % PRIME
    whole = math.prod(point - x for x in shares)
    parts = zip(shares.items(), _divisors(tuple(shares), PRIME), strict=True)
    return sum(share * (whole // (point - x)) * divisor for (x, share), divisor in parts) % PRIME


@lru_cache(maxsize=256)
def _divisors(points: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """Return, for each point, the inverse of the product of its differences from the others."""
    return tuple(pow(math.prod(x - other for other in points if other != x), -1, prime) for x in points)


def _value(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
