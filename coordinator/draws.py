"""Random draws of a federation: the cohort of a round, and the neurons that each device trains.

Each draw is HMAC-SHA256 of purpose, round and name under the federation's secret, 32 random bytes, so that no device
can predict it. With ``draws=seed`` the secret is derived from the federation's name and seed, and all devices can
compute all draws.

Cohorts are drawn without replacement:

uniform              every device has the same chance
least_recently       devices with the oldest last round first, devices without any round before all others
budget               chance proportional to the budget, at each draw (weighted sampling; Efraimidis and Spirakis,
                     IPL 2006)
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
    """Return the 32-byte secret of a new federation."""
    if settings.draws == "seed":
        return hashlib.sha256(f"draws|{federation}:{settings.seed}".encode()).digest()
    return secrets.token_bytes(32)


def neurons_of(secret: bytes, assignment: Assignment, device: str) -> str:
    """Return the neuron key of an assignment."""
    return assignment.draw_key or neuron_key(secret, assignment.round, device)


def neuron_key(secret: bytes, round_number: int, device: str) -> str:
    """Return the key of a device's neurons in a round (``masks.NeuronDraw``): 128 bits, hexadecimal.

    It reveals neither the secret nor other keys.
    """
    return _chance(secret, "neurons", round_number, device)[:16].hex()


@dataclass(frozen=True)
class Candidate:
    """A device that can be drawn."""

    name: str
    budget: float = 1.0
    # The last round it was drawn for, or -1.
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
    """Return the sorted names of ``size`` candidates, or of all if there are fewer."""

    def key(each: Candidate) -> tuple[float, bytes]:
        chance = _chance(secret, purpose, round_number, each.name)
        if policy == "least_recently":
            return each.last_round, chance
        if policy == "budget":
            # An exponential variate of rate budget: the smallest ones win.
            return -math.log(_share(chance)) / each.budget, chance
        return 0.0, chance

    return sorted(each.name for each in sorted(candidates, key=key)[:size])


def choose_each(names: Iterable[str], chance: float, *, secret: bytes, round_number: int) -> list[str]:
    """Return the sorted names that are drawn, each independently with this chance."""
    return sorted(name for name in names if _share(_chance(secret, "cohort", round_number, name)) <= chance)


def uniform(secret: bytes, purpose: str, round_number: int, name: str) -> float:
    """Return a number in (0, 1] for this purpose, round and name."""
    return _share(_chance(secret, purpose, round_number, name))


def _chance(secret: bytes, purpose: str, round_number: int, name: str) -> bytes:
    """Return 32 uniform bytes for this purpose, round and name."""
    return hmac.digest(secret, f"{purpose}|{round_number}|{name}".encode(), "sha256")


def _share(digest: bytes) -> float:
    return (int.from_bytes(digest[:6], "big") + 1) / 2**48
