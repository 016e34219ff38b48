"""Rounds of secure aggregation: the coordinator learns only the sums of cells.

A round has five phases. In each, every remaining device gets an assignment:

    phase    a device sends                                 then the coordinator
    keys     signed public keys for this round              draws cells, neighbours and neurons at random
    shares   shares of its secrets, sealed for neighbours   drops cells with too few devices
    train    a masked update                                sends the list of remaining devices
    agree    a signature of that list                       sends the signatures, if most devices signed
    unmask   shares of remaining and lost devices           opens the sum of each cell with enough devices

A phase ends when all devices have answered or returned the work, or at its deadline. The state is in ``Round.secure``
and in the assignments' reports, which contain no device's secret.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from sparrow.protocol import bundle
from sparrow.protocol.manifest import Array
from sparrow.protocol.masks import Mask, pack
from sparrow.protocol.messages import Kind
from sparrow.protocol.parts import Plan
from sparrow.protocol.secure.consistency import round_digest, with_digest
from sparrow.protocol.secure.fine import read_extras, statistics
from sparrow.protocol.secure.groups import choose_sharing, least_cell, make_cells, most_of
from sparrow.protocol.secure.messages import Keys, Unmask
from sparrow.protocol.secure.numbers import WORDS, Scale, Words
from sparrow.protocol.settings import FederationSettings

from ..models.global_models import Models, settings_of
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation, Round
from .assignments import assign, update_key
from .secure_state import PHASES, CellState, SecureState, scale_of, state_of

log = logging.getLogger(__name__)


WHY_NO_SUM = "secure_why"
"""Key of a round's note with the reason why the round, or a cell, has no sum."""


def cell_size(settings: FederationSettings) -> int:
    """Return the smallest cell that keeps enough devices if the share ``secure_dropouts`` drops out."""
    least = least_cell(settings.secure_colluders)
    size = least
    while size - math.floor(settings.secure_dropouts * size + 1e-9) < least:
        size += 1
    return size


@dataclass(frozen=True)
class CellSum:
    """The mean of a cell's updates: values [count_values(manifest, mask)], float32, or float64 under noise."""

    assignment_ids: Sequence[str]
    values: Array
    mask: Mask | None
    num_examples: int


@dataclass(frozen=True)
class Ended:
    """The end of a secure round."""

    sums: Sequence[CellSum]
    # Assignment id -> reason for an update in no sum.
    lost: Mapping[str, str]
    # Counts.
    notes: dict[str, Any]


@dataclass(frozen=True)
class _Member:
    id: str
    name: str
    device_id: str
    status: str
    report: dict[str, Any] | None
    update_sha256: str | None
    deadline_at: float
    ratio: float | None
    most_examples: int | None
    identity: str | None


@dataclass(frozen=True)
class _Answers:
    """The answers that open sums, by device name."""

    keys: Mapping[str, Keys]
    trained: Mapping[str, _Member]
    # Owner -> point -> share.
    seeds: Mapping[str, Mapping[int, int]]
    pad_secrets: Mapping[str, Mapping[int, int]]


@dataclass(frozen=True)
class _Opened:
    """A cell at the end of its round."""

    sum: CellSum | None
    # Lost, as in ``Ended``.
    lost: Mapping[str, str]
    # Name -> sum, weight.
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    wrong_shares: int = 0
    # It has updates but no sum.
    why: str | None = None


