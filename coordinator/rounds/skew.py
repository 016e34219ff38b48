"""The decision to adjust outputs by class frequencies if the labels are skewed enough (``protocol.skew``).

In the first round devices report a sketch of their class frequencies, under masks in secure rounds. The decision is in
the plan of all later work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.protocol.messages import Kind, UpdateReport
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.skew import ADJUSTS, skew, skew_of

from ..errors import read_stored
from ..models.global_models import settings_of
from ..storage.tables import Assignment, Federation, Round

NOTE = "label_skew_permille"


def adjustment(db: Session, federation: Federation) -> dict[str, bool]:
    """Return the decision for an assignment's plan; may be empty."""
    settings = settings_of(federation)
    if not _depends(settings) or not federation.round:
        return {}
    note = Round.notes[NOTE].as_integer()
    noted = select(note).where(Round.federation_id == federation.id, note.is_not(None)).order_by(Round.number)
    permille = db.scalar(noted.limit(1))
    return {} if permille is None else {ADJUSTS: permille >= 1000 * settings.logit_adjustment_from}


def note_of(db: Session, federation: Federation, number: int, notes: Mapping[str, Any]) -> dict[str, int]:
    """Return the skew for a round's notes; empty if not needed or unknown."""
    settings = settings_of(federation)
    if not _depends(settings) or adjustment(db, federation):
        return {}
    if settings.secure:
        found = skew(int(notes.get("secure_unmask_asked", 0)), notes.get("metrics", {}))
    else:
        of_round = (Assignment.federation_id == federation.id, Assignment.round == number)
        done = (Assignment.kind == Kind.train.value, Assignment.status == "done")
        reports = [
            read_stored(UpdateReport, each) for each in db.scalars(select(Assignment.report).where(*of_round, *done))
        ]
        found = skew_of(each.labels for each in reports if each is not None and each.labels is not None)
    return {} if found is None else {NOTE: round(1000 * found)}


def _depends(settings: FederationSettings) -> bool:
    return bool(settings.logit_adjustment and settings.logit_adjustment_from)
