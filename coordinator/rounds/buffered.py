"""Buffered asynchronous rounds.

    w_i ← w_i + Σ_k n_k s(τ_k) Δ_ki / Σ_k n_k          over the updates, of K, that sent weight i

after Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba (FedBuff), AISTATS 2022, arXiv:2106.06639, Algorithm 1, with
s(τ) = (1 + τ)^-a. ``buffer`` is K, ``staleness_exponent`` is a (0.5 in the paper), ``cohort`` the number of devices
that train at a time, Δ_k the difference from the device's base model, τ versions old. n_k are sample counts; the paper
weighs all updates equally.

A device trains at most once in a round. Updates count in the order of their acknowledgement: the first K in the open
round, later ones in the next. The last round, and a round before a rollback or replacement, closes at once with all
arrived updates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import bindparam, literal_column, select, update
from sqlalchemy.orm import Session

from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import Mask, pack
from sparrow.protocol.messages import Kind

from ..models.global_models import settings_of
from ..storage.tables import Assignment, Federation
from ..sums.averages import difference
from .assignments import UNCOUNTED


@dataclass(frozen=True)
class Arrival:
    """An acknowledged update that is not yet part of a round."""

    number: int
    assignment_id: str
    update_sha256: str
    # The model it was trained on.
    model_version: int
    # Largest weight of the update; None for no limit.
    most_examples: int | None


_OF_FEDERATION = Assignment.federation_id == bindparam("federation_id")
_NOT_COUNTED = (_OF_FEDERATION, UNCOUNTED)
_ARRIVALS = (
    select(
        Assignment.arrival,
        Assignment.id,
        Assignment.update_sha256,
        Assignment.model_version,
        Assignment.most_examples,
    )
    .where(*_NOT_COUNTED, Assignment.arrival > bindparam("after"))
    .order_by(Assignment.arrival)
)
# A literal, because SQLite uses a partial index only for the expression in its definition.
_WORKING = (_OF_FEDERATION, Assignment.kind == Kind.train.value, Assignment.status == literal_column("'open'"))

_AT_WORK = select(Assignment.device_id, Assignment.id).where(*_WORKING)


def number_arrival(db: Session, federation_id: int, assignment_id: str) -> None:
    """Assign the next arrival number to an update that is being acknowledged."""
    counted = update(Federation).where(Federation.id == federation_id).values(arrivals=Federation.arrivals + 1)
    number = db.execute(counted.returning(Federation.arrivals)).scalar_one()
    db.execute(update(Assignment).where(Assignment.id == assignment_id).values(arrival=number))


def arrivals(db: Session, federation: Federation, after: int = 0, most: int | None = None) -> list[Arrival]:
    """Return the next uncounted updates after number ``after``, in order."""
    if settings_of(federation).buffer is None:
        return []
    statement = _ARRIVALS if most is None else _ARRIVALS.limit(most)
    rows = db.execute(statement, {"federation_id": federation.id, "after": after})
    return [Arrival(row[0] or 0, row[1], row[2] or "", row[3], row[4]) for row in rows]


def count_in(db: Session, federation: Federation, number: int, last: int) -> None:
    """Assign all uncounted updates up to arrival ``last`` to round ``number``."""
    counted = update(Assignment).where(
        Assignment.federation_id == federation.id,
        UNCOUNTED,
        Assignment.arrival <= last,
    )
    db.execute(counted.values(counted_round=number))


def working(db: Session, federation: Federation) -> dict[str, str]:
    """Return the training devices of any round: device id -> assignment id."""
    rows = db.execute(_AT_WORK, {"federation_id": federation.id})
    return {row[0]: row[1] for row in rows}


def staleness_weight(models_behind: int, exponent: float) -> float:
    """Return the weight s(τ) = (1 + τ)^-a."""
    return float((1 + models_behind) ** -exponent)


def bring_forward(
    manifest: Manifest, values: Array, mask: Mask | None, began: Tensors, now: Tensors, weight: float
) -> NDArray[np.float32]:
    """Return now + weight (values - began), float32 [count_values(manifest, mask)]."""
    moved = difference(manifest, began, values, mask)
    # Overflow gives infinite values, with which an update is left out.
    with np.errstate(over="ignore"):
        return (pack(manifest, now, mask) + weight * moved).astype(np.float32)


def goes_on(db: Session, federation: Federation) -> bool:
    """Return True if the updates of training devices, or waiting updates, will count in the next round."""
    if settings_of(federation).buffer is None:
        return False
    return bool(working(db, federation) or arrivals(db, federation, most=1))


def is_final(federation: Federation, number: int) -> bool:
    """Return True if a buffered round is the last one."""
    stopped = federation.status == "stopped"
    last = settings_of(federation).rounds
    asked = federation.rollback_version is not None or federation.replacement is not None
    return stopped or number >= last or asked