class SecureRounds:
    """Advance secure rounds from phase to phase. expire: ``Expiry.expire``."""

    def __init__(self, store: Store, models: Models, clock: Callable[[], float], expire: Callable[..., None]) -> None:
        self._store = store
        self._models = models
        self._clock = clock
        self._expire = expire

    def begin(self, db: Session, federation: Federation, current: Round, plan: Plan) -> None:
        """Begin a round whose ``keys`` assignments are new in this session."""
        manifest = self._models.manifest(federation)
        model = self._models.sent_digest(federation)
        digest = round_digest(manifest, model, settings_of(federation), plan, current.number)
        # Unique and unpredictable, so that keys and masks derived from it are used only once.
        context = f"{federation.uid}|{current.number}|{secrets.token_hex(8)}"
        state = SecureState(phase=Kind.keys, context=with_digest(context, digest), plan=plan)
        current.secure = state.model_dump(mode="json")
        for assignment in db.new:
            if isinstance(assignment, Assignment) and assignment.kind == Kind.keys.value:
                assignment.deadline_at = self._clock() + settings_of(federation).secure_phase_seconds

    def advance(self, federation: Federation, current: Round) -> bool | Ended:
        """End the current phase if it is complete; return True for a change."""
        state = state_of(current)
        settings = settings_of(federation)
        phase = state.phase
        with self._store.reading() as db:
            counts = _count(db, federation.id, current.number, phase)
        open_ones, earliest = counts.get("open", (0, math.inf))
        asked = sum(count for count, _ in counts.values())
        answered, _ = counts.get("done", (0, 0.0))
        stopped = federation.status == "stopped"
        late = stopped or earliest <= self._clock()
        enough = phase is Kind.train and answered >= math.ceil(settings.quorum * asked - 1e-9)
        if open_ones and not late and not enough:
            return False
        with self._store.reading() as db:
            members = _members(db, federation.id, current.number, phase)
        if waiting := [member.id for member in members if member.status == "open"]:
            self._expire(waiting, away=late and not stopped)
            return True
        done = [member for member in members if member.status == "done"]
        if stopped and phase is not Kind.unmask:
            return self._over(federation, current, "the federation was stopped")
        match phase:
            case Kind.keys:
                return self._to_shares(federation, current, state, done)
            case Kind.shares:
                return self._to_training(federation, current, state, done)
            case Kind.train:
                return self._to_agreement(federation, current, state, done)
            case Kind.agree:
                return self._to_unmasking(federation, current, state, done)
        return self._open(federation, current, state, done)

    def _to_shares(
        self, federation: Federation, current: Round, state: SecureState, done: Sequence[_Member]
    ) -> bool | Ended:
        settings = settings_of(federation)
        names = [member.name for member in done]
        least = cell_size(settings)
        colluders = settings.secure_colluders
        # A small cohort may tolerate fewer dropouts than ``secure_dropouts``, or none; privacy is the same.
        tolerant = choose_sharing(len(names), colluders, settings.secure_dropouts)
        sharing = tolerant or choose_sharing(len(names), colluders, 0.0)
        if sharing is None:
            return self._over(federation, current, f"{len(names)} devices sent keys, too few to hide one another")
        # Drawn after the keys arrived, so that no device can choose its key by its neighbours.
        seed = secrets.token_hex(16)
        ratios = {member.name: member.ratio for member in done}
        made = make_cells(ratios, least, f"cells {seed}".encode())
        cells = tuple(CellState(names=each.names, ratio=each.ratio, key=secrets.token_hex(16)) for each in made)
        weights = self._weights(done, alike=settings.noise_multiplier is not None)
        following = state.model_copy(
            update={
                "phase": Kind.shares,
                "seed": seed,
                "cohort": {member.name: member.identity for member in done},
                "neighbours": sharing.neighbours,
                "threshold": sharing.threshold,
                "cells": cells,
                "weights": weights,
            }
        )
        return self._next(federation, current, following, done)

    def _weights(self, members: Sequence[_Member], *, alike: bool) -> dict[str, int]:
        """Return each device's weight: its sample count, at most the largest limited count of any device.

        alike: all weights are 1 (``sums.private``).
        """
        if alike:
            return {member.name: 1 for member in members}
        with self._store.reading() as db:
            counts = {member.name: db.get_one(Device, member.device_id).num_examples or 1 for member in members}
        most = max(
            counts[member.name] if member.most_examples is None else min(counts[member.name], member.most_examples)
            for member in members
        )
        return {name: min(count, most) for name, count in counts.items()}

    def _to_training(
        self, federation: Federation, current: Round, state: SecureState, done: Sequence[_Member]
    ) -> bool | Ended:
        least = least_cell(settings_of(federation).secure_colluders)
        shared = {member.name for member in done}
        alive = {name for cell in state.cells if len(shared & set(cell.names)) >= least for name in cell.names}
        trains = [member for member in done if member.name in alive]
        if not trains:
            return self._over(federation, current, f"no cell has {least} devices that shared their secrets")
        following = state.model_copy(update={"phase": Kind.train, "shared": tuple(sorted(shared))})
        return self._next(federation, current, following, trains)

    def _to_unmasking(
        self, federation: Federation, current: Round, state: SecureState, done: Sequence[_Member]
    ) -> bool | Ended:
        wanted = most_of(len(state.cohort), settings_of(federation).secure_colluders)
        if len(done) < wanted:
            return self._over(
                federation, current, f"{len(done)} devices agree on the remaining devices, but {wanted} must"
            )
        return self._next(federation, current, state.model_copy(update={"phase": Kind.unmask}), done)

    def _to_agreement(
        self, federation: Federation, current: Round, state: SecureState, done: Sequence[_Member]
    ) -> bool | Ended:
        least = least_cell(settings_of(federation).secure_colluders)
        alike = _alike(state.cells, done)
        left = {member.name for member in alike}
        if not any(len(left & set(cell.names)) >= least for cell in state.cells):
            return self._over(federation, current, f"no cell has {least} updates, so no sum is unmasked")
        following = state.model_copy(update={"phase": Kind.agree, "left": tuple(sorted(left))})
        return self._next(federation, current, following, alike)

    def _next(self, federation: Federation, current: Round, state: SecureState, members: Sequence[_Member]) -> bool:
        settings = settings_of(federation)
        now = self._clock()
        kind = state.phase
        cells = {name: cell for cell in state.cells for name in cell.names}
        with self._store.moving() as db:
            current = db.get_one(Round, current.id)
            federation = db.get_one(Federation, federation.id)
            # Another process has moved the round.
            if current.status != "open" or state_of(current).phase is kind:
                return True
            devices = {
                device.id: device
                for device in db.scalars(select(Device).where(Device.id.in_([member.device_id for member in members])))
            }
            for position, member in enumerate(members):
                cell = cells[member.name]
                assignment = assign(
                    federation,
                    devices[member.device_id],
                    kind,
                    current.number,
                    position,
                    now,
                    ratio=cell.ratio,
                    most_examples=member.most_examples,
                )
                assignment.draw_key = cell.key if cell.ratio is not None else None
                if kind is Kind.train:
                    assignment.plan = dict(state.plan) or None
                    current.deadline_at = assignment.deadline_at
                else:
                    assignment.deadline_at = now + settings.secure_phase_seconds
                db.add(assignment)
            current.secure = state.model_dump(mode="json")
            current.stale = True
        return True

    def _over(self, federation: Federation, current: Round, why: str) -> Ended:
        log.warning(
            "%s: round %s has no sum: %s", federation.name, current.number, why, extra={"round": current.number}
        )
        with self._store.reading() as db:
            trained = _members(db, federation.id, current.number, Kind.train.value)
            notes = self._notes(db, federation, current)
        lost = {member.id: f"no sum: {why}" for member in trained if member.status == "done"}
        return Ended([], lost, notes | {"secure_without_sum": 1, WHY_NO_SUM: why})

    def _open(self, federation: Federation, current: Round, state: SecureState, done: Sequence[_Member]) -> Ended:
        with self._store.reading() as db:
            keys, trained = (
                {each.name: each for each in _members(db, federation.id, current.number, kind) if each.status == "done"}
                for kind in (Kind.keys.value, Kind.train.value)
            )
            notes = self._notes(db, federation, current)
        seeds, pad_secrets = _collected(done, sorted(state.cohort))
        known = {name: Keys.model_validate(each.report) for name, each in keys.items()}
        answers = _Answers(known, trained, seeds, pad_secrets)
        cells = [self._open_cell(federation, state, cell, answers) for cell in state.cells]
        metrics = defaultdict[str, float](float)
        weights = defaultdict[str, float](float)
        for each in cells:
            for name, (summed, counted) in each.metrics.items():
                metrics[name] += summed
                weights[name] += counted
        # A smaller weight is only rounding error: no device had this metric.
        means = {name: metrics[name] / counted for name, counted in weights.items() if counted > 0.5}
        sums = [each.sum for each in cells if each.sum is not None]
        closed = [each.why for each in cells if each.why]
        notes |= {
            "secure_cells": len(sums),
            "secure_cells_without_sum": len(closed),
            "secure_wrong_shares": sum(each.wrong_shares for each in cells),
        }
        if closed:
            notes[WHY_NO_SUM] = closed[0]
        if settings_of(federation).masks_metrics:
            notes["metrics"] = means
        return Ended(sums, {key: why for each in cells for key, why in each.lost.items()}, notes)

    def _open_cell(self, federation: Federation, state: SecureState, cell: CellState, answers: _Answers) -> _Opened:
        """Open the sum of a cell, or return the reason why this is impossible."""
        # Needs cryptography, an optional dependency.
        from sparrow.protocol.secure.opening import CannotOpen, open_sum

        settings = settings_of(federation)
        trained = answers.trained
        left = [name for name in cell.names if name in state.left]
        gone = [name for name in cell.names if name in state.shared and name not in state.left]
        ids = [trained[name].id for name in left]
        odd = [trained[name].id for name in gone if name in trained]
        lost = dict.fromkeys(odd, "its scale or model differs from that of most updates in its cell")
        least = least_cell(settings.secure_colluders)
        if len(left) < least:
            why = f"its cell has {len(left)} devices left, but at least {least} must hide one another"
            return _Opened(None, lost | dict.fromkeys(ids, why), why=why if left else None)
        total, mask = self._total(federation, [trained[name] for name in left])
        try:
            opened, bad = open_sum(
                total,
                state.context,
                left=left,
                gone=gone,
                keys=answers.keys,
                seeds=answers.seeds,
                pad_secrets=answers.pad_secrets,
                threshold=state.threshold,
            )
        except CannotOpen as error:
            return _Opened(None, lost | dict.fromkeys(ids, f"no sum: {error}"), why=str(error))
        _warn_of_shares(federation, sorted(state.cohort), bad)
        weight = sum(state.weights[name] for name in left)
        scale = scale_of(settings, cell.names, state.weights)
        values, metrics = self._values(federation, opened, mask, scale, weight)
        return _Opened(CellSum(ids, values, mask, weight), lost, metrics, wrong_shares=sum(map(len, bad.values())))

    def _values(
        self, federation: Federation, opened: Words, mask: Mask | None, scale: Scale, weight: float
    ) -> tuple[Array, dict[str, tuple[float, float]]]:
        """Return a cell's mean update, and its summed metrics with their weights."""
        manifest = self._models.manifest(federation)
        model = self._models.model(federation, federation.model_version)
        base = pack(manifest, model.tensors, mask)
        places = statistics(manifest, mask)
        total = scale.sum_of(opened[: len(base)])
        asked = settings_of(federation).masks_metrics
        total[places], metrics = read_extras(opened[len(base) :], base[places], scale, metrics=asked)
        values = base + total / weight
        # Under noise keep float64: the bound on what one update adds must stay exact.
        if settings_of(federation).noise_multiplier is None:
            values = values.astype(np.float32)
        squares = statistics(manifest, mask, kind="running_var")
        values[squares] = np.maximum(values[squares], 0)
        return values, metrics

    def _total(self, federation: Federation, members: Sequence[_Member]) -> tuple[Words, Mask | None]:
        total: Words | None = None
        mask: Mask | None = None
        manifest = self._models.manifest(federation)
        known = self._models.model(federation, federation.model_version).mask
        for member in members:
            key = update_key(federation.id, member.id, member.update_sha256 or "")
            decoded = bundle.decode(self._store.blobs.load(key), manifest, known, intact=True)
            assert decoded.masked is not None, "checked when it was accepted"
            assert decoded.extras is not None, "so was this"
            mask = decoded.mask
            if total is None:
                total = np.concatenate([decoded.masked, decoded.extras], dtype=WORDS[8 * decoded.masked.itemsize])
            else:
                count = len(decoded.masked)
                total[:count] += decoded.masked
                total[count:] += decoded.extras
        assert total is not None, "a cell has members"
        return total, mask

    @staticmethod
    def _notes(db: Session, federation: Federation, current: Round) -> dict[str, Any]:
        notes = dict[str, Any]()
        for phase in PHASES:
            members = _members(db, federation.id, current.number, phase)
            if members:
                answered = sum(member.status == "done" for member in members)
                notes |= {f"secure_{phase}_asked": len(members), f"secure_{phase}_vanished": len(members) - answered}
        return notes


