"""Candidates: the devices that a round can be given to, the draw among them, and the end of a federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from sqlalchemy import and_, bindparam, func, or_, select
from sqlalchemy.orm import Session

from sparrow.protocol.messages import Kind
from sparrow.protocol.settings import FederationSettings

from ..draws import Candidate, choose, choose_each, uniform
from ..methods import Participation, Situation, load_method
from ..models.global_models import Models, settings_of
from ..storage.tables import Assignment, Device, Federation
from .assignments import COHORT_KINDS, Drawable, open_round, weight_of

SLACK = 1e-9
"""The error of binary floats that a budget may have: 1 - 0.7 exceeds 0.3."""

MOST_MEDIANS = 10
"""Times the median of its cohort's samples that one update counts with, at most."""

ROUNDS_LOOKED_AT = 500
"""Rounds that the choice of devices' active ratios looks back."""

FEWEST_COUNTS = 3
"""Devices of a cohort that say how many samples they have, below which the median is that of all that are there."""

# Columns of devices and not whole records, for there may be many; statements of every round are made once.
_EXAMPLES = (
    select(Device.num_examples, func.count())
    .where(
        Device.federation_id == bindparam("federation_id"),
        or_(
            Device.status == "active",
            and_(Device.status == "stopped", Device.stopped_round == bindparam("number")),  # with an update that counts
        ),
    )
    .group_by(Device.num_examples)
)
_PLAN = (
    select(Assignment.plan)
    .where(
        Assignment.federation_id == bindparam("federation_id"),
        Assignment.round == bindparam("number"),
        Assignment.kind.in_(COHORT_KINDS),
    )
    .limit(1)
)
_ABLE = select(Device.id, Device.name, Device.budget, Device.holds_model, Device.num_examples).where(
    Device.federation_id == bindparam("federation_id"),
    Device.status == "active",
    Device.present,
    Device.rest_until <= bindparam("now"),
)
_STATUSES = (
    select(Device.status, Device.budget, func.count())
    .where(Device.federation_id == bindparam("federation_id"), Device.status != "revoked")
    .group_by(Device.status, Device.budget)
)


def devices_of(db: Session, federation: Federation, statuses: Sequence[str]) -> list[Device]:
    """Return the federation's devices of these statuses."""
    return list(db.scalars(select(Device).where(Device.federation_id == federation.id, Device.status.in_(statuses))))


def situation_of(db: Session, models: Models, federation: Federation, number: int) -> Situation:
    """Return the situation of round ``number`` for its method, when it opens and when it closes."""
    which = {"federation_id": federation.id, "number": number}
    examples = [row[0] for row in db.execute(_EXAMPLES, which) for _ in range(row[1])]
    settings = settings_of(federation)
    return Situation(
        models.manifest(federation),
        settings,
        number,
        db.scalars(_PLAN, which).first() or {},
        devices=len(examples),
        num_examples=sum(capped(examples, settings)),
    )


def drawable(db: Session, federation: Federation, now: float) -> list[Drawable]:
    """Return the devices that a cohort can be drawn from: present, not stopped, not resting, with enough budget."""
    smallest = smallest_budget(federation)
    return [device for device in able(db, federation, now) if reaches(device.budget, smallest)]


def able(db: Session, federation: Federation, now: float) -> list[Drawable]:
    """Return the devices that could train now, whatever their budget."""
    return [Drawable(*row) for row in db.execute(_ABLE, {"federation_id": federation.id, "now": now})]


def smallest_budget(federation: Federation) -> float:
    """Return the budget below which a device is not drawn."""
    return load_method(federation.method).smallest_budget(settings_of(federation))


def reaches(budget: float, smallest: float) -> bool:
    """Return whether a device of this budget is drawn."""
    return budget >= smallest - SLACK


def most_examples(
    drawn: Sequence[Device | Drawable], there: Sequence[Drawable], settings: FederationSettings
) -> list[int | None]:
    """Return the largest weight of each drawn device's update, whatever it will report; None for any.

    It is the least of the samples that the device told before the round, of ``MOST_MEDIANS`` times the cohort's median,
    and of ``max_examples``. there: all devices that could have been drawn, whose median counts for a small cohort.
    """
    counts = [device.num_examples for device in drawn]
    told = [count for count in counts if count is not None]
    if len(told) < FEWEST_COUNTS:
        told = [device.num_examples for device in there if device.num_examples is not None]
    limit = _limit(told, settings)
    return [_least(count, limit) for count in counts]


def capped(counts: Iterable[int | None], settings: FederationSettings) -> list[int]:
    """Return the samples of the devices that told, each as it would count beside the others."""
    told = [count for count in counts if count is not None]
    limit = _limit(told, settings)
    return told if limit is None else [min(count, limit) for count in told]


