"""Who takes part in a round: a uniform draw without replacement that a restarted coordinator repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def choose(names: Iterable[str], size: int, *, job: str, round_number: int) -> list[str]:
    """``size`` of the device ``names`` (all, where there are fewer), sorted.

    Those with the smallest SHA-256 of ``cohort|job|round|name``: uniform, independent of the order in which devices
    enrolled, and the same again for the same job (the federation's name and seed) and round.
    """

    def digest(name: str) -> bytes:
        return hashlib.sha256(f"cohort|{job}|{round_number}|{name}".encode()).digest()

    return sorted(sorted(names, key=digest)[:size])
