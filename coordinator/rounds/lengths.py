"""The usual length of updates, from which ``relative_clip`` computes its bound.

A length is the 2-norm of an update's difference from the sent values, not scaled by the budget: devices with different
budgets have about the same norm (docs/results/security.md).

The usual length is the lower median over the last ``WINDOW`` rounds; the first round uses its own. Lengths are taken
after clipping, so a minority of malicious devices cannot raise it above the longest honest length. With the lower
median, the longer of two updates does not determine its own bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median_low

import numpy as np
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from sparrow.protocol.manifest import Array, Manifest, Tensors
from sparrow.protocol.masks import CHUNK_VALUES, Mask, unpack

from ..storage.tables import Round

WINDOW = 10
"""Number of past rounds that determine the usual length."""

KEPT = 21
"""Largest number of lengths kept per round."""

LENGTHS = "lengths"
"""Key of the lengths in a round's notes."""

_LAST = (
    select(Round.notes)
    .where(
        Round.federation_id == bindparam("federation_id"),
        Round.status == "closed",
        Round.number.between(bindparam("least"), bindparam("most")),
    )
    .order_by(Round.number)
)


def norm_of(manifest: Manifest, sent: Tensors, values: Array, mask: Mask | None) -> float:
    """Return the 2-norm of an update's difference from ``sent``, in chunks."""
    total = 0.0
    moved, scratch = np.empty((2, CHUNK_VALUES))
    for spec, place, part in unpack(manifest, values, mask):
        before = sent[spec.name].reshape(-1)
        if part.size < before.size:
            before = np.empty(part.size, np.float32)
            place.take_into(sent[spec.name], before)
        after = part.reshape(-1)
        for start in range(0, part.size, CHUNK_VALUES):
            stop = min(start + CHUNK_VALUES, part.size)
            difference = moved[: stop - start]
            old = scratch[: stop - start]
            difference[:] = after[start:stop]
            old[:] = before[start:stop]
            difference -= old
            # No dot product: the threads that BLAS starts for it cost more than they save.
            total += float(np.square(difference, out=difference).sum())
    return math.sqrt(total)


def usual(lengths: Iterable[float]) -> float | None:
    """Return the lower median; None if there are no lengths."""
    found = list(lengths)
    return median_low(found) if found else None


def kept(lengths: Sequence[float]) -> list[float]:
    """Return at most ``KEPT`` lengths, evenly spaced in ascending order."""
    ordered = sorted(lengths)
    places = np.linspace(0, len(ordered) - 1, KEPT).round().astype(int)
    return ordered if len(ordered) <= KEPT else [ordered[place] for place in places]


def usual_before(db: Session, federation_id: int, number: int) -> float | None:
    """Return the usual length before round ``number``; None if earlier rounds have no lengths."""
    rows = db.scalars(_LAST, {"federation_id": federation_id, "least": number - WINDOW, "most": number - 1})
    return usual(length for notes in rows for length in (notes or {}).get(LENGTHS, ()))
