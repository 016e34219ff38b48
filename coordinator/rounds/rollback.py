"""Rollback to an older global model.

Rounds whose models are discarded stay in the records, marked ``undone``. An open round closes first.

Devices are not notified: masks are sent as changes to the mask that the device reports, and a device with the model of
an undone round receives the full model. Personal models and parts do not change. A method with stages refuses a
rollback that would break them.
"""

from __future__ import annotations

import logging

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.orm import Session

from sparrow.protocol.events import EventKind
from sparrow.protocol.messages import ModelInfo

from ..errors import NotFound, WrongState
from ..methods import Situation, load_method
from ..models.global_models import Models, settings_of
from ..models.retention import best_of
from ..storage import events
from ..storage.tables import Federation, Model, Round
from .assignments import open_round
from .quality import known_quality

log = logging.getLogger(__name__)

_NEWEST = select(func.max(Round.model_version)).where(Round.federation_id == bindparam("federation_id"))


def ask(db: Session, federation: Federation, models: Models, version: int, now: float) -> None:
    """Roll back to ``version`` now, or after the open round has closed. Raises NotFound, WrongState."""
    wanted = _kept(db, federation, models, version)
    method = load_method(federation.method)
    current = open_round(db, federation)
    if method.prepares and version == 0:
        raise WrongState(
            f"model_version: {federation.method} prepares model 0 before it is trained; roll back to a later model"
        )
    following = (current.number if current else federation.round) + 1
    situation = Situation(models.manifest(federation), settings_of(federation), following)
    method.schedule.check_rollback(wanted.round or 0, situation)
    federation.rollback_version = version
    if current is None:
        carry_out(db, federation, now)


def carry_out(db: Session, federation: Federation, now: float) -> None:
    """Carry out a requested rollback, if any; only between rounds."""
    version = federation.rollback_version
    if version is None:
        return
    of_federation = Round.federation_id == federation.id
    stays = _made_of(db, federation, version)
    known = (of_federation, Round.model_version.is_not(None))
    undone = Round.model_version.not_in(stays)
    db.execute(update(Round).where(*known).values(undone=undone, stale=True, facts=Round.facts + 1))
    db.execute(update(Model).where(Model.federation_id == federation.id).values(undone=Model.version.not_in(stays)))
    log.warning("%s: rolling back from model %s to %s", federation.name, federation.model_version, version)
    detail = f"model {federation.model_version} to {version}"
    events.record(db, federation.id, EventKind.rolled_back, now, detail=detail)
    federation.model_version = version
    federation.rollback_version = None
    federation.model_sha256 = db.get_one(Model, (federation.id, version)).sha256


def pin(db: Session, federation: Federation, models: Models, version: int, until: float) -> None:
    """Keep a model at least until this time, while an operator decides about it. Raises NotFound."""
    _kept(db, federation, models, version).pinned_until = until


def newest_version(db: Session, federation: Federation) -> int:
    """Return the highest model version so far, including undone ones."""
    return max(federation.model_version, db.scalar(_NEWEST, {"federation_id": federation.id}) or 0)


def list_models(db: Session, federation: Federation, models: Models) -> list[ModelInfo]:
    """Return the stored global models, oldest first."""
    kept = models.kept(db, federation)
    quality = known_quality(db, federation, kept.values())
    best = best_of(kept.values(), quality)
    return [
        ModelInfo(
            version=version,
            round=model.round,
            bytes=model.bytes,
            model_sha256=model.sha256,
            undone=model.undone,
            current=version == federation.model_version,
            accuracy=quality[version].accuracy if version in quality else None,
            loss=quality[version].loss if version in quality else None,
            devices=quality[version].devices if version in quality else 0,
            best=version == best,
        )
        for version, model in kept.items()
    ]


def _kept(db: Session, federation: Federation, models: Models, version: int) -> Model:
    kept = models.kept(db, federation)
    if version not in kept:
        raise NotFound(
            f"model_version: {federation.name} no longer has model {version}; choose one of {', '.join(map(str, kept))}"
        )
    return kept[version]


def _made_of(db: Session, federation: Federation, version: int) -> set[int]:
    """Return ``version`` and its ancestors."""
    bases: dict[int | None, int | None] = {}
    closed = select(Round.model_version, Round.base_version).where(
        Round.federation_id == federation.id, Round.status == "closed"
    )
    for made, base in db.execute(closed.order_by(Round.number)):
        # Later rounds without a new model name the same version.
        bases.setdefault(made, base)
    found: set[int] = set()
    step: int | None = version
    while step is not None and step not in found:
        found.add(step)
        step = bases.get(step)
    return found