def _limit(told: Sequence[int], settings: FederationSettings) -> int | None:
    # Of an even number the lower middle one: of two devices the larger must not be its own measure.
    return _least(MOST_MEDIANS * median_low(told) if told else None, settings.max_examples)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def draw(db: Session, federation: Federation, active: Sequence[Drawable], size: int, number: int) -> list[str]:
    """Return the names of a round's cohort, sorted; ``cohort`` and ``privacy`` describe the draw."""
    settings, secret = settings_of(federation), federation.secret
    if settings.noise_multiplier is not None:
        enrolled = len(devices_of(db, federation, ("active", "stopped")))
        names = [device.name for device in active]
        return choose_each(names, min(1.0, size / enrolled), secret=secret, round_number=number)
    last: dict[str, int] = {}
    if settings.cohort_policy == "least_recently":
        drawn = select(Assignment.device_id, func.max(Assignment.round)).where(
            Assignment.federation_id == federation.id, Assignment.kind.in_(COHORT_KINDS)
        )
        last = {row[0]: row[1] for row in db.execute(drawn.group_by(Assignment.device_id))}
    candidates = [Candidate(device.name, device.budget, last.get(device.id, -1)) for device in active]
    return choose(candidates, size, secret=secret, round_number=number, policy=settings.cohort_policy)


def chosen_ratios(
    db: Session, models: Models, federation: Federation, drawn: Sequence[Drawable], number: int
) -> Mapping[str, float]:
    """Return the active ratios that the method chooses for devices drawn for round ``number``, by name; none where
    their budgets say them."""
    settings = settings_of(federation)
    active = load_method(federation.method).active
    pruning = active.pruning(settings) if active else None
    if pruning is None or not drawn:
        return {}
    budgets = {device.name: device.budget for device in drawn}
    ratios = pruning.ratios(
        participations(db, federation, number),
        budgets,
        lambda name: uniform(federation.secret, "ratio", number, name),
        Situation(models.manifest(federation), settings, number),
    )
    return {name: min(ratio, budgets[name]) for name, ratio in ratios.items()}


def participations(db: Session, federation: Federation, before: int) -> list[Participation]:
    """Return the updates of rounds ``before`` - ``ROUNDS_LOOKED_AT`` to ``before`` - 1, in the order of rounds and of
    their cohorts."""
    report = Assignment.report
    phases = [report["telemetry"][phase]["seconds"].as_float() for phase in ("download", "train")]
    rows = db.execute(
        select(
            *(Assignment.round, Device.name, Device.budget, Assignment.ratio, Assignment.most_examples),
            *(report["num_examples"].as_integer(), report["train_loss"].as_float()),
            *(report["training_flops"].as_float(), *phases, Assignment.upload_cost["seconds"].as_float()),
        )
        .join(Device, Device.id == Assignment.device_id)
        .where(
            Assignment.federation_id == federation.id,
            Assignment.kind == Kind.train.value,
            Assignment.status == "done",
            Assignment.ratio.is_not(None),
            report["num_examples"].as_integer() > 0,  # not of a report that cannot be read
            report["train_loss"].as_float().is_not(None),
            Assignment.round.between(before - ROUNDS_LOOKED_AT, before - 1),
        )
        .order_by(Assignment.round, Assignment.position)
    )
    return [
        Participation(
            number, name, budget, ratio, weight_of(examples, most), loss, int(flops or 0), sum(map(_or_0, times))
        )
        for number, name, budget, ratio, most, examples, loss, flops, *times in rows
    ]


def _or_0(seconds: float | None) -> float:
    return seconds or 0.0


def why_over(db: Session, federation: Federation) -> str | None:
    """Return the reason why no round follows, or None."""
    if federation.round >= settings_of(federation).rounds:
        return "max_rounds"
    enrolled = db.execute(_STATUSES, {"federation_id": federation.id}).all()
    # One that was never drawn, because its budget does not reach, keeps nobody waiting who has stopped.
    smallest = smallest_budget(federation)
    statuses = [status for status, budget, _ in enrolled if status == "stopped" or reaches(budget, smallest)]
    return "all_stopped" if statuses and all(status == "stopped" for status in statuses) else None


def what_is_missing(db: Session, federation: Federation, now: float) -> str | None:
    """Return, in words, what keeps a running federation from opening its next round, or None."""
    if federation.status != "running" or open_round(db, federation) or drawable(db, federation, now):
        return None
    if why_over(db, federation):
        return None
    if able(db, federation, now):
        return (
            f"a device with a budget of at least {smallest_budget(federation):g}, which {federation.method} needs; "
            f"those that are there have less"
        )
    paused = Counter(device.paused for device in devices_of(db, federation, ("active",)) if device.paused)
    if paused:
        words = ", ".join(f"{count} {word}" for word, count in sorted(paused.items()))
        return f"a device whose policy lets it work (paused: {words})"
    return "a device that still trains and is there; the others may wait or leave"
