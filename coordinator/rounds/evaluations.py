"""Evaluations after a round: each device that is asked evaluates models on its own data.

A device judges the personal model that it keeps, for which nothing goes down but the request. The global model travels
to be judged, so a sample of the devices that are there judges it, seldom: ``global_evaluation_devices`` of them, every
``global_evaluation_interval`` rounds and at the end. Where devices keep no personal model there is nothing else to
judge, and the sample does so every ``evaluation_interval`` rounds. At the end, where a mixture with the global model
may be the better personal model, every device is sent the finished one.

With ``personal_model=fleet`` that end has two steps. All devices first ``compare`` what they may take with the finished
model, and tell moments of it; the evaluation then brings what these are in the mean (``protocol.evidence``). In secure
rounds the cohort of the last one tells them under its masks. Where devices are fewer than ``FEWEST_DEVICES``, each
chooses by its own data.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from sparrow.protocol.evidence import Pool, pool_of
from sparrow.protocol.messages import Kind, Receipt
from sparrow.protocol.settings import FederationSettings

from ..draws import Candidate, choose
from ..errors import read_stored
from ..methods import load_method, sends_values
from ..models.global_models import settings_of
from ..storage.tables import Assignment, Device, Federation, Round
from ..sums.private import noisy_means
from .assignments import assign, rests
from .candidates import devices_of, why_over
from .skew import adjustment


def ask_for_evaluation(
    db: Session, federation: Federation, now: float, *, with_global: bool = False, last: bool = False
) -> bool:
    """Ask the devices that are present, stopped or not, to evaluate models; return False if nobody is asked.

    Those that rest because their updates were refused are not asked.

    with_global: a sample of them also judges the global model. last: so it does, for no round follows; where devices
    are first to compare what they may take, they are asked for that.
    """
    method, settings = load_method(federation.method), settings_of(federation)
    there = devices_of(db, federation, ("active", "stopped"))
    present = sorted((each for each in there if each.present and not rests(each, now)), key=_name)
    mixes = last and method.mixes_global and settings.keeps_best
    kind, plan = _work(db, federation, settings, mixes=mixes)
    sample = _who_judges_global(federation, settings, present, always=mixes, wanted=with_global or last)
    asked = [device for device in present if device.name in sample or (method.personal_models and device.holds_model)]
    for position, device in enumerate(asked):
        whole = device.name in sample
        assignment = assign(federation, device, kind, federation.round, position, now, whole=whole)
        assignment.plan = plan or None
        db.add(assignment)
    return bool(asked)


def evaluate_in_between(db: Session, federation: Federation, before: int, now: float) -> None:
    """Ask for the evaluations that are due after a round; ``before``: the number of the round before it."""
    settings, number = settings_of(federation), federation.round

    def is_due(interval: int) -> bool:
        return interval > 0 and number // interval > before // interval

    with_global = is_due(settings.global_evaluation_interval)
    if with_global or is_due(settings.evaluation_interval):
        last = why_over(db, federation) is not None
        ask_for_evaluation(db, federation, now, with_global=with_global, last=last)


def _work(
    db: Session, federation: Federation, settings: FederationSettings, *, mixes: bool
) -> tuple[Kind, dict[str, Any]]:
    """Return what devices are asked for, and its plan. mixes: they may take the finished model, or a part of it."""
    plan: dict[str, Any] = adjustment(db, federation)
    if not mixes:
        return Kind.evaluate, plan
    plan |= {"finished": True}
    if settings.personal_model != "fleet":
        return Kind.evaluate, plan
    compared = _compared(db, federation)
    if not compared and not settings.secure:
        return Kind.compare, plan
    pool = _pool(db, federation, settings, compared)
    return Kind.evaluate, plan if pool is None else plan | pool.as_plan()


def _who_judges_global(
    federation: Federation, settings: FederationSettings, present: list[Device], *, always: bool, wanted: bool
) -> set[str]:
    """Return the names of the devices that are sent the global model: all if ``always``, a sample if ``wanted``."""
    method = load_method(federation.method)
    if not sends_values(method, Kind.evaluate, holds_model=True):
        return set()
    # A model that is not usable alone means nothing without the newest global one.
    if always or not method.usable_global_model:
        return {device.name for device in present}
    if not (wanted or not method.personal_models):
        return set()
    chosen = choose(
        [Candidate(device.name) for device in present],
        settings.global_evaluation_devices,
        secret=federation.secret,
        round_number=federation.round,
        purpose="evaluation",
    )
    return set(chosen)


def _compared(db: Session, federation: Federation) -> list[Assignment]:
    """Return the assignments by which the finished model was compared with others, answered or not."""
    of_last = select(Assignment).where(
        Assignment.federation_id == federation.id,
        Assignment.round == federation.round,
        Assignment.kind == Kind.compare.value,
    )
    return list(db.scalars(of_last))


def _pool(db: Session, federation: Federation, settings: FederationSettings, compared: list[Assignment]) -> Pool | None:
    """Return what all devices have found; None where too few have told it, or under noise of secure sums alone."""
    if settings.secure:
        return _pool_of_round(db, federation) if settings.noise_multiplier is None else None
    receipts = [read_stored(Receipt, each.report) for each in compared if each.status == "done"]
    told = [each.evidence for each in receipts if each is not None and each.evidence is not None]
    if settings.noise_multiplier is None:
        return pool_of(told)
    means = noisy_means(told, len(compared), settings, federation.noise_key, federation.round)
    return Pool.of(len(compared), means)


def _pool_of_round(db: Session, federation: Federation) -> Pool | None:
    """Return what the devices of the last secure round have told under its masks."""
    last = db.scalar(select(Round).where(Round.federation_id == federation.id, Round.number == federation.round))
    notes = last.notes if last is not None and isinstance(last.notes, dict) else {}
    means = notes.get("metrics", {})
    return Pool.of(int(notes.get("secure_unmask_asked", 0)), means)


def _name(device: Device) -> str:
    return device.name
