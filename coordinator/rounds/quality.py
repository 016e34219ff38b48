"""The quality of old global models, from devices' evaluations in the records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from statistics import fmean

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from sparrow.protocol.messages import Kind, Receipt

from ..errors import read_stored
from ..models.global_models import settings_of
from ..models.retention import Quality, noted
from ..storage.tables import Assignment, Federation, Model, Round

LOOK_BACK = 3
"""Number of newest models to reassess when a round closes, because evaluations arrive after their round."""


def note_quality(db: Session, federation: Federation, models: Collection[Model]) -> None:
    """Record the quality of the newest of these models."""
    newest = sorted(models, key=lambda each: each.version)[-LOOK_BACK:]
    found = quality_of(db, federation, newest)
    for each in newest:
        if each.version in found:
            each.accuracy, each.loss, each.devices = found[each.version]


def known_quality(db: Session, federation: Federation, models: Collection[Model]) -> dict[int, Quality]:
    """Return the quality of these models by version, for the newest from all evaluations so far."""
    newest = sorted(models, key=lambda each: each.version)[-LOOK_BACK:]
    return noted(models) | quality_of(db, federation, newest)


def quality_of(db: Session, federation: Federation, models: Collection[Model]) -> dict[int, Quality]:
    """Return the quality of these models by version, without models that no device has evaluated.

    A device's validation data count if it reports them, otherwise held-out data: results of the global model, or else
    of its personal one.
    """
    if settings_of(federation).secure:
        return _under_masks(db, federation, {each.version for each in models})
    rows = db.execute(
        select(Assignment.model_version, Assignment.report).where(
            Assignment.federation_id == federation.id,
            Assignment.round.in_({each.round for each in models}),
            Assignment.kind == Kind.evaluate.value,
            Assignment.status == "done",
        )
    )
    judged = defaultdict(list)
    for version, report in rows:
        receipt = read_stored(Receipt, report)
        evaluation = receipt and (receipt.validation or receipt.global_model or receipt.personal)
        if evaluation:
            judged[version].append(evaluation)
    return {
        version: Quality(
            fmean(known) if (known := [each.accuracy for each in found if each.accuracy is not None]) else None,
            fmean(each.loss for each in found),
            len(found),
        )
        for version, found in judged.items()
    }


def _under_masks(db: Session, federation: Federation, versions: Collection[int]) -> dict[int, Quality]:
    """Return the quality from secure rounds, whose devices evaluate the received global model."""
    rounds = select(Round.base_version, Round.model_version, Round.notes).where(
        Round.federation_id == federation.id,
        Round.status == "closed",
        or_(Round.base_version.in_(versions), Round.model_version.in_(versions)),
    )
    found: dict[str, dict[int, Quality]] = {"global": {}, "personal": {}}
    for base, made, notes in db.execute(rounds):
        means = notes.get("metrics", {}) if isinstance(notes, dict) else {}
        for which, version in (("global", base), ("personal", made)):
            if (loss := means.get(f"loss_{which}")) is not None:
                found[which][version] = Quality(means.get(f"accuracy_{which}"), loss)
    return found["global"] or found["personal"]
