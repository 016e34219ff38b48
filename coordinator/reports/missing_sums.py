"""Notice of secure rounds that closed without a sum, until a round has a sum again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.protocol.overview import Notice

from ..clock import iso
from ..models.global_models import settings_of
from ..rounds.secure import WHY_NO_SUM
from ..storage.tables import Federation, Round

LOOKED_AT = 100
"""Number of closed rounds that are read."""


def missing_sums(db: Session, federation: Federation) -> Iterable[Notice]:
    """Yield a notice if the last rounds, or cells of them, have no sum."""
    if not settings_of(federation).secure:
        return
    notes = Round.notes
    newest = (
        select(
            Round.number,
            Round.closed_at,
            notes[WHY_NO_SUM].as_string(),
            notes["secure_cells"].as_integer(),
            notes["secure_cells_without_sum"].as_integer(),
        )
        .where(Round.federation_id == federation.id, Round.status == "closed")
        .order_by(Round.number.desc())
        .limit(LOOKED_AT)
    )
    without = list(takewhile(lambda row: row[2] is not None, db.execute(newest)))
    if not without:
        return
    last, _, why, opened, closed = without[0]
    first, since = without[-1][:2]
    rounds = f"Round {last}" if first == last else f"Rounds {first} to {last}"
    cells = f" in {closed} of {opened + closed} cells" if opened else ""
    yield Notice(
        kind="no_sum",
        text=f"{rounds}: no secure sum{cells} ({why})",
        since=None if since is None else iso(since),
        remedy="The model does not learn from these devices. Check those that vanished, or enrol more; the records of "
        "rounds count them by phase (secure_*_vanished).",
    )
