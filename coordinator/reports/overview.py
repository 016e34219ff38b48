"""The overview of a federation for the page (``sparrow.protocol.overview``), from a bounded number of queries.

Beyond ``MOST_POINTS`` rounds, two, four, eight and so on are merged into one point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from prometheus_client import Counter
from sqlalchemy import Double, and_, cast, func, or_, select
from sqlalchemy.orm import Session

from sparrow.command_line.table import percent
from sparrow.protocol.failures import explain
from sparrow.protocol.messages import Doing, FederationInfo, Kind
from sparrow.protocol.overview import FederationLine, Notice, OpenRound, Overview, RoundPoint

from ..clock import iso
from ..fleet.federations import Federations
from ..models.global_models import Models, settings_of
from ..rounds.assignments import COHORT_KINDS, JUDGING_KINDS, UNCOUNTED, open_round
from ..rounds.candidates import smallest_budget
from ..storage import events
from ..storage.store import Store
from ..storage.tables import Assignment, Device, Federation, Round
from .device_list import FAILING, NOT_EXPORTED, DeviceLists
from .metrics import Metrics
from .missing_sums import missing_sums
from .open_work import OpenAssignments
from .records import Records

MOST_POINTS = 240
MOST_NAMES = 100
MOST_AWAITED = 25
LOOK_BACK = 8
"""Number of closed rounds to read again, because upload costs and evaluations arrive after a round."""

_SUMS = ("updates", "bytes_up", "bytes_down", "evaluation_bytes_up", "evaluation_bytes_down", "seconds")
_LAST = (
    "accuracy_personal",
    "accuracy_personal_decile",
    "accuracy_global",
    "loss_personal",
    "loss_global",
    "train_loss",
    "device_seconds_median",
    "device_seconds_slowest",
)
MOST_FAILURES = 5
"""Largest number of devices with listed failures; the device list has all."""
WELL_BELOW = 0.03
"""Difference of accuracy by which personal models below the global model cause a warning."""
ENDED = ("finished", "stopped")
RECENT = 10
"""Number of last rounds from which the remaining time is estimated."""
_TRAINING = ("download", "train", "upload")
_PHASES = (*_TRAINING, "evaluation")
_JOULES = ("joules_measured", "joules_estimated")


class Overviews:
    """Overviews of all federations."""

    def __init__(
        self,
        store: Store,
        models: Models,
        federations: Federations,
        records: Records,
        open_assignments: OpenAssignments,
        metrics: Metrics,
        devices: DeviceLists,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._models = models
        self._federations = federations
        self._records = records
        self._open_assignments = open_assignments
        self._metrics = metrics
        self._devices = devices
        self._clock = clock

    def look(self, name: str, since: int | None = None) -> Overview:
        """Return the current overview; with ``since``, points from shortly before that round on. Raises NotFound."""
        federation_id = self._records.refresh(name)
        now = self._clock()
        with self._store.reading() as db:
            federation = db.get_one(Federation, federation_id)
            info = self._federations.describe(db, federation)
            span = span_of(federation.round)
            first = None if since is None else _start(since - LOOK_BACK, span)
            whole = 2 * 4 * self._models.manifest(federation).shared_values
            doing = self._devices.count_doing(db, federation)
            totals = _totals(db, federation)
            evaluating, since_round = _evaluations(db, federation)
            rows = _rows(db, federation, first)
            sums = tuple(missing_sums(db, federation))
            began, newest_event = _began(db, federation)
            evaluated = [row for row in rows if not since_round or row["number"] < since_round]
            return Overview(
                at=iso(now),
                federation=info,
                federations=_lines(db),
                span=span,
                points=tuple(_points(rows, span, whole)),
                open_round=_open_round(db, federation, self._open_assignments),
                began_at=None if began is None else iso(began),
                ends_at=_ends(info, rows, now),
                **_metrics(db, federation),
                everything_bytes=federation.published_bytes + totals.moved,
                evaluating=evaluating,
                evaluating_since=since_round,
                doing={each: count for each, (count, _) in doing.items()},
                smallest_budget=smallest_budget(federation),
                failing=totals.failing,
                not_exported=totals.not_exported,
                notices=(*_failures(db, federation), *sums, *self._notices(info, doing, evaluated)),
                newest_event=newest_event,
            )

    def _notices(
        self, info: FederationInfo, doing: dict[Doing, tuple[int, float]], rows: Sequence[dict[str, Any]]
    ) -> Iterable[Notice]:
        if Doing.offline in doing:
            count, since = doing[Doing.offline]
            remedy = "Check their power and network, and run sparrow join on them again, or revoke them."
            yield Notice(kind="offline", text=f"Offline devices: {count}", since=iso(since), remedy=remedy)
        if Doing.away in doing:
            count, since = doing[Doing.away]
            text = f"Devices away after a missed deadline, silence or leaving: {count}"
            remedy = "They take part again when they ask for work; a longer deadline_seconds helps slow devices."
            yield Notice(kind="lost", text=text, since=iso(since), remedy=remedy)
        judged = next((row for row in reversed(rows) if row["accuracy_personal"] is not None), None)
        if judged is not None and judged["accuracy_personal"] < (judged["accuracy_global"] or 0) - WELL_BELOW:
            own = judged["accuracy_personal"]
            common = judged["accuracy_global"]
            yield Notice(
                kind="personal",
                text=f"Personal models are well below the global one: {percent(own)} to {percent(common)} in "
                f"round {judged['number']}",
                remedy="Set personal_model=best, with which devices keep the better model, train longer "
                "(local_epochs), or publish with another method.",
            )
        if info.warning:
            yield Notice(kind="method", text=info.warning)
        if (count := _counted(self._metrics.left_out, info.name)) > 0:
            text = f"Updates left out of the model since the coordinator's start: {count}"
            remedy = "Each round's record (left_out) has devices and reasons; revoke devices that you do not trust."
            yield Notice(kind="left_out", text=text, remedy=remedy)


def span_of(rounds: int) -> int:
    """Return the number of rounds per point, a power of two."""
    span = 1
    while span * MOST_POINTS < rounds:
        span *= 2
    return span


def _start(number: int, span: int) -> int:
    """Return the first round of a round's point. Rounds count from 1; preparing rounds come before."""
    return (number - 1) // span * span + 1


