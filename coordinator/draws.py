"""Random draws of a federation: the cohort of a round, and the neurons that each device trains.

All of it is HMAC-SHA256 of purpose, round and name under the federation's secret: 32 random bytes that stay in the
records. So a restarted coordinator, or another process of it, draws the same, in whatever order devices enrolled; and
no device can know a draw before its assignment tells it its own: in which rounds it takes part, under which name it
would, which neurons others train and so leave to it. In simulations and tests the secret follows from the federation's
name and seed (the setting ``draws``), so that the same seeds give the same model; everybody can then compute all draws.

Cohorts are draws without replacement:

uniform              everybody has the same chance
least_recently       those whose last round lies furthest back come first, those that have had none before all others
budget               chances grow with budgets: of two devices the one of twice the budget is the first to be drawn with
                     twice the chance (weighted sampling; Efraimidis and Spirakis, IPL 2006)
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sparrow.protocol.settings import FederationSettings

from .storage.tables import Assignment

CohortPolicy = Literal["uniform", "least_recently", "budget"]


def new_secret(federation: str, settings: FederationSettings) -> bytes:
    """Return the secret of a new federation of this name, 32 bytes."""
    if settings.draws == "seed":
        return hashlib.sha256(f"draws|{federation}:{settings.seed}".encode()).digest()
    return secrets.token_bytes(32)


def neurons_of(secret: bytes, assignment: Assignment, device: str) -> str:
    """Return the key of the neurons that an assignment is to train: its own, or that of its device in this round."""
    return assignment.draw_key or neuron_key(secret, assignment.round, device)


def neuron_key(secret: bytes, round_number: int, device: str) -> str:
    """Return the key of the neurons that a device trains in a round (``masks.NeuronDraw``): 128 bits, hexadecimal.

    It tells nothing of the secret, nor of other keys."""
    return _chance(secret, "neurons", round_number, device)[:16].hex()


@dataclass(frozen=True)
class Candidate:
    """A device that can be drawn. last_round: the last one it was drawn for, -1 for none."""

    name: str
    budget: float = 1.0
    last_round: int = -1


def choose(
    candidates: Iterable[Candidate],
    size: int,
    *,
    secret: bytes,
    round_number: int,
    policy: CohortPolicy = "uniform",
    purpose: Literal["cohort", "evaluation"] = "cohort",
) -> list[str]:
    """Return the names of ``size`` of the candidates (all, if there are fewer), sorted."""

    def key(each: Candidate) -> tuple[float, bytes]:
        chance = _chance(secret, purpose, round_number, each.name)
        if policy == "least_recently":
            return each.last_round, chance
        if policy == "budget":
            return -math.log(_share(chance)) / each.budget, chance  # exponential, of rate budget: the first ones win
        return 0.0, chance

    return sorted(each.name for each in sorted(candidates, key=key)[:size])


def choose_each(names: Iterable[str], chance: float, *, secret: bytes, round_number: int) -> list[str]:
    """Return the names that are drawn, sorted: each by itself with this chance, so no draw depends on another."""
    return sorted(name for name in names if _share(_chance(secret, "cohort", round_number, name)) <= chance)


def uniform(secret: bytes, purpose: str, round_number: int, name: str) -> float:
    """Return a number in (0, 1] of this purpose, round and name, independent of all others."""
    return _share(_chance(secret, purpose, round_number, name))


def _chance(secret: bytes, purpose: str, round_number: int, name: str) -> bytes:
    """Return the 32 bytes that decide the part of ``name`` in a draw: uniform, and independent of all others."""
    return hmac.digest(secret, f"{purpose}|{round_number}|{name}".encode(), "sha256")


def _share(digest: bytes) -> float:
    return (int.from_bytes(digest[:6], "big") + 1) / 2**48
