"""Candidate devices of a round, the draw among them, and the end of a federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from sqlalchemy import ColumnElement, and_, bindparam, func, or_, select, update
from sqlalchemy.orm import Session

from sparrow.protocol.messages import Kind
from sparrow.protocol.secure.groups import least_cell
from sparrow.protocol.settings import FederationSettings
from sparrow.protocol.tags import Selection

from ..draws import Candidate, choose, choose_each, uniform
from ..methods import Participation, Situation, load_method
from ..models.global_models import Models, settings_of
from ..storage.tables import Assignment, Device, Federation
from ..storage.tagging import selected
from .assignments import COHORT_KINDS, Drawable, open_round, weight_of

SLACK = 1e-9
"""Tolerance for floating-point error in budgets: 1 - 0.7 is not exactly 0.3."""

MOST_MEDIANS = 10
"""Largest weight of an update, as a multiple of the cohort's median sample count."""

ROUNDS_LOOKED_AT = 500
"""Number of past rounds that the choice of active ratios considers."""

FEWEST_COUNTS = 3
"""Number of reported sample counts from which on a cohort uses its own median."""

ENROLLED = ("active", "stopped")
"""Statuses of devices that take part."""

# A federation may have many devices: select columns, not whole records, and build the statements once.
_EXAMPLES = (
    select(Device.num_examples, func.count())
    .where(
        Device.federation_id == bindparam("federation_id"),
        or_(
            Device.status == "active",
            # A device that stopped in this round has an update that counts.
            and_(Device.status == "stopped", Device.stopped_round == bindparam("number")),
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
    .where(Device.federation_id == bindparam("federation_id"), Device.status.in_(ENROLLED))
    .group_by(Device.status, Device.budget)
)


def devices_of(db: Session, federation: Federation, statuses: Sequence[str]) -> list[Device]:
    """Return the federation's devices with one of these statuses."""
    return list(db.scalars(select(Device).where(Device.federation_id == federation.id, Device.status.in_(statuses))))


def situation_of(db: Session, models: Models, federation: Federation, number: int) -> Situation:
    """Return the method's situation at the opening or closing of round ``number``."""
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
    """Return the drawable devices: active, present, not resting, and with enough budget."""
    smallest = smallest_budget(federation)
    return [device for device in able(db, federation, now) if reaches(device.budget, smallest)]


def able(db: Session, federation: Federation, now: float) -> list[Drawable]:
    """Return the devices that are selected, active, present and not resting, with any budget."""
    those = _ABLE.where(is_selected(federation))
    return [Drawable(*row) for row in db.execute(those, {"federation_id": federation.id, "now": now})]


def is_selected(federation: Federation) -> ColumnElement[bool]:
    """Return SQL that is true for devices whose tags let them train."""
    return selected(Selection.parse(settings_of(federation).cohort_where))


def smallest_budget(federation: Federation) -> float:
    """Return the smallest budget with which a device is drawn."""
    return load_method(federation.method).smallest_budget(settings_of(federation))


def reaches(budget: float, smallest: float) -> bool:
    """Return True if a budget is large enough."""
    return budget >= smallest - SLACK


def fewest_devices(settings: FederationSettings) -> int:
    """Return the smallest number of devices with which a round can change the model."""
    return least_cell(settings.secure_colluders) if settings.secure else 1


def most_examples(
    drawn: Sequence[Device | Drawable], there: Sequence[Drawable], settings: FederationSettings
) -> list[int | None]:
    """Return the largest weight of each drawn device's update; None for no limit."""
    # It is the smallest of three numbers: the device's sample count reported before the round, ``MOST_MEDIANS`` times
    # the cohort's median, and ``max_examples``. A small cohort uses the median of all candidates, ``there``.
    counts = [device.num_examples for device in drawn]
    reported = [count for count in counts if count is not None]
    if len(reported) < FEWEST_COUNTS:
        reported = [device.num_examples for device in there if device.num_examples is not None]
    limit = _limit(reported, settings)
    return [_least(count, limit) for count in counts]


def capped(counts: Iterable[int | None], settings: FederationSettings) -> list[int]:
    """Return the reported sample counts, each limited as in ``most_examples``."""
    reported = [count for count in counts if count is not None]
    limit = _limit(reported, settings)
    return reported if limit is None else [min(count, limit) for count in reported]


def _limit(reported: Sequence[int], settings: FederationSettings) -> int | None:
    # The lower median: of two devices, the larger one must not set its own limit.
    return _least(MOST_MEDIANS * median_low(reported) if reported else None, settings.max_examples)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def draw(db: Session, federation: Federation, active: Sequence[Drawable], size: int, number: int) -> list[str]:
    """Draw a round's cohort and return its device names, sorted."""
    settings = settings_of(federation)
    secret = federation.secret
    if settings.noise_multiplier is not None:
        enrolled = len(devices_of(db, federation, ENROLLED))
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
    """Return the active ratios that the method chooses for drawn devices: name -> ratio.

    Empty if the method does not choose them: then the budgets are the ratios.
    """
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
    """Return the updates of the last ``ROUNDS_LOOKED_AT`` rounds before ``before``, by round and cohort position."""
    report = Assignment.report
    rows = db.execute(
        select(
            Assignment.round,
            Device.name,
            Device.budget,
            Assignment.ratio,
            Assignment.most_examples,
            report["num_examples"].as_integer(),
            report["train_loss"].as_float(),
            report["training_flops"].as_float(),
            report["telemetry"]["download"]["seconds"].as_float(),
            report["telemetry"]["train"]["seconds"].as_float(),
            Assignment.upload_cost["seconds"].as_float(),
        )
        .join(Device, Device.id == Assignment.device_id)
        .where(
            Assignment.federation_id == federation.id,
            Assignment.kind == Kind.train.value,
            Assignment.status == "done",
            Assignment.ratio.is_not(None),
            # Excludes unreadable reports.
            report["num_examples"].as_integer() > 0,
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


def call_back(db: Session, federation: Federation) -> None:
    """Prepare the devices of a federation that continues after its end.

    Devices that stopped early may train again: they start their stop rule anew. Devices that a host runs in turn are
    there; others have ended with the federation, and are absent until they ask for work.
    """
    those = update(Device).where(Device.federation_id == federation.id)
    db.execute(those.where(Device.status == "stopped").values(status="active", stopped_round=None))
    db.execute(those.where(Device.status == "active", Device.hosted.is_(False)).values(present=False))
    federation.status = "running" if is_enough(db, federation) else "waiting"


def is_enough(db: Session, federation: Federation) -> bool:
    """Return whether a waiting federation can start: ``min_devices`` are enrolled or, after its end, present."""
    least = settings_of(federation).min_devices
    enrolled = (Device.federation_id == federation.id, Device.status.in_(ENROLLED))
    count = db.scalar(select(func.count()).where(*enrolled)) or 0
    if not federation.round:
        return count >= least
    return (db.scalar(select(func.count()).where(*enrolled, Device.present)) or 0) >= max(1, min(least, count))


def why_over(db: Session, federation: Federation) -> str | None:
    """Return the reason if no round follows (``max_rounds``, ``all_stopped`` or ``too_few``), else None."""
    settings = settings_of(federation)
    if federation.round >= settings.rounds:
        return "max_rounds"
    enrolled = db.execute(_STATUSES.where(is_selected(federation)), {"federation_id": federation.id}).all()
    # A device that is not selected, or whose budget is too small, is never drawn, so it does not keep the federation
    # open.
    smallest = smallest_budget(federation)
    counts = Counter[str]()
    for status, budget, count in enrolled:
        if status == "stopped" or reaches(budget, smallest):
            counts[status] += count
    stopped = counts.pop("stopped", 0)
    # Devices that have not stopped may be away and return, but if others have stopped, they remain too few.
    if not stopped or counts.total() >= fewest_devices(settings):
        return None
    return "too_few" if counts.total() else "all_stopped"


def what_is_missing(db: Session, federation: Federation, now: float) -> str | None:
    """Describe the missing devices; None if a round can open."""
    if federation.status == "waiting" and federation.round and not is_enough(db, federation):
        return "its devices to be back"
    if federation.status != "running" or open_round(db, federation):
        return None
    settings = settings_of(federation)
    there = len(drawable(db, federation, now))
    least = fewest_devices(settings)
    if there >= least or why_over(db, federation):
        return None
    if not settings.secure and able(db, federation, now):
        return (
            f"a device with a budget of at least {smallest_budget(federation):g}, which {federation.method} needs; "
            f"the present devices have less"
        )
    chosen = Selection.parse(settings.cohort_where)
    devices = [device for device in devices_of(db, federation, ("active",)) if chosen.matches(device.tags)]
    if not devices:
        return f"a device with the tags {settings.cohort_where}"
    paused = Counter(device.paused for device in devices if device.paused)
    words = ", ".join(f"{count} {word}" for word, count in sorted(paused.items()))
    if settings.secure:
        ready = f"ready: {there}, paused: {words}" if paused else f"ready: {there}"
        return f"the {least} devices of a secure sum ({ready})"
    if paused:
        return f"a device whose policy lets it work (paused: {words})"
    return "an available device that still trains; the other devices are done"
