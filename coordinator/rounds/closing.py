"""Close rounds: compute the next model from a round's sums, store it, and record it.

The new model's files are written first, outside any transaction, because slow storage may need a minute. Then a short
transaction checks that the round is still open and records the model. If it fails, it is repeated with the same model,
so that noise is drawn once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.protocol.events import EventKind

from ..methods import GlobalModel, load_method
from ..models.global_models import ModelFiles, Models, carry_out_replacement, settings_of
from ..storage import events
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation, Round
from .assignments import open_round, update_folder
from .buffered import count_in, is_final, working
from .candidates import situation_of
from .cleanup import clear, models_in_use
from .costs import UploadCosts
from .evaluations import evaluate_in_between
from .expiry import MOST_SAID
from .intake import DecodedUpdates, Folding, next_model
from .opening import Opening
from .privacy import spent
from .quality import note_quality
from .rollback import carry_out, newest_version
from .skew import note_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Closing:
    round: int
    base: int
    # Files of the new model; None if there is no new model.
    files: ModelFiles | None
    updates: int
    notes: dict[str, Any]
    parts: dict[str, int]
    # Last in a buffered round, its last arrival.
    last: int
    warning: str | None


class Closing:
    """Close rounds; arguments as in ``Rounds``."""

    def __init__(
        self,
        store: Store,
        models: Models,
        clock: Callable[[], float],
        costs: UploadCosts,
        decoded: DecodedUpdates,
        opening: Opening,
        on_closed: Callable[[str, float, int], None],
        progress: Callable[[], None],
    ) -> None:
        self._store = store
        self._models = models
        self._clock = clock
        self._costs = costs
        self._decoded = decoded
        self._opening = opening
        self._on_closed = on_closed
        self._progress = progress
        # Unrecorded results, by federation.
        self._made: dict[int, _Closing] = {}

    def is_made(self, federation: Federation, current: Round) -> bool:
        """Return True if the open round has a result that is not recorded yet."""
        made = self._made.get(federation.id)
        return made is not None and (made.round, made.base) == (current.number, federation.model_version)

    def forget(self, federation_id: int) -> None:
        """Discard the federation's unrecorded result."""
        self._made.pop(federation_id, None)

    def forget_all(self) -> None:
        """Discard all unrecorded results, because another process may have advanced the rounds."""
        self._made.clear()

    def close(
        self, federation: Federation, number: int, folding: Folding, skipped: Mapping[str, str] | None = None
    ) -> bool:
        """Compute the next model and close the round; return whether its sums can be dropped.

        skipped: assignment id -> the reason, for a round without a new model.
        """
        version = federation.model_version
        method = load_method(federation.method)
        warning = federation.warning
        folding.finish()
        sums = folding.intake.sums
        notes = folding.intake.notes() | folding.notes
        if settings_of(federation).buffer is not None:
            notes |= {"stale_updates": sum(map(bool, folding.behind)), "most_stale": max(folding.behind, default=0)}
        model: GlobalModel | None = None
        if skipped is not None:
            notes["left_out"] = dict(skipped)
        elif folding.intake.moves(folding.position):
            with self._store.reading() as db:
                situation = situation_of(db, self._models, federation, number)
                newest = newest_version(db, federation)
            made = next_model(method, self._models.model(federation, version), sums, situation)
            if isinstance(made, str):
                warning = f"round {number} made no new model, the old one stays: {made}"
                notes["left_out"] = {**dict.fromkeys(folding.taken, warning), **notes.get("left_out", {})}
            else:
                model = made
                version = newest + 1
                notes |= model.notes
                warning = method.warning(model, situation)
            if warning and warning != federation.warning:
                log.warning("%s: %s", federation.name, warning)
        with self._store.reading() as db:
            notes |= note_of(db, federation, number, notes)
            cost = spent(db, federation.id, number, settings_of(federation))
        self._made[federation.id] = _Closing(
            number,
            federation.model_version,
            None if model is None else self._models.files(federation.id, version, model),
            0 if model is None else sums.updates,
            notes if cost is None else {**notes, "privacy": cost.model_dump()},
            dict(folding.sizes),
            folding.last,
            warning,
        )
        return self.record(federation)

    def record(self, federation: Federation) -> bool:
        """Write the model's files, then record the close; return whether the sums can be dropped."""
        closing = self._made[federation.id]
        number = closing.round
        files = closing.files
        notes = closing.notes
        method = load_method(federation.method)
        now = self._clock()
        self._costs.write()
        if files is not None:
            self._models.write(federation.id, files, self._progress)
        with self._store.moving() as db:
            federation = db.get_one(Federation, federation.id)
            current = open_round(db, federation)
            version = federation.model_version if files is None else files.version
            outdated = files is not None and version != newest_version(db, federation) + 1
            if outdated or current is None or (current.number, federation.model_version) != (number, closing.base):
                # Another process has closed the round.
                self.forget(federation.id)
                return True
            if is_final(federation, number) and working(db, federation):
                # An operator has just made this round the last one: first withdraw the open training.
                self.forget(federation.id)
                return False
            if files is not None:
                self._models.record(db, federation.id, files, number)
                federation.model_version = version
                federation.model_sha256 = files.sha256
            before = federation.round
            federation.round = number
            federation.warning = closing.warning
            current.base_version = closing.base
            current.model_version = version
            current.model_sha256 = federation.model_sha256
            current.status = "closed"
            current.closed_at = now
            current.stale = True
            current.notes = notes
            current.parts = closing.parts
            if closing.last:
                count_in(db, federation, number, closing.last)
            left_out = _names(db, notes.get("left_out", {}))
            if method.prepares and version == 0:
                self._opening.withdraw(db, current)
                federation.warning = (
                    "the model is not prepared yet: the device did not answer in time or returned the work, and "
                    "another "
                    "device is asked. If preparing takes long, raise deadline_seconds"
                )
            carry_out(db, federation, now)
            if carry_out_replacement(federation):
                events.record(db, federation.id, EventKind.model_replaced, now)
            if federation.status == "running":
                evaluate_in_between(db, federation, before, now)
            note_quality(db, federation, self._models.recorded(db, federation))
            self._models.drop_old(db, federation, models_in_use(db, federation), now)
        if files is not None and federation.model_sha256 == files.sha256:
            self._models.remember(federation.id, files)
        self.forget(federation.id)
        log.info(
            "%s: round %s closed with %s updates",
            federation.name,
            number,
            closing.updates,
            extra={"round": number},
        )
        if left_out:
            log.warning("%s: round %s leaves out %s", federation.name, number, left_out, extra={"round": number})
        self._on_closed(federation.name, now - current.opened_at, len(notes.get("left_out", {})))
        # Updates may be removed only after the new model is recorded.
        self._decoded.forget(update_folder(federation.id))
        clear(self._store, self._models, federation.id)
        return True


def _names(db: Session, left_out: Mapping[str, str]) -> str:
    if not left_out:
        return ""
    first = list(left_out)[:MOST_SAID]
    whose = select(Assignment.id, Device.name).join(Device, Device.id == Assignment.device_id)
    found = {row[0]: row[1] for row in db.execute(whose.where(Assignment.id.in_(first)))}
    more = f" and {len(left_out) - MOST_SAID} more" if len(left_out) > MOST_SAID else ""
    return f"{', '.join(found[each] for each in first)}{more}: {left_out[first[0]]}"
