"""Blobs that no record names any more: what a round was made of when it has closed, and what kills left behind.

An update is needed from its acknowledgement until its round has closed; a global model while it is the current one, an
open assignment is about it, or it is kept by rule (``models.Retention``); a mask while a device holds it.
"""

from __future__ import annotations

import logging

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from coordinator.models import Models
from coordinator.storage.store import Store
from coordinator.storage.tables import Assignment, Device, Federation, Round

log = logging.getLogger(__name__)


def clear(store: Store, models: Models, federation_id: int) -> None:
    """Remove a federation's leftovers. Only between rounds, or while nobody sends: an update that is on its way to the
    records is none yet."""
    with store.reading() as db:
        federation = db.get_one(Federation, federation_id)
        of_open = select(Assignment.model_version).where(
            Assignment.federation_id == federation_id, Assignment.status == "open"
        )
        in_use = {federation.model_version, *db.scalars(of_open)}
        known = select(Device.mask).where(
            Device.federation_id == federation_id, Device.mask.is_not(None), Device.status != "revoked"
        )
        masks = {digest for digest in db.scalars(known) if digest}
        updates = _needed(db, federation_id)
    if store.blobs.keys(f"{federation_id}/masks"):
        current_mask = models.model(federation, federation.model_version).mask
        if current_mask is not None:
            masks.add(current_mask.digest)
    models.forget(federation_id, in_use, masks)
    for key in store.blobs.keys(f"{federation_id}/updates"):
        if key not in updates:
            store.blobs.delete(key)


def clear_all(store: Store, models: Models) -> None:
    """Remove what kills left behind, of every federation. What keeps one from being cleared is logged: it does no harm
    to the others, nor to its rounds."""
    with store.reading() as db:
        federations = db.scalars(select(Federation.id)).all()
    for federation_id in federations:
        try:
            clear(store, models, federation_id)
        except Exception:
            log.exception("what is left over of federation %s could not be removed", federation_id)


def drop_unneeded(store: Store, federation_id: int, key: str) -> None:
    """Remove an update that came a second time, or too late, unless it is the one that its round needs."""
    with store.reading() as db:
        needed = key in _needed(db, federation_id)
    if not needed:
        store.blobs.delete(key)


def update_key(federation_id: int, assignment_id: str, digest: str) -> str:
    """Named by its content too: of two bodies that race for one assignment, the one recorded is the one folded."""
    return f"{federation_id}/updates/{assignment_id}.{digest}"


def _needed(db: Session, federation_id: int) -> set[str]:
    """The keys of the open round's updates."""
    of_round = and_(Round.federation_id == Assignment.federation_id, Round.number == Assignment.round)
    rows = db.execute(
        select(Assignment.id, Assignment.update_sha256)
        .join(Round, of_round)
        .where(Assignment.federation_id == federation_id, Assignment.status == "done", Round.status == "open")
    )
    return {update_key(federation_id, row[0], row[1] or "") for row in rows}
