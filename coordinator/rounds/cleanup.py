"""Remove unreferenced blobs: updates of closed rounds, and files from killed processes.

An update is needed from its acknowledgement until its round has closed; a global model while it is current, used by an
open assignment, or kept by ``models.Retention``; a mask while a device holds it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sqlalchemy import and_, bindparam, literal_column, select
from sqlalchemy.orm import Session

from ..errors import Unavailable
from ..models.global_models import Models, file_keys, mask_key
from ..storage.store import Store
from ..storage.tables import Assignment, DeletedFederation, Device, Federation, Round
from .assignments import assignment_of, update_folder, update_key
from .buffered import Arrival, arrivals

log = logging.getLogger(__name__)

_OPEN = select(Assignment.id, Assignment.model_version).where(
    Assignment.federation_id == bindparam("federation_id"), Assignment.status == literal_column("'open'")
)
_MASKS = (
    select(Device.mask)
    .where(Device.federation_id == bindparam("federation_id"), Device.mask.is_not(None), Device.status != "revoked")
    .distinct()
)
_ACKNOWLEDGED = (
    select(Assignment.id, Assignment.update_sha256)
    .join(Round, and_(Round.federation_id == Assignment.federation_id, Round.number == Assignment.round))
    .where(
        Assignment.federation_id == bindparam("federation_id"),
        Assignment.status == "done",
        Assignment.arrival.is_(None),
        Round.status == "open",
    )
)


def clear(store: Store, models: Models, federation_id: int) -> None:
    """Remove a federation's unreferenced blobs."""
    # Updates of open assignments stay, since they may be about to be recorded. Blobs are listed before the records
    # are read, so that blobs of another process that moves rounds meanwhile are not removed.
    folders = *(f"{federation_id}/{each}" for each in ("models", "masks", "files")), update_folder(federation_id)
    found = model_keys, mask_keys, _, update_keys = [store.blobs.keys(folder) for folder in folders]
    with store.reading() as db:
        of_federation = {"federation_id": federation_id}
        federation = db.get_one(Federation, federation_id)
        masks = {digest for digest in db.scalars(_MASKS, of_federation) if digest} if mask_keys else set()
        updates = set()
        if update_keys:
            on_the_way = {row[0] for row in db.execute(_OPEN, of_federation)}
            updates = _needed(db, federation_id, arrivals(db, federation))
            updates.update(key for key in update_keys if assignment_of(key) in on_the_way)
        models_needed = models.needed(db, federation_id, model_keys)
        files_needed = file_keys(federation, models.manifest(federation))
    if mask_keys:
        current_mask = models.model(federation, federation.model_version).mask
        if current_mask is not None:
            masks.add(current_mask.digest)
    needed = (models_needed, {mask_key(federation_id, digest) for digest in masks}, files_needed, updates)
    for folder, keys, keep in zip(folders, found, needed, strict=True):
        store.blobs.retain(folder, keep, keys)


def models_in_use(db: Session, federation: Federation) -> set[int]:
    """Return the versions of global models of open assignments and waiting updates."""
    of_open = {row[1] for row in db.execute(_OPEN, {"federation_id": federation.id})}
    return {federation.model_version, *of_open, *(each.model_version for each in arrivals(db, federation))}


def clear_all(store: Store, models: Models) -> None:
    """Remove files from killed processes in all federations, including deleted ones.

    An error is only logged.
    """
    with store.reading() as db:
        federations = db.scalars(select(Federation.id)).all()
        deleted = db.scalars(select(DeletedFederation.id)).all()
    for federation_id in [*federations, *deleted]:
        try:
            if federation_id in deleted:
                clear_deleted(store, federation_id)
            else:
                clear(store, models, federation_id)
        except Unavailable as error:
            # The store has logged the cause.
            log.warning("unused files of federation %s could not be removed: %s", federation_id, error)
        except Exception:
            log.exception("unused files of federation %s could not be removed", federation_id)


def clear_deleted(store: Store, federation_id: int) -> None:
    """Remove all blobs of a deleted federation."""
    for folder in ("models", "masks", "files", "updates"):
        store.blobs.retain(f"{federation_id}/{folder}", ())


def drop_unneeded(store: Store, federation_id: int, keys: Sequence[str]) -> None:
    """Remove duplicate or late updates that no round needs."""
    if not keys:
        return
    with store.reading() as db:
        # None if it was deleted meanwhile.
        federation = db.get(Federation, federation_id)
        needed = _needed(db, federation_id, arrivals(db, federation)) if federation is not None else set()
    for key in keys:
        if key not in needed:
            store.blobs.delete(key)


def _needed(db: Session, federation_id: int, late: Sequence[Arrival]) -> set[str]:
    """Return the keys of acknowledged updates that are not in a closed round's model."""
    rows = db.execute(_ACKNOWLEDGED, {"federation_id": federation_id})
    named = [*((row[0], row[1] or "") for row in rows), *((each.assignment_id, each.update_sha256) for each in late)]
    return {update_key(federation_id, *name) for name in named}
