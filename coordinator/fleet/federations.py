"""Federations: description, changes and deletion."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pydantic import ValidationError
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from sparrow.protocol import values
from sparrow.protocol.messages import (
    ChangeFederation,
    FederationInfo,
    FederationStatus,
)
from sparrow.protocol.settings import FederationSettings

from ..errors import (
    BadContent,
    NotFound,
    Unreadable,
    WrongState,
    explain,
)
from ..methods import load_method
from ..models.global_models import Models, settings_of, why_unusable
from ..rounds import rollback
from ..rounds.assignments import extend_deadlines, forget_adapted
from ..rounds.candidates import what_is_missing, why_over
from ..rounds.cleanup import clear_deleted
from ..rounds.privacy import spent
from ..storage.store import Store
from ..storage.tables import (
    Assignment,
    DeletedDevice,
    DeletedFederation,
    Device,
    Federation,
    Model,
    Round,
    Token,
)
from . import publications
from .checks import check_settings, why_no_pages, why_unbounded

log = logging.getLogger(__name__)


class Federations:
    """Every federation of this coordinator."""

    def __init__(self, store: Store, models: Models, clock: Callable[[], float]) -> None:
        self._store = store
        self._models = models
        self._clock = clock

    def change(self, name: str, request: ChangeFederation) -> FederationInfo:
        """Pause, resume, stop or reopen a federation, or change settings from the next round on."""
        if request.model_version is not None:
            self._check_whole(name, request.model_version)
        with self._store.writing() as db:
            federation = find(db, name)
            settings_of(federation)  # can be read
            changed = request.model_dump(exclude={"action", "model_version"}, exclude_none=True)
            federation.settings = {**federation.settings, **changed}
            try:
                settings = FederationSettings.model_validate(federation.settings)
            except ValidationError as error:
                raise BadContent(explain(error)) from None
            if settings.rounds < federation.round:
                raise BadContent(f"rounds: {federation.round} have closed already; give at least as many")
            if changed:
                check_settings(load_method(federation.method), self._models.manifest(federation), settings)
                publications.check_changed(db, federation, settings)
            if (request.action == "rollback") != (request.model_version is not None):
                raise BadContent("model_version: give it with the action rollback, and with no other")
            if request.model_version is not None:
                rollback.ask(db, federation, self._models, request.model_version)
            elif request.action is not None:
                _act(federation, request.action)
            over = why_over(db, federation) if request.action == "reopen" else None
            if over:
                remedy = {
                    "max_rounds": "set more rounds first",
                    "all_stopped": "every device has stopped early, and more rounds change nothing: reopen it when a "
                    "device has enrolled that has not",
                }
                raise WrongState(f"{name} would end again at once: {remedy.get(over, over)}")
            if request.action == "reopen":
                forget_adapted(db, federation)
            if request.action == "resume":
                extend_deadlines(db, federation, self._clock())
        return self.get(name)

    def delete(self, name: str) -> None:
        """Remove a federation that is not at work: its records, devices and models. Raises NotFound, WrongState.

        Later calls with its devices' tokens are answered so. Operators' tokens that were for it alone are revoked, and
        stay in the records: their kind remains guarded.
        """
        with self._store.writing() as db:
            federation = find(db, name)
            if federation.status in (FederationStatus.running.value, FederationStatus.paused.value):
                raise WrongState(
                    f"{name} is {federation.status}: its devices would lose their work. Stop it first (on the page, or "
                    f"sparrow federation stop {name}), then delete it"
                )
            now = self._clock()
            db.add(DeletedFederation(id=federation.id, name=name, deleted_at=now))
            db.flush()
            for token in (Device.token_sha256, Device.next_token_sha256):
                known = select(token, Device.federation_id).where(
                    Device.federation_id == federation.id, token.is_not(None)
                )
                db.execute(insert(DeletedDevice).from_select(["token_sha256", "federation_id"], known))
            for table in (Assignment, Round, Device, Model):
                db.execute(delete(table).where(table.federation_id == federation.id))
            its_own = update(Token).where(Token.federation_id == federation.id)
            db.execute(its_own.values(federation_id=None, revoked_at=func.coalesce(Token.revoked_at, now)))
            db.delete(federation)
            log.info("%s is deleted", name)
        # Blobs after the commit: killed in between, the next start removes them.
        clear_deleted(self._store, federation.id)
        self._models.drop(federation.id)

    def list(self) -> list[FederationInfo]:
        """Return every federation that can be read, by age."""
        found = []
        with self._store.reading() as db:
            for federation in db.scalars(select(Federation)):
                try:
                    found.append(self.describe(db, federation))
                except Unreadable as error:  # asking for it alone tells why
                    log.error("%s", error)
        return found

    def get(self, name: str) -> FederationInfo:
        """Return one federation. Raises NotFound."""
        with self._store.reading() as db:
            return self.describe(db, find(db, name))

    def describe(self, db: Session, federation: Federation) -> FederationInfo:
        """Return the description of a federation."""
        manifest = self._models.manifest(federation)
        statuses = db.execute(
            select(Device.status, func.count()).where(Device.federation_id == federation.id).group_by(Device.status)
        )
        counts = {row[0]: row[1] for row in statuses}
        settings = settings_of(federation)
        no_pages = why_no_pages(settings, load_method(federation.method), manifest)
        return FederationInfo(
            uid=federation.uid,
            name=federation.name,
            method=federation.method,
            task=federation.task,
            status=FederationStatus(federation.status),
            reason=federation.reason,
            waiting_for=what_is_missing(db, federation, self._clock()),
            warning=federation.warning,
            notice=why_unbounded(settings),
            round=federation.round,
            rounds=settings.rounds,
            devices=counts.get("active", 0) + counts.get("stopped", 0),
            devices_stopped=counts.get("stopped", 0),
            model_version=federation.model_version,
            rollback_version=federation.rollback_version,
            model_sha256=federation.model_sha256,
            privacy=spent(db, federation.id, federation.round, settings),
            parameters=manifest.trainable_values,
            frozen_parameters=sum(spec.size for spec in manifest.frozen),
            frozen_bytes=values.size(manifest, "frozen"),
            published_bytes=federation.published_bytes,
            manifest_digest=manifest.digest,
            publisher=federation.publisher,
            publication=federation.publication_sha256,
            replacing=federation.replacement is not None,
            input_shape=manifest.input_shape,
            output_shape=manifest.output_shape,
            global_model_usable=why_unusable(federation, manifest) is None,
            device_kinds=("sdk",) if no_pages else ("sdk", "page"),
            no_pages_because=no_pages,
            settings=settings,
        )

    def _check_whole(self, name: str, version: int) -> None:
        """Raise Damaged where a model that is kept is: now, and not when the federation goes back to it."""
        with self._store.reading() as db:
            federation = find(db, name)
            kept = self._models.kept(db, federation)
        if version in kept:
            self._models.file(federation, version)


def find(db: Session, name: str) -> Federation:
    """Return the federation of this name. Raises NotFound."""
    federation = db.scalar(select(Federation).where(Federation.name == name))
    if federation is None:
        raise NotFound(f"there is no federation {name!r}; GET /v1/federations lists all")
    return federation


_ACTIONS: dict[str, tuple[set[str], str | None]] = {
    "pause": ({"waiting", "running"}, "paused"),
    "resume": ({"paused"}, None),
    "stop": ({"waiting", "running", "paused"}, "stopped"),
    "reopen": ({"finished", "stopped"}, None),
}
"""Of each action: the statuses in which it can be taken, and the next one; None: that of a federation at work."""


def _act(federation: Federation, action: str) -> None:
    """Take an operator's action. Raises WrongState."""
    allowed, following = _ACTIONS[action]
    if federation.status not in allowed:
        raise WrongState(
            f"{federation.name} is {federation.status}; this can be done while it is {' or '.join(sorted(allowed))}"
        )
    federation.status = following or ("running" if federation.round else "waiting")
    if action == "stop":
        federation.reason = "operator"
    if action == "reopen":
        federation.reason = federation.finished_at = None