def _alike(cells: Sequence[CellState], done: Sequence[_Member]) -> list[_Member]:
    # A device signs only statements with its own scale and model, so keep the most frequent ones of each cell.
    stated = {member.name: (member.report or {})["secure"]["scale"] for member in done}
    most = {
        name: Counter(stated[other] for other in cell.names if other in stated).most_common(1)[0][0]
        for cell in cells
        for name in cell.names
        if name in stated
    }
    return [member for member in done if stated[member.name] == most[member.name]]


def _count(db: Session, federation_id: int, number: int, kind: str) -> dict[str, tuple[int, float]]:
    rows = db.execute(
        select(Assignment.status, func.count(), func.min(Assignment.deadline_at))
        .where(Assignment.federation_id == federation_id, Assignment.round == number, Assignment.kind == kind)
        .group_by(Assignment.status)
    )
    return {status: (count, earliest) for status, count, earliest in rows}


def _members(db: Session, federation_id: int, number: int, kind: str) -> list[_Member]:
    rows = db.execute(
        select(
            Assignment.id,
            Device.name,
            Device.id,
            Assignment.status,
            Assignment.report,
            Assignment.update_sha256,
            Assignment.deadline_at,
            Assignment.ratio,
            Assignment.most_examples,
            Device.identity_key,
        )
        .join(Device, Device.id == Assignment.device_id)
        .where(Assignment.federation_id == federation_id, Assignment.round == number, Assignment.kind == kind)
        .order_by(Device.name)
    )
    return [_Member(*row) for row in rows]


def _warn_of_shares(federation: Federation, cohort: Sequence[str], bad: Mapping[str, Collection[int]]) -> None:
    """Log wrong shares. bad: owner -> senders' places in the cohort, from 1."""
    for name, points in bad.items():
        keepers = ", ".join(cohort[point - 1] for point in sorted(points))
        log.warning("%s: wrong shares of %s came from %s", federation.name, name, keepers)


def _collected(
    done: Sequence[_Member], names: Sequence[str]
) -> tuple[dict[str, dict[int, int]], dict[str, dict[int, int]]]:
    """Return the received shares of self-masks and of pads: owner -> point -> share."""
    point = {name: place for place, name in enumerate(names, start=1)}
    seeds = dict[str, dict[int, int]]()
    pad_secrets = dict[str, dict[int, int]]()
    for member in done:
        answer = Unmask.model_validate(member.report)
        for kept, shares in ((seeds, answer.seeds), (pad_secrets, answer.pads)):
            for name, share in shares.items():
                kept.setdefault(name, {})[point[member.name]] = int(share, 16)
    return seeds, pad_secrets
