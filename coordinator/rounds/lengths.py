"""The usual length of an update, by which ``relative_clip`` bounds the next ones.

A length is the 2-norm of an update's difference from the values that were sent, whatever the device's budget: a device
that trains a twentieth of the values moves them further, and about as far in all (docs/results/security.md), and the
2-norm bounds how far the model goes. The usual length is the lower median of those that the last ``WINDOW`` rounds
noted. It is known before a round's first update comes, so the round's sums need not wait, and the order in which
updates come changes nothing. The first round has none before it: its updates wait until all have come, and its own
lower median serves.

An update enters as it counted, cut where it was too long, once in its round. So devices that are less than half of
those of the window cannot raise the usual length above the longest honest one. Of an even number the lower middle one
is taken: of two devices the longer must not be its own measure.

Lengths are kept in a round's notes: after a restart the same bound comes out. A round keeps ``KEPT`` at most, evenly
spaced in their order.
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
"""Rounds whose updates say what is usual."""

KEPT = 21
"""Lengths that a round keeps."""

LENGTHS = "lengths"
"""The lengths in a round's notes."""

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
    """Return the 2-norm of the difference of an update's values from those that were sent, slice by slice."""
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
            difference, old = moved[: stop - start], scratch[: stop - start]
            difference[:] = after[start:stop]
            old[:] = before[start:stop]
            difference -= old
            # Not a product of vectors: the threads that BLAS begins for it cost more than they save.
            total += float(np.square(difference, out=difference).sum())
    return math.sqrt(total)


def usual(lengths: Iterable[float]) -> float | None:
    """Return the lower median; None of none."""
    found = list(lengths)
    return median_low(found) if found else None


def kept(lengths: Sequence[float]) -> list[float]:
    """Return the lengths that a round keeps of its updates', in ascending order."""
    ordered = sorted(lengths)
    places = np.linspace(0, len(ordered) - 1, KEPT).round().astype(int)
    return ordered if len(ordered) <= KEPT else [ordered[place] for place in places]


def usual_before(db: Session, federation_id: int, number: int) -> float | None:
    """Return the usual length before round ``number``; None where no round noted any."""
    rows = db.scalars(_LAST, {"federation_id": federation_id, "least": number - WINDOW, "most": number - 1})
    return usual(length for notes in rows for length in (notes or {}).get(LENGTHS, ()))
