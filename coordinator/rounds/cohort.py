"""The cohort of a round: a draw without replacement that a restarted coordinator repeats.

uniform              everybody has the same chance
least_recently       those whose last round lies furthest back come first, those that have had none before all others
budget               chances grow with budgets: of two devices the one of twice the budget is the first to be drawn with
                     twice the chance (weighted sampling; Efraimidis and Spirakis, IPL 2006)

Ties, and chance, are decided by the SHA-256 of ``cohort|job|round|name``: independent of the order in which devices
enrolled, and the same again for the same job (the federation's name and seed) and round.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

CohortPolicy = Literal["uniform", "least_recently", "budget"]


@dataclass(frozen=True)
class Candidate:
    """A device that can be drawn. last_round: the last one it was drawn for, -1 for none."""

    name: str
    budget: float = 1.0
    last_round: int = -1


def choose(
    candidates: Iterable[Candidate], size: int, *, job: str, round_number: int, policy: CohortPolicy = "uniform"
) -> list[str]:
    """Return the names of ``size`` of the candidates (all, if there are fewer), sorted."""

    def key(each: Candidate) -> tuple[float, bytes]:
        chance = _digest(each.name, job, round_number)
        if policy == "least_recently":
            return each.last_round, chance
        if policy == "budget":
            return -math.log(_share(chance)) / each.budget, chance  # exponential, of rate budget: the first ones win
        return 0.0, chance

    return sorted(each.name for each in sorted(candidates, key=key)[:size])


def choose_each(names: Iterable[str], chance: float, *, job: str, round_number: int) -> list[str]:
    """Return the names that are drawn, sorted: each by itself with this chance, so no draw depends on another."""
    return sorted(name for name in names if _share(_digest(name, job, round_number)) <= chance)


def _digest(name: str, job: str, round_number: int) -> bytes:
    return hashlib.sha256(f"cohort|{job}|{round_number}|{name}".encode()).digest()


def _share(digest: bytes) -> float:
    """Return a uniform number in (0, 1]."""
    return (int.from_bytes(digest[:6], "big") + 1) / 2**48