def _rows(db: Session, federation: Federation, first: int | None) -> list[dict[str, Any]]:
    summary = Round.summary
    columns = [summary[name].as_float().label(name) for name in (*_SUMS, *_LAST)]
    columns += [summary[(phase, "seconds")].as_float().label(f"{phase}_seconds") for phase in _PHASES]
    columns += [
        summary[(phase, joules)].as_float().label(f"{phase}_{joules}") for phase in _TRAINING for joules in _JOULES
    ]
    columns += [summary["slowest"].as_string().label("slowest"), Round.opened_at, Round.closed_at]
    rows = select(Round.number, *columns).where(
        Round.federation_id == federation.id,
        Round.status == "closed",
        # A round that closed a moment ago has no record yet.
        summary["round"].as_integer().is_not(None),
    )
    if first is not None:
        rows = rows.where(Round.number >= first)
    return [dict(row) for row in db.execute(rows.order_by(Round.number)).mappings()]


def _metrics(db: Session, federation: Federation) -> dict[str, dict[str, float]]:
    """Return the metrics of the last evaluated round by the overview's fields."""
    summary = Round.summary
    last = (
        select(summary)
        .where(
            Round.federation_id == federation.id,
            Round.status == "closed",
            summary["evaluated_devices"].as_integer() > 0,
        )
        .order_by(Round.number.desc())
        .limit(1)
    )
    found = db.scalar(last) or {}
    return {name: found.get(name) or {} for name in ("metrics_personal", "metrics_global")}


def _points(rows: Sequence[dict[str, Any]], span: int, whole: int) -> Iterable[RoundPoint]:
    for _, group in groupby(rows, key=lambda row: _start(row["number"], span)):
        rounds = list(group)

        def total(name: str, rounds: Sequence[dict[str, Any]] = rounds) -> float:
            return sum(row[name] or 0.0 for row in rounds)

        def last(name: str, rounds: Sequence[dict[str, Any]] = rounds) -> Any:
            return next((row[name] for row in reversed(rounds) if row[name] is not None), None)

        yield RoundPoint(
            first=rounds[0]["number"],
            round=rounds[-1]["number"],
            updates=int(total("updates")),
            bytes_up=int(total("bytes_up")),
            bytes_down=int(total("bytes_down")),
            evaluation_bytes=int(total("evaluation_bytes_up") + total("evaluation_bytes_down")),
            whole_bytes=int(total("updates")) * whole,
            seconds=total("seconds"),
            slowest=last("slowest"),
            **{name: last(name) for name in _LAST},
            **{f"{phase}_seconds": total(f"{phase}_seconds") for phase in _PHASES},
            **{joules: sum(total(f"{phase}_{joules}") for phase in _TRAINING) for joules in _JOULES},
        )


def _open_round(db: Session, federation: Federation, assignments: OpenAssignments) -> OpenRound | None:
    current = open_round(db, federation)
    if current is None:
        return None
    its_own = Assignment.round == current.number
    # In a buffered federation the update of any training device may count in this round.
    if settings_of(federation).buffer is not None:
        its_own = or_(Assignment.status == "open", UNCOUNTED, and_(its_own, Assignment.status != "done"))
    phase = current.secure["phase"] if current.secure else None
    kinds = COHORT_KINDS if phase is None else (phase,)
    of_round = (Assignment.federation_id == federation.id, Assignment.kind.in_(kinds), its_own)
    by_status = select(Assignment.status, func.count()).where(*of_round).group_by(Assignment.status)
    counts = {row[0]: row[1] for row in db.execute(by_status)}
    return OpenRound(
        round=current.number,
        phase=phase,
        opened_at=iso(current.opened_at),
        deadline_at=iso(current.deadline_at),
        extensions=current.extensions,
        target=current.target if phase in (None, Kind.train.value) else sum(counts.values()),
        cohort=sum(counts.values()),
        done=counts.get("done", 0),
        returned=counts.get("returned", 0),
        expired=counts.get("expired", 0),
        waiting_for=assignments.awaited(db, *of_round, most=MOST_AWAITED),
    )


