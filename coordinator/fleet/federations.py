"""Federations: description, changes and deletion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from sparrow.protocol import values
from sparrow.protocol.events import EventKind
from sparrow.protocol.messages import (
    ChangeFederation,
    FederationInfo,
    FederationStatus,
)
from sparrow.protocol.secure.groups import least_cell
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
from ..rounds.candidates import call_back, what_is_missing, why_over
from ..rounds.cleanup import clear_deleted
from ..rounds.privacy import spent
from ..storage import events
from ..storage.store import Store
from ..storage.tables import (
    Assignment,
    DeletedDevice,
    DeletedFederation,
    Device,
    Event,
    Federation,
    Model,
    Round,
    Token,
    natural,
)
from . import publications
from .checks import check_settings, why_no_pages, why_unbounded

log = logging.getLogger(__name__)

PIN_SECONDS = 120.0
"""The page repeats a pin while its dialog is open."""


class Federations:
    """All federations of this coordinator."""

    def __init__(self, store: Store, models: Models, clock: Callable[[], float]) -> None:
        self._store = store
        self._models = models
        self._clock = clock

    def change(self, name: str, request: ChangeFederation) -> FederationInfo:
        """Pause, resume, stop, reopen or roll back a federation, or change settings from the next round on."""
        if request.model_version is not None:
            self._check_whole(name, request.model_version)
        with self._store.writing() as db:
            federation = find(db, name)
            # Raises Unreadable.
            settings_of(federation)
            changed = request.model_dump(exclude={"action", "model_version"}, exclude_none=True)
            before = federation.settings
            now = self._clock()
            federation.settings = {**federation.settings, **changed}
            try:
                settings = FederationSettings.model_validate(federation.settings)
            except ValidationError as error:
                raise BadContent(explain(error)) from None
            if settings.rounds < federation.round:
                raise BadContent(f"rounds: {federation.round} rounds have closed; give at least as many")
            if changed:
                check_settings(load_method(federation.method), self._models.manifest(federation), settings)
                publications.check_changed(db, federation, settings)
            if detail := _differences(before, changed):
                events.record(db, federation.id, EventKind.settings_changed, now, detail=detail)
            if (request.action == "rollback") != (request.model_version is not None):
                raise BadContent("model_version: give it with the action rollback only")
            if request.model_version is not None:
                rollback.ask(db, federation, self._models, request.model_version, now)
            elif request.action is not None:
                events.record(db, federation.id, _act(federation, request.action, now), now)
            if request.action == "reopen":
                call_back(db, federation)
                if why_over(db, federation):
                    raise WrongState(f"{name} would end again at once: set more rounds first")
                forget_adapted(db, federation)
            if request.action == "resume":
                extend_deadlines(db, federation, now)
        return self.get(name)

    def pin_model(self, name: str, version: int) -> None:
        """Keep a global model for ``PIN_SECONDS``. Raises NotFound."""
        with self._store.writing() as db:
            rollback.pin(db, find(db, name), self._models, version, self._clock() + PIN_SECONDS)

    def delete(self, name: str) -> None:
        """Delete an inactive federation with its records, devices and models. Raises NotFound, WrongState.

        Later calls of its devices get 410. Tokens for this federation only are revoked but stay recorded, so that their
        kind remains guarded.
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
            for table in (Assignment, Round, Device, Model, Event):
                db.execute(delete(table).where(table.federation_id == federation.id))
            its_own = update(Token).where(Token.federation_id == federation.id)
            db.execute(its_own.values(federation_id=None, revoked_at=func.coalesce(Token.revoked_at, now)))
            db.delete(federation)
            log.info("%s is deleted", name)
        # Blobs go after the commit; if the process is killed in between, the next start removes them.
        clear_deleted(self._store, federation.id)
        self._models.drop(federation.id)

    def list(self) -> list[FederationInfo]:
        """Return all readable federations, in natural order of their names."""
        found = []
        with self._store.reading() as db:
            for federation in db.scalars(select(Federation)):
                try:
                    found.append(self.describe(db, federation))
                except Unreadable as error:
                    # A request for this federation reports the reason.
                    log.error("%s", error)
        return sorted(found, key=lambda info: natural(info.name))

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
            smallest_sum=least_cell(settings.secure_colluders) if settings.secure else None,
            settings=settings,
        )

    def _check_whole(self, name: str, version: int) -> None:
        """Raise Damaged before the rollback if a kept model is damaged."""
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


@dataclass(frozen=True)
class _Action:
    # Statuses in which it is possible.
    allowed: frozenset[str]
    # Next status; None for active.
    following: str | None
    event: EventKind


_ACTIONS = {
    "pause": _Action(frozenset({"waiting", "running"}), "paused", EventKind.paused),
    "resume": _Action(frozenset({"paused"}), None, EventKind.resumed),
    "stop": _Action(frozenset({"waiting", "running", "paused"}), "stopped", EventKind.stopped),
    "reopen": _Action(frozenset({"finished", "stopped"}), None, EventKind.reopened),
}


def _differences(before: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    was = {name: before.get(name) for name in changed}
    return "; ".join(
        f"{name}: {was[name] or 'none'} to {to or 'none'}" for name, to in changed.items() if was[name] != to
    )


def _act(federation: Federation, action: str, now: float) -> EventKind:
    """Carry out an operator's action. Raises WrongState."""
    taken = _ACTIONS[action]
    if federation.status not in taken.allowed:
        possible = " or ".join(sorted(taken.allowed))
        raise WrongState(f"{federation.name} is {federation.status}; {action} it while it is {possible}")
    federation.status = taken.following or ("running" if federation.round else "waiting")
    if action == "stop":
        federation.reason = "operator"
        federation.finished_at = now
    if action == "reopen":
        federation.reason = None
        federation.finished_at = None
    return taken.event