def _failures(db: Session, federation: Federation) -> Iterable[Notice]:
    reason = Device.failure["reason"].as_string()
    at = Device.failure["at"].as_float()
    rows = db.execute(
        select(Device.name, Device.status, reason, at, func.count().over())
        .where(Device.federation_id == federation.id, FAILING)
        .order_by(Device.seen_at.desc(), Device.name)
        .limit(MOST_FAILURES)
    ).all()
    for name, status, why, since, _ in rows:
        cause, remedy = _explained(why or "")
        text = f"{name}: {cause}"
        if status == "not_joined":
            text = f"{name} could not join: {cause}"
            advice = f"If it will not join again: sparrow device remove {federation.name} {name}."
            remedy = advice if remedy is None else f"{remedy} {advice}"
        yield Notice(kind="failed", text=text, since=since and iso(since), remedy=remedy)
    if rows and (more := rows[0][4] - len(rows)) > 0:
        yield Notice(kind="failed", text=f"Other devices whose work fails: {more}")


_REMEDIES = {
    "out of memory": "Give it a smaller budget (sparrow join --budget) or smaller batches (batch_size).",
    "missed the deadline": "Give it more time (deadline_seconds), a smaller budget or fewer local_epochs.",
    "silent": "Check its power and network.",
    "refused": "Compare its version of Sparrow with the coordinator's, and see its own log.",
}


def _explained(reason: str) -> tuple[str, str | None]:
    if (known := explain(reason)) is not None:
        advice = known.advice
        return known.cause, f"{advice[0].upper()}{advice[1:]}." if advice else None
    remedies = (remedy for words, remedy in _REMEDIES.items() if words in reason)
    return reason, next(remedies, "See the device's log.")


def _began(db: Session, federation: Federation) -> tuple[float | None, int]:
    first = select(func.min(Round.opened_at), events.newest(federation.id)).where(Round.federation_id == federation.id)
    row = db.execute(first).one()
    return row[0], row[1]


def _ends(info: FederationInfo, rows: Sequence[dict[str, Any]], now: float) -> str | None:
    """Return the estimated end of the last round, from the duration of recent ones, or None."""
    recent = [row for row in rows if row["number"] >= 1 and row["closed_at"] is not None][-RECENT:]
    left = info.rounds - (recent[-1]["number"] if recent else 0)
    if info.status != "running" or info.waiting_for or not recent or left <= 0:
        return None
    each = (recent[-1]["closed_at"] - recent[0]["opened_at"]) / len(recent)
    return iso(max(now, recent[-1]["closed_at"] + left * each))


def _evaluations(db: Session, federation: Federation) -> tuple[int, int | None]:
    open_ones = select(func.count(), func.min(Assignment.round)).where(
        Assignment.federation_id == federation.id, Assignment.status == "open", Assignment.kind.in_(JUDGING_KINDS)
    )
    count, oldest = db.execute(open_ones).one()
    return count, oldest


class _Totals(NamedTuple):
    """Sums over devices. moved: bytes of all their calls."""

    moved: int
    failing: int
    not_exported: int


def _totals(db: Session, federation: Federation) -> _Totals:
    # Sums of values from devices could overflow an integer.
    each = cast(Device.bytes_down + Device.bytes_up, Double)
    sums = (func.coalesce(func.sum(each), 0.0), *(func.count().filter(those) for those in (FAILING, NOT_EXPORTED)))
    moved, failing, not_exported = db.execute(select(*sums).where(Device.federation_id == federation.id)).one()
    return _Totals(int(moved), failing, not_exported)


def _lines(db: Session) -> tuple[FederationLine, ...]:
    names = ("name", "method", "task", "status", "round")
    columns = [getattr(Federation, name) for name in names]
    rounds = Federation.settings["rounds"].as_integer().label("rounds")
    newest = select(*columns, rounds).order_by(Federation.id.desc()).limit(MOST_NAMES)
    return tuple(FederationLine.model_validate(dict(row)) for row in db.execute(newest).mappings())


def _counted(counter: Counter, federation: str) -> int:
    """Return this process's count of a federation."""
    samples = next(iter(counter.collect())).samples
    mine = [each for each in samples if each.name.endswith("_total") and each.labels["federation"] == federation]
    return int(sum(each.value for each in mine))
